"""The GPU day: what `scripts/gpu_day` runs."""
