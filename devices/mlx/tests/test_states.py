"""Tests of recurrent states on a hybrid model: random traces with few snapshots, inert padding of
compiled steps, no copies of pools, and the moves of states. Does not use torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import SPOILED, TokenEngine, check_same, write_tiny
from devices.mlx.tests.sampling_rows import planted
from devices.mlx.tests.test_traces import TOLERANCE, Life, Truth, check_life, draw_life, open_engine, play
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.core.errors import ConfigError
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore_mlx import bring_up, forward, states, stepper
from sglcore_mlx.layers.recurrent import CausalConv
from sglcore_mlx.models.contract import StateShape
from sglcore_mlx.states import NONE, StatePool, state_bytes

CHANNELS = 4 * 8 + 2 * 2 * 6
STATE = 2 * 4 * (2 * CHANNELS + 4 * 8 * 6)
"""Bytes of a request's state: two layers with two tokens of the convolution and one matrix per
head, in float32."""
SNAPSHOTS = 3
SEEDS = (3, 4, 13)
SLICED_SEEDS = (3, 4, 13, 21, 22, 23)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("hybrid"), hybrid=True)


def opened(folder: Path, **settings: Any) -> TokenEngine:
    """Start a device with few snapshots."""
    return open_engine(folder, **{"snapshot_memory": SNAPSHOTS * STATE, **settings})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TokenEngine]:
    with opened(folder) as made:
        yield made


@pytest.fixture(scope="module")
def truth(engine: TokenEngine) -> Truth:
    return Truth(engine.recorder)


def life_of(seed: int) -> Life:
    return draw_life(Random(seed))


def test_random_lives_give_each_request_what_it_gets_alone(engine: TokenEngine, truth: Truth) -> None:
    seen = dict.fromkeys(("retractions", "snapshot_hits", "evicted_snapshots", "evicted_pages"), 0)
    for seed in SEEDS:
        for overlap in (True, False):
            print("seed", seed, "overlap", overlap)
            lived = play(engine.recorder, life_of(seed), overlap=overlap)
            check_life(life_of(seed), lived, truth)
        for name in seen:
            seen[name] += getattr(lived.stats, name) > 0
    assert min(seen.values()) > 0, seen


def live_by_slices(folder: Path, truth: Truth) -> set[str]:
    """Run traces with layered prefill, one or two layers at a time; return the paths of the
    steps."""
    with opened(folder, prompt_slices="1") as engine:
        for seed in SLICED_SEEDS:
            check_life(life_of(seed), play(engine.recorder, life_of(seed), overlap=True), truth)
        return engine.recorder.paths


def test_random_lives_by_slices_of_layers_give_each_request_what_it_gets_alone(folder: Path, truth: Truth) -> None:
    assert any(path.startswith("layers 1 to") for path in live_by_slices(folder, truth))


def test_states_that_a_decode_step_left_between_two_slices_are_written(
    folder: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = "        self._write_left()\n        self._left = _Left"
    monkeypatch.setattr(bring_up, "StatePool", planted(states, sound, "        self._left = _Left").StatePool)
    with pytest.raises(AssertionError):
        live_by_slices(folder, truth)


def lost_tails(patch: pytest.MonkeyPatch) -> None:
    """A chunk does not update the convolution's state."""
    sound = CausalConv.__call__

    def defect(self: CausalConv, x: mx.array, tails: mx.array, lens: Any = None) -> tuple[mx.array, mx.array]:
        return sound(self, x, tails)[0], tails if x.shape[1] > 1 else sound(self, x, tails)[1]

    patch.setattr(CausalConv, "__call__", defect)


class EarlySnapshots(StatePool):
    """Takes snapshots before the step."""

    def take(self, batch: ScheduleBatch, rows: int) -> list[Any]:
        """Remember the states before the step."""
        self.taken = super().take(batch, rows)
        return self.taken

    def leave(self, batch: ScheduleBatch, states: list[Any]) -> None:
        """Write snapshots from the states before the step."""
        super().leave(batch, self.taken)
        self._write(self._left.kept, self._left.copies)
        self._left = replace(self._left, states=states, kept=NONE, copies=NONE)


