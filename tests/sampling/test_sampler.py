"""The batched sampler equals the reference row by row, whatever other rows are in the batch."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglcore.conformance.inputs.sampling_state import make_penalties, make_state
from sglcore.sampling.gumbel_race import lowest_argmax
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.sampling.processors import unpack_bitmask
from sglcore.sampling.reference_sampler import reference_draw
from sglcore.sampling.sampler import Sampler
from sglcore.sampling.state import Masks
from tests.sampling.rows import drawn, staged, with_history

PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 4.0)),
    top_k=st.integers(0, 40),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    xtc_probability=st.sampled_from((0.0, 0.0, 0.4, 1.0)),
    xtc_threshold=st.sampled_from((0.0, 0.01, 0.1, 0.3, 0.5)),
)
ROWS = st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))


@given(
    st.lists(ROWS, min_size=1, max_size=5), st.integers(1, 60), st.integers(0, 2**31), st.sampled_from((0.1, 3.0, 30.0))
)
def test_torch_draws_what_the_reference_draws(rows, vocab_size, seed, spread):
    rng = random.Random(seed)
    logits = torch.tensor([[rng.gauss(0, spread) for _ in range(vocab_size)] for _ in rows])
    logits[:, rng.randrange(vocab_size)] = rng.choice((0.0, -math.inf))
    result = drawn(logits, [row[:3] for row in rows], [row[3] for row in rows])
    expected = [reference_draw(logits[i].tolist(), *row) for i, row in enumerate(rows)]
    assert list(zip(result.token_ids.tolist(), result.bad_rows.tolist(), strict=True)) == expected


def mixed_batch(count, vocab_size, seed):
    """Logits, rows with every kind of parameter, positions and histories."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [
        {"temperature": 0.4},
        {"temperature": 0.0},
        {"top_k": 7, "temperature": 2.5},
        {"top_p": 0.8, "temperature": 1.3, "xtc_probability": 0.5, "xtc_threshold": 0.02},
        {"min_p": 0.1, "logit_bias": {3: 4.0, 5: -4.0}},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 30},
        {"presence_penalty": 1.5, "temperature": 0.0, "xtc_probability": 1.0},
        {"min_tokens": 4},
    ]
    rows = [(SamplingParams(**kinds[i % 8]), rng.getrandbits(64), i % 3, 6, (0, 1, 2)) for i in range(count)]
    history = [[rng.randrange(vocab_size) for _ in range(6 + rng.randrange(8))] for _ in rows]
    return torch.randn(count, vocab_size) * 3, rows, [len(tokens) for tokens in history], history


def draw_subset(batch, chosen, pad=0, sampler_kind=Sampler):
    """The tokens of these rows of a mixed batch drawn together, with `pad` rows of garbage at the
    end."""
    logits, rows, positions, history = batch
    picked = [rows[i] for i in chosen]
    penalties = None
    if any(row[0].needs_history for row in picked):
        penalties = with_history(picked, [history[i] for i in chosen], logits.shape[1], all_rows=False)
    garbage = torch.full((pad, logits.shape[1]), math.nan)
    where = torch.tensor([positions[i] for i in chosen] + [-(2**31)] * pad, dtype=torch.int32)
    greedy = [(SamplingParams(temperature=0.0), 0)] * pad
    state = make_state(SamplingBatch.from_params(picked + greedy), where, penalties)
    result = sampler_kind(logits.shape[1], "cpu").sample(torch.cat([logits[chosen], garbage]), state)
    return result.token_ids[: len(chosen)].tolist()


def company_differs(sampler_kind=Sampler):
    """Whether any row of a mixed batch draws another token if the other rows change."""
    batch = mixed_batch(24, 90, seed=5)
    together = draw_subset(batch, list(range(24)), sampler_kind=sampler_kind)
    alone = [draw_subset(batch, [i], sampler_kind=sampler_kind)[0] for i in range(24)]
    order = list(range(24))
    random.Random(6).shuffle(order)
    shuffled = draw_subset(batch, order, pad=3, sampler_kind=sampler_kind)
    return together != alone or shuffled != [together[i] for i in order]


def test_a_row_draws_the_same_token_alone_in_any_batch_and_in_any_order():
    assert not company_differs()


