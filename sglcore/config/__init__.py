"""The settings of the engine and the server: declared once, read once, frozen."""
