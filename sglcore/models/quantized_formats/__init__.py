"""The formats in which checkpoints store quantised weights: which tensors a layer has, and what they mean."""
