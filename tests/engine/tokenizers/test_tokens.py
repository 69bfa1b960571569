"""The token side of an engine on failures: every request gets its last outputs."""

from __future__ import annotations

import threading

import pytest

from sglcore.engine import token_engine
from sglcore.engine.structured_output.grammar_cache import Grammars
from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.grammar_spec import Grammar, GrammarBusy, GrammarError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Matcher, Request
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.engine.test_ended_requests import ConstantWorker
from tests.schedule.fake_worker import FakeWorker, make_limits

BOUND = SamplingParams(max_tokens=4, n=2, grammar=Grammar("regex", "a"))


class BrokenWorker(FakeWorker):
    def submit(self, batch: ScheduleBatch) -> Ticket:
        raise RuntimeError("no step is taken")


class Failing:
    """A backend that refuses every grammar, or with grammars that can not be started."""

    name = "failing"
    vocabulary: Vocabulary

    def __init__(self, error: Exception) -> None:
        self.error = error

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        if isinstance(self.error, GrammarError):
            raise self.error
        return self

    def start(self) -> Matcher:
        raise self.error


class Slow:
    """A backend that blocks until `go` is set."""

    name = "slow"
    vocabulary: Vocabulary

    def __init__(self) -> None:
        self.go = threading.Event()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.go.wait(30)
        raise GrammarError("too late")


class KeepsCompiling(TokenEngine):
    """Mutant: an aborted request still waits for its grammar."""

    def abort(self, request_id: str) -> list[EngineOutput]:
        compiling = dict(self._compiling)
        outputs = super().abort(request_id)
        self._compiling.update(compiling)
        return outputs


@pytest.mark.parametrize(("kind", "is_over"), [(TokenEngine, True), (KeepsCompiling, False)])
def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_runs(
    kind: type[TokenEngine], is_over: bool
) -> None:
    backend = Slow()
    engine = kind(FakeWorker(make_limits()), frozenset(), open_grammars=lambda: Grammars(backend))
    engine.add("bound", [1, 2], BOUND, 0)
    assert engine.num_compiling == 1
    assert [(each.index, each.finish_reason) for each in engine.abort("bound")] == [(0, "abort"), (1, "abort")]
    assert (engine.num_compiling == 0 and not engine.has_work) is is_over
    backend.go.set()
    engine.close()


DRY = SamplingParams(max_tokens=4, dry_multiplier=0.8)


@pytest.mark.parametrize(
    ("params", "masks", "changes", "compiles", "refusal"),
    [
        (BOUND, True, True, True, ""),
        (BOUND, True, False, True, ""),
        (BOUND, False, True, True, "sampler takes no masks"),
        (BOUND, True, True, False, "this engine follows no grammars"),
        (DRY, True, True, True, ""),
        (DRY, True, False, True, "sampler takes no additions to logits, so there is no DRY"),
        (DRY, False, True, True, "sampler takes no masks"),
    ],
)
def test_a_request_that_binds_its_output_needs_a_sampler_and_a_compiler_for_it(
    params: SamplingParams, masks: bool, changes: bool, compiles: bool, refusal: str
) -> None:
    limits = make_limits(takes_masks=masks, takes_changes=changes)
    grammars = Grammars(Failing(GrammarError("no such grammar")))
    engine = TokenEngine(FakeWorker(limits), frozenset(), open_grammars=lambda: grammars if compiles else None)
    if refusal:
        with pytest.raises(RequestError, match=refusal):
            engine.add("r", [1, 2], params, 0)
        assert not engine.has_work
    else:
        engine.add("r", [1, 2], params, 0)
        assert engine.num_compiling == 1
    engine.add("r", [1, 2], SamplingParams(max_tokens=4), 0)
    engine.close()
    grammars.close()


def make_engine(error: Exception) -> TokenEngine:
    """An engine with a compilation that has failed before the request comes."""
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


def test_a_grammar_that_is_refused_for_now_ends_its_request_with_the_time_after_which_another_try_makes_sense() -> None:
    engine = make_engine(GrammarBusy("much to do"))
    engine.add("bound", [1, 2], BOUND, 0)
    outputs = engine.step()
    assert [(each.error, each.refused, each.retry_after) for each in outputs] == [("much to do", True, 10.0)] * 2
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


