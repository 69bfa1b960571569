"""Layers of transformers' classes with recurrent states, by themselves: the cache that they are
given, and the calls of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from sglcore.models.transformers_backend.stateful_layers import Held, Mixer, check_mixers
from tests.models.transformers.test_transformers_states import Keeper, mixer


@pytest.mark.parametrize("kernel", [1, 3, 4, None])
@pytest.mark.parametrize("sizes", [(6,), (2, 1, 1), (1, 1, 1, 1, 1), (5, 3, 7), (1, 9)])
def test_states_are_kept_as_in_transformers_own_cache(sizes: tuple[int, ...], kernel: int | None) -> None:
    """`kernel`: the size that a class gives. None: the first call's length."""
    states: dict[str, Tensor] = {}
    theirs, generator = LinearAttentionLayer(number_of_states=2), torch.Generator().manual_seed(0)
    named = {} if kernel is None else {"conv_kernel_size": kernel}
    for size in sizes:
        held = Held(states)
        for state in (0, 1):
            new, matrix = (torch.randn(2, 3, each, generator=generator) for each in (size, 4))
            before = held.get_conv_state(7, state), held.get_recurrent_state(7, state)
            assert [each is None for each in before] == [not theirs.has_previous_state[state]] * 2
            assert torch.equal(
                held.update_conv_state(new, 7, state, **named), theirs.update_conv_state(new, state, **named)
            )
            assert torch.equal(
                held.update_recurrent_state(matrix, 7, state), theirs.update_recurrent_state(matrix, state)
            )
    kept: dict[str, Any] = {f"conv{state}": theirs.conv_states[state] for state in (0, 1)}
    kept |= {f"recurrent{state}": theirs.recurrent_states[state] for state in (0, 1)}
    assert states.keys() == kept.keys() and all(torch.equal(states[name], kept[name]) for name in kept)


def test_the_linear_cache_of_one_type_is_the_first_matrix() -> None:
    states: dict[str, Tensor] = {}
    matrix = torch.randn(1, 2, 2)
    Held(states).set_linear_cache(3, matrix)
    assert Held(states).get_linear_cache(3) is matrix is Held(states).get_recurrent_state(3)
    assert Held(states).get_recurrent_state(3, 1) is None and not Held(states).is_recording_past(3)


STEPS = [
    ([1, 1, 1], [3, 1, 2], [3]),  # the rows of each call
    ([1, 1, 3], [3, 1, 0], [2, 1]),
    ([3, 1, 2], [0, 1, 4], [1, 1, 1]),
    ([2], [0], [1]),
    ([4, 1, 1], [2, 3, 0], [1, 1, 1]),
]


@pytest.mark.parametrize(("lengths", "before", "rows"), STEPS)
@pytest.mark.parametrize("what", ["sum", "forgets"])
def test_each_request_of_a_step_goes_on_from_its_own_state(
    what: str, lengths: list[int], before: list[int], rows: list[int]
) -> None:
    """`rows`: those of the calls for the class that keeps its state in calls of several tokens."""
    made, calls = mixer(what), []
    check_mixers((made,))
    assert made.forgets is (what == "forgets")
    made._call._forward = recorded(made._call._forward, calls)
    slots, generator = [4, 1, 2, 3][: len(lengths)], torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, generator=generator)
    hidden, kept, wanted = torch.randn(sum(lengths), 4, generator=generator), states.clone(), []
    for slot, tokens, prefix in zip(slots, hidden.split(lengths), before, strict=True):
        kept[slot] = 0 if prefix == 0 else kept[slot]
        wanted.append(kept[slot] + tokens.cumsum(0))
        kept[slot] = wanted[-1][-1]
    states[[slot for slot, prefix in zip(slots, before, strict=True) if not prefix]] = 0
    batch: Any = SimpleNamespace(
        req_pool_indices=torch.tensor(slots),
        forward_mode=SimpleNamespace(is_decode=False),
        extend_seq_lens_cpu=torch.tensor(lengths),
        extend_prefix_lens_cpu=torch.tensor(before),
    )
    found = made.mix(hidden, batch, {"recurrent0": states})
    torch.testing.assert_close(found, torch.cat(wanted))
    torch.testing.assert_close(states, kept)
    singles = [length if what == "forgets" and prefix else 1 for length, prefix in zip(lengths, before, strict=True)]
    leading = rows[0] if lengths[0] == 1 else 0
    assert calls == ([leading] if leading else []) + [1] * sum(singles[leading:])
    assert what == "forgets" or calls == rows


def recorded(forward: Any, calls: list[int]) -> Any:
    """A forward that appends the rows of each call to `calls`."""

    def called(hidden: Tensor, **named: Any) -> Any:
        calls.append(len(hidden))
        return forward(hidden, **named)

    return called


def test_a_decode_step_is_one_call_whatever_the_host_knows_of_lengths() -> None:
    made, calls = mixer("sum"), []
    check_mixers((made,))
    made._call._forward = recorded(made._call._forward, calls)
    states, hidden = torch.randn(5, 4), torch.randn(3, 4)
    wanted = states.clone()
    wanted[[3, 1, 2]] += hidden
    batch: Any = SimpleNamespace(
        req_pool_indices=torch.tensor([3, 1, 2]), forward_mode=SimpleNamespace(is_decode=True), extend_seq_lens_cpu=None
    )
    torch.testing.assert_close(made.mix(hidden, batch, {"recurrent0": states}), wanted[[3, 1, 2]])
    torch.testing.assert_close(states, wanted)
    assert calls == [3]


class Notes(Keeper):
    """Notes the tokens of each call, and whether it was given a state."""

    def forward(self, hidden: Tensor, cache_params: Any = None) -> Tensor:
        """[rows, T, 4]."""
        self.noted = [*getattr(self, "noted", []), (hidden.shape[1], bool(cache_params.states))]
        return super().forward(hidden, cache_params)


def test_a_walk_runs_a_prompt_and_a_token_after_it() -> None:
    """What a class does with one token and a state must show in the walk too."""
    with torch.device("meta"):
        module = Notes("sum")
        made = Mixer(0, module)
        found = made.module(torch.ones(1, 5, 4))
    assert module.noted == [(5, False), (1, True)]
    assert found.shape == (1, 5, 4) and made.size == 4 and list(made.kept) == ["recurrent0"]
