"""The main job: train a small GPT data parallel and show what happened to its gradients."""
