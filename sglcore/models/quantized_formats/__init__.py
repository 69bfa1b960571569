"""Formats of quantized weights in checkpoints: the tensors of a layer and their meaning."""
