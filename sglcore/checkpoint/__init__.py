"""What a checkpoint says: configuration, quantization, GGUF and safetensors headers. Host data
only, no tensor library."""
