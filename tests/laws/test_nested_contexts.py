"""A draft runs inside the target's forward context and restores it, also when its forward
raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from sglcore.runtime import forward_context as contexts
from sglcore.runtime import model_runner
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.forward_context import forward_context, get_forward_context, has_forward_context
from sglcore.runtime.speculative.drafter import DraftRows
from tests.laws.proposers import PROPOSERS, Proposers, plain_fixture, proposers_fixture
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.texts import Ran, check_same

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.needs("graphs.native")
"""Independent of the device."""

proposers, plain = proposers_fixture(), plain_fixture()


class Nested:
    """A drafter that runs inside the target's context, fails once in the middle of a forward, and
    records whether the context was restored."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.inner = worker, worker.drafter
        self.seen: list[bool] = []
        self.fails_in = 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def within(self, call: Callable[[DraftRows], Any], rows: DraftRows) -> Any:
        outer = self.worker.runner.context(rows.batch)
        self.fails_in -= 1
        with forward_context(outer):
            try:
                return call(rows)
            finally:
                self.seen.append(get_forward_context() is outer)

    def advance(self, rows: DraftRows) -> Any:
        return self.within(self.inner.advance, rows)

    def grow(self, rows: DraftRows) -> Any:
        return self.within(self.inner.grow, rows)


def check_nested(proposers: Proposers, plain: Ran, name: str, monkeypatch: Patch) -> None:
    """Draft forwards restore the target's context, even one that raises; later requests are
    served."""
    engine = proposers.engine(name, graph="off")
    worker: Any = engine.worker
    worker.drafter = nested = Nested(worker)
    backend, attend = worker.runner.attn_backend, AttentionBackend.forward

    def failing(own: Any, *given: Any) -> Tensor:
        found = attend(own, *given)
        if own is not backend and nested.fails_in == 0:
            nested.fails_in = -1
            raise ArithmeticError("in the middle of a draft")
        return found

    monkeypatch.setattr(AttentionBackend, "forward", failing)
    with pytest.raises(ArithmeticError, match="in the middle of a draft"):
        laws.run(engine)
    assert nested.seen == [True] * 3 and not has_forward_context()
    while engine.loop.has_work:
        engine.loop.step()
    check_same(laws.run(engine), plain)
    assert all(nested.seen) and not has_forward_context()


@pytest.mark.parametrize("proposer", [name for name in PROPOSERS if name not in ("ngram", "suffix")])
def test_a_nested_context_in_which_a_draft_raises_restores_the_targets(
    proposers: Proposers, plain: Ran, proposer: str, monkeypatch: Patch
) -> None:
    check_nested(proposers, plain, proposer, monkeypatch)
    proposers.close()


class StaysWhereItFails(forward_context):
    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            super().__exit__(*raised)


@pytest.mark.parametrize("proposer", ["eagle", "mtp of several layers", "frozen-mtp"])
def test_a_context_that_stays_where_a_draft_raises_is_caught(
    proposers: Proposers, plain: Ran, proposer: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(model_runner, "forward_context", StaysWhereItFails)
    try:
        with pytest.raises(AssertionError):
            check_nested(proposers, plain, proposer, monkeypatch)
    finally:
        contexts._current.set(None)
    proposers.close()
