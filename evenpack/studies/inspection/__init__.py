"""Inspects lengths before a run: the cost of padding, the effect of packing, and a recommendation of packs."""
