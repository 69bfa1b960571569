"""The native attention kernels match a dense oracle for all pages, lengths, dtypes and numbers of
threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.attention_cases import BYTE, FLOAT, HALF, Ask, Case, make_case
from sglcore_cpu.native import BoundKernel, Engine, recorder
from tests.attention.rows import Heads

SHAPES = (
    Heads(1, 1, 8),
    Heads(4, 4, 24),
    Heads(8, 2, 64),
    Heads(6, 2, 80, scaling=0.3),
    Heads(16, 8, 128),
    Heads(4, 1, 256),
    Heads(14, 2, 64),
    Heads(5, 1, 20),
    Heads(9, 1, 32),
    Heads(3, 3, 2),
)
TYPES = ((FLOAT, FLOAT), (HALF, HALF), (HALF, BYTE), (FLOAT, HALF), (FLOAT, BYTE), (HALF, FLOAT))
EDGES = (1, 2, 15, 16, 17, 31, 33, 95, 96, 97, 192, 255, 256, 257, 513)


def decode_ask(number: int) -> Ask:
    """Make requests of one token each, with lengths at block edges and random ones."""
    rng = random.Random(number)
    lengths = [rng.choice(EDGES) if rng.random() < 0.5 else rng.randint(1, 600) for _ in range(rng.randint(1, 4))]
    return drawn([(length - 1, 1) for length in lengths], rng, number)


def prefill_ask(number: int) -> Ask:
    """Make requests with any number of tokens."""
    rng = random.Random(number)
    rows = [
        (rng.choice((0, 0, 1, 37, 96, 200)), rng.choice((1, 2, 7, 16, 48, 95, 97, 130)))
        for _ in range(rng.randint(1, 3))
    ]
    return drawn(rows, rng, number)


def drawn(rows: list[tuple[int, int]], rng: random.Random, number: int) -> Ask:
    """Take the shapes and pairs of dtypes in turn, and everything else at random."""
    heads = replace(
        SHAPES[number % len(SHAPES)],
        window=rng.choice((None, None, 1, 5, 96, 256, 300)),
        softcap=rng.choice((None, None, 0.7, 50.0)),
        has_sinks=rng.choice((False, True)),
    )
    q_type, cells = TYPES[number % len(TYPES)]
    return Ask(rows, heads, rng.choice((1, 3, 8, 16)), q_type, cells, rng.choice((0, 0, 1, 3)), number)


@pytest.mark.parametrize("number", range(30))
def test_rows_of_one_token(engine: Engine, number: int) -> None:
    case = make_case(decode_ask(number))
    case.check(case.run(engine, "paged_decode"))


@pytest.mark.parametrize("number", range(12))
def test_rows_of_trees(engine: Engine, number: int) -> None:
    """A tree mask hides single keys, within a chunk and at its start."""
    rows = [(before, 1) for before in (0, 9, 31, 32, 255, 256, 270, 511, 600)]
    ask = replace(drawn(rows, random.Random(number), number), page_size=(1, 3, 8, 16)[number % 4])
    case = make_case(replace(ask, heads=replace(ask.heads, window=None)))
    case.make_tree(number)
    case.check(case.run(engine, "paged_decode"))
    assert any(case.hidden(row) for row in range(len(rows)))


@pytest.mark.parametrize("number", range(30))
def test_rows_of_several_tokens(engine: Engine, number: int) -> None:
    case = make_case(prefill_ask(number))
    case.check(case.run(engine, "paged_prefill"))


@pytest.mark.parametrize(("q_type", "cells"), TYPES)
def test_both_kernels_agree_on_rows_of_one_token(engine: Engine, q_type: torch.dtype, cells: torch.dtype) -> None:
    case = make_case(Ask([(299, 1), (0, 1)], Heads(8, 2, 64, 200), 16, q_type, cells))
    case.check(case.run(engine, "paged_decode"))
    case.check(case.run(engine, "paged_prefill"))


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
def test_padding_comes_out_as_zero_and_reads_no_cell(engine: Engine, kernel: str) -> None:
    case = make_case(Ask([(20, 1), (0, 1)], padding=3))
    case.seq_lens[2:] = torch.tensor([1, 10**6, -5], dtype=torch.int32)
    found = case.run(engine, kernel)
    case.check(found)
    assert not case.run(engine, kernel, rows=0).any()


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("heads", [Heads(4, 2, 32), Heads(4, 2, 32, softcap=0.7, has_sinks=True)])
def test_a_nan_of_the_row_itself_is_not_hidden(engine: Engine, kernel: str, heads: Heads) -> None:
    case = make_case(Ask([(20, 1), (7, 1)], heads, dtype=HALF, cells=HALF))
    wanted = case.run(engine, kernel).clone()
    case.q[0, 0] = torch.nan
    found = case.run(engine, kernel)
    assert found[0, :32].isnan().all()
    assert torch.equal(found[0, 64:], wanted[0, 64:]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("place", [0, 350, -1])
def test_one_key_may_outweigh_all_others_by_more_than_a_float_holds(engine: Engine, kernel: str, place: int) -> None:
    case = make_case(Ask([(699, 1)], Heads(4, 2, 64), 16))
    case.q[0] = 40 * case.keys[0][place].repeat_interleave(2, 0).flatten()
    case.check(case.run(engine, kernel))


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 33, 96, 97, 257])
def test_a_window_ends_with_the_row_and_begins_anywhere(engine: Engine, kernel: str, window: int) -> None:
    """Lengths 80 to 115 put the window's edges at every position of a block and a chunk."""
    case = make_case(Ask([(length, 1) for length in range(80, 116)], Heads(2, 1, 16, window), 8, seed=window))
    case.check(case.run(engine, kernel))


