"""Two host threads use the device at once: no deadlock between the simulator's mutex and the GIL,
and no false alarm."""

import threading
import time

import torch


def run_all(workers):
    failures = []

    def guarded(worker):
        try:
            worker()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not failures, failures


def test_two_threads_compute_on_their_own_streams(sim, dev):
    def work():
        stream = torch.Stream(dev)
        with stream:
            for step in range(300):
                x = torch.full((16,), float(step), device=dev)
                y = (x * 2 + 1).cumsum(0)
                host = torch.empty(16, pin_memory=True)
                host.copy_(y, non_blocking=True)
                event = torch.Event(dev)
                event.record(stream)
                event.synchronize()
                assert host[0] == 2 * step + 1

    run_all([work, work])


def test_one_thread_polls_what_another_computes(sim, dev):
    events, done = [], threading.Event()

    def produce():
        stream = torch.Stream(dev)
        with stream:
            for step in range(200):
                host = torch.empty(4, pin_memory=True)
                host.copy_(torch.full((4,), float(step), device=dev), non_blocking=True)
                event = torch.Event(dev)
                event.record(stream)
                events.append((step, event, host))
        done.set()

    def consume():
        seen = 0
        while seen < 200:
            if seen == len(events):
                time.sleep(0)
                continue
            step, event, host = events[seen]
            while not event.query():
                time.sleep(0)
            assert host.tolist() == [float(step)] * 4
            seen += 1

    run_all([produce, consume])


def test_a_thread_replays_while_another_allocates(sim, dev, make_graph):
    x = torch.ones(8, device=dev)
    side, graph = torch.Stream(dev), make_graph()
    torch.accelerator.synchronize()
    out = graph.capture(lambda: sim.call("vendor::plus", lambda a: a + 1, x), side)

    def replay():
        with side:
            for _ in range(300):
                graph.replay()
            assert out.tolist() == [2.0] * 8

    def allocate():
        for size in range(1, 300):
            torch.empty(size * 100, device=dev).zero_()
        torch.accelerator.memory_stats()

    torch.accelerator.synchronize()
    run_all([replay, allocate])
