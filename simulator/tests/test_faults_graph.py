"""Capture and replay: calls that are faults in a capture, the accesses of a replay, and graphs that
share memory."""

import gc
from functools import partial

import pytest
import torch


def ready(dev):
    x, out = torch.ones(4, device=dev), torch.zeros(4, device=dev)
    torch.accelerator.synchronize()
    return x, out


def test_a_replay_reads_its_inputs_again(sim, dev, side, make_graph):
    x, out = ready(dev)
    graph = make_graph()
    inner = graph.capture(lambda: (out.copy_(x * 2), x + 5)[1], side)
    assert out.tolist() == [0.0] * 4
    x.fill_(3)
    graph.replay()
    assert out.tolist() == [6.0] * 4
    assert inner.tolist() == [8.0] * 4
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [8.0] * 4


def test_a_replay_writes_what_an_operation_makes_by_resizing(sim, dev, side, make_graph):
    """`arange` creates an empty result and resizes it."""
    x, _ = ready(dev)
    graph = make_graph()
    out = graph.capture(lambda: x + torch.arange(4, device=dev), side)
    for value in (5, 7):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [value + place for place in range(4)]


def test_a_capture_leaves_memory_outside_its_pool_alone(sim, dev, side, make_graph):
    x, out = ready(dev)
    make_graph().capture(
        lambda: (out.add_(1), x.zero_(), out.index_copy_(0, torch.zeros(1, dtype=torch.int64, device=dev), x[:1])), side
    )
    assert out.tolist() == [0.0] * 4
    assert x.tolist() == [1.0] * 4


def test_an_output_is_not_computed_before_the_first_replay(sim, dev, side, make_graph):
    x, _ = ready(dev)
    graph = make_graph()
    inner = graph.capture(lambda: x + 1, side)
    inner.sum()  # eager work between captures may run on garbage
    with sim.expect("uninitialised"):
        inner.cpu()
    graph.replay()
    assert inner.tolist() == [2.0] * 4


@pytest.mark.parametrize("wait", ["item", "cpu", "stream", "device", "event", "query"])
def test_a_wait_of_the_host_faults_in_a_capture(sim, dev, side, make_graph, wait):
    x, out = ready(dev)
    event = torch.Event(dev)
    event.record()
    deeds = {
        "item": lambda: x[0].item(),
        "cpu": lambda: x.cpu(),
        "stream": side.synchronize,
        "device": torch.accelerator.synchronize,
        "event": event.synchronize,
        "query": event.query,
    }
    kind = "pageable_in_capture" if wait == "cpu" else "sync_in_capture"
    with sim.expect(kind) as caught:
        make_graph().capture(lambda: (out.copy_(x), deeds[wait]()), side)
    assert "test_faults_graph.py" in caught.text
    make_graph().capture(lambda: out.copy_(x), side)
    deeds[wait]()


@pytest.mark.parametrize("shape", ["nonzero", "mask", "unique"])
def test_a_shape_that_depends_on_data_faults_in_a_capture(sim, dev, side, make_graph, shape):
    x, _ = ready(dev)
    deeds = {"nonzero": lambda: x.nonzero(), "mask": lambda: x[x > 0], "unique": lambda: torch.unique(x)}
    with sim.expect("data_dependent"):
        make_graph().capture(deeds[shape], side)
    graph = make_graph()
    kept = graph.capture(lambda: torch.where(x > 0, x, 0), side)
    graph.replay()
    assert kept.tolist() == [1.0] * 4


def test_a_pageable_copy_faults_in_a_capture_and_a_pinned_one_is_a_node(sim, dev, side, make_graph):
    _, out = ready(dev)
    pinned = torch.full((4,), 7.0).pin_memory()
    for bad in (lambda: out.copy_(torch.ones(4)), lambda: out.copy_(pinned), lambda: torch.tensor([1], device=dev)):
        with sim.expect("pageable_in_capture"):
            make_graph().capture(bad, side)
    graph = make_graph()
    graph.capture(lambda: out.copy_(pinned, non_blocking=True), side)
    graph.replay()
    assert out.tolist() == [7.0] * 4
    pinned.fill_(8)
    graph.replay()
    assert out.tolist() == [8.0] * 4


