"""The pytest plugin: options, one test for each case of each law, gaps as expected failures, and
the result at the end.

It runs on the device that `--conform-device` names, or else on the device of the package that
contains the test file. Heavy modules are imported when a law runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sglcore.conformance.gaps import Gap, Skip
    from sglcore.conformance.kit_run import Kit, Outcome
    from sglcore.conformance.law import Law
    from sglcore.conformance.target import Target

LEVELS = ("C0", "C1", "C2", "C3", "C4")


@dataclass(slots=True)
class Run:
    """One device's run within a session."""

    target: Target
    """The device under test."""
    gaps: tuple[Gap, ...]
    """Its known failures."""
    skips: tuple[Skip, ...] = ()
    """The rows of its skipped laws."""
    asked: set[str] = field(default_factory=set)
    """Names of the requested cases."""
    outcomes: list[Outcome] = field(default_factory=list)
    """What came of the cases that ran."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with its gaps, skips and tolerances."""
    obstacle: str | None = None
    """Why the device cannot run here. None: not probed yet."""
    was_named: bool = False
    """`--conform-device` names it."""

    def reason_against(self, level: str) -> str:
        """Return why laws of a level can not run here; empty if they can. The first call probes the
        device. Laws of level C0, the package itself, can run everywhere."""
        if level == LEVELS[0]:
            return ""
        if self.obstacle is None:
            self.obstacle = self.target.obstacle()
        return self.obstacle

    @property
    def not_run(self) -> list[str]:
        """Names of requested cases without an outcome, sorted: the run was cut short, or left some
        out."""
        return sorted(self.asked - {outcome.name for outcome in self.outcomes})


_DEFAULTS = MappingProxyType(
    {"--conform-level": "C4", "--conform-law": (), "--conform-set": (), "--conform-hardware": ""}
)
RUNS = pytest.StashKey[dict[str, Run]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options (`--conform-...`) to pytest's command line; pytest calls it."""
    group = parser.getgroup("conformance", "sglcore's conformance kit")
    group.addoption("--conform-device", metavar="NAME", help='the device under test, or "reference"')
    group.addoption("--conform-level", default="C4", choices=LEVELS, help="run the laws up to this level")
    group.addoption("--conform-law", action="append", default=[], metavar="LAW", help="run these laws only")
    group.addoption(
        "--conform-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of every engine, such as dtype",
    )
    group.addoption("--conform-result", type=Path, metavar="FILE", help="write the result as JSON")
    group.addoption(
        "--conform-hardware", default="", metavar="TEXT", help='name of the hardware; "simulated" if there is none'
    )
    group.addoption("--conform-record", type=Path, metavar="FILE", help="write the steps of a run, and nothing else")
    group.addoption("--conform-replay", type=Path, metavar="FILE", help="run recorded steps, and nothing else")
    group.addoption("--conform-mutants", action="store_true", help="run each law on each broken device it must catch")


def _option(config: pytest.Config, name: str) -> Any:
    """Return the value of an option; its default if the plugin was loaded too late to add options,
    with the test file that imports the suite."""
    return config.getoption(name, default=_DEFAULTS.get(name))


def pytest_configure(config: pytest.Config) -> None:
    """Begin the session without any `Run`; pytest calls it. Runs are made as their tests are
    collected."""
    config.stash[RUNS] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each case of each law, for the gaps, and for recording; pytest calls it for
    each test function of the suite. What was not requested gets no parameters."""
    if "law_case" in metafunc.fixturenames:
        run = _run_for(metafunc.config, metafunc.definition.path)
        found = [] if _records(metafunc.config) else list(_law_cases(metafunc.config, run))
        run.asked.update(case.run_name for case in found if case.mutant is None)
        metafunc.parametrize("law_case", [pytest.param(case, id=case.name) for case in found], scope="session")
    for name, wanted in (("gap_run", not _records(metafunc.config)), ("run_to_record", _records(metafunc.config))):
        if name in metafunc.fixturenames:
            run = _run_for(metafunc.config, metafunc.definition.path)
            found = [pytest.param(run, id=run.target.name)] if wanted else []
            metafunc.parametrize(name, found, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that were not requested, instead of skipping them: laws while steps are
    recorded, and recording otherwise. pytest calls it; `items` is changed in place."""
    own = [item for item in items if {"law_case", "gap_run", "run_to_record"} & set(_fixtures(item))]
    unasked = [item for item in own if item.get_closest_marker("skip") is not None]
    if unasked:
        config.hook.pytest_deselected(items=unasked)
        items[:] = [item for item in items if item not in unasked]


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(item.fixturenames) if isinstance(item, pytest.Function) else ()


def _records(config: pytest.Config) -> bool:
    return bool(_option(config, "--conform-record") or _option(config, "--conform-replay"))


@dataclass(frozen=True, slots=True)
class LawCase:
    """The parameter of one test of the kit: one case of a law on one device. `mutant`: an index
    into the law's mutants, for a test of the whole law against that mutant (`case` is empty then);
    None: a test of the device itself."""

    run: Run
    law: Law
    case: str
    mutant: int | None = None

    @property
    def name(self) -> str:
        """The id of the test: level, case and mutant."""
        planted = "" if self.mutant is None else f" against {self.law.mutants[self.mutant].name}"
        return f"{self.law.level}-{self.run_name}{planted}"

    @property
    def run_name(self) -> str:
        """The case's name in gaps and results: `law[case]`, or `law` without variants."""
        from sglcore.conformance.law import run_name

        return run_name(self.law, self.case)


def _law_cases(config: pytest.Config, run: Run) -> Iterator[LawCase]:
    from sglcore.conformance.catalogue import laws_up_to

    names = _option(config, "--conform-law")
    for law in laws_up_to(_option(config, "--conform-level"), names):
        if _option(config, "--conform-mutants"):
            yield from (LawCase(run, law, "", number) for number in range(len(law.mutants)))
        else:
            yield from (LawCase(run, law, case) for case in law.cases(run.target))


def _run_for(config: pytest.Config, file: Path) -> Run:
    """Return the session's run for the device that `--conform-device` names, or else for the device
    of the package that contains the test file `file`; it is made at the first call. Raises
    UsageError if there is neither."""
    from sglcore.conformance.gaps import read_gaps, read_skips

    named = _option(config, "--conform-device")
    name = named or _declared_device(file)
    if not name:
        raise pytest.UsageError(f"{file} is in no device package; give --conform-device NAME")
    runs = config.stash[RUNS]
    if name not in runs:
        target = _target(name)
        rows = read_gaps(target.folder), read_skips(target.folder)
        runs[name] = Run(target, *rows, was_named=bool(named))
    return runs[name]


def _target(name: str) -> Target:
    if name == "reference":
        from sglcore.conformance.reference_parts import REFERENCE

        return REFERENCE
    from sglcore.conformance.target import find_target

    return find_target(name)


def _declared_device(file: Path) -> str:
    """Return the name of the device that the nearest pyproject.toml above a file declares as an
    entry point; empty if there is no such file, or if it declares none."""
    from sglcore.device.discovery import GROUP

    for folder in file.parents:
        declared = folder / "pyproject.toml"
        if declared.is_file():
            points = tomllib.loads(declared.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
            return next(iter(points.get(GROUP, {})), "")
    return ""


@pytest.fixture(scope="session")
def conformance_kits(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Run], Kit]]:
    """Fixture: a function that returns the kit of a run's device. Each kit is made once in a
    session, at the first call, and closed at its end."""
    from sglcore.conformance.kit_run import Kit

    kits: dict[str, Kit] = {}

    def kit_of(run: Run) -> Kit:
        name = run.target.name
        if name not in kits:
            folder = tmp_path_factory.mktemp(f"conformance-{name}")
            kits[name] = Kit(run.target, folder, _settings(pytestconfig))
        return kits[name]

    yield kit_of
    for kit in kits.values():
        kit.close()


