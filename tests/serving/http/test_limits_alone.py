"""Consecutive limits, each tested alone: if one hid another, a missing one would go unnoticed."""

from __future__ import annotations

import json

import numpy as np

from sglcore.serving.apis.answer import MOST_WARNED, WARNINGS, shown, warned
from sglcore.serving.apis.batches.lines import MOST_FAULTS, read_lines
from sglcore.serving.apis.unknown import LONGEST_NAME, MOST_NAMED, UnknownFields
from sglcore.serving.replicas.restart import MOST_FAILED_STARTS, RestartPolicy
from sglcore.serving.replicas.router import Router, block_hashes


def test_unknown_fields_are_named_up_to_a_number_and_a_length() -> None:
    body = {f"{place:03}" + "x" * 100: 1 for place in range(3 * MOST_NAMED)}
    fields = UnknownFields()
    for _ in range(2):
        fields.take(dict, body, frozenset({"known"}))
    assert fields.places(body) == [name[:LONGEST_NAME] for name in list(body)[:MOST_NAMED]]


def test_names_in_a_header_are_cut_to_its_length() -> None:
    assert shown(["a" * (MOST_WARNED - 1)]) == "a" * (MOST_WARNED - 1)
    assert shown(["a" * MOST_WARNED, "b"]) == "a" * MOST_WARNED
    assert len(warned(["a" * 9] * MOST_WARNED)[WARNINGS]) == MOST_WARNED + len("ignored: ")


def test_faults_of_a_batch_file_are_told_up_to_a_number() -> None:
    for count in (MOST_FAULTS - 1, MOST_FAULTS, MOST_FAULTS + 1, 3 * MOST_FAULTS):
        _, faults = read_lines([b"{"] * count, "/v1/completions")
        assert [fault["line"] for fault in faults] == list(range(1, min(count, MOST_FAULTS) + 1))
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    _, faults = read_lines([json.dumps(good).encode()] * (2 * MOST_FAULTS), "/v1/completions")
    assert len(faults) == MOST_FAULTS and {fault["code"] for fault in faults} == {"duplicate_custom_id"}


def test_a_line_of_a_batch_file_has_as_many_bytes_as_are_allowed_and_no_more() -> None:
    text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}).encode()
    lines, faults = read_lines([text], "/v1/completions", len(text))
    assert len(lines) == 1 and not faults
    lines, faults = read_lines([text], "/v1/completions", len(text) - 1)
    assert not lines and [fault["code"] for fault in faults] == ["request_too_large"]
    assert f"{len(text)} bytes; at most {len(text) - 1}" in faults[0]["message"]


def test_failed_starts_count_in_a_row() -> None:
    policy = RestartPolicy()
    for _ in range(3):
        for _ in range(MOST_FAILED_STARTS - 1):
            policy.end(None, 1)
            assert policy.may_go_on
        policy.end(1e6, 1)
        assert policy.may_go_on and policy.wait == 0.0
    for _ in range(MOST_FAILED_STARTS):
        assert policy.may_go_on
        policy.end(None, 1)
    assert not policy.may_go_on


class Replica:
    """An idle replica."""

    load, page_size = 0, 4

    def __init__(self, number: int, num_pages: int = 1000) -> None:
        self.number, self.num_pages = number, num_pages


def prompt(*tokens: int) -> bytes:
    return np.repeat(np.array(tokens, "<i4"), Replica.page_size).tobytes()


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    router, one = Router(), Replica(0, num_pages=4)
    for sent in (prompt(1, 2, 3), prompt(7, 8)):
        router.choose([one], sent)
    known = [router.matched(one, block_hashes(each, Replica.page_size)) for each in (prompt(1, 2, 3), prompt(7, 8))]
    assert known == [2, 2] and router.remembered(0) == 4


def test_a_replica_that_has_ended_is_next_where_nothing_else_tells_replicas_apart() -> None:
    router, replicas = Router(), [Replica(number) for number in range(3)]
    assert [router.choose(replicas, b"").number for _ in range(3)] == [0, 1, 2]
    router.forget(2)
    assert [router.choose(replicas, b"").number for _ in range(3)] == [2, 0, 1]


def test_what_is_shorter_than_the_largest_page_is_no_reason_to_choose_a_replica() -> None:
    router, large, small = Router(), Replica(0), Replica(1)
    large.page_size = 2 * Replica.page_size
    chosen = [router.choose([large, small], prompt(*pages)).number for pages in ((1, 2), (1, 3), (1, 2, 3), (1, 3, 2))]
    assert chosen == [0, 1, 0, 1]


def test_a_replica_is_chosen_for_its_cache_up_to_the_bound_and_not_beyond() -> None:
    for slack, loads in ((0, (0, 3)), (2, (2, 5)), (4, (4, 7))):
        router, busy, other = Router(slack=slack), Replica(0), Replica(1)
        assert router.choose([busy, other], prompt(1, 2)) is busy
        busy.load, other.load = loads[0], 0
        assert router.choose([busy, other], prompt(1, 3)) is busy
        busy.load = loads[0] + 1
        assert router.choose([busy, other], prompt(1, 4)) is other
        router.forget(1)
        busy.load, other.load = loads[1], 2
        assert router.choose([busy, other], prompt(1, 5)) is busy, "half as many more again"
        busy.load = loads[1] + 1
        assert router.choose([busy, other], prompt(1, 6)) is other
