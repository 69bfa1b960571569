"""DeepSeek's models and those with the same layers."""
