"""How documents are chunked into rows, and what that does to a model: concat, padding, atoms and their rivals."""
