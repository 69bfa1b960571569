"""Sampling on MLX: the core's integer sampler over lazy arrays, token for token the same. Host
parts are the core's own."""
