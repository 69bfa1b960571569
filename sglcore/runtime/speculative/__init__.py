"""Speculative decoding: drafters, verification, acceptance rules, draft trees."""
