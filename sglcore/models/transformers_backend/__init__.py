"""Models that run by transformers' own classes, with the engine's attention and kernels."""
