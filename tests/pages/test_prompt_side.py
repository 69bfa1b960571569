"""A prompt engine that serves several decode engines: requests, ends and losses of one do not
affect another, though each numbers its leases from 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcore.device.page_transfer import Told
from sglcore.engine.disaggregation.prefill_side import PromptSide
from sglcore.engine.disaggregation.transfer_messages import Ask
from sglcore.schedule.request_output import EngineOutput

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
        return [SimpleNamespace(num_cells=0, prompt_ids=prompt, output_ids=[], pages=[], finish_reason=None)]

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