def test_a_pinned_source_changed_under_a_replay_faults(sim, dev, side, make_graph):
    _, out = ready(dev)
    pinned = torch.full((4,), 7.0).pin_memory()
    graph = make_graph()
    graph.capture(lambda: out.copy_(pinned, non_blocking=True), side)
    graph.replay()
    pinned.fill_(8)
    with sim.expect("pinned_source_changed"):
        torch.accelerator.synchronize()


def test_a_pinned_row_freed_under_a_replay_faults(sim, dev, side, make_graph):
    """A graph that was reset keeps nothing alive, but the work that it queued still runs."""
    _, out = ready(dev)
    held, graph = [torch.full((4,), 7.0).pin_memory()], make_graph()
    run = partial(sim.host_view(out).copy_, held[0])
    graph.capture(partial(sim.launch, "copy_rows", run, reads=[held[0]], writes=[out]), side)
    graph.replay()
    graph.reset()
    with sim.expect("pinned_freed") as caught:
        held.clear()
        del run
        gc.collect()
        torch.accelerator.synchronize()
    assert "reading" in caught.text and "pinned host memory" in caught.text
    torch.accelerator.synchronize()


def test_a_captured_copy_to_pinned_memory_arrives_after_each_replay(sim, dev, side, make_graph):
    x, _ = ready(dev)
    pinned = torch.zeros(4, pin_memory=True)
    graph = make_graph()
    graph.capture(lambda: pinned.copy_(x, non_blocking=True), side)
    assert pinned.tolist() == [0.0] * 4
    graph.replay()
    with sim.expect("pinned_read_early"):
        pinned.tolist()
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1.0] * 4


def test_a_capture_on_the_default_stream_faults(sim, dev, side, make_graph):
    x, _ = ready(dev)
    with sim.expect("wrong_capture") as caught:
        make_graph().capture(lambda: x + 1, torch.accelerator.current_stream())
    assert "default stream" in caught.text
    make_graph().capture(lambda: x + 1, side)


def test_a_nested_capture_faults(sim, dev, side, make_graph):
    x, _ = ready(dev)
    other, inner = torch.Stream(dev), make_graph()
    with sim.expect("wrong_capture"):
        make_graph().capture(lambda: (x + 1, inner.capture(lambda: x + 2, other)), side)
    make_graph().capture(lambda: x + 1, side)
    make_graph().capture(lambda: x + 2, other)


def test_an_empty_capture_faults(sim, dev, side, make_graph):
    x, _ = ready(dev)
    other = torch.Stream(dev)

    def elsewhere():
        with other:
            x.sum()

    with sim.expect("wrong_capture") as caught:
        make_graph().capture(elsewhere, side)
    assert "empty" in caught.text
    make_graph().capture(lambda: x.sum(), side)


def test_a_fork_must_be_joined(sim, dev, side, make_graph):
    x, _ = ready(dev)
    other = torch.Stream(dev)

    def forked(join):
        other.wait_stream(side)
        with other:
            y = x + 1
        if join:
            side.wait_stream(other)
        return y

    with sim.expect("wrong_capture") as caught:
        make_graph().capture(lambda: (x.sum(), forked(False)), side)
    assert "never joined" in caught.text
    graph = make_graph()
    y = graph.capture(lambda: forked(True), side)
    graph.replay()
    assert y.tolist() == [2.0] * 4


def test_forked_streams_race_inside_a_capture(sim, dev, side, make_graph):
    x, out = ready(dev)
    other = torch.Stream(dev)

    def forked(wait):
        other.wait_stream(side)
        out.copy_(x)
        if wait:
            other.wait_stream(side)
        with other:
            out.add_(1)
        side.wait_stream(other)

    with sim.expect("race"):
        make_graph().capture(lambda: forked(False), side)
    graph = make_graph()
    graph.capture(lambda: forked(True), side)
    graph.replay()
    assert out.tolist() == [2.0] * 4


