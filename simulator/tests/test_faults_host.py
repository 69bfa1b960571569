"""Faults of the host: accesses to pinned memory during a copy, hidden waits, and access to device
memory."""

import gc
import threading

import numpy as np
import pytest
import torch


def test_a_copy_to_pinned_memory_arrives_only_after_a_wait(sim, dev):
    x, host, event = torch.arange(4.0, device=dev), torch.zeros(4, pin_memory=True), torch.Event(dev)
    view = host.numpy()
    host.copy_(x, non_blocking=True)
    event.record()
    assert np.isnan(view).all()
    event.synchronize()
    assert view.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("read", ["tolist", "item", "host_view"])
def test_reading_pinned_memory_before_the_wait_faults(sim, dev, read):
    x, host, event = torch.ones(1, device=dev), torch.zeros(1, pin_memory=True), torch.Event(dev)
    host.copy_(x, non_blocking=True)
    event.record()

    def look():
        return sim.host_view(host) if read == "host_view" else getattr(host, read)()

    with sim.expect("pinned_read_early") as caught:
        look()
    assert "test_faults_host.py" in caught.text
    event.synchronize()
    look()


def test_a_query_that_answers_true_delivers(sim, dev):
    x, host, event = torch.ones(1, device=dev), torch.zeros(1, pin_memory=True), torch.Event(dev)
    host.copy_(x, non_blocking=True)
    event.record()
    answers = [event.query() for _ in range(4)]
    assert answers[0] is False
    assert answers[-1] is True
    assert host.tolist() == [1.0]


def test_an_event_recorded_before_the_copy_does_not_deliver(sim, dev):
    x, host, event = torch.ones(1, device=dev), torch.zeros(1, pin_memory=True), torch.Event(dev)
    event.record()
    host.copy_(x, non_blocking=True)
    event.synchronize()
    with sim.expect("pinned_read_early"):
        host.tolist()
    torch.accelerator.synchronize()
    assert host.tolist() == [1.0]


def test_refilling_a_pinned_source_in_flight_faults(sim, dev):
    host = torch.ones(4).pin_memory()
    x = host.to(dev, non_blocking=True)
    host.fill_(2)
    with sim.expect("pinned_source_changed") as caught:
        torch.accelerator.synchronize()
    assert "test_faults_host.py" in caught.text
    assert x.tolist() == [1.0] * 4


def test_refilling_a_pinned_source_after_its_event_is_fine(sim, dev):
    host, event = torch.ones(4).pin_memory(), torch.Event(dev)
    x = host.to(dev, non_blocking=True)
    event.record()
    event.synchronize()
    host.fill_(2)
    torch.accelerator.synchronize()
    assert x.tolist() == [1.0] * 4


