"""Where the time of a run went that ranks waited: by cause, by rank, over time, and whom they waited for."""
