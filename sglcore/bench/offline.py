"""Runs a load on an engine in this process, without HTTP. All requests are added at once, whatever
their arrival times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglcore.bench.reply import Fault
from sglcore.bench.request_record import Record
from sglcore.bench.workload import Job
from sglcore.engine.llm import LLM
from sglcore.engine.outputs import RequestOutput
from sglcore.sampling.params import SamplingParams


@dataclass(slots=True)
class TimedRequest:
    """A request in progress: its job, its output so far, and in `marks` the times at which the
    engine gave it tokens, in seconds since the load began."""

    job: Job
    output: RequestOutput
    marks: list[float] = field(default_factory=list)


def run_offline(
    llm: LLM, jobs: Sequence[Job], done: Callable[[Record], None], *, temperature: float = 0.0
) -> list[Record]:
    """Add every job to the engine at once, step it until all have ended, and return their records,
    in order of their numbers.

    Blocks. The arrival times of jobs are ignored: `due` and `sent` are 0. `done` is called with
    each record when its request ends. A request that fails has a `fault` in its record. Raises what
    `engine.add` raises for a job that it refuses.
    """
    begin = time.perf_counter()
    running: dict[str, TimedRequest] = {}
    for job in jobs:
        params = SamplingParams(max_tokens=job.output_len, temperature=temperature, ignore_eos=True)
        output = llm.engine.add(job.prompt, params)
        running[output.request_id] = TimedRequest(job, output)
    records: list[Record] = []
    while running:
        deltas = llm.engine.step()
        now = time.perf_counter() - begin
        for delta in deltas:
            one = running[delta.request_id]
            if delta.token_ids:
                one.marks.append(now)
            if delta.finish_reason is not None:
                records.append(_record(running.pop(delta.request_id), now))
                done(records[-1])
    return sorted(records, key=lambda record: record.number)


def _record(one: TimedRequest, end: float) -> Record:
    (completion,) = one.output.outputs
    fault = None if completion.finish_reason == "length" else Fault(str(completion.finish_reason), completion.error)
    return Record(
        one.job.number,
        0.0,
        0.0,
        end,
        tuple(one.marks),
        len(one.job.prompt),
        len(completion.token_ids),
        one.output.cached_tokens,
        fault,
        completion.proposed_tokens,
        completion.accepted_tokens,
    )
