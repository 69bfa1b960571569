"""Encoders: models that return hidden states or scores instead of text."""
