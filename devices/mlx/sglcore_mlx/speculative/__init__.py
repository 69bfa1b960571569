"""Speculative decoding: draft tokens after each request's last token, and their verification in one
decode step."""
