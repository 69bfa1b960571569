"""The prefill side of disaggregation: an engine that prefills prompts for other engines.

Each prompt that another engine sends becomes a request of one token here. Its pages stay allocated
until the transfers have read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sglcore.core.errors import SglcoreError
from sglcore.engine.disaggregation.transfer_messages import Ask, First, Refusal, pack_logprobs
from sglcore.sampling.params import SamplingError
from sglcore.sampling.plain_params import unpack_params
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.page_transfer import Ints, PageTransfer, Progress, Told, Transfer

if TYPE_CHECKING:
    from sglcore.engine.token_engine import TokenEngine


@dataclass(slots=True)
class Job:
    """A prompt that a decode engine (`peer`) sent. This engine prefills it and writes its pages to
    that engine: the request here, the pages there, and what was sent so far."""

    peer: int
    """The transfer's number of the decode engine."""
    lease: int
    """The number of the decode engine's lease, which each message about the prompt repeats."""
    request: Request
    """The request here that prefills the prompt."""
    first_page: int
    """Index of the first page of the prompt that the decode engine needs; it has the pages
    before."""
    target: Ints
    """int32: the decode engine's page numbers for the prompt's pages from `first_page` on."""
    sent: int
    """Number of leading pages of the prompt that were written or that the decode engine has."""
    transfers: list[Transfer] = field(default_factory=list)
    """The transfers that were started, ended ones included."""
    last: EngineOutput | None = None
    """The output with which the request ended. None: it has not ended."""
    is_cancelled: bool = False
    """The peer does not want it any more."""


class PromptSide:
    """The `PageSide` of a prompt engine. The engine also serves requests of its own clients."""

    def __init__(self, transfer: PageTransfer, engine: TokenEngine) -> None:
        self._transfer, self._engine = transfer, engine
        self._jobs: dict[str, Job] = {}

    @property
    def has_work(self) -> bool:
        """Whether a prompt of a decode engine is in progress, or messages have arrived."""
        return bool(self._jobs) or self._transfer.has_news

    @property
    def lacks(self) -> str:
        """Empty: a prompt engine needs no other engine."""
        return ""

    def mark(self, requests: list[Request]) -> None:
        """Do nothing: this engine prefills its own clients' requests itself."""

    def begin(self, seconds: float) -> list[EngineOutput]:
        """Add the prompts that decode engines have sent, and abort those that they have cancelled
        or whose engine is lost. Waits up to `seconds` for the first message. Returns []."""
        for told in self._transfer.receive(seconds):
            if told.body:
                self._take(told)
            else:
                self._cancel(told)
        return []

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Write pages that a step has filled to the decode engines; after the last page, send the
        first token. Returns the outputs that are for this engine's own clients."""
        own: list[EngineOutput] = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                own.append(output)
            elif output.finished:
                job.last = output
        for name, job in list(self._jobs.items()):
            if self._advance(job):
                del self._jobs[name]
        return own

    def fileno(self) -> int:
        """The descriptor of the transfer, readable while messages have arrived."""
        return self._transfer.fileno()

    def close(self) -> None:
        """Close the connections.

        A peer that waits for pages learns of it from the closed connection.
        """
        self._transfer.close()

    def _take(self, told: Told) -> None:
        ask = msgspec.msgpack.decode(told.body, type=Ask)
        name, target = f"@{told.peer}:{ask.lease}", np.frombuffer(ask.pages, "<i4")
        try:
            params = unpack_params(ask.params)
            params = replace(params, n=1, max_tokens=1, min_tokens=min(params.min_tokens, 1))
            prompt = np.frombuffer(ask.prompt, "<i4")
            (request,) = self._engine.add(name, prompt, params, ask.seed, first_index=ask.sample_index)  # pyright: ignore[reportArgumentType]
        except (SglcoreError, SamplingError) as error:
            self._tell(told.peer, Refusal(ask.lease, str(error), refused=True))
            return
        request.is_lent = True
        self._jobs[name] = Job(told.peer, ask.lease, request, ask.first_page, target, ask.first_page)

    def _cancel(self, told: Told) -> None:
        for name, job in list(self._jobs.items()):
            if job.peer == told.peer and (told.lost or job.lease == told.cancelled):
                job.is_cancelled = True
                for output in self._engine.abort(name):
                    job.last = job.last or output

    def _advance(self, job: Job) -> bool:
        """Write a job's new full pages, and answer once all are written. Returns whether the job
        has ended."""
        if not job.is_cancelled:
            self._write(job)
        if job.last is None or any(each.progress is Progress.PENDING for each in job.transfers):
            return False
        if not job.is_cancelled:
            self._tell(job.peer, self._answer(job))
        self._engine.remote.arrivals.let_go(job.request)
        return True

    def _write(self, job: Job) -> None:
        """Write the pages that are full and not sent yet; once the first token is known, also the
        last page, which may be partly filled. A preempted request computes its tokens again; pages
        that were sent are not sent again."""
        request, size = job.request, self._engine.limits.page_size
        cells = min(request.held.num_cells, len(request.prompt_ids))
        full = -(-cells // size) if request.output_ids else cells // size
        if min(full, len(request.held.pages)) <= job.sent or request.finish_reason == "error":
            return
        source = np.array(request.held.pages[job.sent : full], np.int32)
        start = job.sent - job.first_page
        target = job.target[start : start + len(source)]
        job.transfers.append(self._transfer.write(job.peer, job.lease, source, target))
        job.sent += len(source)

    def _answer(self, job: Job) -> First | Refusal:
        last, request = job.last, job.request
        failed = next((each.reason for each in job.transfers if each.progress is Progress.FAILED), "")
        if last is None or last.finish_reason in ("error", "abort") or failed:
            error = failed or (last and last.error) or "its prompt was aborted"
            return Refusal(job.lease, f"the prompt engine: {error}", refused=last is not None and last.refused)
        logprobs = pack_logprobs(request.logprobs[0]) if request.logprobs else b""
        prompt = [pack_logprobs(each) for each in request.prompt_logprobs]
        return First(job.lease, request.output_ids[0], max(request.cached_tokens, 0), logprobs, prompt)

    def _tell(self, peer: int, message: First | Refusal) -> None:
        self._transfer.tell(peer, msgspec.msgpack.encode(message))
