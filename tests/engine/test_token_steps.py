"""The steps of an engine's token side: what each waits for, what the page side is given, and what
an end leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglcore.engine.core import Engine
from sglcore.engine.start import embedded_model
from sglcore.engine.token_engine import SampleGroup, TokenEngine
from sglcore.sampling.grammar_spec import Grammar, Thinking, TokenRules
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.engine.test_ended_requests import TOKEN, ConstantWorker, known
from tests.schedule.fake_worker import make_limits

FREE = SamplingParams(max_tokens=4)
BOUND = SamplingParams(max_tokens=4, grammar=Grammar("regex", "a"))


class Compiler:
    """Grammars that are compiled when `is_done` is set; records each wait, and each compilation."""

    def __init__(self) -> None:
        self.is_done = False
        self.waits: list[float] = []
        self.given: list[tuple[Any, ...]] = []

    def compile(self, *given: Any) -> Compiler:
        self.given.append(given)
        return self

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.is_done

    def start_after(self, prompt: Any) -> tuple[None, None]:
        return None, None

    def close(self) -> None: ...


def compiling(compiler: Any, **limits: Any) -> TokenEngine:
    return TokenEngine(ConstantWorker(make_limits(**limits)), frozenset(), open_grammars=lambda: compiler)


def test_a_step_waits_a_moment_for_a_compiler_only_where_no_other_request_can_run() -> None:
    compiler = Compiler()
    engine = compiling(compiler)
    engine.add("bound", [1, 2], BOUND, 0)
    engine.step()
    (wait,) = compiler.waits
    assert 0 < wait < 0.1
    engine.add("free", [1, 2], FREE, 0)
    while engine.loop.has_work:
        engine.step()
    assert compiler.waits == [wait] and engine.num_compiling == 1
    compiler.is_done = True
    ended = [each.index for _ in range(9) if engine.has_work for each in engine.step() if each.finished]
    assert ended == [0] and not engine.has_work
    engine.close()


def test_a_compiler_is_opened_once_and_with_the_first_request_that_needs_it() -> None:
    compiler, opened = Compiler(), list[Any]()

    def open_grammars() -> Any:
        opened.append(compiler)
        return compiler

    engine = TokenEngine(ConstantWorker(make_limits()), frozenset(), open_grammars=open_grammars)
    engine.add("free", [1, 2], FREE, 0)
    assert not opened
    for name in ("first", "second"):
        engine.add(name, [1, 2], BOUND, 0)
    assert len(opened) == 1 and len(compiler.given) == 2
    engine.close()


def test_a_compiler_is_given_all_that_binds_an_output() -> None:
    compiler = Compiler()
    engine = compiling(compiler, takes_changes=True)
    thinking, rules = Thinking("</think>", "</think>"), TokenRules(allowed=(3, 4))
    params = replace(BOUND, thinking=thinking, token_rules=rules, dry_multiplier=0.8)
    engine.add("bound", [1, 2], params, 0)
    assert params.repetition is not None
    assert compiler.given == [(params.grammar, thinking, rules, params.repetition)]
    engine.close()


def test_each_sample_follows_a_grammar_by_itself_from_the_end_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting(Compiler):
        def start_after(self, prompt: Any) -> Any:
            begun.append((prompt.tolist(), object(), object()))
            return begun[-1][1:]

    begun: list[Any] = []
    compiler = Starting()
    compiler.is_done = True
    engine = compiling(compiler)
    requests = engine.add("bound", [1, 2], replace(BOUND, n=3), 0)
    assert not begun
    monkeypatch.setattr(engine, "_queue", lambda group: None)
    engine.step()
    assert [prompt for prompt, *_ in begun] == [[1, 2]] * 3 and len({id(matcher) for _, matcher, _ in begun}) == 3
    assert [(each.matcher, each.change) for each in requests] == [(matcher, change) for _, matcher, change in begun]
    engine.close()


def test_a_request_that_can_never_run_is_refused_before_its_grammar_is_compiled() -> None:
    compiler = Compiler()
    engine = compiling(compiler, max_model_len=32)
    for prompt, why in (([], "is empty"), ([1] * 32, "has 32 tokens")):
        with pytest.raises(RequestError, match=why):
            engine.add("bound", prompt, BOUND, 0)
    assert not compiler.given and not engine.num_compiling and not engine.has_work
    engine.close()


class Sending:
    """A page side that records the outputs that it may send, and answers for one of its own."""

    has_work, lacks = False, ""

    def __init__(self) -> None:
        self.sent: list[list[tuple[str, str | None]]] = []
        self.begun: list[EngineOutput] = []

    def mark(self, requests: list[Request]) -> None:
        """Leave all requests to this engine."""

    def begin(self, seconds: float) -> list[EngineOutput]:
        begun, self.begun = self.begun, []
        return begun

    def end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        self.sent.append([(each.request_id, each.finish_reason) for each in outputs])
        return [each for each in outputs if each.request_id != "theirs"]

    def close(self) -> None: ...


class Fragile(ConstantWorker):
    """A worker of which each step can be made to fail."""

    fails = False

    def submit(self, batch: ScheduleBatch) -> Ticket:
        if self.fails:
            raise RuntimeError("the device is gone")
        return super().submit(batch)


def test_outputs_after_a_failure_go_through_the_page_side_as_those_of_a_step_do() -> None:
    """A request of another engine that a failure ends is answered, and is no output here."""
    side: Any = Sending()
    worker = Fragile(make_limits())
    engine = TokenEngine(worker, frozenset(), open_pages=lambda engine: side)
    for name in ("ours", "theirs"):
        engine.add(name, [1, 2], FREE, 0)
    worker.fails = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert not side.sent
    assert [(each.request_id, each.finish_reason) for each in engine.drain()] == [("ours", "error")]
    assert side.sent == [[("ours", "error"), ("theirs", "error")]]
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_output_has_the_text_of_the_steps_before_a_failure_and_its_reason(overlap: bool) -> None:
    """At once: the next step may never come."""
    worker = Fragile(make_limits(vocab_size=2147, runs_ahead=True))
    engine = Engine(worker, embedded_model(), overlap=overlap)
    output = engine.add([1, 2], SamplingParams(max_tokens=8))
    for _ in range(3):
        engine.step()
    worker.fails = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    (sample,) = output.outputs
    assert output.finished and sample.finish_reason == "error" and "the device is gone" in sample.error
    assert sample.token_ids == [TOKEN] * 3, "the step that was in flight is collected"
    assert sample.text == engine.codec.decode([TOKEN] * 3) and not engine.has_work
    assert engine.add([1, 2], SamplingParams(), output.request_id).request_id == output.request_id
    engine.close()


def test_requests_that_a_failure_or_another_engine_ends_are_forgotten() -> None:
    """An embedding that the failure ends has its error, and is no output."""
    before = known(SampleGroup)
    side: Any = Sending()
    worker = Fragile(make_limits())
    engine = TokenEngine(worker, frozenset(), open_pages=lambda engine: side)
    (elsewhere,) = engine.add("elsewhere", [1, 2], FREE, 0)
    engine.step()
    ended = engine.scheduler.abort(elsewhere.rid)
    assert ended is not None
    side.begun = [ended]
    assert [each.request_id for each in engine.step() if each.finished] == ["elsewhere"]
    engine.add("here", [1, 2], FREE, 0)
    embedded = engine.embed("embed", [1, 2])
    worker.fails = True
    while engine.has_work:
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
        assert {each.request_id for each in engine.drain()} <= {"here"}
    assert "the device is gone" in str(embedded.error)
    assert not known(SampleGroup) - before
    engine.close()


def test_progress_says_what_was_cached_from_the_first_report_on() -> None:
    engine = TokenEngine(ConstantWorker(make_limits(max_batch_tokens=16)), frozenset())
    reports: list[list[tuple[int, int]]] = []
    for last in (7, 8):
        engine.add("r", [*[3] * 40, last], FREE, 0, progress=True)
        outputs = [each for _ in range(99) if engine.has_work for each in engine.step()]
        reports.append([(each.cached_tokens, each.processed) for each in outputs if each.is_progress])
        (first, *_) = (each for each in outputs if each.token_ids)
        assert {each for each, _ in reports[-1]} == {first.cached_tokens}
    assert reports == [[(0, 16), (0, 32), (0, 41)], [(40, 41)]]
    engine.close()


class Counted(ConstantWorker):
    """A worker that records its calls."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(make_limits(**limits))
        self.calls: list[str] = []

    def submit(self, batch: ScheduleBatch) -> Ticket:
        self.calls.append("submit")
        return super().submit(batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        self.calls.append("collect")
        return super().collect(ticket)

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_in_flight_is_collected_before_the_worker_is_closed(overlap: bool) -> None:
    worker = Counted(runs_ahead=True)
    engine = TokenEngine(worker, frozenset(), overlap=overlap)
    engine.add("r", [1, 2], FREE, 0)
    engine.step()
    assert worker.calls == (["submit"] if overlap else ["submit", "collect"])
    engine.close()
    engine.close()
    assert worker.calls == ["submit", "collect", "close"]


def test_other_engines_are_left_before_the_worker_is_closed_and_once() -> None:
    class Leaving(Sending):
        def close(self) -> None:
            worker.calls.append("pages")

    worker, side = Counted(), Leaving()
    engine = TokenEngine(worker, frozenset(), open_pages=lambda engine: side)  # pyright: ignore[reportArgumentType]
    engine.close()
    engine.close()
    assert worker.calls == ["pages", "close"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_engine_overlaps_steps_and_shares_prefixes_only_if_it_is_told_to(overlap: bool, prefix_cache: bool) -> None:
    worker = Counted(runs_ahead=True, vocab_size=2147)
    engine = Engine(worker, embedded_model(), overlap=overlap, prefix_cache=prefix_cache)
    engine.add([3] * 20, FREE)
    engine.step()
    assert worker.calls == (["submit"] if overlap else ["submit", "collect"])
    while engine.has_work:
        engine.step()
    output = engine.add([3] * 20, FREE)
    while engine.has_work:
        engine.step()
    assert (output.cached_tokens > 0) is prefix_cache
    engine.close()


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7]], ids=["text", "ids"])
def test_an_output_has_the_text_of_its_prompt_if_there_is_one_and_its_ids(prompt: Any) -> None:
    engine = Engine(ConstantWorker(make_limits(vocab_size=2147)), embedded_model())
    output = engine.add(prompt, FREE)
    is_text = isinstance(prompt, str)
    assert output.prompt == (prompt if is_text else None)
    assert output.prompt_token_ids == (engine.codec.encode(prompt) if is_text else prompt)
    engine.close()