def test_batch_independence_catches_a_sampler_keyed_by_row_index():
    class KeyedByRow(Sampler):
        def sample(self, logits, state):
            return super().sample(
                logits, replace(state, positions=torch.arange(len(state.positions), dtype=torch.int32))
            )

    assert company_differs(KeyedByRow)


def test_batch_independence_catches_one_temperature_for_all_rows():
    class FirstRowsScale(Sampler):
        def sample(self, logits, state):
            return super().sample(logits, replace(state, scale=state.scale[:1].expand_as(state.scale)))

    assert company_differs(FirstRowsScale)


@pytest.mark.parametrize("block_elements", [1, 500, 10**9])
def test_the_block_size_never_changes_a_token(block_elements):
    logits, rows, positions, history = mixed_batch(20, 70, seed=8)
    state = staged(rows, positions, penalties=with_history(rows, history, 70))
    expected = Sampler(70, "cpu").sample(logits, state).token_ids
    assert torch.equal(Sampler(70, "cpu", block_elements).sample(logits, state).token_ids, expected)


def test_wider_flags_of_a_captured_graph_never_change_a_token():
    logits, rows, positions, history = mixed_batch(24, 70, seed=9)
    needs = SamplingBatch.from_params(rows).needs
    for i, row in enumerate(rows):
        penalties = with_history([row], [history[i]], 70)
        wide = make_state(
            SamplingBatch.from_params([row]), torch.tensor([positions[i]], dtype=torch.int32), penalties, needs=needs
        )
        own = drawn(logits[i : i + 1], [row], [positions[i]], penalties=penalties if row[0].needs_history else None)
        assert torch.equal(Sampler(70, "cpu").sample(logits[i : i + 1], wide).token_ids, own.token_ids)


def test_greedy_rows_take_the_lowest_id_of_the_largest_logit():
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, -3.0, -math.inf, -3.0]])
    greedy = [(SamplingParams(temperature=0), 1)] * 3
    assert drawn(logits, greedy, [0] * 3).token_ids.tolist() == [1, 0, 1]
    mixed = [*greedy, (SamplingParams(), 1)]
    assert drawn(torch.cat([logits, logits[:1]]), mixed, [0] * 4).token_ids.tolist()[:3] == [1, 0, 1]


def test_greedy_is_decided_by_the_float_not_by_the_fixed_point():
    logits = torch.tensor([[1.0, 1.0 + 2**-20]])
    assert drawn(logits, [(SamplingParams(temperature=0), 1)], [0]).token_ids.tolist() == [1]
    both = [(SamplingParams(temperature=0), 1), (SamplingParams(), 2)]
    assert drawn(logits.expand(2, 2), both, [0, 0]).token_ids.tolist()[0] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_flagged_draws_token_0_and_hurts_nobody(temperature, spoil):
    torch.manual_seed(2)
    logits = torch.randn(3, 50)
    spoiled = logits.clone()
    spoiled[1, slice(None) if spoil == -math.inf else 17] = spoil
    rows = [
        (SamplingParams(temperature=temperature, top_k=9 * (temperature > 0), top_p=0.9), seed) for seed in range(3)
    ]
    good, bad = drawn(logits, rows, [4] * 3), drawn(spoiled, rows, [4] * 3)
    assert bad.bad_rows.tolist() == [False, True, False] and not good.bad_rows.any()
    assert bad.token_ids[[0, 2]].tolist() == good.token_ids[[0, 2]].tolist() and bad.token_ids[1] == 0


def test_masked_tokens_are_never_drawn():
    logits = torch.full((500, 20), -math.inf)
    logits[:, 3::5] = torch.randn(1, 4)
    rows = [(SamplingParams(temperature=5.0), seed) for seed in range(500)]
    assert set(drawn(logits, rows, [0] * 500).token_ids.tolist()) == {3, 8, 13, 18}


def test_zero_rows_are_allowed_with_every_part():
    needs = mixed_batch(8, 10, 1)
    wide = SamplingBatch.from_params([*needs[1], (SamplingParams(logprobs=2), 0)]).needs
    penalties = with_history(needs[1], needs[3], 10)
    empty = type(penalties)(
        None,
        *(getattr(penalties, name)[:0] for name in ("seen", "output_counts", "repetition", "presence", "frequency")),
    )
    state = make_state(SamplingBatch.from_rows([]), torch.zeros(0, dtype=torch.int32), empty, needs=wide)
    result = Sampler(10, "cpu").sample(torch.zeros(0, 10), state)
    assert result.token_ids.shape == (0,) and result.logprobs is not None and result.logprobs.top.shape == (0, 2)
    assert Sampler(10, "cpu").sample(torch.zeros(0, 10), staged([], [])).token_ids.shape == (0,)


