"""Turns sequence lengths in many formats into a histogram."""
