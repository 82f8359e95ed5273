"""Does a run of packs train the same model as one without packing?"""
