"""The reference kernels of recurrent layers, compared with transformers' functions: in one step, in
chunks and token by token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as delta

from sglcore.runtime.kernels.table import KernelTable
from tests.kernels.test_reference_kernels import random

TABLE = KernelTable()
LENGTHS = (6, 1, 70)
"""Tokens of each request; the last is longer than one chunk of transformers."""
CUTS = ((), (4,), (1, 2, 3, 4))
"""Tokens at which requests are cut into steps."""


class Rows(NamedTuple):
    """The arguments of an entry that describe a batch."""

    slots: Tensor
    starts: Tensor | None
    lengths: Tensor | None


Run = Callable[[list[Tensor], Rows], Tensor]
"""An entry bound to its weights and state pool: takes inputs of a step [T, ...] and its rows,
returns results [T, ...]."""


def in_steps(run: Run, inputs: list[list[Tensor]], cuts: tuple[int, ...]) -> list[Tensor]:
    """Run all requests together, cut at these tokens, and return the results of each. After the
    last cut only longer requests go on."""
    done: list[list[Tensor]] = [[] for _ in inputs[0]]
    bounds = (0, *cuts, 10**6)
    for first, last in pairwise(bounds):
        live = [row for row, part in enumerate(inputs[0]) if len(part) > first]
        parts = [[part[row][first:last] for row in live] for part in inputs]
        lengths = torch.tensor([len(part) for part in parts[0]], dtype=torch.int32)
        slots = torch.tensor([3 - row for row in live], dtype=torch.int32)
        singles = last - first == 1
        rows = Rows(slots, None if singles else (lengths.cumsum(0) - lengths).int(), None if singles else lengths)
        for row, part in zip(live, run([torch.cat(part) for part in parts], rows).split(lengths.tolist()), strict=True):
            done[row].append(part)
    return [torch.cat(part) for part in done]


def requests(*shape: int, seed: int) -> list[Tensor]:
    """Return random tokens of each request."""
    return list(random(sum(LENGTHS), *shape, seed=seed).split(LENGTHS))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("silu", "has_bias"), [(True, False), (False, True)])
def test_the_convolution_is_the_oracles(cuts: tuple[int, ...], silu: bool, has_bias: bool) -> None:
    x, weight, bias = requests(12, seed=0), random(4, 12, seed=1), random(12, seed=2) if has_bias else None
    tails = torch.zeros(4, 3, 12)

    def run(given: list[Tensor], rows: Rows) -> Tensor:
        return TABLE.causal_conv(given[0], weight, bias, silu, tails, *rows)

    found = in_steps(run, [x], cuts)
    for part, one in zip(x, found, strict=True):
        wanted = delta.causal_conv1d_fn(part.T[None], weight.T, bias, "silu" if silu else None)
        torch.testing.assert_close(one, wanted[0].T, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_delta_rule_is_the_oracles(cuts: tuple[int, ...], key_heads: int) -> None:
    heads, size, width = 4, 8, 12
    qkv, a, b = requests(2 * key_heads * size + heads * width, seed=0), requests(4, seed=1), requests(4, seed=2)
    a_log, dt_bias, states = random(heads, seed=3), random(heads, seed=4), torch.zeros(4, heads, size, width)

    def run(given: list[Tensor], rows: Rows) -> Tensor:
        return TABLE.gated_delta_rule(given[0], given[1], given[2], a_log, dt_bias, states, *rows)

    found = in_steps(run, [qkv, a, b], cuts)
    for row, (part, decays, betas) in enumerate(zip(qkv, a, b, strict=True)):
        q, k, v = part[None].split([key_heads * size, key_heads * size, heads * width], -1)
        g = -a_log.exp() * torch.nn.functional.softplus(decays + dt_bias)
        given = q.unflatten(-1, (-1, size)), k.unflatten(-1, (-1, size)), v.unflatten(-1, (-1, width))
        for oracle in (delta.torch_chunk_gated_delta_rule, delta.torch_recurrent_gated_delta_rule):
            wanted, state = oracle(
                *given, g[None], betas.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            torch.testing.assert_close(found[row], wanted[0].flatten(1), rtol=0, atol=1e-5)
            torch.testing.assert_close(states[3 - row], state[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("groups", "most"), [(1, float("inf")), (2, 1.5)])
def test_the_selective_scan_is_the_oracles(cuts: tuple[int, ...], groups: int, most: float) -> None:
    heads, size, width = 4, 6, 8
    xbc, dt = requests(heads * size + 2 * groups * width, seed=0), requests(heads, seed=1)
    a_log, d, bias = (random(heads, seed=seed) for seed in (2, 3, 4))
    states = torch.zeros(4, heads, size, width)

    def run(given: list[Tensor], rows: Rows) -> Tensor:
        return TABLE.selective_scan(given[0], given[1], a_log, d, bias, 0.1, most, states, *rows)

    found = in_steps(run, [xbc, dt], cuts)
    for row, (part, steps) in enumerate(zip(xbc, dt, strict=True)):
        x, before, after = part[None].split([heads * size, groups * width, groups * width], -1)
        wanted, state = mamba.mamba2_chunk_scan(
            x.unflatten(-1, (heads, size)),
            steps[None],
            -a_log.exp(),
            before.unflatten(-1, (groups, width)),
            after.unflatten(-1, (groups, width)),
            chunk_size=16,
            D=d,
            dt_bias=bias,
            dt_softplus=True,
            dt_limit=(0.1, most),
            return_final_states=True,
        )
        torch.testing.assert_close(found[row], wanted[0].flatten(1), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(states[3 - row], state[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gated_norm_is_both_oracles_to_the_bit(dtype: torch.dtype) -> None:
    x, gate = random(5, 24, dtype=dtype), random(5, 24, dtype=dtype, seed=1)
    after, before = delta.Qwen3NextRMSNormGated(8), mamba.GraniteMoeHybridRMSNormGated(24, 8)
    after.weight.data, before.weight.data = random(8, dtype=dtype, seed=2), random(24, dtype=dtype, seed=3)
    found = TABLE.gated_rms_norm(x, gate, after.weight.view(1, 8), 1e-6, False)
    assert torch.equal(found, after(x.view(15, 8), gate.view(15, 8)).view(5, 24))
    assert torch.equal(TABLE.gated_rms_norm(x, gate, before.weight.view(3, 8), 1e-6, True), before(x, gate))


def test_a_padding_row_changes_nothing() -> None:
    """A padding row changes neither its state slot nor other rows, though it seems to have a
    token."""
    x, weight, tails = random(3, 12), random(4, 12, seed=1), random(2, 3, 12, seed=2)
    before, alone = tails.clone(), tails.clone()
    slots, starts, lengths = (torch.tensor(part, dtype=torch.int32) for part in ([1, 0], [0, 0], [2, 1]))
    found = TABLE.causal_conv(x, weight, None, True, tails, slots, starts, lengths)
    wanted = TABLE.causal_conv(x[:2], weight, None, True, alone, slots[:1], starts[:1], lengths[:1])
    assert torch.equal(found, torch.cat((wanted, torch.zeros(1, 12)))) and torch.equal(tails, alone)
    assert not TABLE.causal_conv(x[:1], weight, None, True, tails, slots[1:], None, None).any()
    assert torch.equal(tails[0], before[0]) and not torch.equal(tails[1], before[1])
