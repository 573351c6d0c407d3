"""Planning of buckets: which gradients are reduced together, and when. Pure data and numbers."""
