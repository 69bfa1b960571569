"""Modelled time: the host goes on while a stream is busy, and whoever waits for it waits so long."""

import time

import pytest
import torch

LONG, SHORT = 3_600_000, 30
"""Milliseconds: more than a run of the tests takes, and what a test may wait."""


def waited(wait):
    begin = time.monotonic()
    wait()
    return (time.monotonic() - begin) * 1e3


def timed(dev):
    return torch.Event(dev, enable_timing=True)


def test_the_host_goes_on_and_is_told_that_the_work_is_not_done(sim, dev):
    stream, event = torch.accelerator.current_stream(), torch.Event(dev)
    sim.busy(LONG)
    event.record()
    assert not any(event.query() or stream.query() for _ in range(5))


@pytest.mark.parametrize("how", ["event", "stream", "device", "item"])
def test_who_waits_for_a_busy_stream_waits_so_long(sim, dev, how):
    x, event, stream = torch.ones(1, device=dev), torch.Event(dev), torch.accelerator.current_stream()
    sim.busy(SHORT)
    event.record()
    wait = {"event": event.synchronize, "stream": stream.synchronize, "device": torch.accelerator.synchronize}
    assert waited(wait.get(how, x.item)) >= SHORT - 1
    assert event.query()


def test_work_of_one_stream_adds_up(sim, dev):
    begin, end = timed(dev), timed(dev)
    begin.record()
    sim.busy(SHORT)
    sim.busy(SHORT)
    end.record()
    assert waited(end.synchronize) >= SHORT
    assert begin.elapsed_time(end) >= 2 * SHORT


def test_streams_are_busy_at_the_same_time(sim, dev, side):
    event = torch.Event(dev)
    sim.busy(LONG)
    with side:
        sim.busy(SHORT)
        event.record()
    event.synchronize()
    assert not torch.accelerator.current_stream().query()


def test_a_stream_that_waits_for_an_event_begins_after_it(sim, dev, side):
    begin, end = timed(dev), timed(dev)
    begin.record()
    sim.busy(SHORT)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        sim.busy(SHORT)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 2 * SHORT


def test_a_replay_is_busy_and_a_capture_is_not(sim, dev, side, make_graph):
    x, captured, replayed = torch.ones(1, device=dev), torch.Event(dev), torch.Event(dev)
    graph = make_graph()

    def step():
        x.add_(1)
        sim.busy(LONG)

    graph.capture(step, side)
    with side:
        captured.record()
        graph.replay()
        replayed.record()
    captured.synchronize()
    assert not any(replayed.query() for _ in range(5))
