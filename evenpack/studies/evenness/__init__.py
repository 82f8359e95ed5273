"""How equal the costs of packs are, and how equal they can be."""
