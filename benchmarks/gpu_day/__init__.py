"""The first day on a GPU: what `scripts/gpu_day` runs."""