WRONG = (
    {"window": 41},
    {"page_size": 3},
    {"scaling": 0.36},
    {"kv_heads": 1},
    {"heads": 2},
    {"softcap": 0.0},
    {"softcap": 0.6},
    {"sinks": 0},
)


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_argument_is_seen(engine: Engine, kernel: str, wrong: dict[str, float]) -> None:
    case = make_case(Ask([(99, 1), (50, 1)], Heads(4, 2, 8, 40, softcap=0.5, has_sinks=True)))
    case.check(case.run(engine, kernel))
    with pytest.raises(AssertionError):
        case.check(case.run(engine, kernel, **wrong))


# -- other rows, threads and chunks change nothing
# ---------------------------------------------------------------


def alone(case: Case, row: int) -> dict[str, float]:
    """Return arguments that show `paged_decode` one row only."""
    return {
        "q": case.q[row].data_ptr(),
        "slots": case.slots[row:].data_ptr(),
        "seq_lens": case.seq_lens[row:].data_ptr(),
        "rows": 1,
        "tokens": 1,
    }


@pytest.mark.parametrize(("q_type", "cells"), TYPES[:3])
def test_a_row_has_the_same_bits_in_any_batch(engine: Engine, q_type: torch.dtype, cells: torch.dtype) -> None:
    case = make_case(Ask([(700, 1), (30, 1), (300, 1)], Heads(6, 2, 64), 16, q_type, cells))
    together = case.run(engine, "paged_decode")
    for row in range(3):
        assert torch.equal(case.run(engine, "paged_decode", **alone(case, row))[0], together[row])


@pytest.mark.parametrize(("q_type", "cells"), TYPES[:3])
@pytest.mark.parametrize("heads", [Heads(12, 6, 64), Heads(3, 3, 24)])
def test_rows_that_share_pages_have_the_bits_that_each_has_alone(
    engine: Engine, q_type: torch.dtype, cells: torch.dtype, heads: Heads
) -> None:
    """With shared pages the kernel works in another order: chunk by chunk, each for all rows."""
    case = make_case(Ask([(700, 1), (430, 1), (300, 1), (299, 1), (30, 1)], heads, 16, q_type, cells, padding=1))
    slots = case.slots.tolist()
    for row in (1, 2, 3):
        case.page_table[slots[row], :18] = case.page_table[slots[0], :18]
        for kept in (case.keys, case.values):
            kept[row][:288] = kept[0][:288]
    together = case.run(engine, "paged_decode")
    case.check(together)
    for row in range(5):
        assert torch.equal(case.run(engine, "paged_decode", **alone(case, row))[0], together[row])


@pytest.mark.parametrize(("q_type", "cells"), TYPES[:3])
@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(
    engine: Engine, q_type: torch.dtype, cells: torch.dtype, window: int | None
) -> None:
    case = make_case(Ask([(40, 150)], Heads(6, 2, 32, window), 16, q_type, cells))
    whole = case.run(engine, "paged_prefill")
    for first, last in ((0, 1), (1, 70), (70, 150)):
        case.seq_lens[0] = 40 + last
        starts = torch.tensor([first, last], dtype=torch.int32)
        part = case.run(engine, "paged_prefill", starts=starts.data_ptr(), tokens=last)
        assert torch.equal(part[first:last], whole[first:last])


# -- recorded calls
# --------------------------------------------------------------------------------------------------


class Kept:
    """A recorder that appends calls to a program."""

    def __init__(self, engine: Engine) -> None:
        self.program = engine.program()

    def add(self, engine: Engine, kernel: int, arguments: bytes) -> None:
        """Append the call."""
        self.program.add(kernel, arguments)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not used."""
        raise NotImplementedError

    def kernel(self, name: str) -> BoundKernel | None:
        """Not used."""
        raise NotImplementedError

    def host(self, function: Callable[..., object], *arguments: object) -> None:
        """Not used."""
        raise NotImplementedError


def test_a_recorded_call_serves_other_lengths_and_slots(engine: Engine) -> None:
    case = make_case(Ask([(500, 1), (90, 1), (3, 1)], Heads(4, 2, 16), 8, padding=1))
    kept = Kept(engine)
    token = recorder.set(kept)
    out = case.run(engine, "paged_decode")
    recorder.reset(token)
    kept.program.run(0, 1)
    case.check(out)
    case.slots[:2] = case.slots[:2].flip(0)
    for kind in (case.keys, case.values):
        kind[0], kind[1] = kind[1], kind[0]
    for lengths in ((91, 501, 4), (7, 256, 1), (91, 257, 2)):
        case.seq_lens[:3] = torch.tensor(lengths)
        case.q[:3] = torch.randn(3, 64)
        now = replace(case, keys=cut(case.keys, lengths), values=cut(case.values, lengths))
        kept.program.run(0, 1)
        now.check(out)
    case.slots[1] = 0
    kept.program.run(0, 1)
    assert not out[1].any() and not out[3].any()


def cut(parts: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """Return the first `lengths[i]` elements of each part i."""
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]