def test_an_end_that_the_vocabulary_does_not_have_ends_nothing() -> None:
    """A checkpoint may name end tokens above the vocabulary; suppressing end tokens indexes logits
    by them."""
    engine = TokenEngine(FakeWorker(make_limits(vocab_size=50)), frozenset({49, 50, 51}))
    assert engine.eos_ids == {49}
    engine.close()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_as_many_requests_run_as_all_shards_take(shards: int) -> None:
    limits = make_limits()
    engine = TokenEngine(FakeWorker(limits), frozenset(), shards=shards)
    assert engine.max_requests == limits.max_requests * shards
    engine.close()


def test_samples_are_numbered_from_the_first_index_on() -> None:
    engine = TokenEngine(ConstantWorker(make_limits()), frozenset())
    found = engine.add("r", [1, 2], SamplingParams(max_tokens=2, n=2), 5, first_index=3)
    assert [(each.rid, each.sample_index, each.seed) for each in found] == [("r/3", 3, 5), ("r/4", 4, 5)]
    ended: list[int] = []
    while engine.has_work:
        ended += [each.index for each in engine.step() if each.finished]
    assert sorted(ended) == [3, 4]
    engine.close()


class Elsewhere:
    """A page side of which the prompts are never written; it records how long it may wait."""

    has_work, lacks = False, ""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.error: Exception | None = None

    def mark(self, requests: list[Request]) -> None:
        for request in requests:
            request.is_remote = request.rid.startswith("away")

    def begin(self, seconds: float) -> list[EngineOutput]:
        self.seconds.append(seconds)
        if self.error is not None:
            raise self.error
        return []

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        return outputs

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...


def test_a_step_waits_for_another_engine_only_where_all_requests_do() -> None:
    side = Elsewhere()
    engine = TokenEngine(ConstantWorker(make_limits()), frozenset(), open_pages=lambda engine: side)
    assert engine.only_waits
    engine.add("away", [1, 2], SamplingParams(max_tokens=2), 0)
    assert engine.has_work and engine.only_waits
    engine.step()
    assert engine.only_waits
    engine.add("here", [1, 2], SamplingParams(max_tokens=2), 0)
    assert not engine.only_waits
    engine.step()
    assert [seconds > 0 for seconds in side.seconds] == [True, False]
    engine.close()


def test_a_grammar_that_is_refused_is_told_of_after_another_engines_messages_could_not_be_read() -> None:
    side, grammars = Elsewhere(), Grammars(Failing(GrammarError("no such grammar")))
    assert BOUND.grammar is not None and grammars.compile(BOUND.grammar).wait()
    engine = TokenEngine(
        FakeWorker(make_limits()), frozenset(), open_grammars=lambda: grammars, open_pages=lambda engine: side
    )
    engine.add("bound", [1, 2], BOUND, 0)
    side.error = RuntimeError("no message")
    with pytest.raises(RuntimeError, match="no message"):
        engine.step()
    assert engine.has_work and not engine.num_compiling
    side.error = None
    assert [(each.index, each.refused) for each in engine.step()] == [(0, True), (1, True)]
    assert not engine.has_work
    engine.close()


class TellsAgain(TokenEngine):
    """Mutant: reports the progress of a prompt at every step."""

    def _progress(self) -> list[EngineOutput]:
        for group in self._watched.values():
            group.reported = -1
        return super()._progress()


@pytest.mark.parametrize(("kind", "is_once"), [(TokenEngine, True), (TellsAgain, False)])
def test_progress_is_told_once_for_each_chunk_and_not_after_the_first_token(
    kind: type[TokenEngine], is_once: bool
) -> None:
    """Decode steps of another request run between the chunks."""
    engine = kind(ConstantWorker(make_limits(allows_mixed_batches=False)), frozenset())
    engine.add("other", [1, 2], SamplingParams(max_tokens=20), 0)
    engine.step()
    engine.add("long", [3] * 40, SamplingParams(max_tokens=3), 0, progress=True)
    told, emitted = [], []
    while engine.has_work:
        for output in (each for each in engine.step() if each.request_id == "long"):
            told += [output.processed] if output.is_progress else []
            emitted += output.token_ids
            assert not (output.is_progress and emitted)
    assert (told == [16, 32, 40]) is is_once and len(emitted) == 3
    engine.close()


@pytest.mark.parametrize("is_led", [True, False])
def test_samples_compute_their_prompt_once(is_led: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_led:
        monkeypatch.setattr(token_engine, "Request", lambda *given, leader, **named: Request(*given, **named))
    engine = TokenEngine(ConstantWorker(make_limits(max_batch_tokens=120, num_pages=64)), frozenset())
    engine.add("r", [3] * 40, SamplingParams(max_tokens=3, n=3), 0)
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.stats().computed_prompt_tokens == 40 + 2 * 4) is is_led
    engine.close()
