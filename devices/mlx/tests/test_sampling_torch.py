"""Tests whole batches on MLX against the torch sampler, bit for bit, eagerly and in `mx.compile`,
and that planted defects are detected."""

import random

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.sampling_rows import host_arrays, make_state, planted, random_logits, random_params
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.sampling.state import Masks
from sglcore_mlx.sampling import sampler as sampler_module
from sglcore_mlx.sampling.state import place_state

pytestmark = pytest.mark.needs("torch")

BANNED = (3, 4)


class Case:
    """A random batch with every kind of logit processor: the inputs of both samplers, as numpy
    arrays."""

    def __init__(self, seed, vocab_size=120, plain=False):
        rng = random.Random(seed)
        count = rng.randrange(1, 9)
        self.logits = random_logits(rng, count, vocab_size)
        if rng.random() < 0.3:
            self.logits[rng.randrange(count), rng.randrange(vocab_size)] = rng.choice((np.nan, np.inf))
        starts = [rng.randrange(1, 5) for _ in range(count)]
        self.rows = [
            (random_params(rng, 0 if plain else vocab_size), rng.randrange(2**64), rng.randrange(3), start, BANNED)
            for start in starts
        ]
        history = np.random.default_rng(seed).integers(-2, vocab_size + 2, (count, 12))
        self.history = history.astype(np.int32)
        self.positions = np.array([start + rng.randrange(6) for start in starts], np.int32)
        self.mask_rows, self.mask_words = random_masks(seed, count, vocab_size) if rng.random() < 0.5 else (None, None)
        self.host = SamplingBatch.from_params(self.rows)