def test_an_event_from_outside_faults_in_a_capture(sim, dev, side, make_graph):
    x, _ = ready(dev)
    event = torch.Event(dev)
    event.record()
    with sim.expect("wrong_capture") as caught:
        make_graph().capture(lambda: (side.wait_event(event), x + 1), side)
    assert "outside" in caught.text
    side.wait_event(event)
    make_graph().capture(lambda: x + 1, side)


def test_an_event_of_a_finished_capture_cannot_be_waited_for(sim, dev, side, make_graph):
    x, _ = ready(dev)
    event, outside = torch.Event(dev), torch.Event(dev)
    make_graph().capture(lambda: (x + 1, event.record(side)), side)
    with sim.expect("wrong_capture"):
        torch.accelerator.current_stream().wait_event(event)
    outside.record(side)
    torch.accelerator.current_stream().wait_event(outside)


def test_a_replay_over_freed_memory_faults(sim, dev, side, make_graph):
    x, out = ready(dev)
    graph = make_graph()
    graph.capture(lambda: out.copy_(x), side)
    graph.replay()
    torch.accelerator.synchronize()
    x = torch.full((4,), 9.0, device=dev)
    with sim.expect("stale_graph") as caught:
        graph.replay()
    assert "refill them in place" in caught.text


def test_a_replay_races_with_unordered_work(sim, dev, side, make_graph):
    x, out = ready(dev)
    graph = make_graph()
    graph.capture(lambda: out.copy_(x), side)
    x.fill_(5)
    with sim.expect("race"), side:
        graph.replay()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        graph.replay()
    with sim.expect("race"):
        out.sum()
    torch.accelerator.current_stream().wait_stream(side)
    assert out.tolist() == [5.0] * 4


def test_a_pool_mate_clobbers_an_output_that_is_read_too_late(sim, dev, side, make_graph):
    x, _ = ready(dev)
    first, second = make_graph(), make_graph()
    a = first.capture(lambda: (x + 1) * 2, side)
    b = second.capture(lambda: x + 10, side, first.pool())
    second.replay()
    assert b.tolist() == [11.0] * 4
    first.replay()
    assert a.tolist() == [4.0] * 4
    with sim.expect("pool_mate"):
        b.sum()
    second.replay()
    assert b.tolist() == [11.0] * 4


def test_a_graph_may_read_the_output_of_a_pool_mate(sim, dev, side, make_graph):
    x, _ = ready(dev)
    first, second = make_graph(), make_graph()
    a = first.capture(lambda: (x + 1) * 2, side)
    b = second.capture(lambda: a + 10, side, first.pool())
    first.replay()
    second.replay()
    assert b.tolist() == [14.0] * 4


def test_what_a_pool_mate_updates_in_place_is_still_there_for_the_next(sim, dev, side, make_graph):
    x, _ = ready(dev)
    first, second, third, other = (make_graph() for _ in range(4))
    kept = [first.capture(lambda: x + 1, side)]
    second.capture(lambda: kept[0].mul_(2), side, first.pool())
    b = third.capture(lambda: kept[0] + 10, side, first.pool())
    kept.clear()
    other.capture(lambda: x + 7, side, first.pool())
    for _ in range(2):
        for graph in (first, second, third):
            graph.replay()
        assert b.tolist() == [14.0] * 4
    first.replay()
    second.replay()
    other.replay()
    with sim.expect("pool_mate"):
        third.replay()


def test_row_writes_follow_the_indices_of_the_replay(sim, dev, side, make_graph):
    pool, rows, index = torch.zeros(8, 2, device=dev), torch.ones(2, 2, device=dev), torch.tensor([0, 1], device=dev)
    torch.accelerator.synchronize()
    graph = make_graph()
    graph.capture(lambda: pool.index_copy_(0, index, rows), side)
    index.copy_(torch.tensor([4, 5]))
    graph.replay()
    with side:
        pool[:2].add_(1)
    with sim.expect("race"), side:
        pool[4:6].add_(1)


