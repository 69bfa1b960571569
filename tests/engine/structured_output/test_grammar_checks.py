"""Grammars that take too long, take too much memory or end their process fail only their own
requests; later requests do not wait for them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from sglcore.engine.start import embedded_model
from sglcore.engine.structured_output.grammar_cache import Grammars
from sglcore.engine.structured_output.grammar_check import GrammarChecks, GrammarLimits, failure_of
from sglcore.engine.structured_output.grammar_size import MOST_WRITTEN_OUT, refuse_large, written_out
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary, first_steps
from sglcore.engine.structured_output.killable_checks import CheckJob, OnVerdict, Verdict
from sglcore.engine.structured_output.killable_checks_process import Check
from sglcore.sampling.grammar_spec import Grammar, GrammarBusy, GrammarError, GrammarKind, Thinking
from tests.engine.structured_output.test_grammar_backends import EOS, SIZE, Fake, Startable

PATIENCE = 120.0
ENDLESS = "((x{100}){100}){100}"
SCHEMA: tuple[GrammarKind, str] = ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')


class Asked:
    """Runs checks with these limits, as a context manager, and returns the verdict on each
    grammar."""

    def __init__(self, **limits: Any) -> None:
        tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
        self.checks = GrammarChecks("llguidance", Vocabulary(tokenizer, SIZE, EOS), GrammarLimits(**limits))

    def ask(self, kind: GrammarKind, text: str) -> Future[Verdict]:
        """Return the future verdict on a grammar; does not wait."""
        found: Future[Verdict] = Future()
        self.checks.submit(Grammar(kind, text), found.set_result)
        return found

    def found(self, kind: GrammarKind, text: str) -> str:
        """Return what is wrong with a grammar; waits."""
        return str(failure_of(self.ask(kind, text).result(PATIENCE)) or "")

    def kill(self) -> None:
        """Kill the process and its forks."""
        assert self.checks._process is not None
        os.killpg(self.checks._process._process.pid, signal.SIGKILL)

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.checks.close()


def test_a_grammar_that_compiles_for_ever_is_ended_and_told_the_limit_and_the_next_one_is_compiled() -> None:
    with Asked(seconds=0.2, young_seconds=PATIENCE) as asked:
        found = asked.found("regex", ENDLESS)
        assert found.startswith("compiling the grammar takes longer than 0.2 s of the processor; wanted a smaller one;")
        assert not asked.found(*SCHEMA)


def test_a_grammar_that_takes_too_much_memory_or_too_long_for_each_token_is_refused_with_the_number() -> None:
    with Asked(seconds=PATIENCE, memory=64 << 20, mask_seconds=-1.0) as asked:
        assert "takes more than 64 MiB of memory" in asked.found("regex", ENDLESS)
        assert re.search(r"each token of the grammar takes 0\.\d\d s of CPU time", asked.found(*SCHEMA))


class Busy:
    """A grammar of two tokens; its second mask takes `seconds` of CPU time."""

    error = ""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_begun = seconds, False

    def start(self) -> Busy:
        return Busy(self.seconds)

    def accept(self, token_id: int) -> bool:
        self.is_begun = True
        return True

    def rollback(self, count: int) -> None:
        raise AssertionError("nothing is taken back")

    def fill(self, words: NDArray[np.int32]) -> None:
        words[:] = 1
        begin = time.thread_time()
        while self.is_begun and time.thread_time() < begin + self.seconds:
            pass


def test_the_time_of_a_token_is_that_of_the_masks_after_the_first_one() -> None:
    vocabulary = Vocabulary(Tokenizer(models.BPE()), 32, (5,))
    assert first_steps(Busy(0.02), vocabulary) >= 0.02


def test_who_asks_after_endless_grammars_does_not_wait_for_them_and_more_of_those_are_refused_for_now() -> None:
    """The grammar takes about a second of CPU time. All checks are requested at once, so that under
    no load the first two end before the third has used its 0.2 seconds."""
    with Asked(seconds=PATIENCE, most_seconds=PATIENCE, young=2, young_seconds=0.2, slow=2) as asked:
        ended: list[str] = []
        told = [asked.ask("regex", ENDLESS) for _ in range(3)] + [asked.ask(*SCHEMA)]
        for name, each in zip(("first", "second", "third", "schema"), told, strict=True):
            each.add_done_callback(lambda _, name=name: ended.append(name))
        third = told[2].result(PATIENCE)
        assert isinstance(failure_of(third), GrammarBusy) and "other checks took the time" in third.busy
        assert not failure_of(told[3].result(PATIENCE)) and not asked.found(*SCHEMA)
        for each in told:
            each.result(PATIENCE)
        assert ended.index("schema") < min(ended.index("first"), ended.index("second"))
        endless = [asked.ask("regex", ENDLESS) for _ in range(2)]
        asked.kill()
        ends = [each.result(PATIENCE) for each in endless]
        assert {each.busy for each in ends} == {"the process that checks grammars ended with code -9"}
        assert not asked.found(*SCHEMA)


@pytest.mark.parametrize("is_begun", [False, True])
def test_checks_that_were_closed_start_no_process_and_tell_nobody(is_begun: bool) -> None:
    asked = Asked()
    if is_begun:
        asked.checks.open()
    before = asked.checks._process
    asked.checks.close()
    asked.checks.open()
    told = asked.ask(*SCHEMA)
    after = asked.checks._process
    asked.checks.close()
    assert after is before and not told.done()


def test_what_is_begun_ends_with_the_process_that_asked() -> None:
    asked = Asked(seconds=PATIENCE)
    asked.ask("regex", ENDLESS)
    assert not asked.found(*SCHEMA)
    process = asked.checks._process
    assert process is not None
    group = process._process.pid
    process._lines.put(None)  # closes its standard input, as the end of this process would
    process._process.wait(PATIENCE)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


class Held:
    """A compiler that blocks on some texts until `go` is set."""

    def __init__(self) -> None:
        self.go = Event()

    def compile(self, grammar: Grammar) -> Startable:
        assert not grammar.text.startswith("held") or self.go.wait(PATIENCE)
        return Startable()


class Told:
    """Checks that return the test's verdicts, in order."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[Grammar] = []
        self.is_closed = False

    def submit(self, grammar: Grammar, told: OnVerdict) -> None:
        self.asked.append(grammar)
        told(self.verdicts.pop(0))

    def close(self) -> None:
        self.is_closed = True


