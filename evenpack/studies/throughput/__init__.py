"""Times steps of a run on the available device: layouts, packing depths, the cost of a micro-batch."""
