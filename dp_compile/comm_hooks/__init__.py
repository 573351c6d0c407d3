"""Communication hooks, which replace the all-reduce of a bucket: torch's, functional ones, and eight-bit gradients."""