@pytest.mark.parametrize(
    ("ignores", "stops", "cause"),
    [
        (False, (), TOKEN),
        (True, (), None),
        (True, (TOKEN,), TOKEN),
        (True, (TOKEN + 1,), None),
        (False, (TOKEN + 1,), TOKEN),
        (False, (TOKEN,), TOKEN),
    ],
)
def test_a_request_may_ignore_the_ends_of_a_text_but_not_its_own_stop_tokens(
    ignores: bool, stops: tuple[int, ...], cause: int | None
) -> None:
    """The worker draws the end of a text at each step."""
    engine = TokenEngine(ConstantWorker(make_limits(vocab_size=2147)), frozenset({TOKEN}))
    engine.add("r", [1, 2], SamplingParams(max_tokens=3, ignore_eos=ignores, stop_token_ids=stops), 0)
    outputs = [each for _ in range(9) if engine.has_work for each in engine.step()]
    tokens = [token for each in outputs for token in each.token_ids]
    assert (outputs[-1].finish_reason, outputs[-1].stop_cause) == ("length" if cause is None else "stop", cause)
    assert tokens == [TOKEN] * (3 if cause is None else 1)
    engine.close()


def test_each_sample_ends_once_and_the_others_go_on() -> None:
    engine = TokenEngine(ConstantWorker(make_limits()), frozenset())
    engine.add("r", [1, 2], SamplingParams(max_tokens=9, n=3), 0)
    engine.step()

    def told(outputs: list[EngineOutput]) -> list[tuple[int, str | None, int | str | None]]:
        return [(each.index, each.finish_reason, each.stop_cause) for each in outputs]

    assert told(engine.end_sample("r", 1, "word")) == [(1, "stop", "word")]
    assert told(engine.end_sample("r", 0, None)) == [(0, "abort", None)]
    assert engine.end_sample("r", 1, None) == [] == engine.end_sample("r", 7, "word") == engine.abort("other")
    assert {each.index for each in engine.step()} <= {2} and engine.has_work
    assert told(engine.abort("r")) == [(2, "abort", None)]
    while engine.has_work:
        assert engine.step() == []
    assert engine.abort("r") == []
    engine.close()
