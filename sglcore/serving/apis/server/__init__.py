"""The server's own endpoints: probes, server info, metrics, tokenization, control."""
