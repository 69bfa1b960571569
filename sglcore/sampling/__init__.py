"""Sampling: parameters, penalties, masks, and the sampler that draws the same token on every
device.

`cutoffs`, `gumbel_race`, `logprobs`, `narrow_sums`, `packing`, `processors`, `sampler` and `xtc`
use torch; the other files are host code. `reference_sampler` defines correct results. This module
does not load torch.
"""

from sglcore.sampling.params import SamplingError, SamplingParams, fresh_seed

__all__ = ("SamplingError", "SamplingParams", "fresh_seed")
