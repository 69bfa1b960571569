"""Tokenizers and chat templates: from text to tokens and back."""
