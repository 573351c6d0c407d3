"""The main job: train a small language model on several processes and show what happened to its gradients."""
