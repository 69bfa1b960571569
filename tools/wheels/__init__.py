"""Wheels of all distributions of this checkout: built, checked, installed and tried away from it,
and their one version."""
