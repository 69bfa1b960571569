"""Programs for people who work on this checkout; no package of it imports them."""
