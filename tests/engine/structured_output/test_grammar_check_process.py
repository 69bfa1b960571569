"""What the process that checks grammars is told, and its verdict on each grammar."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models

from sglcore.engine.structured_output import answer_check_process
from sglcore.engine.structured_output.answer_check import Question
from sglcore.engine.structured_output.grammar_cache import Grammars
from sglcore.engine.structured_output.grammar_check import CheckSpec, GrammarChecks, GrammarLimits, failure_of
from sglcore.engine.structured_output.grammar_check_process import _checked
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.killable_checks import OnVerdict, Verdict
from sglcore.sampling.grammar_spec import Grammar, GrammarBusy, GrammarError
from tests.engine.structured_output.test_grammar_backends import Fake
from tests.engine.structured_output.test_grammar_checks import Busy

PATIENCE = 120.0
SMALL = Vocabulary(Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")), 40, (2, 5))
GRAMMAR = Grammar("regex", "a")


def verdict(found: Any, *, mask_seconds: float = 1.0) -> Verdict:
    """Return the verdict on a grammar of a compiler that returns or raises this."""

    def compile(grammar: Grammar) -> Any:
        if isinstance(found, BaseException):
            raise found
        return found

    backend: Any = Fake(compile)
    backend.vocabulary = SMALL
    return _checked(backend, GRAMMAR, mask_seconds)


def test_a_verdict_says_what_the_compiler_said() -> None:
    assert verdict(Busy(0.0)) == Verdict(0)
    assert verdict(GrammarError("one", wanted="two", remedy="three")).error == ("one", "two", "three")
    for failed, said in ((KeyError("x"), "KeyError: 'x'"), (SystemExit(3), "SystemExit: 3")):
        wanted = f"fake failed on this regex: {said}", "a grammar that it can read", ""
        assert verdict(failed).error == wanted
    with pytest.raises(MemoryError):
        verdict(MemoryError())


def test_a_mask_may_take_as_long_as_the_limit() -> None:
    assert verdict(Busy(0.02), mask_seconds=5.0).error is None
    found = verdict(Busy(0.02), mask_seconds=0.01).error
    assert found is not None and found[0].startswith("each token of the grammar takes 0.0")
    assert found[1:] == ("a smaller one", "take out repetitions with large counts")


@pytest.mark.parametrize("limits", [None, GrammarLimits(seconds=3.0, mask_seconds=0.5)])
def test_the_process_is_told_the_vocabulary_the_compiler_and_the_limits(limits: GrammarLimits | None) -> None:
    spec = msgspec.json.decode(msgspec.json.encode(GrammarChecks("name", SMALL, limits)._spec()), type=CheckSpec)
    assert (spec.backend, spec.size, spec.eos_ids) == ("name", 40, (2, 5))
    assert spec.limits == (limits or GrammarLimits()) and spec.tokenizer == SMALL.tokenizer.to_str()


def test_a_failure_for_now_comes_before_others() -> None:
    found = failure_of(Verdict(1, error=("a", "b", "c"), ended="takes long", busy="much to do"))
    assert isinstance(found, GrammarBusy) and found.found == "much to do"
    found = failure_of(Verdict(1, error=("a", "b", "c"), ended="takes long"))
    assert found is not None and str(found).startswith("compiling the grammar takes long; wanted a smaller one; take")
    found = failure_of(Verdict(1, error=("a", "b", "c")))
    assert found is not None and (found.found, found.wanted, found.remedy) == ("a", "b", "c")
    assert failure_of(Verdict(1, said=("x",))) is None


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [Panic, SystemExit, MemoryError, KeyboardInterrupt])
def test_whatever_a_compiler_raises_fails_its_own_request_alone(kind: type[BaseException]) -> None:
    def compile(grammar: Grammar) -> Any:
        if grammar.text == "bad":
            raise kind("inside")
        return SimpleNamespace(start=lambda: "started")

    grammars = Grammars(Fake(compile))
    for _ in range(2):
        with pytest.raises(GrammarError, match=f"fake failed on this regex: {kind.__name__}: inside; wanted a gram"):
            grammars.compile(Grammar("regex", "bad")).start()
        assert grammars.compile(Grammar("regex", "good")).start() == "started"
    grammars.close()


@pytest.mark.parametrize("told_first", [0, 1, 2])
def test_of_grammars_that_wait_for_their_checks_the_one_that_is_refused_for_now_is_checked_again(
    told_first: int,
) -> None:
    waiting: dict[str, list[OnVerdict]] = {}

    class Later:
        def submit(self, grammar: Grammar, told: OnVerdict) -> None:
            waiting.setdefault(grammar.text, []).append(told)

        def close(self) -> None:
            """Nothing to close."""

    backend = Fake(lambda grammar: SimpleNamespace(start=lambda: "started"))
    grammars = Grammars(backend, Later())
    compiling = [grammars.compile(Grammar("regex", text)) for text in "abc"]
    busy = "abc"[told_first]
    waiting[busy][0](Verdict(1, busy="much to do"))
    with pytest.raises(GrammarBusy, match="much to do"):
        compiling[told_first].start()
    again = [grammars.compile(Grammar("regex", text)) for text in "abc"]
    assert {text: len(told) for text, told in waiting.items()} == {**dict.fromkeys("abc", 1), busy: 2}
    for told in waiting.values():
        told[-1](Verdict(2))
    assert [each.start() for each in again] == ["started"] * 3 and sorted(backend.texts) == ["a", "b", "c"]
    grammars.close()


@pytest.mark.parametrize(("seconds", "lane"), [(0.0, "_quick"), (0.49, "_quick"), (0.5, "_slow"), (9.0, "_slow")])
def test_a_grammar_that_took_half_a_second_to_check_is_compiled_beside_the_slow_ones(seconds: float, lane: str) -> None:
    class Checked:
        def submit(self, grammar: Grammar, told: OnVerdict) -> None:
            told(Verdict(1, seconds=seconds))

        def close(self) -> None:
            """Nothing to close."""

    grammars = Grammars(Fake(lambda grammar: SimpleNamespace(start=lambda: "started")), Checked())
    assert grammars.compile(Grammar("regex", "a")).start() == "started"
    assert [name for name in ("_quick", "_slow") if getattr(grammars, name)._threads] == [lane]
    grammars.close()


def test_a_check_of_an_answer_that_has_no_memory_left_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit that ended it is told by the process that started it."""

    def full(*_: object) -> list[str]:
        raise MemoryError

    monkeypatch.setattr(answer_check_process, "not_kept", full)
    question = Question('{"not": {}}', ("#/not",), "1")
    with pytest.raises(MemoryError):
        answer_check_process.checked(msgspec.json.encode(question))


def test_a_tokenizer_that_the_compiler_can_not_read_is_the_reason_of_each_check() -> None:
    checks = GrammarChecks("llguidance", Vocabulary(Tokenizer(models.BPE()), 4, (2,)))
    try:
        for _ in range(2):
            found: Future[Verdict] = Future()
            checks.submit(GRAMMAR, found.set_result)
            error = found.result(PATIENCE).error
            assert error is not None and "llguidance" in error[0]
    finally:
        checks.close()
