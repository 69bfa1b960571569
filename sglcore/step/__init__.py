"""The host half of a step, shared by workers of every tensor library: numpy arrays in and out, no
tensors."""
