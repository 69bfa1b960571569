"""Recurrent states: by slot and chunk, restored from snapshots, in graphs; and each missing copy is
caught."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import NoForwardContextError
from sglcore.runtime.graphs.shadow_mode import Shadow
from sglcore.runtime.memory.states import StatePool, StateTensor, state_bytes
from sglcore.runtime.state_layer import StateLayer
from sglcore.step.snapshot_copies import state_moves
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.runtime.tiny import (
    HIDDEN,
    SHARED,
    SLOTS,
    STAGED,
    Desk,
    Site,
    TinyModel,
    assert_close,
    attend_densely,
    ints,
    make_site,
    random_tokens,
    tokens_of,
)

SNAPSHOTS = 3


class Decay(StateLayer):
    """Each token halves the sum, then adds itself and a quarter of the token before."""

    def __init__(self, layer_id: int) -> None:
        kept = StateTensor((HIDDEN,), torch.float32)
        super().__init__(layer_id, {"sum": kept, "last": kept})

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """In decode, all slots at once; in prefill, one token after the other."""
        slots = batch.req_pool_indices
        if batch.forward_mode.is_decode:
            return self.step(hidden, slots, states)
        assert batch.extend_seq_lens_cpu is not None
        rows = hidden.split(batch.extend_seq_lens_cpu.tolist())
        return torch.cat(
            [self.step(token, slots[i : i + 1], states) for i, row in enumerate(rows) for token in row.split(1)]
        )

    def step(self, hidden: Tensor, slots: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """One token of each of these slots."""
        sums = states["sum"][slots] / 2 + hidden + states["last"][slots] / 4
        states["sum"][slots], states["last"][slots] = sums, hidden
        return sums


class DecayModel(TinyModel):
    """Two layers with a state, before the attention of the tiny model."""

    def __init__(self) -> None:
        super().__init__(windows=(None,))
        self.state_layers = (Decay(0), Decay(1))

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, HIDDEN]."""
        hidden = self.embedding[batch.input_ids]
        for layer in self.state_layers:
            hidden = layer(hidden)
        (attention,), (qkv,), (out,) = self.attention_layers, self.qkv, self.out
        return hidden + attention(*self._split(hidden @ qkv)) @ out

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """The oracle, computed from the first token on."""
        hidden = self.embedding[torch.tensor(tokens)]
        for _ in self.state_layers:
            sums, last, out = torch.zeros(HIDDEN), torch.zeros(HIDDEN), []
            for token in hidden:
                sums, last = sums / 2 + token + last / 4, token
                out.append(sums)
            hidden = torch.stack(out)
        q, k, v = self._split(hidden @ self.qkv[0])
        return hidden + attend_densely(q, k, v, None) @ self.out[0]


def make(pool: type[StatePool] = StatePool, poison: bool = True, **options: Any) -> Site:
    """A site over the model, with poisoned states."""
    model = DecayModel()
    states = pool(model.state_layers, SLOTS, SNAPSHOTS, "cpu", poison)
    return make_site(model, state_pool=states, **options)


def run(site: Site, batch: ScheduleBatch) -> list[list[int]]:
    """The tokens of each request."""
    result = site.worker.collect(site.worker.submit(batch))
    return [tokens_of(result, row) for row in range(batch.batch_size)]


def script(site: Site, steps: int = 3) -> dict[str, tuple[list[int], list[int]]]:
    """Return {name: (prompt, tokens)} after every movement of states: chunks, a snapshot taken and
    restored into another slot while the first one goes on, a slot reused by another request, and
    joint decode steps."""
    desk, long, other = Desk(3), random_tokens(5, 8), random_tokens(6, 3)
    found: dict[str, list[int]] = {"first": [], "hit": [], "next": []}
    run(site, desk.extend({2: long[:3]}, emits=[False], state_from=ints([0])))
    run(site, desk.extend({2: long[3:5]}, emits=[False], state_to=ints([2])))
    rows = {2: long[5:], 4: other}
    first, stale = run(site, desk.extend(rows, state_from=ints([-1, 0]), state_to=ints([0, 1])))
    found["first"] += first
    desk.leave(4)
    # The prefix hit shares no pages here: it recomputes its KV cells and runs only its last three
    # tokens.
    desk.lens[4], desk.pages[4] = 5, list(desk.pages[2][:2])
    batch = desk.extend({4: long[5:]}, state_from=ints([2]))
    batch.page_counts, batch.new_pages = ints([0]), ints(desk.pages[4])
    batch.new_page_offsets = ints([0, len(desk.pages[4])])
    found["hit"] += run(site, batch)[0]
    found["next"] += run(site, desk.extend({7: other}, state_from=ints([0])))[0]
    for _ in range(steps):
        for name, row in zip(("first", "hit", "next"), run(site, desk.decode(2, 4, 7)), strict=True):
            found[name] += row
    prompts = {"first": long, "hit": long, "next": other}
    return {"left": (other, stale), **{name: (prompts[name], tokens) for name, tokens in found.items()}}


def is_right(site: Site, steps: int = 3) -> bool:
    """Whether every token equals what the model gives for the whole text."""
    return all(site.model.continuation(prompt, len(found)) == found for prompt, found in script(site, steps).values())


@pytest.mark.parametrize("facts", [SHARED, STAGED])
@pytest.mark.parametrize("buckets", [(), (4,)])
def test_states_move_in_and_out_and_between_slots(facts: Any, buckets: tuple[int, ...]) -> None:
    site = make(facts=facts, buckets=buckets)
    assert is_right(site)


