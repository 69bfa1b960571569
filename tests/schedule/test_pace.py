"""Decode latency during a long prompt in layer slices, in simulated time: at most twice that
without the prompt, for any layer cost and mix of requests; the prompt takes no longer than this
forces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.schedule import step_loop
from sglcore.schedule.layered_prefill.slice_choice import Slicing
from sglcore.schedule.layered_prefill.slice_pace import Pace
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop
from sglcore.schedule.steps_in_flight import BatchRecord
from tests.schedule.fake_worker import make_limits
from tests.schedule.timed_worker import LAYERS, Costs, TimedWorker

LONG = 8192
DEVICES = {
    "a processor": Costs(decode=0.010, launch=0.00002, token=3e-5, is_ahead=False),
    "a processor whose layers are launches": Costs(decode=0.010, launch=0.0005, token=1e-7, is_ahead=False),
    "a large model": Costs(decode=0.007, launch=0.0002, token=8e-7),
    "a small model, whose layers are launches": Costs(decode=0.0016, launch=0.00025, token=1e-7),
    "a large model with a lane": Costs(decode=0.007, launch=0.0002, token=8e-7, has_lane=True),
    "a small model with a lane": Costs(decode=0.0016, launch=0.00025, token=1e-7, has_lane=True),
    "a small model whose slices are work for the host": Costs(decode=0.0016, launch=0.0001, token=1e-8, slicing=0.0015),
    "a small model of many chats": Costs(decode=0.00145, launch=0.0003, token=1e-7, host=0.0003, telling=0.0006),
    "a small model of many chats with a lane": Costs(
        decode=0.00145, launch=0.0003, token=1e-7, host=0.0003, telling=0.0006, has_lane=True
    ),
    "a long step beside short layers": Costs(decode=0.050, launch=0.0001, token=1e-7, has_lane=True),
}


class Load:
    """Four decoding chats, and prompts that arrive while they run."""

    def __init__(
        self, costs: Costs, patch: pytest.MonkeyPatch, sliced_layers: int = LAYERS, slice_budget: int = 0
    ) -> None:
        sizes = {
            "max_model_len": 2 * LONG,
            "num_pages": 4000,
            "page_size": 16,
            "max_requests": 8,
            "max_batch_tokens": 2048,
        }
        limits = make_limits(**sizes, runs_ahead=costs.is_ahead, sliced_layers=sliced_layers, slice_budget=slice_budget)
        self.worker = TimedWorker(limits, costs)
        patch.setattr(step_loop, "perf_counter", self.worker.clock)
        self.scheduler = make_scheduler(limits, prefix_cache=False)
        self.loop = Loop(self.scheduler, self.worker)
        self.chats = [self.add(64, LONG) for _ in range(4)]
        while not all(chat.output_ids for chat in self.chats):
            self.loop.step()

    def add(self, length: int, tokens: int) -> Request:
        """Queue a request."""
        prompt = np.arange(length, dtype=np.int32) % 50
        made = Request(f"{self.worker.now}-{self.scheduler._arrivals}", prompt, SamplingParams(max_tokens=tokens))
        self.scheduler.add(made)
        return made

    def gaps(self, until: int = 0, awaited: Request | None = None) -> np.ndarray:
        """Seconds between the tokens of one chat: `until` gaps, and until `awaited` has its first
        token."""
        found, chat = list[float](), self.chats[0]
        last, had = self.worker.now, len(chat.output_ids)
        while len(found) < until or (awaited is not None and not awaited.output_ids):
            self.loop.step()
            if len(chat.output_ids) > had:
                found.append(self.worker.now - last)
                last, had = self.worker.now, len(chat.output_ids)
        return np.array(found)


@pytest.mark.parametrize("name", DEVICES)
def test_running_requests_wait_at_most_twice_as_long(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(DEVICES[name], monkeypatch)
    quiet = float(np.median(load.gaps(50)))
    load.gaps(awaited=load.add(LONG, 1))
    begin = load.worker.now
    gaps = load.gaps(awaited=load.add(LONG, 1))
    taken = load.worker.now - begin
    print(name, np.percentile(gaps, [50, 90, 99]) / quiet, taken, len(gaps))
    assert np.percentile(gaps, 50) <= 2.0 * quiet and np.percentile(gaps, 99) <= 2.8 * quiet
    assert taken <= most_seconds(DEVICES[name], quiet)


class OneAtATime(Loop):
    """Submits the step after a slice only when the slice's turn is over."""

    def _submit_step(self) -> list[BatchRecord]:
        first = self._submit()
        return [] if first is None else [first]


