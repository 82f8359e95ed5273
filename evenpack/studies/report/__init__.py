"""One or more runs beside each other: curves, rates, waits, and in what they differ."""
