"""Host data reach the device in one copy, or without a copy where memory is shared, and never mix
with the data of the step before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglcore.device.facts import Facts
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.staging import RING, HostBlock, PinnedRing, StagedArrays
from sglcore.worker.schedule_batch import ForwardMode
from tests.runtime.tiny import SHARED, STAGED, Desk, Site, assert_close, ints, make_site, random_tokens

COPY = torch.ops.aten.copy_.default


class Copies(TorchDispatchMode):
    """Counts copies. `late`: they happen only when `run` is called, as on a device that lags."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the copies; run every other operation."""
        if func is COPY:
            self.made.append((args[0], args[1]))
            if self.late:
                return args[0]
        return func(*args, **(kwargs or {}))

    def run(self) -> list[list[int]]:
        """Perform the copies in order; return the content of the destination after each."""
        return [target.copy_(source).tolist() for target, source in self.made]


def staged_block(kind: type[HostBlock] = HostBlock, shares: bool = False) -> HostBlock:
    """A block of three numbers on the processor."""
    return kind(3, "cpu", shares_memory=shares, pinned=False)


def test_the_parts_of_a_block_are_separate_arrays_on_both_sides() -> None:
    block = HostBlock(10, "cpu", shares_memory=False, pinned=False)
    (flat, flat_host), (wide, wide_host) = block.part(0, (4,)), block.part(4, (2, 3))
    flat_host[:], wide_host[:] = [1, 2, 3, 4], [[5, 6, 7], [8, 9, 10]]
    assert flat.tolist() == [0] * 4
    block.commit()
    assert flat.tolist() == [1, 2, 3, 4]
    assert wide.tolist() == [[5, 6, 7], [8, 9, 10]]


def test_where_memory_is_shared_the_parts_are_the_same_bytes_and_nothing_is_copied() -> None:
    block = staged_block(shares=True)
    device, host = block.part(0, (3,))
    host[:] = [1, 2, 3]
    assert device.tolist() == [1, 2, 3]
    with Copies() as copies:
        block.commit()
    assert copies.made == []


def two_late_commits(kind: type[HostBlock]) -> list[list[int]]:
    """The values that the device sees in two steps if both copies run after the second step was
    staged."""
    block = staged_block(kind)
    _, host = block.part(0, (3,))
    with Copies(late=True) as copies:
        for value in (1, 2):
            host[:] = value
            block.commit()
    host[:] = 3
    return copies.run()


class OneMirror(HostBlock):
    """Mutant: one mirror instead of a ring."""

    def commit(self) -> None:
        """Always send the first mirror."""
        self._turn = 0
        super().commit()


def test_staging_the_next_step_does_not_touch_a_copy_still_under_way() -> None:
    assert RING == 2
    assert two_late_commits(HostBlock) == [[1] * 3, [2] * 3]


def test_a_block_with_one_mirror_is_caught() -> None:
    assert two_late_commits(OneMirror) == [[2] * 3, [2] * 3]


class Overwritten(StagedArrays):
    """Mutant: a lasting array stays in the words that the next step overwrites."""

    def arrive(self, block: HostBlock) -> None:
        """Treat the arrays as arrays of this step alone."""
        self._lasting = False
        super().arrive(block)


def carried(kind: type[StagedArrays] = StagedArrays) -> tuple[list[int], list[int], list[int]]:
    """The lasting array of step 0 after step 1 brought its own, the array of step 1, and the number
    of spare words in each of three commits (the last without arrays)."""
    block, ring = (
        HostBlock(3, "cpu", shares_memory=False, pinned=False, spare=64),
        PinnedRing(torch.device("cpu"), False),
    )
    steps = [kind({"values": ints([step] * 4)}, lasting=not step) for step in (0, 1)]
    with Copies() as copies:
        for arrays in steps:
            arrays.pack(block, ring)
            block.commit()
            arrays.arrive(block)
        block.commit()
    sizes = [target.numel() for target, _ in copies.made if target.data_ptr() == block._device.data_ptr()]
    return steps[0].arrived["values"].tolist(), steps[1].arrived["values"].tolist(), [size - 3 for size in sizes]


def test_what_lasts_is_not_overwritten_by_the_next_step_and_a_step_sends_only_its_own() -> None:
    first, second, sizes = carried()
    assert (first, second) == ([0] * 4, [1] * 4)
    assert sizes[0] == sizes[1] >= 4 and sizes[2] == 0


def test_what_lasts_and_is_overwritten_is_caught() -> None:
    assert carried(Overwritten)[0] == [1] * 4


def step_copies(facts: Facts, mode: ForwardMode) -> int:
    """The number of copies of one `init_new`."""
    site, desk = make_site(facts=facts), Desk()
    desk.extend({1: random_tokens(1, 3), 2: random_tokens(2, 2)})
    if mode is ForwardMode.DECODE:
        batch = desk.decode(1, 2)
    else:
        batch = desk.batch({1: [-1], 2: [5, 6]}, mode, mrope_positions=np.ones((3, 3), dtype=np.int32))
    registry = site.runner.registry_for(batch)
    with Copies() as copies:
        ForwardBatch.init_new(batch, registry)
    return len(copies.made)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED])
def test_a_step_is_one_copy_however_many_fields_it_stages_or_none_where_memory_is_shared(mode: ForwardMode) -> None:
    assert step_copies(STAGED, mode) == 1
    assert step_copies(SHARED, mode) == 0


def run_steps(site: Site) -> list[torch.Tensor]:
    """Hidden states of a mixed sequence of large and small steps."""
    desk = Desk(3)
    first, second, third = (random_tokens(seed, 5) for seed in (1, 2, 3))
    steps = [
        desk.extend({1: first, 2: second[:2]}),
        desk.batch({1: [7], 2: second[2:]}, ForwardMode.MIXED),
        desk.extend({3: third}),
        desk.extend({4: third[:1], 2: [8]}),
    ]
    return [site.runner.run_eager(site.runner.init_batch(batch)) for batch in steps]


def test_the_results_are_the_same_whether_memory_is_shared_or_not() -> None:
    for shared, staged in zip(run_steps(make_site()), run_steps(make_site(facts=STAGED)), strict=True):
        assert torch.equal(shared, staged)


def test_the_results_are_right_whether_memory_is_shared_or_not() -> None:
    for facts in (SHARED, STAGED):
        site = make_site(facts=facts, poison=True)
        whole = site.model.dense(random_tokens(1, 5) + [7])
        results = run_steps(site)
        assert_close(results[0][:5], whole[:5])
        assert_close(results[1][:1], whole[5:])


def test_staged_values_arrive_with_the_commit_and_not_before() -> None:
    site = make_site(facts=STAGED)
    registry = site.runner.decode_registry
    registry.stage("seq_lens", ints([4, 5]))
    buffer = registry.input_buffer("seq_lens").tensor
    assert buffer[:2].tolist() == [1, 1]
    registry.commit()
    assert buffer[:2].tolist() == [4, 5]
