"""What the keys of run files mean: from the schemas to `evenpack config explain` and docs/run_file.md."""
