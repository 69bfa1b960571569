"""Helpers of the sampler tests: short calls of the sampler, random batches, and copies of a module
with a planted defect."""

import inspect
import random
from collections.abc import Sequence
from types import ModuleType

import mlx.core as mx
import numpy as np

from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch, SamplingNeeds
from sglcore.sampling.state import Masks, SampledTokens, penalty_arrays, state_arrays
from sglcore_mlx.sampling.sampler import Sampler, candidate_gaps
from sglcore_mlx.sampling.state import SamplingState, place_state


def host_arrays(batch: SamplingBatch, needs: SamplingNeeds) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that `place_state` takes."""
    return state_arrays(batch, needs) | (penalty_arrays(batch, all_rows=True) if needs.any_penalty else {})


def make_state(
    host: SamplingBatch,
    positions: mx.array,
    *,
    history: mx.array | None = None,
    masks: Masks[mx.array] | None = None,
    needs: SamplingNeeds | None = None,
) -> SamplingState:
    """Return the state of a host batch at positions int32[B]. `needs` may ask for more than the
    batch needs."""
    needs = needs or host.needs
    arrays = host_arrays(host, needs)
    parts = {name: mx.array(part) for name, part in arrays.items()}
    return place_state(needs, positions, parts, history=history, masks=masks)


def staged(rows: Sequence[tuple], positions: Sequence[int], **parts) -> SamplingState:
    """Return the state of rows (params, seed[, sample_index[, prompt_len[, banned_early]]]) at
    these positions."""
    return make_state(SamplingBatch.from_params(rows), mx.array(list(positions), mx.int32), **parts)


def drawn(logits, rows: Sequence[tuple], positions: Sequence[int], **parts) -> SampledTokens:
    """Sample one token per row of logits (anything that converts to float32[B, V])."""
    logits = mx.array(np.asarray(logits, np.float32))
    return Sampler(logits.shape[1]).sample(logits, staged(rows, positions, **parts))


def tokens_of(found: SampledTokens) -> list[int]:
    """Return the sampled tokens; waits for them."""
    return np.array(found.token_ids).tolist()


def compiled_draw(logits: np.ndarray, rows: Sequence[tuple], positions: Sequence[int]) -> list[int]:
    """Return the tokens sampled inside `mx.compile`, with arrays as inputs."""
    batch, sampler = SamplingBatch.from_params(rows), Sampler(logits.shape[1])

    def draw(logits: mx.array, positions: mx.array, parts: dict[str, mx.array]) -> mx.array:
        return sampler.sample(logits, place_state(batch.needs, positions, parts)).token_ids

    parts = {name: mx.array(part) for name, part in host_arrays(batch, batch.needs).items()}
    found = mx.compile(draw)(mx.array(logits), mx.array(list(positions), mx.int32), parts)
    return np.array(found).tolist()


def candidate_sets(logits, params: Sequence[SamplingParams]) -> list[list[int]]:
    """Return the sorted candidate ids of every row."""
    logits = mx.array(np.asarray(logits, np.float32))
    state = staged([(each, 0) for each in params], [0] * len(params))
    tables = Sampler(logits.shape[1]).tables
    gaps = np.array(candidate_gaps(logits, mx.max(logits, axis=-1), state, tables))
    return [np.flatnonzero(row < 1 << 21).tolist() for row in gaps]


def random_params(rng: random.Random, vocab_size: int = 0) -> SamplingParams:
    """Return a random mix of temperature and cut-offs; with a vocabulary size also of penalties,
    biases and bans."""
    extra = {} if not vocab_size else random_extras(rng, vocab_size)
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 1, 3, 40, 10**6)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 1e-6)),
        min_p=rng.choice((0.0, 0.0, 0.02, 0.5)),
        xtc_probability=rng.choice((0.0, 0.0, 0.5, 1.0)),
        xtc_threshold=rng.choice((0.1, 0.02, 0.0, 0.5)),
        **extra,
    )


def random_extras(rng: random.Random, vocab_size: int) -> dict:
    """Return random penalties, a bias, a minimum of tokens, and logprobs, each only sometimes."""
    return {
        "repetition_penalty": rng.choice((1.0, 0.8, 1.5)),
        "frequency_penalty": rng.choice((0.0, 0.7, -1.1)),
        "presence_penalty": rng.choice((0.0, 1.1, -0.3)),
        "logit_bias": {rng.randrange(vocab_size): rng.choice((2.5, -3.3))} if rng.random() < 0.5 else {},
        "min_tokens": rng.choice((0, 4)),
        "logprobs": rng.choice((None, 0, 4)),
    }


def random_logits(rng: random.Random, rows: int, vocab_size: int) -> np.ndarray:
    """Return float32[rows, vocab_size]: normally distributed, or rounded to give many ties; some
    tokens are -inf."""
    normal = np.random.default_rng(rng.randrange(2**32)).normal(0.0, 3.0, (rows, vocab_size))
    coarse = np.array([rng.random() < 0.5 for _ in range(rows)])
    logits = np.where(coarse[:, None], np.round(normal * 2) / 2, normal).astype(np.float32)
    holes = np.random.default_rng(rng.randrange(2**32)).random((rows, vocab_size)) < 0.1
    holes[:, rng.randrange(vocab_size)] = False
    logits[holes] = -np.inf
    return logits


def planted(module: ModuleType, sound: str, defect: str) -> ModuleType:
    """Return a copy of a module with the single occurrence of `sound` replaced by `defect`. The
    module itself is not changed."""
    source = inspect.getsource(module)
    assert source.count(sound) == 1, f"found {source.count(sound)} times {sound!r} in {module.__name__}, wanted 1"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(sound, defect), module.__name__, "exec"), copy.__dict__)
    return copy