def early(patch: pytest.MonkeyPatch) -> None:
    """Use the pool with this defect."""
    patch.setattr(bring_up, "StatePool", EarlySnapshots)


def rows(patch: pytest.MonkeyPatch) -> None:
    """Every part of a prompt step begins with the states of the first rows."""
    patch.setattr(stepper, "extend_forward", planted(forward, "first += rows", "first += 0").extend_forward)


DEFECTS: dict[str, tuple[str, str]] = {
    "a slot keeps the state of the request before": ('of_slot[moves.get("state_zeroed", NONE)] = 0', "pass"),
    "another snapshot is restored": ('moves.get("state_sources", NONE)\n', 'moves.get("state_sources", NONE) - 1\n'),
    "a snapshot is of the first row": ("kept = np.flatnonzero(", "kept = 0 * np.flatnonzero("),
    "a snapshot is lost while the same requests decode": ("self._write(left.kept, left.copies)", "pass"),
    "states of rows that pause are not written": ("np.flatnonzero(left.slots)", "np.flatnonzero(left.slots)[:0]"),
    "a batch of as many rows is taken for the same": (
        "np.array_equal(sources, left.slots)",
        "len(sources) == len(left.slots)",
    ),
}


def is_caught(folder: Path, truth: Truth) -> bool:
    """Return whether a trace gives a request another result than it gets alone."""
    for seed in SEEDS:
        with opened(folder) as broken:
            try:
                check_life(life_of(seed), play(broken.recorder, life_of(seed), overlap=False), truth)
            except AssertionError as error:
                print(f"caught by seed {seed}: {type(error).__name__}: {error}")
                return True
    return False


OTHERS = {
    "tails are lost between chunks": lost_tails,
    "a snapshot is a step early": early,
    "rows are mistaken": rows,
}