def test_rows_of_what_a_graph_has_made_and_let_go_are_there_when_it_runs_again(sim, dev, side, make_graph):
    x, _ = ready(dev)
    index = torch.tensor([3, 1], device=dev)
    torch.accelerator.synchronize()
    graph = make_graph()
    out = graph.capture(lambda: (x + 1).index_select(0, index) * 2, side)
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 2] * 2


def test_a_launch_is_one_node_and_runs_again(sim, dev, side, make_graph):
    x, out = ready(dev)
    runs = []

    def kernel():
        runs.append(1)
        out.copy_(torch.from_numpy(x.cpu().numpy() * 3))

    graph = make_graph()
    graph.capture(lambda: sim.launch("tripled", kernel, reads=[x], writes=[out]), side)
    assert out.tolist() == [0.0] * 4
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [6.0] * 4
    assert len(runs) == 1


def test_a_call_of_a_reference_gives_device_results_and_replays(sim, dev, side, make_graph):
    x, out = ready(dev)

    def reference(a, b, scale):
        b.copy_(a * scale)
        return a + 1, a.sum()

    plus, total = sim.call("vendor::reference", reference, x, out, 3.0, writes=[out])
    assert (plus.device, plus.tolist(), total.item(), out.tolist()) == (dev, [2.0] * 4, 4.0, [3.0] * 4)
    graph = make_graph()
    plus, total = graph.capture(lambda: sim.call("vendor::reference", reference, x, out, 2.0, writes=[out]), side)
    x.fill_(5)
    graph.replay()
    assert (plus.tolist(), total.item(), out.tolist()) == ([6.0] * 4, 20.0, [10.0] * 4)


def test_a_reference_whose_shape_depends_on_data_faults_on_replay(sim, dev, side, make_graph):
    x, _ = ready(dev)
    graph = make_graph()
    graph.capture(lambda: sim.call("vendor::positive", lambda a: a[a > 0], x), side)
    graph.replay()
    x.fill_(-1)
    with sim.expect("data_dependent"):
        graph.replay()


def test_an_index_of_garbage_does_not_stop_a_capture(sim, dev, side, make_graph):
    table, index = torch.ones(4, 2, device=dev), torch.empty(2, dtype=torch.int64, device=dev)
    torch.accelerator.synchronize()
    graph = make_graph()
    out = graph.capture(lambda: table.index_select(0, index), side)
    index.zero_()
    graph.replay()
    assert out.sum().item() == 4


def test_a_reference_that_stumbles_over_garbage_does_not_stop_a_capture(sim, dev, side, make_graph):
    table, index = torch.ones(4, 2, device=dev), torch.empty(2, dtype=torch.int32, device=dev)
    torch.accelerator.synchronize()
    graph = make_graph()
    out = graph.capture(lambda: sim.call("vendor::rows", lambda t, i: t[i.long()], table, index), side)
    index.zero_()
    graph.replay()
    assert out.sum().item() == 4


def test_memory_of_a_pool_comes_back_with_its_last_graph(sim, dev, side, make_graph):
    x, _ = ready(dev)
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    graph = make_graph()
    kept = graph.capture(lambda: x + 1, side)
    del kept
    graph.reset()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before


def test_a_pool_goes_with_its_last_graph(sim, dev, side, make_graph):
    x, _ = ready(dev)
    failed, next_one, last = make_graph(), make_graph(), make_graph()

    def broken() -> None:
        raise ValueError("in the capture")

    with pytest.raises(ValueError, match="in the capture"):
        failed.capture(broken, side)
    with pytest.raises(RuntimeError, match="a capture needs a new one"):
        next_one.capture(lambda: x + 1, side, failed.pool())
    last.capture(lambda: x + 1, side)
    last.replay()
