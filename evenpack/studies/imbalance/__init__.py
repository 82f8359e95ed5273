"""Simulates the speed of un-padding on many devices, where each step waits for the slowest."""
