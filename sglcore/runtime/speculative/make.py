"""The worker of a start with proposals."""

from __future__ import annotations

from dataclasses import replace

from sglcore.device.facts import Facts
from sglcore.device.worker import Limits
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.choice import Speculation
from sglcore.runtime.speculative.ngram import NgramDrafter
from sglcore.runtime.speculative.worker import SpeculativeWorker
from sglcore.runtime.token_table import TokenTable


def make_speculative_worker(
    speculation: Speculation, runner: ModelRunner, token_table: TokenTable, limits: Limits, facts: Facts
) -> SpeculativeWorker:
    """The worker whose decode steps verify what `speculation` proposes. Steps bring decode rows or prompts, never both; one
    whose forward must be told lengths by the host waits for those of the step before."""
    drafter = NgramDrafter(speculation.tokens)
    limits = replace(
        limits,
        draft_tokens=drafter.tokens,
        lookahead=drafter.lookahead,
        keeps_history=drafter.reads_history,
        allows_mixed_batches=False,
        can_overlap=limits.can_overlap and not facts.needs_host_lengths,
    )
    return SpeculativeWorker(runner, token_table, limits, drafter)
