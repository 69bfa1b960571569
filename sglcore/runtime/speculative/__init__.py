"""Speculative decoding: a drafter proposes tokens, the model verifies them in one forward, the text stays the same."""
