"""State of a replicated module, consumers of its gradients, and the exchange of plain data between its ranks."""
