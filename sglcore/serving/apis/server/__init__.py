"""The server's own endpoints: health, server info, metrics, tokenization, control."""
