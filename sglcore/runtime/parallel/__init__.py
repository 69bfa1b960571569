"""Collectives between ranks: all-reduce, all-to-all of experts, and their dispatchers."""