def test_a_steady_decode_step_moves_nothing_and_sends_nothing() -> None:
    site, desk = make(poison=False), Desk()
    run(site, desk.extend({1: [3, 4]}, state_from=ints([0])))
    batch = desk.decode(1)
    assert site.runner.state_pool is not None
    assert site.runner.state_pool.changes(batch) == {}


def test_moves_name_rows_of_snapshots_behind_those_of_slots() -> None:
    batch = Desk().extend({2: [1], 5: [1], 3: [1], 4: [1]}, state_from=ints([0, -1, 3, 0]), state_to=ints([0, 2, 0, 1]))
    found = {name: rows.tolist() for name, rows in state_moves(batch, 8).items()}
    assert found == {
        "state_zeroed": [2, 4],
        "state_restored": [3],
        "state_sources": [11],
        "state_kept": [5, 4],
        "state_copies": [10, 9],
    }
    assert state_moves(Desk().extend({1: [1]}, state_from=ints([-1]), state_to=ints([0])), 8) == {}


class NoZeroing(StatePool):
    """Does not zero the state of a slot that another request used."""

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Copy everything except the zeros."""
        super().apply({name: rows for name, rows in arrived.items() if name not in ("state_zeroed", "state_entering")})


class EarlySnapshots(StatePool):
    """Takes snapshots before the forward."""

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Copy in and out at once."""
        super().apply(arrived)
        super().copy_out(arrived)

    def copy_out(self, arrived: Mapping[str, Tensor]) -> None:
        """Do nothing: the snapshots are already taken."""


class LateSnapshots(StatePool):
    """Takes snapshots a step late."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late: Mapping[str, Tensor] = {}

    def copy_out(self, arrived: Mapping[str, Tensor]) -> None:
        """Copy the snapshots of the step before."""
        late, self.late = self.late, {name: rows.clone() for name, rows in arrived.items()}
        super().copy_out(late)


class WrongSlot(StatePool):
    """Restores into the next higher slot."""

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Copy to a slot that is one too high."""
        shifted = {name: rows + 1 if name == "state_restored" else rows for name, rows in arrived.items()}
        super().apply(shifted)


@pytest.mark.parametrize("pool", [NoZeroing, EarlySnapshots, LateSnapshots, WrongSlot])
@pytest.mark.parametrize("poison", [True, False])
def test_a_copy_that_is_missing_late_or_elsewhere_is_seen(pool: type[StatePool], poison: bool) -> None:
    site = make(pool, poison)
    if pool is NoZeroing and not poison:
        assert site.runner.state_pool is not None
        site.runner.state_pool.write(torch.arange(SLOTS + 1), [torch.ones(SLOTS + 1, HIDDEN)] * 4)
    assert not is_right(site)


def test_poison_fills_a_slot_that_is_given_to_a_request_until_it_is_zeroed() -> None:
    site, desk = make(), Desk()
    run(site, desk.extend({1: [3, 4]}, state_from=ints([0])))
    desk.leave(1)
    batch = desk.extend({1: [3, 4]})
    result = site.worker.collect(site.worker.submit(batch))
    assert result.bad_rows.all()


def test_a_replay_is_compared_with_an_eager_forward_of_the_states_before_it() -> None:
    site = make(buckets=(4,))
    assert site.runner.graphs is not None
    site.runner.graphs.shadow = Shadow(1)
    assert is_right(site, steps=4)
    assert site.runner.graphs.shadow.compared == 4


def test_a_graph_is_refused_when_the_states_have_moved() -> None:
    site, desk = make(buckets=(4,)), Desk()
    run(site, desk.extend({1: [3, 4]}, state_from=ints([0])))
    assert site.runner.state_pool is not None and site.runner.graphs is not None
    site.runner.state_pool.replace_storage()
    with pytest.raises(StalePlanError, match="generation 0 of the states, it is now 1"):
        run(site, desk.decode(1))
    site.runner.graphs.recapture()
    run(site, desk.decode(1))


def test_a_forward_without_a_pool_says_so() -> None:
    site = make_site(DecayModel())
    with pytest.raises(NoForwardContextError, match="give its ForwardContext the model's state_pool"):
        run(site, Desk().extend({1: [3, 4]}))


def test_bytes_of_a_request_are_the_sum_over_layers_and_names() -> None:
    assert state_bytes(DecayModel().state_layers) == 2 * 2 * HIDDEN * 4


def test_states_that_are_read_are_copies() -> None:
    pool = StatePool(DecayModel().state_layers, SLOTS, SNAPSHOTS, "cpu")
    rows = torch.tensor([1, SLOTS + SNAPSHOTS])
    pool.write(rows, [torch.full((2, HIDDEN), float(i + 1)) for i in range(4)])
    kept = pool.read(rows)
    pool.write(rows, [torch.zeros(2, HIDDEN)] * 4)
    assert_close(torch.stack(kept)[:, 0, 0], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert all(tensor.shape == (1 + SLOTS + SNAPSHOTS, HIDDEN) for tensor in pool.states(1).values())


def test_mixed_steps_keep_the_rows_apart() -> None:
    site, desk, prompt = make(), Desk(2), random_tokens(8, 4)
    (token,) = run(site, desk.extend({3: prompt}, state_from=ints([0])))[0]
    batch = desk.batch({3: [-3], 1: prompt[:2]}, ForwardMode.MIXED, state_from=ints([-1, 0]))
    first, second = run(site, batch)
    assert first == [site.model.next_token([*prompt, token])] and second == [site.model.next_token(prompt[:2])]
