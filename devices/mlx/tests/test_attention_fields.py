"""Tests that a field declared by one line in each of the two batch classes reaches attention: of
prompts, of decode steps, of verifications, and of every step of a draft model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import TokenEngine
from devices.mlx.tests.speculating import Ran, check_same, run
from devices.mlx.tests.test_declared_fields import WiderBatch, WiderSchedule
from devices.mlx.tests.test_draft_texts import SETTINGS, opened, prompts
from sglcore.engine.start import embedded_model
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx import bring_up, forward, worker_bring_up
from sglcore_mlx.attention import prompt
from sglcore_mlx.attention.processor import ProcessorAttention
from sglcore_mlx.attention.prompt import PromptPlan
from sglcore_mlx.attention.tail import TailAttention
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.speculative import drafter

SETS = ("plain", "ngram", "eagle3", "mtp-layers", "dflash", "standalone")
STEPS = ("eagle3", "dflash", "standalone")
"""Those with draft steps of their own. Each of several MTP layers runs the tokens of the target."""
Patch = pytest.MonkeyPatch


def marked(batch: ScheduleBatch) -> WiderSchedule:
    """Return the same step with marks 100 * slot + 7 of each request, and weights slot + 0.5 of
    each token."""
    slots = batch.slots.repeat(batch.token_offsets[1:] - batch.token_offsets[:-1])
    wider = {"marks": 100 * batch.slots + 7, "weights": (slots + 0.5).astype("float32")}
    return WiderSchedule(**{item.name: getattr(batch, item.name) for item in fields(batch)}, **wider)


def factor(batch: ForwardBatch) -> mx.array:
    """Return [T, 1, 1]: 1 for each token with its own request's mark and weight."""
    assert isinstance(batch, WiderBatch)
    assert batch.marks is not None and batch.weights is not None, "attention lacks the fields"
    slots = batch.req_pool_indices
    return ((batch.marks - 100 * slots - 6) * (batch.weights - slots + 0.5))[:, None, None]


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """A plan that gives the right results only with the right fields."""

    own: Any
    factor: mx.array

    def forward(self, q: mx.array, kv: mx.array, layer: Any) -> mx.array:
        """Implements `AttentionPlan.forward`."""
        return self.own.forward(q, kv, layer) * self.factor.astype(q.dtype)


@contextmanager
def reading(patch: Patch, waits: bool = True) -> Iterator[Counter[str]]:
    """Make all attention read the fields of a wider batch. Yield how often it did, by kind. With
    `waits` the values of draft tokens are also checked on the host."""
    seen = Counter[str]()

    class Reading(ProcessorAttention):
        def plan(self, batch: ForwardBatch) -> Any:
            kind = "verified" if batch.width else "one" if batch.forward_mode.is_decode else "one of a prefill"
            seen[kind] += 1
            return ReadingPlan(super().plan(batch), factor(batch))

    def watched(kind: str, right: Callable[..., mx.array]) -> Any:
        def read(self: Any, *given: Any) -> mx.array:
            seen[kind] += 1
            own = factor(self.batch)
            if kind == "draft" and waits:
                is_own = (own[:, 0, 0] == 1) | (self.batch.req_pool_indices == 0)
                assert is_own.all().item(), "attention reads the fields of another request"
            return right(self, *given) * own

        return read

    def wider(own: Any) -> Any:
        class Wider(own):
            def __init__(self, *given: Any, **options: Any) -> None:
                super().__init__(*given, **options, batch_type=WiderBatch)

            def launch(self, batch: ScheduleBatch) -> Any:
                return super().launch(marked(batch))

        return Wider

    with patch.context() as inside:
        inside.setattr(bring_up, "select_attention", lambda *given, **how: Reading)
        inside.setattr(PromptPlan, "forward", watched("prompt", PromptPlan.forward))
        inside.setattr(TailAttention, "attend", watched("draft", TailAttention.attend))
        parts = worker_bring_up.DraftParts
        inside.setattr(worker_bring_up, "DraftParts", lambda *given: replace(parts(*given), batch_type=WiderBatch))
        for name in ("Stepper", "SpeculativeStepper", "DraftStepper"):
            inside.setattr(worker_bring_up, name, wider(getattr(worker_bring_up, name)))
        yield seen


def served(kind: str, graph: str = "off", **how: Any) -> Ran:
    """Run the texts without speculation ("plain"), or with drafts of a kind."""
    if kind == "plain":
        with TokenEngine(embedded_model(), graph=graph, **SETTINGS) as engine:
            return run(engine, prompts(), stagger=2, chunk=16, **how)
    with opened(kind, graph=graph) as engine:
        return run(engine, prompts(), stagger=2, chunk=16, **how)


