"""Hidden states in the scheduler: which requests are refused, which rows of a step bring them, and
what a request keeps."""

from __future__ import annotations

from typing import Any

import pytest

from sglcore.schedule.request_errors import RequestError
from sglcore.worker.schedule_batch import CaptureHiddenMode
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import make_params

NONE, LAST, FULL = CaptureHiddenMode.NONE, CaptureHiddenMode.LAST, CaptureHiddenMode.FULL
GIVING: dict[str, Any] = {"hidden_size": 3, "gives_norm_inputs": True}


def drive(**limits: Any) -> Drive:
    return Drive(**{**GIVING, **limits})


def add(found: Drive, name: str, length: int, wanted: str | None, before: bool = False, tokens: int = 3) -> Any:
    request = found.make(name, length, tokens)
    request.params = make_params(tokens, return_hidden_states=wanted, return_hidden_states_before_norm=before)
    found.scheduler.add(request)
    return request


def modes(found: Drive) -> list[list[int] | None]:
    """The modes of each batch so far."""
    return [None if batch.hidden_modes is None else batch.hidden_modes.tolist() for batch in found.worker.seen]


@pytest.mark.parametrize(
    ("limits", "before", "field", "message"),
    [
        ({"hidden_size": 0}, False, "return_hidden_states", "returns none yet; leave return_hidden_states out"),
        (
            {"gives_norm_inputs": False},
            True,
            "return_hidden_states_before_norm",
            "returned yet; leave return_hidden_states_before_norm out, or start with --model-impl native",
        ),
    ],
)
def test_what_a_worker_does_not_return_is_refused_with_a_remedy(
    limits: dict[str, Any], before: bool, field: str, message: str
) -> None:
    found = drive(**limits)
    other = found.add("other", 5)
    with pytest.raises(RequestError, match=message) as refused:
        add(found, "a", 5, "all", before)
    assert refused.value.field == field and list(found.scheduler.requests) == ["other"]
    found.run()
    assert other.output_ids == found.alone(other)


def test_a_prompts_chunks_return_all_or_only_the_one_that_samples() -> None:
    found = drive(max_batch_tokens=4, overlap=False)
    add(found, "a", 10, "all")
    found.run()
    assert modes(found) == [[FULL], [FULL], [FULL], [LAST], [LAST]]
    found = drive(max_batch_tokens=4, overlap=False)
    add(found, "a", 10, "last")
    found.run()
    assert modes(found) == [None, None, [LAST], [LAST], [LAST]]


def test_rows_that_want_none_have_none_and_norm_inputs_are_negative() -> None:
    found = drive(overlap=False, max_batch_tokens=32)
    for name, wanted, before in (("a", None, False), ("b", "all", True), ("c", "last", False)):
        add(found, name, 5, wanted, before)
    found.run()
    assert modes(found) == [[NONE, -FULL, LAST], [NONE, -LAST, LAST], [NONE, -LAST, LAST]]


def test_a_batch_of_others_says_nothing_about_them() -> None:
    found = drive()
    found.add("a", 5)
    found.run()
    assert all(batch.hidden_modes is None and not batch.capture_hidden_mode.is_set for batch in found.worker.seen)


def test_what_an_output_has_brought_is_not_kept() -> None:
    found = drive(overlap=False, max_batch_tokens=4)
    request = add(found, "a", 10, "all")
    counts = []
    while found.loop.has_work:
        (*_, output) = [*found.step(), None]
        counts.append(sum(map(len, request.hidden_states)))
        if output is not None:
            assert not request.hidden_states and output.hidden_size == 3
    assert counts == [4, 8, 0, 0, 0] and request.num_hidden == 12
    sizes = [len(each.hidden_states) // 12 for each in found.outputs]
    assert sizes == [10, 1, 1]


def test_an_aborted_request_has_no_half_of_its_states() -> None:
    found = drive(overlap=False, max_batch_tokens=4)
    add(found, "a", 10, "all")
    found.step()
    output = found.scheduler.abort("a")
    assert output is not None and output.hidden_states == b"" and output.hidden_size == 0


def test_after_preemption_only_the_chunk_with_the_unread_token_returns_states() -> None:
    found = drive(overlap=False, max_batch_tokens=4, prefix_cache=False)
    request = add(found, "a", 10, "all", tokens=8)
    found.step(5)
    assert (request.num_tokens, request.num_hidden) == (13, 12)
    found.scheduler.running._retract(request)
    found.run()
    assert modes(found)[5:] == [None, None, None, [FULL], *[[LAST]] * 4] and request.num_hidden == 17