def test_the_logits_are_left_as_they_were():
    logits, rows, positions, history = mixed_batch(16, 40, seed=3)
    before = logits.clone()
    drawn(logits, rows, positions, penalties=with_history(rows, history, 40))
    assert torch.equal(logits, before)


def test_nothing_reads_a_device_value():
    """Meta tensors hold no data, so any host read or data-dependent shape raises."""
    rows = [
        (replace(SamplingParams(), **kind), 1, 0, 2, (0,))
        for kind in ({"top_k": 5, "logprobs": 2}, {"top_p": 0.5}, {"min_p": 0.1})
    ]
    rows += [
        (SamplingParams(logit_bias={1: 1.0}, min_tokens=3, frequency_penalty=1.0), 1, 0, 2, (0,)),
        (SamplingParams(temperature=0), 1),
    ]
    batch = SamplingBatch.from_params(rows)
    history = torch.zeros(5, 9, dtype=torch.int32, device="meta")
    penalties = make_penalties(batch, history, torch.zeros(5, dtype=torch.int32, device="meta"), 30, all_rows=True)
    state = make_state(batch, torch.zeros(5, dtype=torch.int32, device="meta"), penalties)
    result = Sampler(30, "meta").sample(torch.zeros(5, 30, device="meta"), state)
    assert result.token_ids.shape == (5,) and result.token_ids.dtype == torch.int32


def test_penalties_without_counts_are_refused():
    with pytest.raises(ValueError, match="make_penalties"):
        staged([(SamplingParams(presence_penalty=1.0), 1)], [0])


def test_an_impossible_vocabulary_is_refused():
    with pytest.raises(ValueError, match="check vocab_size"):
        Sampler(0, "cpu")


def test_ties_of_the_race_go_to_the_lowest_id():
    scores = torch.tensor([[1, 7, 7, 3], [-5, -9, -5, -5], [0, 0, 0, 0]], dtype=torch.int32)
    assert lowest_argmax(scores, torch.arange(4, dtype=torch.int32)).tolist() == [1, 0, 0]


def test_a_grammar_mask_restricts_and_its_bits_are_lowest_first():
    words = torch.tensor([[0b1010, 0], [-(2**31), 1]], dtype=torch.int32)
    allowed = unpack_bitmask(words, 33)
    assert [torch.nonzero(row)[:, 0].tolist() for row in allowed] == [[1, 3], [31, 32]]
    rows = [(SamplingParams(temperature=3.0), 1), (SamplingParams(temperature=0), 1)]
    masks = Masks(torch.tensor([0, 1]), words)
    for position in range(20):
        tokens = drawn(torch.randn(2, 33), rows, [position] * 2, masks=masks).token_ids.tolist()
        assert tokens[0] in (1, 3) and tokens[1] in (31, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_touches_its_own_rows_only_and_not_the_logits_that_are_reported(dtype: torch.dtype):
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = logits.clone()
    rows = [(SamplingParams(temperature=1.0, logprobs=1), seed) for seed in range(5)]
    words = torch.tensor([[1 << 5, 0, 0], [0, 0, 1 << 5]], dtype=torch.int32)
    free = drawn(logits, rows, [7] * 5)
    found = drawn(logits, rows, [7] * 5, masks=Masks(torch.tensor([3, 1]), words))
    assert found.token_ids[[3, 1]].tolist() == [5, 69]
    assert torch.equal(found.token_ids[[0, 2, 4]], free.token_ids[[0, 2, 4]])
    assert torch.equal(logits, before) and found.logprobs is not None and free.logprobs is not None
    assert torch.equal(found.logprobs.top, free.logprobs.top)


def test_a_row_that_may_draw_nothing_is_bad_and_no_other():
    rows = [(SamplingParams(temperature=1.0), 1)] * 3
    masks = Masks(torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int32))
    assert drawn(torch.randn(3, 40), rows, [0] * 3, masks=masks).bad_rows.tolist() == [False, True, False]
