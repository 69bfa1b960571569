"""KV cache of sparse attention in host memory: what stays on the device, and how the rest is
loaded."""
