"""A prompt engine that serves several decode engines: requests, ends and losses of one do not
affect another, though each numbers its leases from 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcore.engine.disaggregation.prefill_side import PromptSide
from sglcore.engine.disaggregation.transfer_messages import Ask, First, Refusal, unpack_logprobs
from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.sampling.plain_params import pack_params
from sglcore.schedule.cache.request_pages import Held
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.model_worker import TokenLogprobs
from sglcore.worker.page_transfer import Progress, Told, Transfer

LEASES, PEERS = (1, 2), (1, 2, 3)


class Played:
    """A transfer and an engine that record their calls; a prompt starts but makes no progress."""

    def __init__(self) -> None:
        self.news: list[Told] = []
        self.aborted: list[str] = []
        self.told: list[int] = []
        self.limits = SimpleNamespace(page_size=4)
        self.remote = SimpleNamespace(arrivals=SimpleNamespace(let_go=lambda request: None))

    def receive(self, seconds: float) -> list[Told]:
        found, self.news = self.news, []
        return found

    def tell(self, peer: int, body: bytes) -> None:
        self.told.append(peer)

    def add(self, name: str, prompt: np.ndarray, *given: Any, **named: Any) -> list[Any]:
        return [SimpleNamespace(held=Held(), prompt_ids=prompt, output_ids=[], finish_reason=None)]

    def abort(self, name: str) -> list[EngineOutput]:
        self.aborted.append(name)
        return [EngineOutput(name, 0, [], "abort")]


def asked() -> tuple[Played, Any]:
    """Each peer has requested the same number of prompts, with the same lease numbers."""
    played = Played()
    side = PromptSide(played, played)  # pyright: ignore[reportArgumentType]
    prompt, pages = (np.arange(8, dtype="<i4").tobytes() for _ in range(2))
    for lease in LEASES:
        for peer in PEERS:
            ask = Ask(lease, prompt, {}, 0, 0, 0, pages)
            played.news.append(Told(peer, msgspec.msgpack.encode(ask)))
    side.begin(0.0)
    assert len(side._jobs) == len(LEASES) * len(PEERS)
    return played, side


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("lease", LEASES)
def test_who_ends_a_prompt_ends_no_other_engines(peer: int, lease: int) -> None:
    played, side = asked()
    played.news.append(Told(peer, cancelled=lease))
    side.begin(0.0)
    assert played.aborted == [f"@{peer}:{lease}"]
    side.end([])
    assert len(side._jobs) == len(LEASES) * len(PEERS) - 1 and not played.told


@pytest.mark.parametrize("peer", PEERS)
def test_who_is_gone_takes_its_own_prompts_along(peer: int) -> None:
    played, side = asked()
    played.news.append(Told(peer, lost="the connection is closed"))
    side.begin(0.0)
    assert played.aborted == [f"@{peer}:{lease}" for lease in LEASES]
    side.end([])
    assert {job.peer for job in side._jobs.values()} == {*PEERS} - {peer}


@pytest.mark.parametrize("peer", PEERS)
def test_an_answer_goes_to_who_has_asked(peer: int) -> None:
    played, side = asked()
    side.end([EngineOutput(f"@{peer}:1", 0, [], "error", None, "no room")])
    assert played.told == [peer] and len(side._jobs) == len(LEASES) * len(PEERS) - 1


class Prompted(Played):
    """A transfer and an engine for one prompt of which the test sets the progress."""

    has_news = False

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__()
        self.refusal = refusal
        self.added: list[tuple[str, list[int], SamplingParams, int, int]] = []
        self.answers: list[First | Refusal] = []
        self.written: list[tuple[int, int, list[int], list[int]]] = []
        self.transfers: list[Transfer] = []
        self.released: list[Any] = []
        self.remote = SimpleNamespace(arrivals=SimpleNamespace(let_go=self.released.append))
        self.request = SimpleNamespace(
            held=Held(),
            prompt_ids=np.arange(14),
            output_ids=[],
            finish_reason=None,
            logprobs=[],
            prompt_logprobs=[],
            cached_tokens=-1,
        )

    def add(self, name: str, prompt: np.ndarray, *given: Any, **named: Any) -> list[Any]:
        if self.refusal is not None:
            raise self.refusal
        params, seed = given
        self.added.append((name, prompt.tolist(), params, seed, named["first_index"]))
        return [self.request]

    def tell(self, peer: int, body: bytes) -> None:
        super().tell(peer, body)
        self.answers.append(msgspec.msgpack.decode(body, type=First | Refusal))

    def write(self, peer: int, lease: int, source: np.ndarray, target: np.ndarray) -> Transfer:
        self.written.append((peer, lease, source.tolist(), target.tolist()))
        self.transfers.append(Transfer())
        return self.transfers[-1]


def prompted(refusal: Exception | None = None, first_page: int = 1, **params: Any) -> tuple[Prompted, PromptSide]:
    """Peer 2 has requested a prompt of 14 tokens, on pages of 4, from page `first_page` on."""
    played = Prompted(refusal)
    side = PromptSide(played, played)  # pyright: ignore[reportArgumentType]
    prompt, pages = (np.arange(count, dtype="<i4").tobytes() for count in (14, 4 - first_page))
    given = pack_params(SamplingParams(**params))
    played.news.append(Told(2, msgspec.msgpack.encode(Ask(5, prompt, given, 77, 3, first_page, pages))))
    side.begin(0.0)
    return played, side


@pytest.mark.parametrize("least", [0, 1, 9])
def test_a_prompt_of_a_peer_is_a_request_of_one_token(least: int) -> None:
    played, _ = prompted(n=3, max_tokens=50, min_tokens=least, temperature=0.25)
    params = SamplingParams(n=1, max_tokens=1, min_tokens=min(least, 1), temperature=0.25)
    assert played.added == [("@2:5", list(range(14)), params, 77, 3)]
    assert played.request.is_lent, "its pages are kept until they are read"


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_pages_are_sent_once_they_are_full_and_the_last_one_with_the_first_token(first_page: int) -> None:
    played, side = prompted(first_page=first_page)
    request, sent = played.request, list[int]()
    request.held.pages = [10, 11, 12, 13]
    for cells, tokens, full in (
        (3, [], 0),
        (4, [], 1),
        (11, [], 2),
        (0, [], 2),
        (14, [], 3),
        (15, [9], 4),
        (16, [9], 4),
    ):
        request.held.num_cells, request.output_ids = cells, tokens
        side.end([])
        sent = list(range(first_page, full))
        assert [page for _, _, pages, _ in played.written for page in pages] == [10 + each for each in sent]
        assert [page for *_, pages in played.written for page in pages] == [each - first_page for each in sent]
    assert all((peer, lease) == (2, 5) for peer, lease, *_ in played.written) and not played.answers


@pytest.mark.parametrize(
    ("cached", "fails", "wanted"),
    [
        (-1, False, First(5, 9, 0)),
        (8, False, First(5, 9, 8)),
        (8, True, Refusal(5, "the prompt engine: it broke")),
    ],
)
def test_the_first_token_is_told_when_all_pages_are_read(cached: int, fails: bool, wanted: First | Refusal) -> None:
    played, side = prompted()
    request = played.request
    request.held.pages, request.held.num_cells, request.cached_tokens = [10, 11, 12, 13], 8, cached
    side.end([])
    request.held.num_cells, request.output_ids = 14, [9]
    side.end([EngineOutput("@2:5", 3, [9], "length")])
    first, last = played.transfers
    last.progress = Progress.DONE
    side.end([])
    assert not played.answers and not played.released and side.has_work, "its answer is still to come"
    first.progress, first.reason = (Progress.FAILED, "it broke") if fails else (Progress.DONE, "")
    side.end([])
    assert played.answers == [wanted] and played.released == [request] and not side.has_work


@pytest.mark.parametrize("refused", [True, False])
def test_a_prompt_that_fails_is_refused_and_none_of_its_pages_are_sent(refused: bool) -> None:
    played, side = prompted()
    request = played.request
    request.held.pages, request.held.num_cells, request.finish_reason = [10, 11, 12, 13], 12, "error"
    side.end([EngineOutput("@2:5", 3, [], "error", None, "no room", refused=refused)])
    assert played.answers == [Refusal(5, "the prompt engine: no room", refused=refused)] and not played.written


@pytest.mark.parametrize("error", [RequestError("it is too long"), SamplingError("it is too long")])
def test_a_prompt_that_can_not_run_is_the_requesters_error(error: Exception) -> None:
    played, side = prompted(error)
    assert played.answers == [Refusal(5, "it is too long", refused=True)] and not side.has_work


def test_outputs_of_its_own_clients_are_returned() -> None:
    _, side = prompted()
    own = EngineOutput("r", 0, [4])
    assert side.end([EngineOutput("@2:5", 3, [9]), own]) == [own]


@pytest.mark.parametrize(("tokens", "cells"), [(13, 15), (14, 16), (15, 17), (16, 17), (16, 18)])
def test_pages_beyond_the_prompt_are_not_sent(tokens: int, cells: int) -> None:
    """A step that runs ahead may already have a cell for the token after the first one."""
    played, side = prompted(first_page=0)
    request = played.request
    request.prompt_ids, request.held.pages = np.arange(tokens), [10, 11, 12, 13, 14]
    request.held.num_cells, request.output_ids = cells, [9]
    side.end([])
    assert [pages for _, _, pages, _ in played.written] == [[10, 11, 12, 13]]


def test_pages_that_a_preempted_request_does_not_have_yet_are_not_sent() -> None:
    played, side = prompted(first_page=0)
    request = played.request
    request.held.pages, request.held.num_cells = [10], 12
    side.end([])
    side.end([])
    assert [pages for _, _, pages, _ in played.written] == [[10]]
    request.held.pages = [20, 21, 22]
    side.end([])
    assert [(pages, target) for _, _, pages, target in played.written[1:]] == [([21, 22], [1, 2])]


@pytest.mark.parametrize("is_lost", [True, False])
def test_of_a_prompt_that_its_peer_ends_no_more_pages_and_no_answer_are_sent(is_lost: bool) -> None:
    """Its pages are released when those on their way have been read."""
    played, side = prompted(first_page=0)
    request = played.request
    request.held.pages, request.held.num_cells = [10, 11, 12, 13], 4
    side.end([])
    request.held.num_cells = 12
    played.news.append(Told(2, lost="it is gone") if is_lost else Told(2, cancelled=5))
    side.begin(0.0)
    side.end([])
    assert played.aborted == ["@2:5"] and len(played.written) == 1 and not played.released
    played.transfers[0].progress = Progress.DONE
    side.end([])
    assert played.released == [request] and not played.answers and not side.has_work


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_prompt_that_ends_here_without_a_token_is_refused_with_a_reason(reason: Any) -> None:
    played, side = prompted()
    side.end([EngineOutput("@2:5", 3, [], reason)])
    assert played.answers == [Refusal(5, "the prompt engine: its prompt was aborted")]
    assert played.released == [played.request] and not side.has_work


def test_the_first_token_brings_the_log_probabilities_of_the_prompt_and_of_itself() -> None:
    def scored(*tokens: int) -> TokenLogprobs:
        ids = np.array(tokens, np.int32)
        return TokenLogprobs(ids.astype(np.float32), ids, ids[:, None], ids[:, None].astype(np.float32))

    played, side = prompted()
    request = played.request
    request.held.pages, request.held.num_cells, request.output_ids = [10, 11, 12, 13], 14, [9]
    request.logprobs, request.prompt_logprobs = [scored(9)], [scored(1, 2), scored(3)]
    side.end([EngineOutput("@2:5", 3, [9], "length")])
    played.transfers[0].progress = Progress.DONE
    side.end([])
    (answer,) = played.answers
    assert isinstance(answer, First) and answer.token == 9
    found = [unpack_logprobs(each).chosen.tolist() for each in (answer.logprobs, *answer.prompt_logprobs)]
    assert found == [[9.0], [1.0, 2.0], [3.0]]


def test_messages_that_have_arrived_are_work_though_nothing_is_computed() -> None:
    played, side = prompted(RequestError("it is too long"))
    found: list[bool] = []
    for played.has_news in (False, True):
        found.append(side.has_work)
    assert found == [False, True]


def test_connections_are_closed_with_the_engine() -> None:
    closed: list[str] = []
    transfer: Any = SimpleNamespace(close=lambda: closed.append("transfer"), fileno=lambda: 7)
    side = PromptSide(transfer, transfer)
    assert (side.fileno(), side.lacks) == (7, "")
    side.close()
    assert closed == ["transfer"]
