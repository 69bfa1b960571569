"""Draft models for speculative decoding, and how they are loaded."""
