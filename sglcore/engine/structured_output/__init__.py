"""Grammars, schemas and token rules that bind what a model writes."""
