"""Steps of a run, timed on the device that is there: layouts, packing depths, the cost of a micro-batch."""
