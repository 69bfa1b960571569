"""Wheels of all distributions of this checkout: building, checking, a trial outside of the
checkout, and their common version."""
