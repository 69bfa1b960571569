"""Busy streams and virtual time: the host continues while a stream is busy, and a wait for the
stream takes that long."""

import time
from datetime import timedelta

import pytest
import torch

from sglcore_sim.clocks import Speeds, virtual_time

LONG, SHORT = 3_600_000, 30
"""Milliseconds: longer than a run of the tests, and short enough for a test to wait."""


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


SLOW = Speeds(flops=1e9, bandwidth=1e9, start=1e-3, launch=1e-4, alpha=2e-3, beta=1e-6)


def test_an_operation_takes_its_arithmetic_or_its_bytes_and_the_host_only_queues_it(sim, dev):
    x, y = torch.ones(64, 64, device=dev), torch.ones(2048, device=dev)
    with virtual_time(sim, SLOW) as clock:
        _ = x @ x
        assert clock.now == pytest.approx(1e-4)
        torch.accelerator.synchronize()
        product = 1e-4 + 1e-3 + 2 * 64**3 / 1e9
        assert clock.now == pytest.approx(product)
        y.add_(1)
        y.view(2, -1)
        torch.accelerator.synchronize()
        assert clock.now == pytest.approx(product + 1e-4 + 1e-3 + y.nbytes / 1e9)
        clock.work(0.5)
        assert clock.now > 0.5


def test_rows_are_counted_and_not_their_table(sim, dev):
    table, rows = torch.zeros(100_000, 4, device=dev), torch.arange(2, device=dev)
    with virtual_time(sim, SLOW) as clock:
        table.index_select(0, rows)
        torch.accelerator.synchronize()
        assert clock.now == pytest.approx(1.1e-3, abs=1e-6)


def test_streams_wait_in_virtual_time_as_in_any_other(sim, dev, side):
    with virtual_time(sim, SLOW) as clock:
        for stream in (torch.accelerator.current_stream(), side):
            clock.share(stream, 1.0)
        sim.busy(LONG)
        with side:
            sim.busy(SHORT)
        side.synchronize()
        assert clock.now == pytest.approx(SHORT / 1e3)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            sim.busy(SHORT)
        side.synchronize()
        assert clock.now == pytest.approx((LONG + SHORT) / 1e3)


@pytest.mark.parametrize(("share", "end"), [(1.0, 30), (0.5, 40), (0.25, 45)])
def test_a_stream_has_a_share_while_others_work(share, end, sim, dev, side):
    """During the 20 ms of the other stream, this one does 20 ms * `share` of its 30 ms of work."""
    with virtual_time(sim, SLOW) as clock:
        clock.share(side, share)
        sim.busy(20)
        with side:
            sim.busy(30)
        side.synchronize()
        assert clock.now * 1e3 == pytest.approx(end)


def test_a_collective_takes_its_link_as_long_and_the_device_goes_on(sim, dev):
    collectives = pytest.importorskip("sglcore_sim.collectives")
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    group = collectives.Group(sim, store, 0, 1, timedelta(seconds=10))
    x = torch.ones(1000, device=dev)
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = True
    with virtual_time(sim, SLOW) as clock:
        work = group.allreduce([x], options)
        sim.busy(5)
        torch.accelerator.current_stream().synchronize()
        assert clock.now == pytest.approx(5e-3)
        work.wait()
        torch.accelerator.current_stream().synchronize()
        assert clock.now == pytest.approx(6e-3)
        group.allreduce([x])
        torch.accelerator.current_stream().synchronize()
        assert clock.now == pytest.approx(12e-3)


def test_time_is_the_hosts_again_behind_it(sim, dev):
    with virtual_time(sim, SLOW):
        sim.busy(LONG)
    sim.busy(SHORT)
    assert SHORT - 1 <= waited(torch.accelerator.synchronize) < LONG