@pytest.mark.parametrize("name", ["a small model of many chats", "a small model of many chats with a lane"])
def test_a_device_that_waits_for_the_host_beside_slices_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a step must be processed while the next one runs, also if it is a slice."""
    load, costs = Load(DEVICES[name], monkeypatch), DEVICES[name]
    load.loop.__class__ = OneAtATime
    quiet = float(np.median(load.gaps(50)))
    load.gaps(awaited=load.add(LONG, 1))
    begin = load.worker.now
    load.gaps(awaited=load.add(LONG, 1))
    assert load.worker.now - begin > most_seconds(costs, quiet)


def most_seconds(costs: Costs, quiet: float) -> float:
    """Upper bound in seconds for a long prompt: `SHARE` of each decode step's time is prompt work;
    60 % more for whole layers; plus a step for each chunk."""
    device, host = LAYERS * costs.token * LONG, LAYERS * (costs.launch * LONG / 2048 + costs.slicing)
    work = max(device, host) if costs.is_ahead else device + host
    return 1.6 * work * (1 + 1 / Pace.SHARE) + quiet * (LONG / 2048 + 2)


def test_whole_prompts_make_them_wait_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without slices, requests wait for the whole prompt."""
    load = Load(DEVICES["a large model"], monkeypatch, sliced_layers=0)
    quiet = float(np.median(load.gaps(50)))
    assert load.gaps(awaited=load.add(LONG, 1)).max() >= 5 * quiet


@pytest.mark.parametrize("name", DEVICES)
def test_under_prompts_without_end_both_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no quiet time for measurements except steps that are kept free of slices on
    purpose."""
    load = Load(DEVICES[name], monkeypatch)
    prompts = [load.add(LONG, 1) for _ in range(6)]
    gaps = load.gaps(awaited=prompts[-1])
    load.scheduler.audit()
    assert all(prompt.output_ids for prompt in prompts)
    assert np.percentile(gaps[len(gaps) // 2 :], 50) <= 2.0 * (DEVICES[name].decode + DEVICES[name].host)


class LearnsBesideSlices(Slicing):
    """Takes the shortest observed step as the duration of a decode step alone, though the host was
    busy while it ran."""

    def _observe_period(self, record: BatchRecord, is_decode: bool, has_launched: bool) -> None:
        if is_decode and self.pace.decode_seconds > (record.seconds or 0.0):
            self.pace.decode_seconds = record.seconds or 0.0
        super()._observe_period(record, is_decode, has_launched)


class LearnsWhileItLaunches(Slicing):
    """Counts a step as quiet though a slice was launched before it was collected."""

    def _observe_period(self, record: BatchRecord, is_decode: bool, has_launched: bool) -> None:
        super()._observe_period(record, is_decode, False)


SLOW_LAUNCH = replace(DEVICES["a small model, whose layers are launches"], launch=0.002)


@pytest.mark.parametrize(
    ("kind", "costs"),
    [(LearnsBesideSlices, DEVICES["a small model with a lane"]), (LearnsWhileItLaunches, SLOW_LAUNCH)],
)
def test_a_pace_that_learns_from_the_wrong_steps_is_caught(
    kind: type, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(costs, monkeypatch)
    load.scheduler._prefill.__class__ = kind
    quiet = float(np.median(load.gaps(50)))
    load.gaps(awaited=load.add(LONG, 1))
    begin = load.worker.now
    gaps = load.gaps(awaited=load.add(LONG, 1))
    is_slow = load.worker.now - begin > most_seconds(costs, quiet)
    assert is_slow or np.percentile(gaps, 50) > 2.0 * quiet


def test_a_layer_that_takes_longer_to_launch_than_a_step_takes_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(SLOW_LAUNCH, monkeypatch)
    quiet = float(np.median(load.gaps(50)))
    gaps = load.gaps(awaited=load.add(LONG, 1))
    assert np.percentile(gaps, 50) <= 2.0 * quiet
