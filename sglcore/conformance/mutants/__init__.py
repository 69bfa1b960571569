"""Mutants: devices with one planted defect each, which a law must catch."""
