"""Modules that moved, by the names they had in `sglcore.device`. Packages for API 3 import them."""
