"""Which gradients are reduced together, and when: pure data and numbers."""
