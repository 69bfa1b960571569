"""Programs for developers of this checkout; its packages do not import them."""