@pytest.fixture(scope="module")
def wanted() -> dict[str, Ran]:
    """The results of attention that does not read the fields."""
    return {kind: served(kind, overlap=False) for kind in SETS}


def same(found: Ran, wanted: Ran) -> None:
    """Assert equal texts, and equal counts of draft tokens, which alone show what drafts read."""
    check_same(found, wanted)
    assert (found.proposed, found.accepted, found.decodes) == (wanted.proposed, wanted.accepted, wanted.decodes)


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("kind", SETS)
def test_declared_fields_reach_attention_in_every_step(
    wanted: dict[str, Ran], kind: str, graph: str, monkeypatch: Patch
) -> None:
    with reading(monkeypatch, waits=graph == "off") as seen:
        found = served(kind, graph, overlap=False)
    if graph == "off":
        same(found, wanted[kind])
    check_same(found, wanted["plain"])
    decoded = "one" if kind == "plain" else "verified"
    assert set(seen) >= {"prompt", decoded} and ("draft" in seen) is (kind in STEPS)
    assert kind != "plain" or "one of a prefill" in seen


def cut_for_prompts(patch: Patch) -> None:
    """The part of a request has the fields of the core alone."""
    patch.setattr(prompt, "part_of", lambda batch, *given: without(forward.part_of(batch, *given)))


def cut_for_single_rows(patch: Patch) -> None:
    """Single tokens among prompts have the fields of the core alone."""
    right = forward.part_of
    patch.setattr(forward, "part_of", lambda batch, *given: without(right(batch, *given)))


def cut_for_decode(patch: Patch) -> None:
    """The rows of decode steps have the fields of the core alone."""
    right = forward.make_batch

    def cut(kind: Any, given: Any) -> Any:
        made = right(kind, given)
        return without(made) if made.page_table is not None else made

    patch.setattr(forward, "make_batch", cut)


def cut_for_drafts(patch: Patch) -> None:
    """Rows of draft tokens repeat nothing, after verifications."""
    patch.setattr(drafter, "repeated", lambda kind: ())


def cut_for_first_drafts(patch: Patch) -> None:
    """Rows of draft tokens repeat nothing, after prompts."""
    patch.setattr(drafter, "continued", lambda like, take: ())


def without(batch: Any) -> Any:
    """Return the batch without the fields of the test."""
    return replace(batch, marks=None, weights=None)


@pytest.mark.parametrize(
    "kind, defect",
    [
        ("plain", cut_for_prompts),
        ("plain", cut_for_single_rows),
        ("plain", cut_for_decode),
        ("eagle3", cut_for_decode),
        ("mtp-layers", cut_for_drafts),
        *((kind, cut) for kind in STEPS for cut in (cut_for_drafts, cut_for_first_drafts)),
    ],
)
def test_attention_that_lacks_a_field_is_caught(kind: str, defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with reading(monkeypatch):
        defect(monkeypatch)
        with pytest.raises(AssertionError, match="lacks the fields"):
            served(kind, overlap=False)


@pytest.mark.parametrize("name", ["fields_of_prompts", "fields_of_verified"])
@pytest.mark.parametrize("kind", ["eagle3", "standalone", "dflash"])
def test_drafts_with_the_fields_of_another_request_are_caught(kind: str, name: str, monkeypatch: Patch) -> None:
    right = getattr(drafter, name)

    def others(*given: Any) -> Any:
        made = right(*given)
        return {**made, "marks": mx.concatenate([made["marks"][1:], made["marks"][:1] + 100])}

    monkeypatch.setattr(drafter, name, others)
    with reading(monkeypatch), pytest.raises(AssertionError, match="of another request"):
        served(kind, overlap=False)


def test_draft_tokens_are_of_the_request_slots_that_draft(monkeypatch: Patch) -> None:
    right, checked = worker_bring_up.DraftStepper._store, list[int]()

    def checking(self: Any, slots: mx.array, pages: mx.array, begun: Any, *rest: Any) -> None:
        # A request may run a step past its last token, in slot 0.
        found, own = np.array(begun.fields["req_pool_indices"])[: slots.shape[0]], np.array(slots)
        assert ((found == own) | (found == 0)).all()
        checked.append(int(found.sum()))
        right(self, slots, pages, begun, *rest)

    monkeypatch.setattr(worker_bring_up.DraftStepper, "_store", checking)
    served("eagle3")
    assert max(checked) > 10
