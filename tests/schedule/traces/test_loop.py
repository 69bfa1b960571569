"""The loop: depth of overlap, and its state after a worker raises."""

from __future__ import annotations

import pytest

from tests.schedule.drive import Drive


@pytest.mark.parametrize(
    ("asked", "can", "depth"), [(True, True, 2), (False, True, 1), (True, False, 1), (False, False, 1)]
)
def test_one_step_is_planned_while_one_is_in_flight_if_asked_and_possible(asked: bool, can: bool, depth: int) -> None:
    drive = Drive(overlap=asked, can_overlap=can)
    drive.add("a", 3, 5)
    drive.run()
    assert drive.worker.most_in_flight == depth


def test_a_worker_that_fails_to_submit_ends_the_requests_of_that_step_only() -> None:
    drive = Drive(max_batch_tokens=4)
    drive.worker.fail_submit = {3}
    lost, later = drive.add("a", 3, 9), drive.add("b", 4, 3)
    drive.scheduler.abort("b")
    drive.step(2)
    with pytest.raises(RuntimeError, match="planned failure of submit 3"):
        drive.step()
    later = drive.add("c", 3, 3)
    outputs = drive.loop.drain()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", None), ("a", "error")]
    assert len(lost.output_ids) == 2 and "planned failure of submit 3" in lost.error
    drive.run()
    assert later.output_ids == drive.alone(later)


def test_a_worker_that_fails_to_collect_ends_the_requests_of_that_step() -> None:
    drive = Drive(max_batch_tokens=4)
    drive.worker.fail_collect = {2}
    lost, spared = drive.add("a", 3, 9), drive.add("b", 12, 3)
    drive.step(2)
    with pytest.raises(RuntimeError, match="planned failure of collect 2"):
        drive.step()
    drive.scheduler.audit()
    assert lost.finish_reason == "error"
    assert drive.scheduler.stats().in_flight == 0
    drive.loop.drain()
    drive.run()
    assert spared.finish_reason == "error" and spared.output_ids == []


def test_the_outputs_of_a_failure_come_with_the_next_step_if_nobody_drained_them() -> None:
    drive = Drive()
    drive.worker.fail_submit = {1}
    drive.add("a", 3, 9)
    with pytest.raises(RuntimeError):
        drive.step()
    assert drive.loop.has_work
    assert [output.finish_reason for output in drive.step()] == ["error"]
    assert not drive.loop.has_work


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["fail_submit", "fail_collect"])
@pytest.mark.parametrize("step", range(1, 7))
def test_no_page_and_no_slot_is_lost_whichever_step_fails(kind: str, step: int, overlap: bool) -> None:
    drive = Drive(overlap=overlap, max_batch_tokens=5, prefix_cache=False)
    setattr(drive.worker, kind, {step})
    for rid in "abc":
        drive.add(rid, 6, 5)
    while drive.loop.has_work:
        try:
            drive.step()
        except RuntimeError:
            drive.outputs += drive.loop.drain()
            drive.scheduler.audit()
    assert sorted(drive.finishes()) == ["a", "b", "c"]
    assert drive.scheduler.stats().free_pages == drive.limits.num_pages


def test_drain_collects_what_is_in_flight_and_submits_nothing() -> None:
    drive = Drive()
    request = drive.add("a", 3, 9)
    drive.step(2)
    drive.loop.drain()
    assert len(request.output_ids) == len(drive.worker.seen) == 2
    assert drive.worker.in_flight == []
    drive.run()
    assert request.output_ids == drive.alone(request)
