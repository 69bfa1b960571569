"""The host half of a step, which workers of every tensor library share: numpy arrays in and out, no tensors."""
