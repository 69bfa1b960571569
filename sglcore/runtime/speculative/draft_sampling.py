"""How drafters draw: with the sampling of the last draw, reduced to one row per request."""

from __future__ import annotations

from dataclasses import fields, replace

from torch import Tensor

from sglcore.runtime.sample_step import SampleStep
from sglcore.runtime.speculative.drafter import DrawDraft, RankDrafts
from sglcore.sampling.sampler import SamplingState


class DraftSampling:
    """Draws and ranks draft tokens with the sampler of a step."""

    def __init__(self, step: SampleStep) -> None:
        self._step = step
        self._drafting = step.known

    def drafting(self, width: int, lengths: Tensor) -> DrawDraft:
        """Return a function that draws draft tokens for the requests of the last draw.

        Each request has `width` rows and its root at `lengths` int32[R]. The function uses the
        request's temperature, cut-offs and noise, without penalties, biases, XTC and masks.
        """
        state = self.state_of_requests(width)

        def draw(logits: Tensor, depth: int) -> Tensor:
            return self._step.sampler.sample(logits, replace(state, positions=lengths + depth)).token_ids

        return draw

    def ranking(self, width: int, lengths: Tensor) -> RankDrafts:
        """Return a function that ranks the leading candidates of each draw (`RankDrafts`).

        Parameters as in `drafting`. Every request must have the same number of rows of logits.
        """
        state = self.state_of_requests(width)

        def rank(logits: Tensor, depth: int, count: int) -> tuple[Tensor, Tensor]:
            own, each = replace(state, positions=lengths + depth), logits.shape[0] // max(lengths.shape[0], 1)
            return self._step.sampler.leaders(logits, own if each == 1 else repeated(own, each), count)

        return rank

    def state_of_requests(self, width: int) -> SamplingState:
        """Return the sampling state of the last draw, reduced from `width` rows per request to one.

        Penalties, biases, XTC and masks are left out.
        """
        if self._drafting.host.number != self._step.known.host.number:
            self._drafting = replace(self._step.known, state=_of_requests(self._step.known.state, width))
        return self._drafting.state


def repeated(state: SamplingState, count: int) -> SamplingState:
    """Return a new state in which each row occurs `count` times, one after another."""
    parts = {item.name: getattr(state, item.name) for item in fields(state)}
    return replace(
        state, **{name: part.repeat_interleave(count, 0) for name, part in parts.items() if isinstance(part, Tensor)}
    )


def _of_requests(state: SamplingState, width: int) -> SamplingState:
    """Return the state of each request's first row, for a plain draw.

    Without penalties, biases, XTC and masks.
    """
    needs = replace(state.needs, any_penalty=False, any_bias=False, any_xtc=False, top_logprobs=None)
    parts = {item.name: getattr(state, item.name) for item in fields(state)}
    first = {name: part[::width].contiguous() for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(state, **first, needs=needs, penalties=None, bias=None, masks=None, xtc=None, changes=None)
