"""Records the forwards that each rank runs, and plants defects in the speculation of shards. Every
rank imports this module, so it imports little."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.parallel import process_group
from sglcore.runtime.speculative import chain_drafts, mtp_drafts
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.step.draft_length import LengthController
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.step_plan import StepPlan

Defect = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward on one rank. `runner`: 0 is the target's; `own`: rows that it ran; `rows`: rows of
    each shard by the agreed plan, and `bucket`: rows of the graph that all replay."""

    runner: int
    rows: tuple[int, ...]
    is_padded: bool
    bucket: int | None
    shard: int
    own: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step on one rank: its own mode, the agreed numbers of draft tokens (verified, proposed),
    and its forwards. `goes_on`: some shard continues a prompt from an earlier step."""

    mode: ForwardMode
    verified: int
    proposed: int
    goes_on: bool
    forwards: tuple[Forward, ...]


def recorded(folder: Path, defect: Defect, rank: int) -> None:
    """Make the runners of this rank record their forwards, and plant a defect."""
    # If one rank has nothing more to run, the others time out instead of waiting for ever.
    process_group.TIMEOUT = timedelta(seconds=3)
    defect(rank)
    file, runners = (folder / f"rank{rank}.jsonl").open("w", buffering=1), dict[int, int]()
    forward, submit = ModelRunner.forward, TpModelWorker.submit

    def counted(self: ModelRunner, batch: Any) -> Any:
        number, plan = runners.setdefault(id(self), len(runners)), batch.step_plan
        agreed = [(), False, None, -1]
        if plan is not None:
            agreed = [plan.global_num_tokens, plan.is_padded, plan.bucket, plan.shard]
        file.write(json.dumps([number, *agreed, batch.num_tokens]) + "\n")
        return forward(self, batch)

    def begun(self: TpModelWorker, batch: Any) -> Any:
        plan = batch.step_plan
        file.write(
            json.dumps({"step": [int(batch.forward_mode), plan.verified, plan.proposed, any(plan.going_on)]}) + "\n"
        )
        return submit(self, batch)

    ModelRunner.forward, TpModelWorker.submit = counted, begun


def recording(folder: Path, defect: Defect) -> Defect:
    """`recorded` as a defect that ranks take."""
    return partial(recorded, folder, defect)


def steps_of(folder: Path, rank: int) -> list[Step]:
    """The steps that a rank recorded."""
    found: list[tuple[list[int], list[Forward]]] = []
    for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
        values = json.loads(line)
        if isinstance(values, dict):
            found.append((values["step"], []))
            continue
        number, rows, is_padded, bucket, shard, own = values
        found[-1][1].append(Forward(number, tuple(rows), is_padded, bucket, shard, own))
    return [
        Step(ForwardMode(begun[0]), begun[1], begun[2], bool(begun[3]), tuple(forwards)) for begun, forwards in found
    ]


def check_forwards(folder: Path, ranks: int) -> list[list[Step]]:
    """Return the steps of every rank, after a check: all ranks run the same forwards with the same
    agreed rows, and each runs its own share of them."""
    found = [steps_of(folder, rank) for rank in range(ranks)]
    assert len({len(steps) for steps in found}) == 1, "a rank ran more steps than another"
    for number, beside in enumerate(zip(*found, strict=True)):
        lists = {
            tuple((each.runner, each.rows, each.is_padded, each.bucket) for each in step.forwards) for step in beside
        }
        assert len(lists) == 1, f"step {number}: {lists}"
        assert len({(step.verified, step.proposed) for step in beside}) == 1, f"step {number}: {beside}"
        for each in (each for step in beside for each in step.forwards):
            assert each.own == each.rows[each.shard], f"step {number}: {each}"
    return found


def check_replayed(steps: list[list[Step]], has_graphs: bool) -> None:
    """Check that all forwards of steps without prompts were replays, those of idle shards too, and
    so were further draft forwards after prompts, if the ranks have graphs."""
    beside = list(zip(*steps, strict=True))
    decodes = [step for each in beside if all(step.mode is not ForwardMode.EXTEND for step in each) for step in each]
    of_decodes = [one.bucket is not None for step in decodes for one in step.forwards]
    assert any(step.mode is ForwardMode.IDLE for step in decodes) and all(of_decodes) is has_graphs is any(of_decodes)
    prompts = [step for each in beside if any(step.mode is ForwardMode.EXTEND for step in each) for step in each]
    assert not any(step.forwards[0].bucket for step in prompts)
    further = [one.bucket is not None for step in prompts for one in step.forwards[2:] if any(one.rows)]
    assert all(further) is has_graphs or not further


def idle_runs_no_draft(rank: int) -> None:
    """An idle shard takes part in the target's forward only."""
    SpeculativeWorker.forward_idle = TpModelWorker.forward_idle


def idle_runs_one_draft(rank: int) -> None:
    """An idle shard takes part in the first draft forward only."""
    own = chain_drafts.AutoregressiveDrafter.follow

    def follow(self: Any, rows: Any, hidden: Any, wanted: int) -> Any:
        return own(self, rows, hidden, wanted if len(rows.most_lens) else 1)

    chain_drafts.AutoregressiveDrafter.follow = follow


def own_width(rank: int) -> None:
    """A shard verifies only the draft tokens that it has itself, as without shards."""
    own = SpeculativeWorker._verified

    def verified(self: Any, batch: Any) -> int:
        here = self._proposals[batch.slots.tolist()] >= 0
        return min(own(self, batch), int(here.any(0).sum()))

    SpeculativeWorker._verified = verified


def own_length(rank: int) -> None:
    """A shard chooses by itself how many tokens to draft, as without shards."""

    class Own(LengthController):
        def __init__(self, lengths: tuple[int, ...]) -> None:
            super().__init__((0, 1, 2, 3))
            self.drawn = random.Random(rank)

        def choose(self, requests: int) -> None:
            self.tokens = self.drawn.choice(self.lengths)

    made = SpeculativeWorker.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        self.length = Own(())

    changed: Any = SpeculativeWorker
    changed.__init__ = init
    changed._wanted = lambda self, batch: self.length.tokens


def counts_requests(rank: int) -> None:
    """The plan counts one row per request in a verification."""
    own = TpModelWorker.submit

    def submit(self: Any, batch: Any) -> Any:
        plan = batch.step_plan
        if plan is not None:
            both = zip(plan.verifying, plan.global_num_tokens, strict=True)
            batch.step_plan = replace(plan, global_num_tokens=tuple(many or rows for many, rows in both))
        return own(self, batch)

    TpModelWorker.submit = submit


def roots_are_not_counted(rank: int) -> None:
    """The rows of new roots are run, but the plan does not count them."""
    StepPlan.with_emitting = lambda self: self.of_rows(self.global_num_tokens)


def further_rows_as_first(rank: int) -> None:
    """The plan gives further draft forwards the rows of the first one."""
    StepPlan.of_emitting = lambda self: self


def no_front(rank: int) -> None:
    """A shard without continued prompts leaves out the forward that continued prompts of others
    begin with."""
    mtp_drafts.MultiHeadDrafter._run_no_front = lambda self, runner, rows, features: None


def roots_by_own_mode(rank: int) -> None:
    """A decoding shard runs its roots with its other rows, whatever the agreed mode is."""
    own = chain_drafts.StandaloneDrafter.take_in

    def take_in(self: Any, rows: Any) -> Any:
        plan = replace(rows.batch.step_plan, is_decode=rows.batch.forward_mode.is_decode)
        rows.batch.step_plan = plan
        return own(self, rows)

    chain_drafts.StandaloneDrafter.take_in = take_in
