"""Order across streams: races by bytes, freed memory, several devices. Every fault has a correct
counterpart."""

import pytest
import torch


def test_a_write_on_another_stream_without_a_wait_is_a_race(sim, dev, side):
    x = torch.ones(8, device=dev)
    with sim.expect("race") as caught, side:
        x.add_(1)
    assert "test_faults_order.py" in caught.text
    assert "ones" not in caught.text or "fill_" in caught.text
    assert "wait for an event" in caught.text


def test_a_write_on_another_stream_after_a_wait_is_ordered(sim, dev, side):
    x = torch.ones(8, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    torch.accelerator.current_stream().wait_stream(side)
    assert x.sum().item() == 16


def test_a_read_races_with_a_later_write(sim, dev, side):
    x = torch.ones(8, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.sum()
    with sim.expect("race") as caught:
        x.zero_()
    assert "which reads them" in caught.text


def test_two_reads_on_two_streams_are_no_race(sim, dev, side):
    x = torch.ones(8, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.sum()
    x.sum()


def test_an_event_orders_only_what_was_queued_before_its_record(sim, dev, side):
    x, event = torch.ones(8, device=dev), torch.Event(dev)
    event.record()
    x.add_(1)
    side.wait_event(event)
    with sim.expect("race"), side:
        x.add_(1)


def test_ordering_passes_through_a_third_stream(sim, dev, side):
    x, third = torch.ones(8, device=dev), torch.Stream(dev)
    third.wait_stream(torch.accelerator.current_stream())
    side.wait_stream(third)
    with side:
        x.add_(1)


def test_a_host_synchronize_orders_later_work_on_every_stream(sim, dev, side):
    x = torch.ones(8, device=dev)
    torch.accelerator.synchronize()
    with side:
        x.add_(1)


def test_disjoint_slices_do_not_race_and_overlapping_ones_do(sim, dev, side):
    x = torch.zeros(16, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    x[:8].add_(1)
    with side:
        x[8:].add_(1)
    with sim.expect("race"), side:
        x[7:9].add_(1)


def test_disjoint_column_slices_do_not_race(sim, dev, side):
    x = torch.zeros(16, 8, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    x[:, :4].add_(1)
    with side:
        x[:, 4:].add_(1)
    with sim.expect("race"), side:
        x[:, 3:5].add_(1)


@pytest.mark.parametrize("write", ["index_copy_", "index_put_", "setitem"])
def test_row_writes_race_only_on_the_same_rows(sim, dev, side, write):
    pool, rows = torch.zeros(16, 4, device=dev), torch.ones(2, 4, device=dev)
    first, second, third = (torch.tensor(r, device=dev) for r in ([1, 5], [2, 6], [5, 7]))

    def put(index):
        if write == "index_copy_":
            pool.index_copy_(0, index, rows)
        elif write == "index_put_":
            pool.index_put_((index,), rows)
        else:
            pool[index] = rows

    side.wait_stream(torch.accelerator.current_stream())
    put(first)
    with side:
        put(second)
    with sim.expect("race"), side:
        put(third)


def test_row_reads_race_only_on_the_same_rows(sim, dev, side):
    pool = torch.zeros(16, 4, device=dev)
    first, second = torch.tensor([1, 5], device=dev), torch.tensor([2, 6], device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    pool.index_copy_(0, first, torch.ones(2, 4, device=dev))
    with side:
        pool.index_select(0, second)
        pool[second]
        torch.nn.functional.embedding(second, pool)
    with sim.expect("race"), side:
        pool.index_select(0, first)


def test_memory_freed_under_another_streams_work_faults_when_it_is_allocated_again(sim, dev, side):
    x = torch.ones(1000, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.sum()
    del x
    with sim.expect("use_after_free") as caught:
        torch.ones(1000, device=dev)
    assert "record_stream" in caught.text


@pytest.mark.parametrize("remedy", ["record_stream", "wait", "synchronize", "smaller"])
def test_memory_freed_after_retention_or_a_wait_is_fine(sim, dev, side, remedy):
    x = torch.ones(1000, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x.sum()
    if remedy == "record_stream":
        x.record_stream(side)
    if remedy == "wait":
        torch.accelerator.current_stream().wait_stream(side)
    if remedy == "synchronize":
        side.synchronize()
    del x
    torch.ones(4000 if remedy == "smaller" else 1000, device=dev)
    side.synchronize()
    assert y.item() == 1000


def test_a_launch_races_by_its_declared_accesses(sim, dev, side):
    x, y = torch.ones(8, device=dev), torch.empty(8, device=dev)

    def kernel():
        y.copy_(x * 2)

    sim.launch("doubled", kernel, reads=[x], writes=[y])
    assert y.tolist() == [2.0] * 8
    sim.launch("doubled", kernel, reads=[x], writes=[y])
    with sim.expect("race") as caught, side:
        y.add_(1)
    assert "doubled" in caught.text
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y.add_(1)


def test_a_launch_over_rows_races_only_on_the_same_rows(sim, dev, side):
    pool, rows, others = (
        torch.zeros(8, 4, device=dev),
        torch.tensor([1, 2], device=dev),
        torch.tensor([2, 3], device=dev),
    )
    side.wait_stream(torch.accelerator.current_stream())
    sim.launch("store", lambda: pool.index_fill_(0, rows, 1.0), reads=[rows], writes=[(pool, rows)])
    with side:
        pool[4:].add_(1)
    with sim.expect("race") as caught, side:
        sim.launch("load", lambda: None, reads=[(pool, others)])
    assert "bytes [32, 48)" in caught.text


def test_a_declared_access_races(sim, dev, side):
    x = torch.ones(8, device=dev)
    sim.access(x, write=True, op="all_reduce")
    with sim.expect("race") as caught, side:
        sim.access(x, op="read")
    assert "all_reduce" in caught.text
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        sim.access(x, op="read")


def test_mixed_devices_fault_and_copied_ones_do_not(sim, dev):
    here, there = torch.ones(3, device=dev), torch.ones(3, device=sim.device(1))
    for mix in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: here + torch.ones(3),
        lambda: torch.ones(3) + here,
    ):
        with sim.expect("device_mismatch"):
            mix()
    assert (here + there.to(dev)).tolist() == [2.0] * 3
    assert (here + torch.tensor(2.0)).tolist() == [3.0] * 3


def test_a_copy_between_devices_is_ordered_on_both_sides(sim, dev):
    here = torch.ones(3, device=dev)
    there = here.to(sim.device(1))
    there.add_(1)
    here.add_(1)
    assert there.tolist() == [2.0] * 3


def test_the_capacity_is_a_limit_of_any_size(sim, dev):
    _, total = torch.accelerator.get_memory_info()
    assert total == sim.memory
    with sim.expect("out_of_memory"):
        torch.empty(total + 1, dtype=torch.uint8, device=dev)
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device=dev)
    assert torch.accelerator.memory_allocated() == before + (1 << 20)
    del x
    assert torch.accelerator.memory_allocated() == before


def test_an_index_outside_its_tensor_faults(sim, dev):
    table = torch.ones(4, 2, device=dev)
    with sim.expect("out_of_bounds"):
        table.index_select(0, torch.tensor([9], device=dev))
    assert table.index_select(0, torch.tensor([3], device=dev)).shape == (1, 2)


def test_an_index_that_nothing_wrote_faults(sim, dev):
    table, index = torch.ones(4, 2, device=dev), torch.empty(2, dtype=torch.int64, device=dev)
    with sim.expect("uninitialised"):
        table.index_select(0, index)
    index.zero_()
    table.index_select(0, index)


def test_check_finite_finds_memory_that_nothing_wrote(sim, dev):
    x = torch.empty(4, device=dev)
    x[:2] = 1
    with sim.expect("uninitialised") as caught:
        sim.check_finite(x, "hidden")
    assert "hidden" in caught.text
    assert "2 elements" in caught.text
    x[2:] = 1
    sim.check_finite(x)
