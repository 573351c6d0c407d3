"""One replicated module as data, what becomes of its gradients, and how its ranks share plain data over the store."""