def random_masks(seed, count, vocab_size):
    """Return some rows in random order, and the bit masks of the tokens that each may draw."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(count)[: rng.integers(1, count + 1)].astype(np.int32)
    allowed = np.pad(rng.random((len(rows), vocab_size)) < 0.7, ((0, 0), (0, -vocab_size % 32)))
    return rows, np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)


def by_torch(case):
    """Return (tokens, bad rows, logprobs or None) of the torch sampler, as numpy arrays."""
    import torch

    from sglcore.conformance.inputs import sampling_state as torch_state
    from sglcore.sampling import sampler as torch_sampler

    positions, history = torch.tensor(case.positions), torch.tensor(case.history)
    penalties = None
    if case.host.needs.any_penalty:
        penalties = torch_state.make_penalties(case.host, history, positions, case.logits.shape[1], all_rows=True)
    masks = None
    if case.mask_rows is not None:
        masks = Masks(torch.tensor(case.mask_rows).long(), torch.tensor(case.mask_words))
    state = torch_state.make_state(case.host, positions, penalties, masks)
    found = torch_sampler.Sampler(case.logits.shape[1], "cpu").sample(torch.tensor(case.logits), state)
    lists = found.logprobs
    parts = None if lists is None else (lists.chosen, lists.ranks, lists.top_ids, lists.top)
    return found.token_ids.numpy(), found.bad_rows.numpy(), parts and [part.numpy() for part in parts]


def by_mlx(case, compiled=False, own=False, module=sampler_module):
    """Return the same of a sampler module on MLX. `compiled`: all in `mx.compile`; `own`: the
    sampler compiles its draw."""
    sampler, needs = module.Sampler(case.logits.shape[1], compiled=own), case.host.needs

    def draw(logits, positions, parts, more):
        masks = Masks(more["rows"], more["words"]) if "rows" in more else None
        state = place_state(needs, positions, parts, history=more["history"], masks=masks)
        found = sampler.sample(logits, state)
        lists = found.logprobs
        parts = [] if lists is None else [lists.chosen, lists.ranks, lists.top_ids, lists.top]
        return found.token_ids, found.bad_rows, parts

    arrays = host_arrays(case.host, needs)
    more = {"history": mx.array(case.history)}
    if case.mask_rows is not None:
        more |= {"rows": mx.array(case.mask_rows), "words": mx.array(case.mask_words)}
    function = mx.compile(draw) if compiled else draw
    inputs = {name: mx.array(part) for name, part in arrays.items()}
    tokens, bad, lists = function(mx.array(case.logits), mx.array(case.positions), inputs, more)
    return np.array(tokens), np.array(bad), [np.array(part) for part in lists] or None


def differences(found, wanted):
    """Return the names of the parts that differ: tokens, bad rows, ranks and ids in any bit;
    logprobs by more than 1e-5."""
    (tokens, bad, lists), (torch_tokens, torch_bad, torch_lists) = found, wanted
    names = [] if np.array_equal(tokens, torch_tokens) else ["tokens"]
    names += [] if np.array_equal(bad, torch_bad) else ["bad rows"]
    if lists is None or torch_lists is None:
        return names if lists is torch_lists else [*names, "logprobs"]
    good = ~torch_bad
    for name, part, other in zip(("chosen", "ranks", "top ids", "top"), lists, torch_lists, strict=True):
        exact = part.dtype == np.int32 and np.array_equal(part[good], other[good])
        close = part.dtype == np.float32 and np.allclose(part[good], other[good], atol=1e-5, rtol=0, equal_nan=True)
        names += [] if part.dtype == other.dtype and (exact or close) else [name]
    return names


@pytest.mark.parametrize("seed", range(60))
def test_a_batch_with_every_processor_is_torchs_bit_for_bit(seed):
    case = Case(seed)
    assert differences(by_mlx(case), by_torch(case)) == []


@pytest.mark.parametrize("seed", range(60, 72))
def test_inside_a_compiled_function_a_batch_is_torchs_bit_for_bit(seed):
    case = Case(seed, vocab_size=random.Random(seed).choice((31, 257, 2147)), plain=seed % 2 == 0)
    wanted = by_torch(case)
    results = {"whole": by_mlx(case, compiled=True), "draw": by_mlx(case, own=True), "neither": by_mlx(case)}
    assert {name: differences(found, wanted) for name, found in results.items()} == {name: [] for name in results}


@pytest.mark.parametrize("compiled", [False, True])
def test_processed_logits_are_torchs_bit_for_bit(compiled):
    import torch

    from sglcore.conformance.inputs import sampling_state as torch_state
    from sglcore.sampling import sampler as torch_sampler

    for seed in range(4 if compiled else 20):
        case = Case(seed)
        needs, positions = case.host.needs, torch.tensor(case.positions)
        penalties = torch_state.make_penalties(case.host, torch.tensor(case.history), positions, 120, all_rows=True)
        wanted_state = torch_state.make_state(case.host, positions, penalties)
        wanted = torch_sampler.Sampler(120, "cpu").process(torch.tensor(case.logits), wanted_state)
        state = make_state(case.host, mx.array(case.positions), history=mx.array(case.history))
        sampler = sampler_module.Sampler(120)

        def process(logits, sampler=sampler, state=state):
            return sampler.process(logits, state)

        found = np.array((mx.compile(process) if compiled else process)(mx.array(case.logits)))
        finite = np.isfinite(case.logits)
        assert needs.any_penalty and np.array_equal(found[finite], wanted.numpy()[finite]), seed


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("== EXPONENT", "== 0"),
        ("mx.where(bad, 0, drawn), bad", "drawn, bad"),
        ("if state.bias is not None:", "if False:"),
        ("if state.penalties is not None:", "if False:"),
        ("if state.masks is not None:", "if False:"),
        ("if state.xtc is not None:", "if False:"),
        ("dropped | is_bad(best)[:, None]", "is_bad(best)[:, None]"),
        ("top_p=xtc.top_p", "top_p=None"),
        ("if state.min_p is not None:", "if False:"),
        ("if state.top_k is not None or state.top_p is not None:", "if state.top_k is not None:"),
        ("mx.where(state.greedy, first_argmax(logits), raced)", "raced"),
        ("row_keys(state.seed_words, state.positions)", "row_keys(state.seed_words, state.positions + 1)"),
        ("logprobs_of(logits, tokens, top_n)", "logprobs_of(self.process(logits, state), tokens, top_n)"),
    ],
)
def test_a_planted_defect_of_the_sampler_is_caught(sound, defect):
    module = planted(sampler_module, sound, defect)
    cases = [Case(seed, plain=seed % 3 == 0) for seed in range(60)]
    assert any(differences(by_mlx(case, module=module), by_torch(case)) for case in cases)
