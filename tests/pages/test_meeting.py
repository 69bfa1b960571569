"""How an engine opens its transfer of KV pages: with which options, whom it waits for, what the
ledger says, and what is closed if a peer does not come."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.engine.disaggregation import disaggregation_start
from sglcore.engine.disaggregation.disaggregation_start import (
    MEETING_SECONDS,
    PageOptions,
    meet,
    open_pages,
    options_of,
)

PROMPT = PageOptions("prompt", address="h:0", secret="s", silence=3.0)
DECODE = PageOptions("decode", ("a:1", "b:2"), secret="s", silence=3.0)


class Transfer:
    """A transfer that records how it is made and closed, and whom it waits for."""

    made: list[Any]

    def __init__(self, *given: Any) -> None:
        self.given, self.address, self.closed = given, "h:9", 0
        self.met: list[tuple[str, float]] = []
        Transfer.made.append(self)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A started engine, whose transfer is recorded."""

    def wait(transfer: Transfer, address: str, seconds: float) -> None:
        transfer.met.append((address, seconds))
        if address == "gone:1":
            raise ConfigError("gone:1 is missing")

    monkeypatch.setattr(Transfer, "made", [], raising=False)
    for name, made in (
        ("TcpPages", Transfer),
        ("wait_for", wait),
        ("check_worker", lambda started: "memory"),
        ("identity_of", lambda path: f"identity of {path}"),
        ("layout_of", lambda memory, identity: f"layout of {memory} and {identity}"),
        ("PromptSide", lambda *given: ("prompt side", *given)),
        ("DecodeSide", lambda *given: ("decode side", *given)),
    ):
        monkeypatch.setattr(disaggregation_start, name, made)
    return SimpleNamespace(model_path=Path("m"), ledger=DecisionLedger())


@pytest.mark.parametrize(
    ("options", "met", "says"),
    [
        (PROMPT, [], "receive KV pages"),
        (DECODE, [("a:1", MEETING_SECONDS), ("b:2", MEETING_SECONDS)], "prefilled at a:1, b:2"),
    ],
)
def test_a_transfer_is_opened_as_the_options_say_and_told_in_the_ledger(
    options: PageOptions, met: list[tuple[str, float]], says: str, started: Any
) -> None:
    transfer: Any = meet(options, started)
    layout = "layout of memory and identity of m"
    assert transfer.given == ("memory", layout, options.address, "s", 3.0) and transfer.met == met
    role, pages = started.ledger.rows
    assert (role.topic, role.requested, role.effective) == ("role", options.role, options.role) and says in role.reason
    assert ("h:9" in role.reason) is (options.role == "prompt"), "the port that it took"
    assert (pages.topic, pages.effective) == ("page layout", layout) and not transfer.closed


def test_a_transfer_is_closed_if_a_prompt_engine_does_not_come(started: Any) -> None:
    with pytest.raises(ConfigError, match="gone:1 is missing"):
        meet(PageOptions("decode", ("a:1", "gone:1", "c:3")), started)
    (transfer,) = Transfer.made
    assert transfer.closed == 1 and [each for each, _ in transfer.met] == ["a:1", "gone:1"]
    assert not started.ledger.rows


def test_each_role_has_its_side_of_the_pages(started: Any) -> None:
    engine: Any = "engine"
    assert open_pages(PageOptions(), started) is None and not Transfer.made
    sides = [open_pages(options, started) for options in (PROMPT, DECODE)]
    prompt, decode = Transfer.made
    assert [make and make(engine) for make in sides] == [
        ("prompt side", prompt, engine),
        ("decode side", decode, engine, ("a:1", "b:2")),
    ]


@pytest.mark.parametrize(
    ("address", "third"),
    [("h:9000", "h:9002"), ("h:0", "h:0"), ("[::1]:9000", "[::1]:9002"), ("h:x", "h:x"), ("h", "h"), (None, "")],
)
def test_only_a_port_that_is_named_moves_on_with_the_number_of_the_replica(address: str | None, third: str) -> None:
    assert options_of(ServerConfig(role="prompt", pages_address=address), 2).address == third
    assert options_of(ServerConfig(role="prompt", pages_address=address)).address == (address or "")


def test_peers_are_the_addresses_between_commas() -> None:
    server = ServerConfig(role="decode", peers=("a:1, ,b:2,", "", " [::1]:3 "))
    assert options_of(server).peers == ("a:1", "b:2", "[::1]:3")
