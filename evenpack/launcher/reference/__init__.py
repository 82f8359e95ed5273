"""Extracts the keys of run files from their schemas, for `evenpack config explain` and docs/run_file.md."""
