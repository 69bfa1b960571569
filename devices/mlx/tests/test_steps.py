"""Tests that compiled steps, their padding, and the number of streams do not change results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from devices.mlx.tests.running import running
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop
from sglcore_mlx import stepper
from sglcore_mlx.inputs import DecodeInputs

LENGTHS = (3, 17, 40, 9, 33)


def run(sampling: dict[str, Any], overlap: bool = True, **settings: Any) -> tuple[list[Request], set[str]]:
    """Run prompts that join one after the other and end at different times; also return the paths
    of the steps."""
    with running(dtype="float32", **settings) as built:
        worker, paths = built["worker"], set()
        scheduler = make_scheduler(worker.limits)
        loop = Loop(scheduler, worker, overlap=overlap)
        rng = np.random.default_rng(11)
        requests = []
        for number, length in enumerate(LENGTHS):
            params = SamplingParams(max_tokens=6 + 5 * number, ignore_eos=True, logprobs=2, **sampling)
            prompt = rng.integers(5, 2000, length).astype(np.int32)
            requests.append(Request(f"r{number}", prompt, params, seed=number))
        collect = worker.collect

        def collected(ticket: Any) -> Any:
            result = collect(ticket)
            paths.add(result.path)
            return result

        worker.collect = collected
        waiting = list(requests)
        while waiting or loop.has_work:
            if waiting:
                scheduler.add(waiting.pop(0))
            loop.step()
        scheduler.audit()
        return requests, paths


def assert_same(found: list[Request], wanted: list[Request], atol: float = 1e-5) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.output_ids == other.output_ids
        first, second = (np.concatenate([part.top_logprobs.ravel() for part in x.logprobs]) for x in (one, other))
        np.testing.assert_allclose(first, second, atol=atol)


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_a_compiled_step_gives_what_its_operations_give_one_by_one(kind: str) -> None:
    wanted, paths = run(SAMPLING[kind], graph="off")
    assert paths == {"eager"}
    found, paths = run(SAMPLING[kind], graph="compiled")
    assert {"compiled:1", "compiled:2", "compiled:4"} <= paths
    assert_same(found, wanted)


def test_steps_that_are_padded_to_configured_sizes_give_the_same() -> None:
    wanted, _ = run(SAMPLING["greedy"], graph="off")
    from sglcore.config.engine_config import resolve_config

    sizes = resolve_config({"graph_buckets": (8,)}, {})
    found, paths = run(SAMPLING["greedy"], graph="compiled", graph_buckets=(8,), sources=sizes.sources)
    assert "compiled:8" in paths and "compiled:4" not in paths
    assert_same(found, wanted)


def test_a_step_in_flight_changes_nothing() -> None:
    for kind in SAMPLING.values():
        assert_same(run(kind, overlap=True, graph="off")[0], run(kind, overlap=False, graph="off")[0])


def test_sharing_the_work_over_two_streams_changes_nothing() -> None:
    assert_same(run(SAMPLING["greedy"], threads=2)[0], run(SAMPLING["greedy"], threads=1)[0])


def _padded_with(slot: int):
    """Defect: padding rows use a running request's slot and write to its KV slot."""
    right = stepper.decode_inputs

    def wrong(batch_type: Any, batch: Any, *others: Any) -> DecodeInputs:
        given = right(batch_type, batch, *others)
        cells = given.fields["out_cache_loc"]
        cells[batch.batch_size :] = cells[0] - slot
        return given

    return wrong


def test_padding_that_writes_to_a_living_cell_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = run(SAMPLING["greedy"], graph="off")
    monkeypatch.setattr(stepper, "decode_inputs", _padded_with(1))
    found, _ = run(SAMPLING["greedy"], graph="compiled", sources={"graph_buckets": "argument"}, graph_buckets=(8,))
    with pytest.raises(AssertionError):
        assert_same(found, wanted)


def test_tokens_of_the_step_before_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect of overlap: a step reads the tokens of two steps ago."""
    wanted, _ = run(SAMPLING["greedy"], graph="off")
    held: list[Any] = []
    right = stepper.Stepper._decode_logits

    def stale(self: Any, batch: Any) -> Any:
        held.append(self._state.last + 0)
        now, self._state.last = self._state.last, held[-2] if len(held) > 1 else self._state.last
        result = right(self, batch)
        self._state.last = now
        return result

    monkeypatch.setattr(stepper.Stepper, "_decode_logits", stale)
    found, _ = run(SAMPLING["greedy"], graph="off")
    with pytest.raises(AssertionError):
        assert_same(found, wanted)


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("budget", ["1", "40", "auto"])
def test_prompts_by_slices_between_decode_steps_give_what_whole_prompts_give(kind: str, budget: str) -> None:
    wanted, paths = run(SAMPLING[kind], graph="off", max_batch_tokens=16)
    assert paths == {"eager"}
    found, paths = run(SAMPLING[kind], graph="off", max_batch_tokens=16, prompt_slices=budget)
    assert any(path.startswith("layers 0 to ") for path in paths)
    assert_same(found, wanted)