def test_writing_to_a_pinned_destination_in_flight_faults(sim, dev):
    x, host = torch.ones(4, device=dev), torch.zeros(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    host.fill_(7)
    with sim.expect("pinned_written"):
        torch.accelerator.synchronize()
    host.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    host.fill_(7)
    assert host.tolist() == [7.0] * 4


def test_one_pinned_buffer_used_both_ways_on_one_stream_is_ordered(sim, dev):
    host = torch.ones(4).pin_memory()
    x = host.to(dev, non_blocking=True)
    host.copy_(x + 1, non_blocking=True)
    y = host.to(dev, non_blocking=True)
    torch.accelerator.synchronize()
    assert y.tolist() == [2.0] * 4
    assert host.tolist() == [2.0] * 4


def test_a_pinned_buffer_used_by_two_streams_without_order_races(sim, dev, side):
    x, host = torch.ones(4, device=dev), torch.zeros(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    with sim.expect("race"), side:
        host.to(dev, non_blocking=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.to(dev, non_blocking=True)


@pytest.mark.parametrize(
    "wait",
    [
        "item",
        "cpu",
        "tolist",
        "bool",
        "nonzero",
        "mask",
        "synchronize",
        "stream",
        "pageable",
        "blocking_pinned",
        "equal",
        "strided_pinned",
    ],
)
def test_a_hidden_wait_faults_in_a_no_sync_region(sim, dev, wait):
    x, pinned = torch.ones(4, device=dev), torch.ones(4, 2).pin_memory()
    deeds = {
        "item": lambda: x[0].item(),
        "cpu": lambda: x.cpu(),
        "tolist": lambda: x.tolist(),
        "bool": lambda: bool(x[0]),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 0],
        "synchronize": torch.accelerator.synchronize,
        "stream": lambda: torch.accelerator.current_stream().synchronize(),
        "pageable": lambda: torch.tensor([1, 2], device=dev),
        "blocking_pinned": lambda: pinned.to(dev),
        "equal": lambda: torch.equal(x, x),
        "strided_pinned": lambda: pinned[:, 0].to(dev, non_blocking=True),
    }
    with sim.expect("sync_forbidden") as caught, sim.no_sync():
        deeds[wait]()
    assert "test_faults_host.py" in caught.text
    syncs = sim.stats()["host_syncs"]
    deeds[wait]()
    assert sim.stats()["host_syncs"] > syncs


def test_work_that_waits_for_nothing_passes_a_no_sync_region(sim, dev, side):
    x, pinned, event = torch.ones(4, device=dev), torch.ones(4).pin_memory(), torch.Event(dev)
    syncs = sim.stats()["host_syncs"]
    with sim.no_sync():
        y = pinned.to(dev, non_blocking=True) + x
        y[y > 1] = 0
        y.masked_fill_(y > 0, 3.0)
        torch.where(y > 0, x, y)
        y += torch.tensor(2.0)
        side.wait_stream(torch.accelerator.current_stream())
        pinned.copy_(y, non_blocking=True)
        event.record()
        event.query()
        event.synchronize()
    assert sim.stats()["host_syncs"] == syncs
    assert pinned.tolist() == [2.0] * 4


def test_a_no_sync_region_binds_its_own_thread_only(sim, dev):
    x, seen = torch.ones(1, device=dev), []
    with sim.no_sync():
        worker = threading.Thread(target=lambda: seen.append(x.item()))
        worker.start()
        worker.join()
    assert seen == [1.0]


def test_pageable_copies_are_counted(sim, dev):
    torch.ones(4).to(dev)
    assert sim.stats()["pageable_h2d"] == 1
    torch.ones(4).pin_memory().to(dev, non_blocking=True)
    assert sim.stats()["pageable_h2d"] == 1
    assert sim.stats()["h2d_copies"] == 2


@pytest.mark.parametrize("reach", ["numpy", "asarray"])
def test_device_memory_gives_no_numpy_array(sim, dev, reach):
    x = torch.ones(2, device=dev)
    with sim.expect("host_access") as caught:
        x.numpy() if reach == "numpy" else np.asarray(x)
    assert "test_faults_host.py" in caught.text
    assert isinstance(caught.fault, TypeError)
    assert np.asarray(x.cpu()).tolist() == [1.0, 1.0]


def over_pinned(sim, dev, write=False):
    """Launch a kernel over pinned memory that only the caller keeps alive."""
    host, out = torch.arange(4.0).pin_memory(), torch.zeros(4, device=dev)

    def run():
        one, other = (out, host) if write else (host, out)
        sim.host_view(other).copy_(sim.host_view(one))

    sim.launch("copy_rows", run, reads=[out if write else host], writes=[host if write else out])
    return host, out


@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("then", ["operation", "wait"])
def test_a_host_row_freed_under_a_kernel_faults(sim, dev, write, then):
    host, out = over_pinned(sim, dev, write)
    with sim.expect("pinned_freed") as caught:
        del host
        gc.collect()
        out.add_(1) if then == "operation" else torch.accelerator.synchronize()
    assert "copy_rows at" in caught.text and ("writing" if write else "reading") in caught.text
    torch.accelerator.synchronize()


@pytest.mark.parametrize("held", ["event", "synchronize", "copy"])
def test_pinned_memory_that_is_freed_in_time_is_fine(sim, dev, held):
    """It is fine if the host has waited, or if a torch copy on the same stream makes the allocator
    keep the memory."""
    host, out = over_pinned(sim, dev)
    if held == "event":
        event = torch.Event(dev)
        event.record()
        event.synchronize()
    elif held == "synchronize":
        torch.accelerator.synchronize()
    else:
        out.copy_(host, non_blocking=True)
    del host
    gc.collect()
    out.add_(1)
    torch.accelerator.synchronize()
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_copy_on_another_stream_keeps_nothing_for_a_kernel(sim, dev, side):
    host, out = over_pinned(sim, dev)
    other = torch.zeros(4, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        other.copy_(host, non_blocking=True)
    with sim.expect("pinned_freed"):
        del host
        gc.collect()
        out.add_(1)
    torch.accelerator.synchronize()
