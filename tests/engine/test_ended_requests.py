"""Ended requests are forgotten: the host keeps no more objects after many requests than after a
few."""

from __future__ import annotations

import gc

import numpy as np

from sglcore.engine.core import Engine
from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.start import embedded_model
from sglcore.engine.structured_output.grammar_cache import Grammars
from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.engine.token_engine import SampleGroup, TokenEngine
from sglcore.sampling.grammar_spec import Grammar, GrammarError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.fake_worker import make_limits

COUNT, KEPT = 400, 100
"""The number of requests of a test, and the most that may still be known when all have ended: rows
up to this number are not compacted."""
TOKEN = 300


class ConstantWorker:
    """Draws the same token for every request."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def submit(self, batch: ScheduleBatch) -> Ticket:
        offsets = np.cumsum([0, *batch.emits], dtype=np.int32)
        tokens = np.full(offsets[-1], TOKEN, dtype=np.int32)
        return Ticket(batch.step, BatchResult(batch.step, offsets, tokens, np.zeros(batch.batch_size, dtype=bool)))

    def collect(self, ticket: Ticket) -> BatchResult:
        assert isinstance(ticket.payload, BatchResult)
        return ticket.payload

    def close(self) -> None: ...


class Refusing:
    """A grammar backend that refuses every grammar."""

    name = "refusing"
    vocabulary: Vocabulary

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        raise GrammarError("no such grammar")


def known(kind: type) -> set[int]:
    """Return the ids of the live objects of a type."""
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) is kind}


def run(engine: Engine | TokenEngine) -> None:
    """Step until there is no work."""
    while engine.has_work:
        engine.step()


def test_an_engine_forgets_requests_however_they_ended() -> None:
    before = {kind: known(kind) for kind in (Request, SampleGroup, OutputProcessor)}
    engine = Engine(ConstantWorker(make_limits(vocab_size=2147)), embedded_model())
    stop = engine.codec.decode([TOKEN] * 2)
    for number in range(COUNT):
        ends = {0: {"stop": (stop,)}, 1: {"stop_token_ids": (TOKEN,)}}.get(number % 4, {})
        engine.add([number, 5, 6], SamplingParams(max_tokens=3, n=1 + number % 2, **ends), f"r{number}")
        engine.step()
        if number % 4 == 2:
            engine.abort(f"r{number - number % 3}")
        if number % 8 == 7:
            run(engine)
    assert len(known(Request) - before[Request]) <= KEPT
    assert not known(SampleGroup) - before[SampleGroup]
    assert not known(OutputProcessor) - before[OutputProcessor]
    engine.close()


def test_a_request_that_ends_at_a_stop_string_gives_its_name_back() -> None:
    engine = Engine(ConstantWorker(make_limits(vocab_size=2147)), embedded_model())
    word = engine.codec.decode([TOKEN]).strip()
    for _ in range(2):
        output = engine.add([5, 6], SamplingParams(max_tokens=8, stop=(word,)), "again")
        run(engine)
        sample = output.outputs[0]
        assert (sample.finish_reason, sample.stop_cause) == ("stop", word) and len(sample.token_ids) < 8
    engine.close()


def test_the_token_side_forgets_whom_it_tells_of_progress_and_whose_grammar_was_refused() -> None:
    groups, requests = known(SampleGroup), known(Request)
    grammars = Grammars(Refusing())
    engine = TokenEngine(ConstantWorker(make_limits(vocab_size=2147)), frozenset(), open_grammars=lambda: grammars)
    for number in range(COUNT):
        grammar = Grammar("regex", "a") if number % 3 == 0 else None
        engine.add(f"r{number}", [number, 5], SamplingParams(max_tokens=2, grammar=grammar), 0, progress=True)
        if number % 6 == 1:
            engine.abort(f"r{number}")
        engine.step()
        if number % 6 == 4:
            engine.abort(f"r{number}")
        if number % 8 == 7:
            run(engine)
    assert len(known(Request) - requests) <= KEPT
    assert len(known(SampleGroup) - groups) <= 1, "an error that is kept may know the last one that it was raised for"
    engine.close()
