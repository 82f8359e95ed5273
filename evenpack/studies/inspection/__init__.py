"""What is seen of lengths before a run: the cost of padding, what packing makes of them, which packs to take."""
