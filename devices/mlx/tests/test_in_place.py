"""Tests that a step writes keys and values in place, also while the next step is queued: no pool is
copied."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.running import running
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.stepper import Stepper

CELLS = 96 << 20
"""Bytes of the KV cache: one layer's part is far larger than any activation of this model."""


def bytes_beside(built: Mapping[str, Any], prompts: int) -> int:
    """Return the peak of bytes allocated in addition to those before the first step, while prompts
    run to their end with overlap."""
    scheduler = make_scheduler(built["worker"].limits)
    rng = np.random.default_rng(5)
    for number in range(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        scheduler.add(Request(f"r{number}", rng.integers(5, 2000, 9 + 20 * number).astype(np.int32), params, seed=0))
    loop = Loop(scheduler, built["worker"], overlap=True)
    # What earlier tests left must not be freed meanwhile.
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    while loop.has_work:
        loop.step()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_steps_in_flight_never_copy_the_cells_of_a_layer(graph: str) -> None:
    with running(kv_cache_memory=CELLS, max_requests=64, graph=graph, dtype="float32") as built:
        layer = built["pools"].cells[0].nbytes
        assert layer > 14 << 20
        assert bytes_beside(built, prompts=3) < layer


SPECULATIVE = {
    "speculative": "ngram",
    "draft_tokens": 4,
    "max_requests": 4096,
    "kv_cache_memory": CELLS,
    "dtype": "float32",
}


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_steps_that_verify_proposals_copy_neither_cells_nor_the_texts_of_all_slots(graph: str) -> None:
    with running(graph=graph, **SPECULATIVE) as built:
        smallest = min(built["pools"].cells[0].nbytes, built["pools"].history.nbytes)
        assert smallest > 4 << 20
        assert bytes_beside(built, prompts=1) < smallest // 2


class _ReadsFirst(SpeculativeStepper):
    """Reads the token history of before the step, then writes to it."""

    def _place(self, *given: Any) -> Any:
        self._before = self._state.made_history[:, :8]
        return super()._place(*given)

    def _accept(self, sampled: Any, *given: Any) -> Any:
        nothing = mx.minimum(mx.min(self._before), 0)
        return super()._accept(replace(sampled, token_ids=sampled.token_ids + nothing), *given)


def test_texts_that_are_read_before_they_are_written_are_seen_to_be_copied() -> None:
    with running(graph="off", **SPECULATIVE) as built:
        built["worker"]._stepper.__class__ = _ReadsFirst
        assert bytes_beside(built, prompts=1) > built["pools"].history.nbytes


class _Holding(Stepper):
    """Holds the last step's KV cache, as a reader on another queue would."""

    def launch(self, *args: Any) -> Any:
        self._held = [cells.reshape(-1) for cells in self._state.cells]
        mx.eval(self._held)
        return super().launch(*args)


def test_cells_that_something_else_holds_are_seen_to_be_copied() -> None:
    with running(kv_cache_memory=CELLS, max_requests=64, graph="off", dtype="float32") as built:
        layer = built["pools"].cells[0].nbytes
        built["worker"]._stepper.__class__ = _Holding
        assert bytes_beside(built, prompts=1) > layer


def order_of_calls(monkeypatch: pytest.MonkeyPatch, kind: type[Stepper] = Stepper) -> list[str]:
    """Return the calls of a stepper, in order, while a prompt runs to its end with overlap. An
    `async_eval` without all of the state that the next step takes is recorded as "... of less"."""
    calls: list[str] = []

    def record(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*args: Any) -> Any:
            started = {id(each) for part in args if isinstance(part, list) for each in part}
            is_whole = owner is not mx or not args or started >= {id(each) for each in state.arrays()}
            calls.append(name if is_whole else f"{name} of less")
            return call(*args)

        monkeypatch.setattr(owner, name, recorded)

    with running(kv_cache_memory=CELLS, graph="off", dtype="float32") as built:
        state = built["worker"]._stepper._state
        for owner, name in ((Stepper, "_generate"), (mx, "synchronize"), (mx, "async_eval")):
            record(owner, name)
        built["worker"]._stepper.__class__ = kind
        bytes_beside(built, prompts=1)
        return calls[:]


def test_a_step_is_built_while_the_one_before_runs_and_started_when_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU MLX queues few operations ahead, so a start too early is only expensive on a GPU;
    this checks the order of calls."""
    assert is_in_turn(order_of_calls(monkeypatch))


def is_in_turn(calls: list[str]) -> bool:
    """Return whether each step is built, then waits for the step before, then starts, and the last
    step is waited for."""
    first, steps = ["_generate", "async_eval"], ["_generate", "synchronize", "async_eval"]
    return calls == first + steps * (len(calls) // 3 - 1) + ["synchronize"] and len(calls) > 60


ENDED: Future[None] = Future()
ENDED.set_result(None)


class _StartsEarly(Stepper):
    """Starts each step before it waits."""

    def launch(self, batch: Any) -> Any:
        output = self._generate(batch)
        mx.async_eval(output.arrays(), self._state.arrays())
        mx.synchronize()
        return output, ENDED


class _StartsLess(Stepper):
    """Does not start the writes of the KV cache."""

    def launch(self, batch: Any) -> Any:
        output = self._generate(batch)
        mx.synchronize()
        mx.async_eval(output.arrays())
        return output, ENDED


@pytest.mark.parametrize("kind", [_StartsEarly, _StartsLess])
def test_a_step_that_starts_early_or_in_part_is_caught(monkeypatch: pytest.MonkeyPatch, kind: type[Stepper]) -> None:
    assert not is_in_turn(order_of_calls(monkeypatch, kind))
