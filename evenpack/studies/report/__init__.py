"""One or more runs side by side: curves, rates, waits, and the settings in which they differ."""
