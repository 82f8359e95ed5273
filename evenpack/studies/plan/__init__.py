"""What a run is before it starts: its data, its step, its memory, its cost, and what would be started."""
