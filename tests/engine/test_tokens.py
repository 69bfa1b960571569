"""The token side of an engine when something goes wrong: every request gets its last outputs."""

from __future__ import annotations

import pytest

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import Ticket
from sglcore.engine.grammar import CompiledGrammar, Grammars
from sglcore.engine.tokens import TokenEngine
from sglcore.sampling.grammar import Grammar, GrammarError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.output import EngineOutput
from sglcore.schedule.request import Matcher
from tests.schedule.fake_worker import FakeWorker, make_limits

BOUND = SamplingParams(max_tokens=4, n=2, grammar=Grammar("regex", "a"))


class BrokenWorker(FakeWorker):
    def submit(self, batch: ScheduleBatch) -> Ticket:
        raise RuntimeError("no step is taken")


class Failing:
    """A backend that refuses every grammar, or whose grammars can not be begun."""

    name = "failing"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        if isinstance(self.error, GrammarError):
            raise self.error
        return self

    def start(self) -> Matcher:
        raise self.error


def make_engine(error: Exception) -> TokenEngine:
    """An engine whose compiler has failed already when a request asks."""
    grammars = Grammars(Failing(error))
    assert BOUND.grammar is not None and grammars.compile(BOUND.grammar).wait()
    return TokenEngine(BrokenWorker(make_limits()), frozenset(), open_grammars=lambda: grammars)


def test_a_grammar_that_is_refused_is_told_of_though_the_step_beside_it_fails() -> None:
    engine = make_engine(GrammarError("no such grammar"))
    engine.add("free", [1, 2], SamplingParams(max_tokens=4), 0)
    engine.add("bound", [1, 2], BOUND, 0)
    with pytest.raises(RuntimeError, match="no step is taken"):
        engine.step()
    outputs = engine.drain()
    assert sorted((each.request_id, each.index, each.finish_reason, each.refused) for each in outputs) == [
        ("bound", 0, "error", True),
        ("bound", 1, "error", True),
        ("free", 0, "error", False),
    ]
    assert not engine.has_work
    engine.close()


def test_a_grammar_that_can_not_be_begun_ends_its_request_and_is_not_the_callers_fault() -> None:
    engine = make_engine(RuntimeError("the library gave up"))
    engine.add("bound", [1, 2], BOUND, 0)
    outputs = engine.step()
    assert [(each.index, each.finish_reason, each.refused) for each in outputs] == [
        (0, "error", False),
        (1, "error", False),
    ]
    assert all("the library gave up" in each.error for each in outputs)
    assert not engine.has_work
    engine.close()


def test_an_output_tells_of_progress_if_it_says_how_far_the_prompt_is_though_that_be_nowhere() -> None:
    assert EngineOutput("r", 0, processed=0).is_progress
    assert not EngineOutput("r", 0, token_ids=[1]).is_progress
