"""One replicated module as data: parameters, group, options, plan, and what becomes of its gradients."""
