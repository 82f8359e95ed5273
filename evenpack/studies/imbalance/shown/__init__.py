"""The study as tables and figures."""
