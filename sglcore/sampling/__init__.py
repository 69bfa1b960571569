"""Sampling: parameters, penalties, masks, and the sampler that draws the same token on every
device.

`params`, `noise`, `reference` and `batch` are host code; the other files are their counterparts in
torch. This module loads neither.
"""

from sglcore.sampling.params import SamplingError, SamplingParams, fresh_seed

__all__ = ("SamplingError", "SamplingParams", "fresh_seed")
