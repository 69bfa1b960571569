"""Tests penalties, bias, early bans and masks on MLX against the plain formula, and that planted
defects are detected."""

import math
import random

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.sampling_rows import drawn, planted, random_extras, staged, tokens_of
from sglcore.core.errors import ConfigError
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore_mlx.sampling import processors
from sglcore_mlx.sampling.processors import Masks
from sglcore_mlx.sampling.sampler import Sampler

VOCAB = 40
BANNED = (9, 11)


def random_rows(count, seed):
    """Return rows with every kind of logit processor, their tokens so far (some are placeholders),
    and logits float32[count, VOCAB]."""
    rng = random.Random(seed)
    rows = [(SamplingParams(**random_extras(rng, VOCAB)), 1, 0, rng.randrange(1, 6), BANNED) for _ in range(count)]
    history = [[rng.randrange(-2, VOCAB + 2) for _ in range(row[3] + rng.randrange(9))] for row in rows]
    return np.random.default_rng(seed).normal(0, 4, (count, VOCAB)).astype(np.float32), rows, history


def table_of(history, seed=1):
    """Return int32[B, L]: the histories followed by random ids, valid and invalid ones."""
    width = max(len(tokens) for tokens in history) + 3
    table = np.random.default_rng(seed).integers(-5, VOCAB + 5, (len(history), width)).astype(np.int32)
    for row, tokens in zip(table, history, strict=True):
        row[: len(tokens)] = tokens
    return mx.array(table)


def processed(module, logits, rows, history):
    """Return float32[B, V]: logits after a module's penalties and bias."""
    positions = [len(tokens) for tokens in history]
    state = staged(rows, positions, history=table_of(history))
    found = module.apply_penalties(mx.array(logits), state.penalties, state.positions)
    return np.array(found if state.bias is None else module.apply_bias(found, state.bias, state.positions))


def plain(logits, row, tokens):
    """Compute the formula in float64, one logit at a time: the repetition penalty over all tokens,
    the other two over the output."""
    params, _, _, prompt_len, banned = row
    output, result = tokens[prompt_len:], []
    for v, x in enumerate(logits.tolist()):
        if v in tokens:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(v) + params.presence_penalty * (v in output)
        early = v in banned and len(output) < params.min_tokens
        result.append(-math.inf if early else x + params.logit_bias.get(v, 0.0))
    return result


def follows_the_plain_formula(module):
    """Return whether a module's penalties and bias agree with the plain formula."""
    logits, rows, history = random_rows(30, seed=1)
    found = processed(module, logits, rows, history)
    wanted = [plain(logits[i], row, history[i]) for i, row in enumerate(rows)]
    return np.allclose(found, wanted, atol=2e-6, rtol=1e-6)


def test_penalties_bias_and_bans_follow_the_plain_formula():
    assert follows_the_plain_formula(processors)


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("positions < lengths[:, None]", "positions <= lengths[:, None]"),
        ("positions >= starts[:, None]", "positions > starts[:, None]"),
        ("(history < vocab_size)", "(history < vocab_size + 5)"),
        ("prompt + output > 0", "output > 0"),
        ("mx.where(logits > 0, logits / factor", "mx.where(logits < 0, logits / factor"),
        ("(output > 0).astype(mx.float32) * state", "output.astype(mx.float32) * state"),
        ("< state.until", "<= state.until"),
        ("state.rows * logits.shape[1] + state.ids", "state.ids"),
    ],
)
def test_a_planted_defect_of_the_processors_is_caught(sound, defect):
    assert not follows_the_plain_formula(planted(processors, sound, defect))


def test_neutral_rows_keep_every_bit():
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32)
    logits[0, :4] = [math.inf, -math.inf, -0.0, math.nan]
    rows = [(SamplingParams(), 1, 0, 1), (SamplingParams(presence_penalty=1.0), 1, 0, 1), (SamplingParams(), 1, 0, 1)]
    found = processed(processors, logits, rows, [[0, 1, 2, 3]] * 3)
    assert np.array_equal(found[[0, 2]].view(np.int32), logits[[0, 2]].view(np.int32))


