"""What others import: `evenpack` itself exports it, each name loaded when it is first used."""
