"""Simulated clusters: items are drawn and assigned to devices, and each step waits for the slowest."""
