"""A model is ready only after a token came out of the path that will serve."""

from __future__ import annotations

from sglcore.device.errors import SglcoreError
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import State

PROMPT_TOKENS = 4


class WarmUpError(SglcoreError):
    """The model started, but does not answer."""

    exit_code = 1


def warm_up(engine: TokenEngine) -> None:
    """Run a short prompt greedily and one with sampling, or embed one; waits. Raises WarmUpError if
    no token comes."""
    limits = engine.limits
    ids = list(range(1, min(PROMPT_TOKENS, limits.max_model_len - 1, limits.vocab_size - 1) + 1))
    if not limits.generates:
        _embed(engine, ids)
        return
    for params in (
        SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True),
    ):
        _generate(engine, ids, params)


def _generate(engine: TokenEngine, ids: list[int], params: SamplingParams) -> None:
    engine.add("warm-up", ids, params, seed=0)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    errors = [each.error for each in outputs if each.error]
    if errors or not any(each.token_ids for each in outputs):
        raise WarmUpError(
            f"the model started but its first token failed: {errors[0] if errors else 'none came'}",
            remedy="run `sglcore doctor`, and check the checkpoint and the dtype",
        )


def _embed(engine: TokenEngine, ids: list[int]) -> None:
    request = engine.embed("warm-up", ids)
    while request.state is not State.FINISHED:
        engine.step()
    if request.embedding is None:
        raise WarmUpError(f"the model started but its first embedding failed: {request.error}")
