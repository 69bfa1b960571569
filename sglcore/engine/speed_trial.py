"""A trial of two workers over the same weights: which one writes the same text faster, measured at
a start with one request."""

from __future__ import annotations

import time
from statistics import median

from sglcore.core.ledger import DecisionLedger, Row
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import ModelWorker, Trial

TOKENS = 64
"""Tokens of each measured text."""
ROUNDS = 3
"""Texts that are measured on each worker, after one that is not measured."""
SECONDS = 2.0
"""Seconds after which no further round begins."""
STRIDE = 1 << 16
"""Distance in composition numbers between two texts, and to the scheduler that comes after."""
MARGIN = 1.25
"""The speed-up that the speculative worker must have: with more requests, speculation gains
less."""


def keep_faster(trial: Trial, ledger: DecisionLedger) -> ModelWorker:
    """Return the speculative worker (`trial.bold`) if it is at least MARGIN times as fast as the
    plain one, else the plain one, and record the decision in the ledger.

    Waits for the device. A rejected speculative worker is released by `trial.leave`.
    """
    begin, rates = time.perf_counter(), list[float]()
    for round_ in range(ROUNDS + 1):
        bold, plain = (seconds_of(worker, trial, seed=round_) for worker in (trial.bold, trial.plain))
        rates += [plain / bold] if round_ else []
        if rates and time.perf_counter() - begin > SECONDS:
            break
    rate = median(rates)
    measured = f"measured now, one request has {rate:.2f} times the tokens per second of one without"
    if rate >= MARGIN:
        ledger.record(Row("speculative", "auto", trial.summary, measured, "--speculative off"))
        return trial.bold
    trial.leave()
    kind = trial.summary.partition(",")[0]
    reason = f"{measured} {kind}, and at least {MARGIN} times is wanted"
    ledger.record(Row("speculative", "auto", "off", reason, f"--speculative {kind}"))
    return trial.plain


def seconds_of(worker: ModelWorker, trial: Trial, seed: int) -> float:
    """Return the seconds that `worker` takes for the tokens of one text after the step that ends
    its prompt.

    The same seed samples the same text on both workers of the trial.
    """
    limits = worker.limits
    scheduler = make_scheduler(limits, prefix_cache=False, first_composition=-(seed + 1) * STRIDE)
    loop = Loop(scheduler, worker, overlap=limits.runs_ahead)
    tokens = min(TOKENS, limits.max_model_len - len(trial.prompt))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    scheduler.add(Request("trial", trial.prompt, params, seed=seed))
    while not loop.step():
        pass
    begin = time.perf_counter()
    while loop.has_work:
        loop.step()
    return time.perf_counter() - begin