def test_a_refusal_for_now_is_not_kept_and_one_for_good_is() -> None:
    checks = Told(Verdict(1, busy="much to do"), Verdict(2, error=("no", "another", "")))
    grammars = Grammars(Fake(lambda grammar: Startable()), checks)
    with pytest.raises(GrammarBusy, match="much to do; try again later"):
        grammars.compile(Grammar("regex", "a")).start()
    for _ in range(2):
        with pytest.raises(GrammarError, match="no; wanted another"):
            grammars.compile(Grammar("regex", "a")).start()
    assert len(checks.asked) == 2
    grammars.close()
    assert checks.is_closed


def test_a_refusal_that_many_callers_get_keeps_the_frames_of_the_last_one_alone() -> None:
    grammars = Grammars(Fake(lambda grammar: Startable()), Told(Verdict(1, error=("no", "another", ""))))
    compiling, depths = grammars.compile(Grammar("regex", "a")), list[int]()
    for _ in range(3):
        with pytest.raises(GrammarError) as error:
            compiling.start()
        depths.append(len(error.traceback))
    assert len(set(depths)) == 1
    grammars.close()


@pytest.mark.parametrize("seconds, is_free", [(0.1, True), (2.0, False)])
def test_of_grammars_that_were_checked_quickly_two_are_compiled_at_once(seconds: float, is_free: bool) -> None:
    blocked = Held()
    grammars = Grammars(Fake(blocked.compile), Told(*(Verdict(number, seconds=seconds) for number in range(2))))
    grammars.compile(Grammar("regex", "held"))
    assert grammars.compile(Grammar("regex", "next")).wait(PATIENCE if is_free else 0.05) is is_free
    blocked.go.set()
    grammars.close()


@pytest.mark.parametrize("seconds, others", [(0.1, 0), (2.0, 2)])
def test_what_took_long_to_check_is_compiled_where_it_holds_up_only_its_like(seconds: float, others: int) -> None:
    blocked = Held()
    checks = Told(*(Verdict(number, seconds=seconds) for number in range(2)), *(Verdict(9) for _ in range(2)))
    grammars = Grammars(Fake(blocked.compile), checks)
    for number in range(2):
        grammars.compile(Grammar("regex", f"held {number}"))
    quick = [grammars.compile(Grammar("regex", f"quick {number}")) for number in range(2)]
    assert [each.wait(PATIENCE if others else 0.05) for each in quick] == [bool(others)] * 2
    blocked.go.set()
    assert all(each.start() == "started" for each in quick)
    grammars.close()


