"""The decode side of disaggregation: a request's pages are allocated here, a prompt engine prefills
the prompt and writes these pages, and decoding continues here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation.transfer_messages import Ask, First, Refusal, unpack_logprobs
from sglcore.sampling.plain_params import pack_params
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.returned_states import STATES
from sglcore.worker.page_transfer import PageTransfer, PeerLost, Told

if TYPE_CHECKING:
    from sglcore.engine.token_engine import TokenEngine

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
"""Seconds between two tries to reach a prompt engine that is gone."""
MOST_TRIES = 3
"""Maximum number of prompt engines that are tried for one request. The limit keeps a request that
kills each engine from killing all of them."""


@dataclass(slots=True)
class Claim:
    """A request that the prompt engine `peer` prefills. The peer has a lease: it may write to the
    request's pages here until the lease ends. `tries`: the number of prompt engines that got the
    request so far, this one included. `is_cancelled`: the peer was told to stop writing."""

    peer: int
    request: Request
    tries: int = 1
    is_cancelled: bool = False


class DecodeSide:
    """The `PageSide` of a decode engine: the prompt engines at `addresses` (HOST:PORT) prefill its
    requests; each request goes to the connected engine with the fewest open leases."""

    def __init__(self, transfer: PageTransfer, engine: TokenEngine, addresses: Sequence[str]) -> None:
        self._transfer, self._engine, self._addresses = transfer, engine, tuple(addresses)
        self._claims: dict[int, Claim] = {}
        self._is_closing = threading.Event()
        self._seeker = threading.Thread(target=self._seek, name="peers", daemon=True)
        self._seeker.start()

    @property
    def has_work(self) -> bool:
        """Whether a prompt engine has a lease on pages here, or messages have arrived."""
        return bool(self._claims) or self._transfer.has_news

    @property
    def lacks(self) -> str:
        """Why no request can be served: no prompt engine is connected. Empty if one is."""
        return "" if self._transfer.peers else f"no prompt engine of {', '.join(self._addresses)} can be reached"

    def mark(self, requests: list[Request]) -> None:
        """Mark the requests for prefill by a prompt engine. Each sample is sent separately, because
        the prompt engine finds common prefixes. Raises RequestError for a prompt of embeddings, and
        for requests for hidden states."""
        for request in requests:
            if request.params.return_hidden_states is not None:
                raise RequestError(
                    "hidden states cannot be returned yet where another engine prefills the prompt; send the request"
                    " to a prompt engine, or to a server without disaggregation",
                    field=STATES,
                )
            if request.embeds is not None:
                raise RequestError(
                    "a prompt of embeddings cannot be prefilled by another engine; send it to a prompt engine"
                )
            request.is_remote, request.leader = True, None

    def begin(self, seconds: float) -> list[EngineOutput]:
        """Process messages and pages that have arrived, and send waiting requests to prompt
        engines, as far as pages are free. Waits up to `seconds` for the first message.

        Returns the outputs of requests that got their first token or failed.
        """
        self._part_with_ended()
        outputs: list[EngineOutput | None] = []
        for told in self._transfer.receive(seconds):
            outputs += self._lose(told) if told.lost else self._take(told)
        self._part_with_ended()
        outputs += self._ask()
        return [each for each in outputs if each is not None]

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Return all outputs: all are for this engine's own clients."""
        return outputs

    def fileno(self) -> int:
        """The descriptor of the transfer, readable while messages have arrived."""
        return self._transfer.fileno()

    def close(self) -> None:
        """End the thread that reconnects, which waits for it, and close the connections; no further
        pages are written."""
        self._is_closing.set()
        self._seeker.join()
        self._transfer.close()

    def _part_with_ended(self) -> None:
        """Cancel the leases of requests that have ended. A lease ends when its writer has stopped;
        only then are its pages free."""
        for lease, claim in list(self._claims.items()):
            if claim.request.state is not State.FINISHED:
                continue
            if not claim.is_cancelled:
                claim.is_cancelled = True
                self._transfer.cancel(lease)
            if self._transfer.drained(lease):
                self._close(lease)

    def _close(self, lease: int) -> Claim | None:
        """End a lease to which its peer writes no more, so that the scheduler may reuse the pages.
        Returns its claim; None: there is no such lease."""
        claim = self._claims.pop(lease, None)
        self._transfer.end(lease)
        if claim is not None:
            self._engine.remote.arrivals.let_go(claim.request)
        return claim

    def _take(self, told: Told) -> list[EngineOutput | None]:
        message = msgspec.msgpack.decode(told.body, type=First | Refusal)
        claim = self._claims.get(message.lease)
        if claim is None or claim.peer != told.peer:
            return []
        request, remote = claim.request, self._engine.remote
        if isinstance(message, Refusal) and not message.refused:
            return self._ask_another(message.lease, claim, message.error)
        self._close(message.lease)
        if request.state is State.FINISHED:
            return []
        if isinstance(message, Refusal):
            return [remote.fail(request.rid, message.error, refused=True)]
        request.begin_with(max(message.cached_tokens, request.held.num_cells))
        request.prompt_logprobs = [unpack_logprobs(each) for each in message.prompt_logprobs]
        request.scored_tokens = sum(len(each.chosen) for each in request.prompt_logprobs)
        found = unpack_logprobs(message.logprobs) if message.logprobs else None
        return [remote.arrive(request, message.token, found)]

    def _lose(self, told: Told) -> list[EngineOutput | None]:
        outputs: list[EngineOutput | None] = []
        for lease, claim in list(self._claims.items()):
            if claim.peer == told.peer:
                outputs += self._ask_another(lease, claim, f"its prompt is lost: {told.lost}")
        return outputs

    def _ask_another(self, lease: int, claim: Claim, why: str) -> list[EngineOutput | None]:
        """Send a request to another prompt engine after its peer failed and stopped writing to the
        lease; `why` is the reason.

        The request keeps its pages here, and the same seed gives the same token. If no other peer
        is connected, the failed peer is tried again. After MOST_TRIES, or without any peer, the
        request fails, and its output is returned; [None] if it had ended before, [] if it was sent.
        """
        request, peers = claim.request, self._transfer.peers
        if request.state is State.FINISHED or not peers or claim.tries >= MOST_TRIES:
            self._close(lease)
            return [self._engine.remote.fail(request.rid, why, is_unserved=not peers)]
        self._claims.pop(lease)
        self._transfer.end(lease)
        others = [peer for peer in peers if peer != claim.peer]
        self._send(self._least_busy(others or peers), request, claim.tries + 1)
        return []

    def _least_busy(self, peers: Sequence[int]) -> int:
        busy = [claim.peer for claim in self._claims.values()]
        return min(peers, key=lambda peer: (busy.count(peer), peer))

    def _ask(self) -> list[EngineOutput | None]:
        remote, peers = self._engine.remote, self._transfer.peers
        if not peers:
            why = self.lacks
            return [remote.fail(request.rid, why, is_unserved=True) for request in list(remote.arrivals.waiting)]
        while (request := remote.reserve()) is not None:
            self._send(self._least_busy(peers), request)
        return []

    def _send(self, peer: int, request: Request, tries: int = 1) -> None:
        pages = np.array(request.held.pages[request.held.shared :], np.int32)
        lease = self._transfer.offer(peer, pages)
        self._claims[lease] = Claim(peer, request, tries)
        ask = Ask(
            lease,
            request.prompt_ids.astype("<i4").tobytes(),
            pack_params(request.params),
            request.seed,
            request.sample_index,
            request.held.shared,
            pages.astype("<i4").tobytes(),
        )
        self._transfer.tell(peer, msgspec.msgpack.encode(ask))

    def _seek(self) -> None:
        """Reconnect to prompt engines that are gone, in a loop on a thread of its own. A refused
        connection, for example of an engine with another page layout, is logged once."""
        told: set[str] = set()
        while not self._is_closing.wait(RETRY_SECONDS):
            known = {self._transfer.name(peer) for peer in self._transfer.peers}
            for address in (each for each in self._addresses if each not in known):
                try:
                    self._transfer.connect(address)
                except PeerLost:
                    continue
                except ConfigError as error:
                    if str(error) not in told:
                        log.warning("%s", error)
                    told.add(str(error))
