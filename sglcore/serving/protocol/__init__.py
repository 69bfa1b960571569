"""What requests and answers look like: one module per family of endpoints. It knows no engine."""
