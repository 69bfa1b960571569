"""The attention contract, the choice of a backend, and the reference backend."""
