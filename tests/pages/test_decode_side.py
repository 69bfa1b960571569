"""A decode engine without a network: which prompt engine gets each prompt, and what the answers of
prompt engines do to a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation import decode_side
from sglcore.engine.disaggregation.decode_side import MOST_TRIES, DecodeSide
from sglcore.engine.disaggregation.transfer_messages import Ask, First, Refusal
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.page_transfer import PeerLost, Told
from tests.engine.test_ended_requests import ConstantWorker
from tests.schedule.fake_worker import make_limits


class Played:
    """A transfer that records what is sent, and returns the messages that a test gives it."""

    def __init__(self, *peers: int) -> None:
        self.peers = peers
        self.asked: list[tuple[int, Ask]] = []
        self.news: list[Told] = []
        self.open: set[int] = set()
        self.cancelled: list[int] = []
        self.drains = True
        self.closed = 0
        self._offered = 0

    @property
    def has_news(self) -> bool:
        return bool(self.news)

    def name(self, peer: int) -> str:
        return f"host{peer}:1"

    def connect(self, address: str) -> int:
        raise PeerLost("nobody is there")

    def receive(self, seconds: float) -> list[Told]:
        found, self.news = self.news, []
        return found

    def offer(self, peer: int, pages: np.ndarray) -> int:
        self._offered += 1
        self.open.add(self._offered)
        return self._offered

    def tell(self, peer: int, body: bytes) -> None:
        self.asked.append((peer, msgspec.msgpack.decode(body, type=Ask)))

    def cancel(self, lease: int) -> None:
        self.cancelled.append(lease)

    def drained(self, lease: int) -> bool:
        return self.drains

    def end(self, lease: int) -> None:
        self.open.discard(lease)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.closed += 1


class Playing:
    """A decode engine of the prompt engines `peers`."""

    def __init__(self, *peers: int) -> None:
        self.transfer: Any = Played(*peers)
        self.engine = TokenEngine(
            ConstantWorker(make_limits()),
            frozenset(),
            open_pages=lambda engine: DecodeSide(self.transfer, engine, ["host1:1", "host2:1"]),
        )

    def add(self, *names: str) -> None:
        for name in names:
            self.engine.add(name, [1, 2, 3], SamplingParams(max_tokens=3), 7)

    def hear(self, *messages: tuple[int, First | Refusal | str]) -> list[EngineOutput]:
        """Take messages of peers, and the loss of peers with their reason, in one step."""
        for peer, each in messages:
            body = b"" if isinstance(each, str) else msgspec.msgpack.encode(each)
            self.transfer.news.append(Told(peer, body, lost=each if isinstance(each, str) else ""))
        return self.engine.step()

    @property
    def asked(self) -> list[tuple[int, int]]:
        """The peer and the lease of each prompt that was sent."""
        return [(peer, ask.lease) for peer, ask in self.transfer.asked]


@pytest.fixture
def playing() -> Iterator[Playing]:
    found = Playing(1, 2, 3)
    yield found
    found.engine.close()


def test_each_prompt_goes_to_the_engine_with_the_fewest(playing: Playing) -> None:
    playing.add("a", "b", "c", "d")
    playing.hear()
    assert playing.asked == [(1, 1), (2, 2), (3, 3), (1, 4)]
    playing.hear((2, First(2, 9, 0)), (3, First(3, 9, 0)))
    playing.add("e", "f", "g")
    playing.hear()
    assert playing.asked[4:] == [(2, 5), (3, 6), (2, 7)]


def test_a_prompt_that_an_engine_has_failed_goes_to_another_one_and_in_the_end_fails(playing: Playing) -> None:
    playing.add("a")
    playing.hear()
    outputs: list[EngineOutput] = []
    for number in range(MOST_TRIES):
        peer, lease = playing.asked[-1]
        assert not outputs and lease == number + 1 and playing.transfer.open == {lease}
        outputs = playing.hear((peer, Refusal(lease, f"broken {number}")))
    assert [peer for peer, _ in playing.asked] == [1, 2, 1] and not playing.transfer.open
    ((index, reason, error, refused, is_unserved),) = [
        (each.index, each.finish_reason, each.error, each.refused, each.is_unserved) for each in outputs
    ]
    assert (index, reason, error) == (0, "error", "broken 2") and not refused and not is_unserved
    assert not playing.engine.has_work


def test_a_single_engine_that_has_failed_is_asked_again() -> None:
    playing = Playing(4)
    playing.add("a")
    playing.hear()
    playing.hear((4, Refusal(1, "broken")))
    assert playing.asked == [(4, 1), (4, 2)]
    first, second = (ask for _, ask in playing.transfer.asked)
    assert msgspec.structs.replace(first, lease=2) == second, "the same pages, seed and parameters"
    playing.engine.close()


@pytest.mark.parametrize("others", [(), (2,)])
def test_prompts_of_an_engine_that_is_gone_go_to_others_or_are_not_served(others: tuple[int, ...]) -> None:
    playing = Playing(1, *others)
    playing.add("a", "b")
    playing.hear()
    playing.transfer.peers = others
    outputs = playing.hear((1, "it is gone"))
    if others:
        assert not outputs and playing.asked == [(1, 1), (2, 2), (2, 3)]
    else:
        assert [(each.is_unserved, each.refused) for each in outputs] == [(True, False)] * 2
        assert all(each.error == "its prompt is lost: it is gone" for each in outputs)
        playing.add("c")
        (unserved,) = playing.hear()
        assert unserved.is_unserved and unserved.error == "no prompt engine of host1:1, host2:1 can be reached"
    playing.engine.close()


def test_a_refusal_of_the_request_itself_is_the_callers_and_is_not_tried_again(playing: Playing) -> None:
    playing.add("a")
    playing.hear()
    (output,) = playing.hear((1, Refusal(1, "too long", refused=True)))
    assert (output.finish_reason, output.error, output.refused) == ("error", "too long", True)
    assert len(playing.asked) == 1 and not playing.transfer.open


def test_messages_about_the_prompts_of_others_change_nothing(playing: Playing) -> None:
    playing.add("a", "b")
    playing.hear()
    assert playing.asked == [(1, 1), (2, 2)]
    strange = [(2, First(1, 9, 0)), (1, Refusal(2, "broken")), (3, First(1, 9, 0)), (1, First(7, 9, 0))]
    assert playing.hear(*strange) == [] and playing.transfer.open == {1, 2} and len(playing.asked) == 2
    (output,) = playing.hear((1, First(1, 9, 0)))
    assert (output.request_id, output.token_ids[0]) == ("a", 9)


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (2, 2)])
def test_the_first_token_brings_what_its_engine_had_of_the_prompt(cached: int, told: int, playing: Playing) -> None:
    playing.add("a")
    playing.hear()
    outputs = playing.hear((1, First(1, 9, cached)))
    assert [(each.token_ids[:1], each.cached_tokens) for each in outputs[:1]] == [([9], told)]


@pytest.mark.parametrize(("cached", "told"), [(0, 8), (4, 8), (12, 12)])
def test_cached_tokens_are_the_most_that_one_of_both_engines_had(cached: int, told: int, playing: Playing) -> None:
    prompt = list(range(1, 14))
    playing.engine.add("a", prompt, SamplingParams(max_tokens=2), 7)
    playing.hear()
    playing.hear((1, First(1, 9, 0)))
    while playing.engine.has_work:
        playing.engine.step()
    playing.engine.add("b", prompt[:11] + [40, 41], SamplingParams(max_tokens=2), 7)
    playing.hear()
    _, ask = playing.transfer.asked[-1]
    assert ask.first_page == 2, "the first two pages are here"
    (output, *_) = playing.hear((1, First(2, 9, cached)))
    assert output.cached_tokens == told


def test_pages_of_a_request_that_has_ended_stay_lent_until_its_writer_has_stopped(playing: Playing) -> None:
    playing.add("a")
    playing.hear()
    playing.transfer.drains = False
    playing.engine.abort("a")
    for _ in range(3):
        playing.hear()
    assert playing.transfer.cancelled == [1] and playing.transfer.open == {1} and playing.engine.has_work
    playing.transfer.drains = True
    playing.hear()
    assert not playing.transfer.open and not playing.engine.has_work


def test_samples_of_a_prompt_are_sent_each_by_itself(playing: Playing) -> None:
    playing.engine.add("a", [1, 2, 3], SamplingParams(max_tokens=3, n=2), 7)
    playing.hear()
    assert [(ask.sample_index, ask.seed, ask.first_page) for _, ask in playing.transfer.asked] == [(0, 7, 0), (1, 7, 0)]
    prompts = [np.frombuffer(ask.prompt, "<i4").tolist() for _, ask in playing.transfer.asked]
    assert prompts == [[1, 2, 3]] * 2
    first, second = (set(np.frombuffer(ask.pages, "<i4").tolist()) for _, ask in playing.transfer.asked)
    assert first and second and not first & second


def test_samples_wait_for_no_other_sample_of_their_prompt(playing: Playing) -> None:
    requests = playing.engine.add("a", [1, 2, 3], SamplingParams(max_tokens=3, n=3), 7)
    assert [(each.is_remote, each.leader) for each in requests] == [(True, None)] * 3


@pytest.mark.parametrize("count", [1, 2, 5])
def test_where_no_engine_is_left_all_that_wait_end_in_one_step(count: int) -> None:
    playing = Playing()
    playing.add(*map(str, range(count)))
    outputs = playing.hear()
    assert [(each.request_id, each.is_unserved) for each in outputs] == [(str(n), True) for n in range(count)]
    assert not playing.engine.has_work
    playing.engine.close()


@pytest.mark.parametrize(
    "word",
    [Refusal(1, "broken"), Refusal(1, "too long", refused=True), First(1, 9, 0), "it is gone"],
    ids=["broken", "refused", "written", "gone"],
)
def test_a_prompt_that_nobody_wants_any_more_is_asked_of_no_other_engine(
    word: First | Refusal | str, playing: Playing
) -> None:
    playing.add("a")
    playing.hear()
    playing.transfer.drains = False
    playing.engine.abort("a")
    assert playing.hear((1, word)) == [] and len(playing.asked) == 1
    assert not playing.transfer.open and not playing.engine.has_work


def test_a_writer_is_told_to_stop_before_others_are_listened_to_and_its_pages_serve_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer may come in the same step, in which its pages are lent again."""
    playing = Playing(1)
    playing.engine.close()
    limits = make_limits(num_pages=16)
    playing.engine = TokenEngine(
        ConstantWorker(limits), frozenset(), open_pages=lambda engine: DecodeSide(playing.transfer, engine, ["host1:1"])
    )
    transfer = playing.transfer
    for name, token in (("first", 5), ("second", 6)):
        playing.engine.add(name, [token] * 60, SamplingParams(max_tokens=2), 7)
    playing.hear()
    assert len(playing.asked) == 1, "there is room for one"
    transfer.drains = False
    playing.engine.abort("first")

    def receive(seconds: float) -> list[Told]:
        transfer.drains = bool(transfer.cancelled)
        return []

    monkeypatch.setattr(transfer, "receive", receive)
    playing.hear()
    assert (transfer.cancelled, transfer.open) == ([1], {2}) and len(playing.asked) == 2
    playing.engine.close()