def _settings(config: pytest.Config) -> dict[str, Any]:
    """Return the settings of `--conform-set` by name, each converted as EngineConfig converts its
    field from an environment variable. Raises ConfigError for an invalid value."""
    from sglcore.config.engine_config import PREFIX, resolve_config

    given = dict(text.partition("=")[::2] for text in _option(config, "--conform-set"))
    found = resolve_config({}, {f"{PREFIX}{name.upper()}": value for name, value in given.items()})
    return {name: getattr(found, name) for name in given}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the outcomes of a pytest-xdist worker over to the main process, as plain values; does
    nothing elsewhere. pytest calls it."""
    handed = getattr(session.config, "workeroutput", None)  # foreign: pytest-xdist's attribute of a worker
    if handed is not None:
        handed["conformance"] = {
            name: {
                "asked": sorted(run.asked),
                "outcomes": [asdict(outcome) for outcome in run.outcomes],
                "problems": run.problems,
                "was_named": run.was_named,
            }
            for name, run in session.config.stash[RUNS].items()
        }


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the outcomes of a pytest-xdist worker to the runs of the main process, so that a result
    has the cases of all workers. pytest-xdist calls it when a worker has ended."""
    handed = getattr(node, "workeroutput", {})  # foreign: pytest-xdist's attribute of a node
    for name, values in handed.get("conformance", {}).items():
        from sglcore.conformance.gaps import read_gaps, read_skips
        from sglcore.conformance.kit_run import Outcome

        runs = node.config.stash[RUNS]
        if name not in runs:
            target = _target(name)
            rows = read_gaps(target.folder), read_skips(target.folder)
            runs[name] = Run(target, *rows, was_named=values["was_named"])
        runs[name].asked.update(values["asked"])
        runs[name].outcomes += [Outcome(**outcome) for outcome in values["outcomes"]]
        runs[name].problems += [text for text in values["problems"] if text not in runs[name].problems]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a line for each device on which laws ran and one for each wider tolerance, and write
    the result to the file of `--conform-result`, if given. pytest calls it at the end; in an xdist
    worker it does nothing."""
    is_worker = hasattr(config, "workerinput")  # foreign: pytest-xdist's attribute of a worker
    ran = [] if is_worker else [run for run in config.stash[RUNS].values() if run.outcomes]
    if not ran:
        return
    from sglcore.conformance.catalogue import LAWS
    from sglcore.conformance.fixture import tolerance_text, tolerance_values
    from sglcore.conformance.result import make_result, verdict, write_result

    file: Path | None = _option(config, "--conform-result")
    for run in ran:
        counts = {
            word: sum(outcome.verdict == word for outcome in run.outcomes) for word in ("passed", "failed", "skipped")
        }
        what = ", ".join(f"{count} {word}" for word, count in counts.items())
        terminalreporter.write_line(
            f"{run.target.name}: {verdict(run.outcomes, run.gaps, run.problems, run.not_run)} ({what})"
        )
        errors = [(outcome.law, outcome.errors) for outcome in run.outcomes]
        for item in tolerance_values(run.target.fixture(), LAWS, errors):
            terminalreporter.write_line(f"wider than the law: {tolerance_text(item)}")
        if file is not None:
            values = make_result(
                run.target,
                run.outcomes,
                run.gaps,
                level=_option(config, "--conform-level"),
                hardware=_option(config, "--conform-hardware"),
                problems=run.problems,
                not_run=run.not_run,
            )
            write_result(file, values)
            terminalreporter.write_line(f"written: {file}")
