"""Which forwards each rank runs, written down where they run; and what is planted where shards
propose. Imported by every rank, so it imports little."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sglcore.device.batch import ForwardMode
from sglcore.device.draft_length import LengthController
from sglcore.device.plan import StepPlan
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.parallel import group
from sglcore.runtime.speculative import autoregressive, heads
from sglcore.runtime.speculative.worker import SpeculativeWorker
from sglcore.runtime.tp_worker import TpModelWorker

Defect = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Forward:
    """One on one rank: of which `runner` (0: the target's), with so many rows of its `own`, of
    `rows` that the shards agreed on."""

    runner: int
    rows: tuple[int, ...]
    is_padded: bool
    shard: int
    own: int


@dataclass(frozen=True, slots=True)
class Step:
    """Of one rank: what it did itself, what was agreed on, and its forwards. `goes_on`: some
    shard's prompts began in another step."""

    mode: ForwardMode
    verified: int
    proposed: int
    goes_on: bool
    forwards: tuple[Forward, ...]


def recorded(folder: Path, defect: Defect, rank: int) -> None:
    """Have the runners of this rank write their forwards down, and plant something."""
    # Ranks of which one has nothing more to run wait for each other.
    group.TIMEOUT = timedelta(seconds=3)
    defect(rank)
    file, runners = (folder / f"rank{rank}.jsonl").open("w", buffering=1), dict[int, int]()
    forward, submit = ModelRunner.forward, TpModelWorker.submit

    def counted(self: ModelRunner, batch: Any) -> Any:
        number, plan = runners.setdefault(id(self), len(runners)), batch.step_plan
        agreed = [plan.global_num_tokens, plan.is_padded, plan.shard] if plan is not None else [(), False, -1]
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
    """The same, as ranks are given it."""
    return partial(recorded, folder, defect)


def steps_of(folder: Path, rank: int) -> list[Step]:
    """What a rank wrote down."""
    found: list[tuple[list[int], list[Forward]]] = []
    for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
        values = json.loads(line)
        if isinstance(values, dict):
            found.append((values["step"], []))
            continue
        number, rows, is_padded, shard, own = values
        found[-1][1].append(Forward(number, tuple(rows), is_padded, shard, own))
    return [
        Step(ForwardMode(begun[0]), begun[1], begun[2], bool(begun[3]), tuple(forwards)) for begun, forwards in found
    ]


def check_forwards(folder: Path, ranks: int) -> list[list[Step]]:
    """The steps of every rank: each runs the same forwards of the same rows, and has of these what
    was agreed on."""
    found = [steps_of(folder, rank) for rank in range(ranks)]
    assert len({len(steps) for steps in found}) == 1, "a rank ran more steps than another"
    for number, beside in enumerate(zip(*found, strict=True)):
        lists = {tuple((each.runner, each.rows, each.is_padded) for each in step.forwards) for step in beside}
        assert len(lists) == 1, f"step {number}: {lists}"
        assert len({(step.verified, step.proposed) for step in beside}) == 1, f"step {number}: {beside}"
        for each in (each for step in beside for each in step.forwards):
            assert each.own == each.rows[each.shard], f"step {number}: {each}"
    return found


def idle_runs_no_draft(rank: int) -> None:
    """A shard that has nothing to run takes part in the target's forward alone."""
    SpeculativeWorker.forward_idle = TpModelWorker.forward_idle


def idle_runs_one_draft(rank: int) -> None:
    """It takes part in the first forward of the draft, and in no further one."""
    own = autoregressive.AutoregressiveDrafter.follow

    def follow(self: Any, rows: Any, hidden: Any, wanted: int) -> Any:
        return own(self, rows, hidden, wanted if len(rows.most_lens) else 1)

    autoregressive.AutoregressiveDrafter.follow = follow


def own_width(rank: int) -> None:
    """A shard verifies no more than was proposed to it, as one that is alone does."""
    own = SpeculativeWorker._verified

    def verified(self: Any, batch: Any) -> int:
        here = self._proposals[batch.slots.tolist()] >= 0
        return min(own(self, batch), int(here.any(0).sum()))

    SpeculativeWorker._verified = verified


def own_length(rank: int) -> None:
    """A shard chooses by itself how many proposals it makes, as one that is alone does."""

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
    """A verification is said to have a row of each request."""
    own = TpModelWorker.submit

    def submit(self: Any, batch: Any) -> Any:
        plan = batch.step_plan
        if plan is not None:
            both = zip(plan.verifying, plan.global_num_tokens, strict=True)
            batch.step_plan = replace(plan, global_num_tokens=tuple(many or rows for many, rows in both))
        return own(self, batch)

    TpModelWorker.submit = submit


def roots_are_not_counted(rank: int) -> None:
    """Rows of the new roots are run, and nobody is told."""
    StepPlan.with_emitting = lambda self: self.of_rows(self.global_num_tokens)


def further_rows_as_first(rank: int) -> None:
    """Further forwards are said to have the rows of the first one."""
    StepPlan.of_emitting = lambda self: self


def no_front(rank: int) -> None:
    """A shard whose prompts do not go on leaves out what those of others begin with."""
    heads.MultiHeadDrafter._run_no_front = lambda self, runner, rows, features: None


def roots_by_own_mode(rank: int) -> None:
    """A shard that decodes runs its roots with the other rows, whatever the others run."""
    own = autoregressive.StandaloneDrafter.take_in

    def take_in(self: Any, rows: Any) -> Any:
        plan = replace(rows.batch.step_plan, is_decode=rows.batch.forward_mode.is_decode)
        rows.batch.step_plan = plan
        return own(self, rows)

    autoregressive.StandaloneDrafter.take_in = take_in
