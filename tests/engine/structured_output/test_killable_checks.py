"""Checks in forks: how many run at once, how they end, and what is told of each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from threading import enumerate as all_threads
from typing import Any

import msgspec
import pytest

from sglcore.engine.structured_output.killable_checks import STACK_BYTES, CheckLimits, ConfinedChecks, Verdict
from tests.engine.scripted_checks import Act

PATIENCE = 120.0
MODULE = "tests.engine.scripted_checks"
MEBI = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the system reports no threads of another process")


class Started:
    """A process of checks, started by hand: it has read all jobs before it begins one."""

    def __init__(self, *acts: Act, hard: int | None = None, **limits: Any) -> None:
        """`hard`: the bytes that the process may have in all."""
        spec = CheckLimits(**{"seconds": PATIENCE, "young_seconds": PATIENCE, "most_seconds": PATIENCE, **limits})
        limited = () if hard is None else ("sh", "-c", f'ulimit -v {hard >> 10}; exec "$@"', "sh")
        self.process = subprocess.Popen(
            [*limited, sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._limit = Timer(PATIENCE, self.process.kill)
        self._limit.start()
        self._count = 0
        self.send(*acts, before=msgspec.json.encode(spec) + b"\n")

    def send(self, *acts: Act, before: bytes = b"") -> None:
        """Write jobs at once."""
        jobs = range(self._count + 1, self._count + 1 + len(acts))
        lines = [{"number": number, "work": act} for number, act in zip(jobs, acts, strict=True)]
        self._count += len(acts)
        assert self.process.stdin is not None
        self.process.stdin.write(before + b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self.process.stdin.flush()

    def told(self) -> Verdict:
        """Return the next verdict; waits."""
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=Verdict)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.parametrize("young", [1, 2])
def test_no_more_checks_run_at_normal_priority_than_the_limit(young: int) -> None:
    with Started(*[Act(spins=0.02)] * 5, young=young) as checks:
        times = [tuple(map(float, checks.told().said)) for _ in range(5)]
    at_once = [sum(begin <= moment < end for begin, end in times) for moment, _ in times]
    assert max(at_once) == young


@on_linux
def test_a_check_that_takes_long_goes_on_at_the_lowest_priority_and_lets_the_next_one_begin(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Started(Act(spins_until=str(go)), Act(spins_until="lowest"), Act(), young=1, young_seconds=0.02) as checks:
        assert {checks.told().number for _ in range(2)} == {2, 3}
        go.touch()
        assert checks.told().number == 1


@pytest.mark.parametrize("slow", [1, 2])
def test_no_more_checks_run_at_the_lowest_priority_than_the_limit(slow: int, tmp_path: Path) -> None:
    go = tmp_path / "go"
    long = Act(spins_until=str(go))
    with Started(*[long] * (slow + 1), young=1, young_seconds=0.02, slow=slow) as checks:
        late = checks.told()
        assert late.number == slow + 1 and "other checks took the time, and this one was not done in" in late.busy
        go.touch()
        ended = [checks.told() for _ in range(slow)]
        assert {each.number for each in ended} == set(range(1, slow + 1))
        assert not any(each.busy or each.ended for each in ended)


@pytest.mark.parametrize("young_seconds", [0.0, PATIENCE], ids=["slow", "young"])
def test_a_check_that_gets_no_time_is_refused_for_now_after_the_longest_wait(young_seconds: float) -> None:
    with Started(Act(waits=True), seconds=0.05, most_seconds=0.1, young_seconds=young_seconds) as checks:
        found = checks.told()
    assert re.fullmatch(r"other checks took the time, and this one was not done in \d+\.\d s", found.busy)
    assert float(found.busy.split()[-2]) >= 0.1 and not found.ended


@pytest.mark.parametrize("most", [2, 3])
def test_as_many_checks_wait_as_the_limit_and_the_next_one_is_refused_for_now(most: int) -> None:
    with Started(*[Act()] * (most + 1), most_waiting=most) as checks:
        found = {each.number: each.busy for each in (checks.told() for _ in range(most + 1))}
    assert found == {**dict.fromkeys(range(1, most + 1), ""), most + 1: f"{most} others wait for their check"}


@pytest.mark.parametrize(
    ("act", "ended"),
    [
        (Act(takes=STACK_BYTES + 64 * MEBI), "takes more than 32 MiB of memory"),
        (Act(kills=signal.SIGKILL), "takes more than 32 MiB of memory"),
        (Act(kills=signal.SIGABRT), "takes more than 32 MiB of memory"),
        (Act(kills=signal.SIGSEGV), "ends its process by SIGSEGV"),
        (Act(kills=signal.SIGPROF), "takes longer than 120 s of the processor"),
    ],
)
def test_a_check_without_a_verdict_is_told_the_limit_that_ended_it_and_the_next_one_runs(act: Act, ended: str) -> None:
    with Started(act, Act(takes=16 * MEBI), memory=32 * MEBI, young=1) as checks:
        first, second = checks.told(), checks.told()
    assert (first.number, first.ended, first.busy, first.error) == (1, ended, "", None)
    assert (second.number, second.ended, second.busy, second.error) == (2, "", "", None)


def test_a_verdict_has_the_cpu_time_of_its_check() -> None:
    with Started(Act(spins=0.05), Act(waits=True), Act(), most_seconds=PATIENCE, young=3) as checks:
        found = {each.number: each.seconds for each in (checks.told(), checks.told())}
    assert found[1] >= 0.05 > found[3]


def test_jobs_and_verdicts_of_any_length_are_whole_and_what_a_check_prints_is_no_part_of_one() -> None:
    long = "x\n" * 200_000
    with Started(Act(says=(long,)), Act(prints="noise\n", says=("last",)), young=1) as checks:
        assert checks.told().said[2:] == (long,)
        assert checks.told().said[2:] == ("last",)


@on_linux
@pytest.mark.parametrize(("hard", "is_kept"), [(2048 * MEBI, False), (512 * MEBI, True)])
def test_a_check_is_held_to_its_memory_and_never_to_more_than_its_process(hard: int, is_kept: bool) -> None:
    with Started(Act(limit="RLIMIT_AS"), hard=hard, memory=600 * MEBI) as checks:
        soft, found = map(int, checks.told().said[2:])
    assert found == hard and (soft == hard) is is_kept
    assert is_kept or 600 * MEBI + STACK_BYTES < soft < hard


def test_a_check_has_the_stack_of_a_compilers_thread() -> None:
    with Started(Act(limit="stack")) as checks:
        assert checks.told().said[2:] == (str(STACK_BYTES),)


def test_a_check_that_crashes_writes_no_image_of_its_memory() -> None:
    with Started(Act(limit="RLIMIT_CORE")) as checks:
        assert checks.told().said[2:] == ("0", "0")


@on_linux
def test_checks_that_ended_leave_neither_processes_nor_open_files() -> None:
    def held() -> tuple[int, str]:
        own = Path(f"/proc/{checks.process.pid}")
        return len(list((own / "fd").iterdir())), (own / f"task/{checks.process.pid}/children").read_text()

    with Started(Act()) as checks:
        checks.told()
        before = held()
        for act in (Act(), Act(kills=signal.SIGKILL), Act()):
            checks.send(act)
            checks.told()
        assert held() == before and not before[1]


@pytest.mark.parametrize("given", [b"", b'{"seconds": 1.0}'])
@pytest.mark.parametrize("module", [MODULE, "sglcore.engine.structured_output.answer_check_process"])
def test_a_process_whose_input_ends_before_it_is_told_its_limits_ends_too(module: str, given: bytes) -> None:
    ran = subprocess.run([sys.executable, "-m", module], input=given, capture_output=True, timeout=PATIENCE, check=True)
    assert not ran.stdout and not ran.stderr


@pytest.fixture
def checks() -> Iterator[ConfinedChecks]:
    made = ConfinedChecks(MODULE, "tests", lambda: CheckLimits(seconds=PATIENCE, young_seconds=PATIENCE))
    yield made
    made.close()


def asked(checks: ConfinedChecks, act: Act) -> Future[Verdict]:
    """Return the future verdict of a check, which may be told once."""
    found: Future[Verdict] = Future()
    checks.submit(act, found.set_result)
    return found


def process_of(checks: ConfinedChecks) -> subprocess.Popen[bytes]:
    assert checks._process is not None
    return checks._process._process


def test_checks_run_with_one_thread_each_whatever_the_environment_says_and_keep_the_rest_of_it(
    checks: ConfinedChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RAYON_NUM_THREADS": "7", "TOKENIZERS_PARALLELISM": "true", "OTHER": "kept"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = asked(checks, Act(environment=tuple(given))).result(PATIENCE)
    assert found.said[2:] == ("1", "false", "kept")


def test_what_is_open_is_not_opened_again_and_what_is_closed_ends_its_process(checks: ConfinedChecks) -> None:
    checks.open()
    process = process_of(checks)
    checks.open()
    assert process_of(checks) is process and process.poll() is None
    checks.close()
    assert process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_is_open_when_its_checks_are_closed_is_told_nothing(
    checks: ConfinedChecks,
) -> None:
    found = asked(checks, Act(waits=True))
    assert asked(checks, Act()).result(PATIENCE).number == 2
    process = process_of(checks)
    checks.close()
    process.wait(PATIENCE)
    wait_for_threads()
    assert not found.done()


def wait_for_threads() -> None:
    """Wait for the threads of processes that have ended."""
    for each in all_threads():
        if each.name.startswith("checks of tests"):
            each.join(PATIENCE)
            assert not each.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_each_check_is_told_once_though_its_process_ends_and_checks_close_after_it(checks: ConfinedChecks) -> None:
    """A second call of `set_result` would raise."""
    done, left = asked(checks, Act(says=("done",))), asked(checks, Act(waits=True))
    assert done.result(PATIENCE).said[2:] == ("done",)
    process = process_of(checks)
    os.killpg(process.pid, signal.SIGKILL)
    found = left.result(PATIENCE)
    assert (found.number, found.busy) == (2, "the process that checks tests ended with code -9")
    wait_for_threads()
    again = asked(checks, Act(says=("again",))).result(PATIENCE)
    assert (again.number, again.said[2:]) == (1, ("again",)) and process_of(checks) is not process
    os.killpg(process_of(checks).pid, signal.SIGKILL)
    process_of(checks).wait(PATIENCE)
    wait_for_threads()
    checks.close()


def large() -> Any:
    return "x" * MEBI


def failing() -> Any:
    raise ValueError("no such tokenizer")


@pytest.mark.parametrize(
    ("module", "spec", "code"),
    [
        pytest.param(
            "tests.no_such_module",
            large,
            1,
            marks=pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
        ),
        pytest.param(
            MODULE, failing, 0, marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
        ),
    ],
    ids=["module", "specification"],
)
def test_checks_whose_process_can_not_begin_are_refused_for_now(
    module: str, spec: Callable[[], Any], code: int
) -> None:
    checks = ConfinedChecks(module, "tests", spec)
    found = asked(checks, Act()).result(PATIENCE)
    assert found.busy == f"the process that checks tests ended with code {code}"
    wait_for_threads()
    checks.close()
