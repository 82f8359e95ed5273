"""Measured runs: the steps of their logs, their rates and waiting, and speed-ups between comparable runs."""
