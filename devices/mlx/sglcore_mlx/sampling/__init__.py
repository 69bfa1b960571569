"""Sampling on MLX: the core's integer sampler over lazy arrays, with identical tokens. The host
part is the core's."""
