"""Graph tools without policy: what collectives look like, how nodes are inserted and moved, what must hold."""
