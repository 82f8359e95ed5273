"""How well the times of one rank predict how long several ranks wait."""