@pytest.mark.parametrize(
    "pattern, size",
    [
        ("", 0),
        ("abc", 3),
        ("x{100}", 100),
        ("((x{100}){100}){100}", 10**6),
        ("(ab){3}c{2,}d{0,9}", 8),
        ("a*b+c?", 1),
        ("a*?b+?c??d{2}?", 3),
        ("((x{100}?){100}?){100}?", 10**6),
        ("^(a|bcd)$|ef", 3),
        (r"\d{3}-[a-z{9}\]]{4}", 8),
        ("[]{7}]{2}", 2),
        ("(a|bc|d){5}|e", 10),
        ("((", 0),
        ("a{x}{2}", 5),
        ("[abc", 1),
        (r"\\{9}\)(\(a){4}\{5}", 21),
        ("[^]a]{3}[^]{2}]", 4),
        ("[\\\n]{2}[\n]{2}.{3}", 7),
        ("a|b{3}|c{2}", 3),
        ("(a{5}|b)(c|d{0}){2}", 7),
        ("ab|{3}", 2),
        ("a){2}b", 4),
        ("a{0}b{01}{x{3}", 5),
        (f"a{{{10**17}}}", 10**17),
        ("a\\", 2),
        ("(?:ab){3}(?<n>a){2}(?P<name>b){4}(?i:c)(?s-m:d){2}", 15),
    ],
)
def test_the_size_of_a_pattern_is_what_its_counts_write_out(pattern: str, size: int) -> None:
    assert written_out(pattern) == size


TAG = {"begin": "<a>", "schema": {"pattern": ENDLESS}, "end": "</a>"}
TAGGED = {"structures": [{**TAG, "begin": "<b>", "schema": {}}, TAG], "triggers": ["<a", "<b"]}


def test_a_pattern_as_large_as_the_limit_is_compiled() -> None:
    for grammar in (Grammar("regex", f"a{{{MOST_WRITTEN_OUT}}}"), Grammar("lark", f"start: /{ENDLESS}/")):
        refuse_large(grammar)


@pytest.mark.parametrize(
    "grammar, place",
    [
        (Grammar("regex", ENDLESS), "this regex needs 1000000 characters"),
        (Grammar("json_schema", f'{{"items": {{"pattern": "{ENDLESS}"}}}}'), "the pattern at #/items needs"),
        (Grammar("json_schema", f'{{"patternProperties": {{"{ENDLESS}": true}}}}'), "the pattern at # needs"),
        (Grammar("structural_tag", json.dumps(TAGGED)), "the pattern at # needs"),
        (
            Grammar("regex", f"a{{{MOST_WRITTEN_OUT + 1}}}"),
            f"{MOST_WRITTEN_OUT + 1} characters.*at most {MOST_WRITTEN_OUT}",
        ),
    ],
)
def test_a_pattern_too_large_is_refused_before_anything_is_compiled(grammar: Grammar, place: str) -> None:
    checks = Told()
    with pytest.raises(GrammarError, match=place):
        Grammars(Fake(lambda grammar: Startable()), checks).compile(grammar).start()
    assert not checks.asked


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not report CPU time of another process")
def test_a_check_has_taken_the_cpu_time_of_its_process_whatever_time_has_passed() -> None:
    """Without its process, the time that has passed is all that is known."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        check = Check(CheckJob(1, msgspec.Raw(b"{}")), waiting.pid, -1, time.monotonic() - 1000.0)
        assert check.processor_seconds < 100.0
    assert check.processor_seconds >= 1000.0


def test_a_grammar_whose_check_can_not_start_is_refused_for_now_and_tried_again() -> None:
    class Full(Told):
        def submit(self, grammar: Grammar, told: OnVerdict) -> None:
            if not self.asked:
                self.asked.append(grammar)
                raise OSError("no more processes")
            super().submit(grammar, told)

    grammars = Grammars(Fake(lambda grammar: Startable()), Full(Verdict(1)))
    with pytest.raises(GrammarBusy, match="checks grammars cannot start: no more processes; try again later"):
        grammars.compile(Grammar("regex", "a")).start()
    assert grammars.compile(Grammar("regex", "a")).start() == "started"
    grammars.close()


def test_what_has_waited_as_long_as_it_may_is_done_and_is_waited_for_no_longer() -> None:
    blocked = Held()
    grammars = Grammars(Fake(blocked.compile), seconds=0.05)
    compiling = grammars.compile(Grammar("regex", "held"))
    begin = time.monotonic()
    assert compiling.wait(PATIENCE) and compiling.is_done and time.monotonic() < begin + PATIENCE
    with pytest.raises(GrammarBusy, match="waited 0.05 s"):
        compiling.start()
    blocked.go.set()
    grammars.close()


def test_what_has_no_grammar_is_not_checked() -> None:
    checks = Told()
    grammars = Grammars(Fake(lambda grammar: Startable()), checks)
    assert grammars.compile(None, Thinking("end", "end")).wait(PATIENCE) and not checks.asked
    grammars.close()
