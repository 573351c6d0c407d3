"""Graph utilities without policy: recognise collectives, insert and reorder nodes, simulate memory."""
