"""The attention contract, its selection, and the reference backend."""
