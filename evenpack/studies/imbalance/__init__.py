"""How fast un-padding is on many devices, where each step waits for the slowest."""
