"""Architectures, one file each, with the parameter names of the published checkpoints; weight
loading; draft models; models that run by transformers' classes."""
