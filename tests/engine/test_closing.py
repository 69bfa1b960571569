"""What an engine opened for its requests ends with it, once."""

from __future__ import annotations

from typing import Any

from sglcore.engine.grammar import Grammars
from sglcore.engine.tokens import TokenEngine
from sglcore.sampling.grammar import Grammar
from sglcore.sampling.params import SamplingParams
from tests.schedule.fake_worker import FakeWorker, make_limits


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