class Sought(Played):
    """A transfer that records where it connects: nobody is at host1, host2 refuses, and host3
    answers."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[str] = []
        self.enough = threading.Event()

    def connect(self, address: str) -> int:
        self.tried.append(address)
        if self.tried.count("host1:1") == 4:
            self.enough.set()
        if address == "host1:1":
            raise PeerLost("nobody is there")
        if address == "host2:1":
            raise ConfigError("pages here have another layout")
        self.peers = (3,)
        return 3


def test_engines_that_are_gone_are_tried_again_until_the_end_and_a_refusal_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_side, "RETRY_SECONDS", 0.001)
    before, transfer = threading.enumerate(), Sought()
    addresses = [f"host{number}:1" for number in (1, 2, 3)]
    with caplog.at_level(logging.WARNING):
        engine = TokenEngine(
            ConstantWorker(make_limits()),
            frozenset(),
            open_pages=lambda engine: DecodeSide(cast(Any, transfer), engine, addresses),
        )
        assert transfer.enough.wait(30.0)
        engine.close()
    tried = list(transfer.tried)
    assert tried[:3] == addresses and tried.count("host3:1") == 1, "an engine that answers is not tried again"
    assert tried.count("host2:1") >= 3
    assert [each.getMessage() for each in caplog.records] == ["pages here have another layout"]
    assert set(threading.enumerate()) <= set(before) and transfer.tried == tried


def test_a_prompt_of_embeddings_is_refused_and_not_queued(playing: Playing) -> None:
    rows = np.zeros((3, 4), np.float32)
    with pytest.raises(RequestError, match="a prompt of embeddings cannot be prefilled by another engine"):
        playing.engine.add("a", [1, 2, 3], SamplingParams(), 7, embeds=PromptEmbeds(rows, [1, 2, 3]))
    assert not playing.engine.has_work


def test_a_request_for_hidden_states_is_refused_and_not_queued(playing: Playing) -> None:
    with pytest.raises(RequestError, match="where another engine prefills the prompt; send the request to a prompt"):
        playing.engine.add("a", [1, 2, 3], SamplingParams(return_hidden_states="last"), 7)
    assert not playing.engine.has_work