@pytest.mark.parametrize("name", [*DEFECTS, *OTHERS])
def test_a_planted_defect_of_the_states_is_caught(
    name: str, folder: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in SEEDS:
        for arrival in life_of(seed).arrivals:
            truth(arrival)
    if name in OTHERS:
        OTHERS[name](monkeypatch)
    else:
        sound, defect = DEFECTS[name]
        monkeypatch.setattr(bring_up, "StatePool", planted(states, sound, defect).StatePool)
    assert is_caught(folder, truth)


def check_padding(folder: Path, patch: pytest.MonkeyPatch, pool: type[StatePool]) -> None:
    """Padding rows compute with NaN; a batch of one to three rows is padded to four. `mx.compile`
    is replaced, because it takes seconds for each expression."""
    write_tiny(folder, spoiled=True, hybrid=True)
    never = {"logit_bias": dict.fromkeys(SPOILED, -1e9), "temperature": 0.8}
    prompts = random_prompts(7, (5, 11, 3))
    with opened(folder) as eager:
        wanted = [eager.session().run([prompt], 12, **never)[0] for prompt in prompts]
    patch.setattr(stepper.mx, "compile", lambda function: function)
    patch.setattr(bring_up, "StatePool", pool)
    with opened(folder, graph="compiled", graph_buckets=(4,)) as made:
        for _ in range(2):
            check_same(made.session(stagger=2).run(prompts, 12, **never), wanted, TOLERANCE)
        assert made.recorder.paths == {"eager", "compiled:4"}


def test_padding_rows_are_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_padding(tmp_path, monkeypatch, StatePool)


def test_padding_rows_that_are_written_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = planted(states, "np.flatnonzero(left.slots)", "np.arange(len(left.slots))").StatePool
    with pytest.raises(AssertionError):
        check_padding(tmp_path, monkeypatch, broken)


def batch_of(slots: list[int], **moves: list[int]) -> ScheduleBatch:
    """Return a decode step of these slots, with `state_from` and `state_to` as given."""
    count = len(slots)
    one = np.ones(count, np.int32)
    given: dict[str, Any] = {name: np.array(values, np.int32) for name, values in moves.items()}
    return ScheduleBatch(
        step=1,
        forward_mode=ForwardMode.DECODE,
        slots=np.array(slots, np.int32),
        seq_lens=2 * one,
        prefix_lens=one,
        token_offsets=np.arange(count + 1, dtype=np.int32),
        input_ids=-np.array(slots, np.int32),
        page_counts=given.pop("page_counts", one),
        new_page_offsets=np.zeros(count + 1, np.int32),
        new_pages=np.zeros(0, np.int32),
        emits=one.astype(bool),
        **given,
    )


def step(pool: StatePool, batch: ScheduleBatch, rows: int) -> list[float]:
    """Run a step that adds one to each row; return the rows from before it."""
    (taken,) = pool.take(batch, rows)
    pool.leave(batch, [[each + 1 for each in taken]])
    first, second = (np.array(each.astype(mx.float32)) for each in taken)
    assert np.array_equal(first[:, 0], second[:, 0, 0], equal_nan=True)
    return first[:, 0].tolist()


LAYERS = [[StateShape((3,), mx.bfloat16), StateShape((2, 4), mx.float32)]]


def test_states_follow_their_slots_through_batches_snapshots_and_restores() -> None:
    pool = StatePool(LAYERS, max_requests=3, num_snapshots=2, poison=True)
    assert state_bytes(LAYERS) == 2 * 3 + 4 * 8
    assert step(pool, batch_of([2, 1], state_from=[0, 0], page_counts=[0, 0]), 2) == [0, 0]
    assert step(pool, batch_of([2, 1], state_to=[0, 2]), 4) == [1, 1, 0, 0]
    assert step(pool, batch_of([2, 1]), 4) == [2, 2, 1, 1]  # the same rows, including padding
    assert step(pool, batch_of([1, 3], state_from=[-1, 2], page_counts=[1, 0]), 2) == [3, 2]
    assert step(pool, batch_of([3, 2, 1], state_to=[1, 0, 0]), 3) == [3, 3, 4]
    assert step(pool, batch_of([1], state_from=[1]), 1) == [4]
    assert step(pool, batch_of([2], state_from=[0]), 2) == [0, 0]


def test_poison_shows_a_slot_that_begins_with_nothing_and_a_snapshot_that_nobody_took() -> None:
    pool = StatePool(LAYERS, max_requests=2, num_snapshots=1, poison=True)
    step(pool, batch_of([1], state_from=[0]), 1)
    assert np.isnan(step(pool, batch_of([1], page_counts=[0]), 1)).all()
    assert np.isnan(step(pool, batch_of([2], state_from=[1]), 1)).all()


def test_nothing_moves_while_the_same_requests_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StatePool(LAYERS, max_requests=3, num_snapshots=2)
    step(pool, batch_of([2, 1], state_from=[0, 0]), 2)
    monkeypatch.setattr(pool, "_write", lambda rows, targets: rows.size and pytest.fail("states were moved"))
    monkeypatch.setattr(pool, "_pools", [[None, None]])
    assert step(pool, batch_of([2, 1]), 2) == [1, 1]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_batch_that_changes_copies_no_pool_unless_something_holds_it(is_held: bool) -> None:
    """Rows are written to their places in the pools, and the pools are not copied."""
    pool = StatePool([[StateShape((1 << 18,), mx.float32)]] * 2, max_requests=30, num_snapshots=1)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for slots in ([1], [2], [1, 3], [3], [2, 1], [4]):
        held = [each.reshape(-1) for each in pool.arrays()] if is_held else []
        mx.eval(held)
        batch = batch_of(slots, state_from=[0 if slots == [4] else -1] * len(slots))
        pool.leave(batch, [[each + 1 for each in layer] for layer in pool.take(batch, len(slots))])
        mx.eval(pool.arrays())
    copied = mx.get_peak_memory() - before > 16 << 20  # a pool has 32 MiB
    assert copied is is_held


def test_limits_and_ledger_tell_of_states(folder: Path) -> None:
    with opened(folder, max_requests=2) as made:
        assert (made.worker.limits.keeps_state, made.worker.limits.num_snapshots) == (True, SNAPSHOTS)
        assert {"states", "snapshots"} <= {row.topic for row in made.started.ledger.rows}


def test_a_model_with_states_that_is_to_embed_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="GraniteMoeHybridForCausalLM keeps recurrent states, and an embedding runs without them"
    ):
        opened(folder, task="embed")
