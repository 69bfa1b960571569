"""How an engine joins a disaggregated group: settings that cannot be combined are refused before
anything is loaded; then the engines connect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig, is_loopback
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.engine.checkpoint_digest import identity_of
from sglcore.engine.disaggregation.decode_side import DecodeSide
from sglcore.engine.disaggregation.prefill_side import PromptSide
from sglcore.engine.disaggregation.tcp_transfer import SILENCE, TcpPages, wait_for
from sglcore.engine.disaggregation.transfer_messages import PageSide
from sglcore.worker.page_transfer import PageHolder, PageMemory, layout_of

if TYPE_CHECKING:
    from sglcore.engine.start import Started
    from sglcore.engine.token_engine import TokenEngine

ROLES = ("both", "prompt", "decode")
MEETING_SECONDS = 120.0
"""Seconds that a decode engine waits at its start for prompt engines."""


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How an engine takes part in disaggregation. `role`: one of ROLES; `peers`: HOST:PORT of
    prompt engines, for role decode; `address`: HOST:PORT where an engine of role prompt listens;
    `secret`: the same for both sides; `silence`: seconds without a frame after which a peer is
    lost."""

    role: str = "both"
    peers: tuple[str, ...] = ()
    address: str = ""
    secret: str = ""
    silence: float = SILENCE


def options_of(server: ServerConfig, replica: int = 0) -> PageOptions:
    """Return the options of replica number `replica` (from 0) of a server.

    The replicas of a prompt server listen on consecutive ports, from the port of `pages_address`
    on; with port 0, each takes a free one. Nothing is checked here: `settled` refuses addresses and
    combinations that cannot be used.
    """
    peers = tuple(each.strip() for given in server.peers for each in given.split(",") if each.strip())
    host, _, port = (server.pages_address or "").rpartition(":")
    address = f"{host}:{int(port) + (replica if int(port) else 0)}" if port.isdecimal() else server.pages_address or ""
    return PageOptions(server.role, peers, address, server.pages_secret or "")


def settled(config: EngineConfig, options: PageOptions) -> EngineConfig:
    """Return the configuration of an engine with these options: with a role other than "both",
    speculation is off. Raises ConfigError for settings that cannot be combined with the role;
    nothing is loaded."""
    _check_options(options)
    if options.role == "both":
        return config
    refused = {
        "tp": config.tp > 1,
        "speculative": config.speculative not in (None, "off", "auto"),
        "draft_model": config.draft_model is not None,
        "hisparse": config.hisparse not in (None, "off"),
        "task": config.task == "embed",
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise ConfigError(
                f"role is {options.role!r} and {name} is {getattr(config, name)!r}, which do not go together yet",
                remedy=f"leave --{name.replace('_', '-')} or --role out",
            )
    return replace(config, speculative="off")


def _check_options(options: PageOptions) -> None:
    role, peers, address = options.role, options.peers, options.address
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}", wanted="one of " + ", ".join(ROLES), remedy="correct --role")
    if bool(peers) != (role == "decode"):
        found = f"role is {role!r} and peers are {', '.join(peers) or 'none'}"
        raise ConfigError(found, wanted="peers with role decode, and with no other", remedy="correct --role or --peers")
    if bool(address) != (role == "prompt"):
        found = f"role is {role!r} and pages_address is {address or 'none'}"
        wanted = "pages_address with role prompt, and with no other"
        raise ConfigError(found, wanted=wanted, remedy="correct --role or --pages-address")
    for each in (*peers, *([address] if address else [])):
        host, _, port = each.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"found {each!r}", wanted="HOST:PORT", remedy="correct --peers or --pages-address")
    if address and not options.secret and not is_loopback(address.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"pages_address is {address}, which other machines can reach, and there is no pages_secret",
            remedy="give all engines the same --pages-secret, or listen on 127.0.0.1",
        )


def check_worker(started: Started) -> PageMemory:
    """Return the page memory of a started engine's worker. Raises ConfigError if its pages cannot
    be sent to another engine."""
    limits, worker = started.worker.limits, started.worker
    what = {
        "it generates no text": not limits.generates,
        "its layers keep a state of each request": limits.keeps_state,
        "its sliding-window layers keep separate pages": limits.num_window_pages > 0,
        "its pages depend on later tokens": limits.lookahead > 0,
        "its embeddings depend on earlier tokens": limits.reads_history,
    }
    why = next((each for each, is_so in what.items() if is_so), "")
    memory = worker.page_memory() if isinstance(worker, PageHolder) and not why else None
    if memory is None:
        why = why or "its layers keep other data than KV pages, or its device cannot export pages"
        raise ConfigError(f"KV pages of this model cannot be sent to another engine: {why}", remedy="leave --role out")
    return memory


def open_pages(options: PageOptions, started: Started) -> Callable[[TokenEngine], PageSide] | None:
    """Connect an engine with a role, and return the function that makes its page side for a token
    engine; None: the role is "both". A decode engine waits up to MEETING_SECONDS for each prompt
    engine. Raises ConfigError if the model's pages cannot be sent, or an engine is missing or does
    not fit."""
    if options.role == "both":
        return None
    transfer = meet(options, started)
    if options.role == "prompt":
        return lambda engine: PromptSide(transfer, engine)
    return lambda engine: DecodeSide(transfer, engine, options.peers)


def meet(options: PageOptions, started: Started) -> TcpPages:
    """Return the transfer of an engine with a role, after it is recorded in the ledger. A prompt
    engine listens; a decode engine connects to each of its prompt engines and waits up to
    MEETING_SECONDS for each. Raises ConfigError if the model's pages cannot be sent, if a prompt
    engine is missing, or if it has another page layout."""
    memory = check_worker(started)
    layout = layout_of(memory, identity_of(started.model_path))
    transfer = TcpPages(memory, layout, options.address, options.secret, options.silence)
    try:
        for address in options.peers:
            wait_for(transfer, address, MEETING_SECONDS)
    except BaseException:
        transfer.close()
        raise
    started.ledger.record(*_rows(options, transfer, str(layout)))
    return transfer


def _rows(options: PageOptions, transfer: TcpPages, layout: str) -> list[Row]:
    if options.role == "prompt":
        how = f"other engines send prompts to {transfer.address} and receive KV pages over TCP; no draft tokens"
        rows = [Row("role", "prompt", "prompt", how, "--role both")]
    else:
        how = f"prompts are prefilled at {', '.join(options.peers)}; KV pages arrive over TCP; no draft tokens"
        rows = [Row("role", "decode", "decode", how, "--role both")]
    return [*rows, Row("page layout", "auto", layout, "must be the same on both engines")]
