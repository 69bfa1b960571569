"""The torch runtime, for any device: forward batches, buffers, model runner, worker."""
