"""Readers of checkpoints: configuration, quantization, GGUF and safetensors headers. Host data
only, no tensor library."""
