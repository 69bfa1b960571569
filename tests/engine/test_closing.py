"""Everything that an engine opened for its requests is closed with it, once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from sglcore.core.errors import ConfigError
from sglcore.engine.structured_output.grammar_cache import Grammars, Lane, open_backend, open_grammars
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.killable_checks import OnVerdict, Verdict
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.params import SamplingParams
from tests.schedule.fake_worker import FakeWorker, make_limits

PATIENCE = 120.0


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "grammar"}


def test_no_thread_of_a_compiler_outlives_what_was_closed() -> None:
    """Holds whether grammars were checked quickly, slowly or not at all."""

    class Checks:
        def submit(self, grammar: Grammar, told: OnVerdict) -> None:
            told(Verdict(1, seconds=10.0 if grammar.text.startswith("slow") else 0.0))

        def close(self) -> None:
            """Nothing to close."""

    backend: Any = type("Backend", (), {"name": "fake", "compile": lambda self, grammar: grammar})()
    before = threads()
    for checks, texts in (
        (Checks(), ("quick", "slow")),
        (Checks(), ("slow",)),
        (None, ("a", "b", "c")),
        (Checks(), ()),
    ):
        grammars = Grammars(backend, checks)
        for text in texts:
            assert grammars.compile(Grammar("regex", text)).wait(PATIENCE)
        begun = threads() - before
        assert bool(begun) == bool(texts)
        grammars.close()
        grammars.close()
        for each in begun:
            each.join(PATIENCE)
            assert not each.is_alive(), texts


def test_what_compiles_grammars_is_closed_with_the_engine_that_opened_it() -> None:
    closed = list[str]()

    class Closing(Grammars):
        def close(self) -> None:
            closed.append("grammars")
            super().close()

    class Worker(FakeWorker):
        def close(self) -> None:
            closed.append("worker")

    backend: Any = type("Backend", (), {"name": "fake", "compile": lambda self, grammar: None})()
    worker: Any = Worker(make_limits(takes_masks=True))
    for opens in (False, True):
        engine = TokenEngine(worker, frozenset(), open_grammars=lambda: Closing(backend))
        params = SamplingParams(grammar=Grammar("regex", "a") if opens else None)
        engine.add("r", [1, 2], params, 0)
        engine.abort("r")
        engine.close()
        engine.close()
        assert closed == ["grammars", "worker"] if opens else ["worker"]
        closed.clear()


@pytest.mark.parametrize("most", [1, 2])
def test_a_lane_starts_no_more_threads_than_it_may_and_leaves_the_stacks_of_others_alone(most: int) -> None:
    go, started, usual = threading.Event(), threading.Semaphore(0), threading.stack_size()
    before = threads()

    def work(job: Any) -> None:
        started.release()
        assert go.wait(PATIENCE)

    lane = Lane(most, work)
    for number in range(most + 2):
        job: Any = number
        lane.put(job)
    for _ in range(most):
        assert started.acquire(timeout=PATIENCE)
    begun = threads() - before
    assert len(begun) == most and threading.stack_size() == usual
    go.set()
    lane.close()
    for each in begun:
        each.join(PATIENCE)
        assert not each.is_alive()
    assert all(started.acquire(timeout=PATIENCE) for _ in range(2)), "jobs that were queued are done before the end"


def test_a_backend_that_lacks_a_library_names_that_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(vocabulary: Vocabulary) -> None:
        raise ImportError("no tensor library", name="tensors")

    monkeypatch.setattr("sglcore.engine.structured_output.grammar_llguidance.Llguidance", lacking)
    vocabulary = Vocabulary(Tokenizer(models.BPE()), 4, (2,))
    with pytest.raises(ConfigError, match="llguidance cannot be imported: no tensor library; pip install tensors"):
        open_backend("llguidance", vocabulary)
    grammars, row = open_grammars("auto", vocabulary)
    assert grammars is None and (row.effective, row.remedy) == ("off", "pip install tensors")