def test_wider_needs_never_change_a_token():
    rows = [(SamplingParams(temperature=0.7), 5), (SamplingParams(top_k=4), 6)]
    logits = np.random.default_rng(4).normal(size=(2, VOCAB))
    wanted = SamplingParams(top_p=0.5, min_p=0.1, top_k=7, presence_penalty=1.0, logit_bias={1: 1.0}, logprobs=3)
    everything = SamplingBatch.from_params([(wanted, 1), *rows]).needs
    wide = drawn(logits, rows, [3, 3], needs=everything, history=table_of([[1, 2, 3]] * 2))
    assert wide.token_ids.tolist() == drawn(logits, rows, [3, 3]).token_ids.tolist()
    assert wide.logprobs is not None and wide.logprobs.top.shape == (2, 3)


def test_a_batch_without_rows_draws_nothing_whatever_is_needed():
    narrow, greedy = (SamplingParams(), 1), (SamplingParams(temperature=0.0), 1)
    asked = SamplingParams(top_p=0.5, min_p=0.1, top_k=7, presence_penalty=1.0, logit_bias={1: 1.0}, logprobs=3)
    wide = (asked, 1)
    for rows in ([narrow], [greedy], [wide], [wide, greedy]):
        needs = SamplingBatch.from_params(rows).needs
        found = drawn(np.zeros((0, VOCAB)), [], [], needs=needs, history=mx.zeros((0, 4), mx.int32))
        assert tokens_of(found) == [] and found.token_ids.dtype == mx.int32 and found.bad_rows.shape == (0,)
        assert found.logprobs is None or found.logprobs.top_ids.shape == (0, 3)


def test_stop_ids_are_banned_until_min_tokens_are_drawn():
    logits = np.zeros((1, VOCAB))
    logits[0, 9] = 50.0
    row = (SamplingParams(min_tokens=3, temperature=0.0, logit_bias={9: 1.0}), 1, 0, 10, BANNED)
    assert [drawn(logits, [row], [position]).token_ids.item() for position in range(10, 15)] == [0, 0, 0, 9, 9]


def test_masks_hold_for_their_own_rows_and_their_bits_may_be_of_either_sign():
    rng = np.random.default_rng(6)
    logits, allowed = rng.normal(size=(7, 70)), rng.random((5, 70)) < 0.3
    places = np.array([4, 0, 6, 2, 3], np.int32)
    allowed[4] = False
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, 26))), axis=-1, bitorder="little").view(np.uint32)
    rows = [(SamplingParams(temperature=t), 3) for t in (0.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0)]
    masks = [Masks(mx.array(places), mx.array(words)) for words in (bits, bits.view(np.int32))]
    free, *results = [drawn(logits, rows, [0] * 7, masks=mask) for mask in (None, *masks)]
    tokens = tokens_of(results[0])
    assert all(allowed[i, tokens[place]] for i, place in enumerate(places[:4]))
    assert results[0].bad_rows.tolist() == [place == 3 for place in range(7)]
    assert [tokens[row] for row in (1, 5)] == [tokens_of(free)[row] for row in (1, 5)]
    assert tokens_of(results[1]) == tokens
    assert np.array_equal(np.array(processors.unpack_bitmask(mx.array(bits), 70)), allowed)


def test_running_twice_changes_nothing():
    logits, rows, history = random_rows(6, seed=5)
    state = staged(rows, [len(tokens) for tokens in history], history=table_of(history))
    sampler, logits = Sampler(VOCAB), mx.array(logits)
    assert mx.array_equal(sampler.process(logits, state), sampler.process(logits, state)).item()


def test_a_penalty_without_a_history_is_refused():
    with pytest.raises(ConfigError, match="history"):
        staged([(SamplingParams(presence_penalty=1.0), 1)], [0])
