"""The native core is compiled once per set of dependencies, by one of the processes that need it;
every kind of fault has a test."""

import pickle
import re
import threading
from pathlib import Path

import pytest

from sglcore_sim import KINDS, Fault, build


@pytest.fixture
def made_up_sources(tmp_path, monkeypatch):
    source = tmp_path / "core.cpp"
    source.write_text("int core;")
    monkeypatch.setenv("SGLSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "sources", lambda: (source,))
    return source


def test_the_binary_is_named_after_everything_it_depends_on(made_up_sources, monkeypatch):
    names = {build.fingerprint()}
    made_up_sources.write_text("long core;")
    names.add(build.fingerprint())
    monkeypatch.setattr(build.torch, "__version__", "0.0.0")
    names.add(build.fingerprint())
    monkeypatch.setattr(build, "FLAGS", ("-O3",))
    names.add(build.fingerprint())
    assert len(names) == 4


def test_several_that_want_it_at_once_compile_it_once(made_up_sources, monkeypatch):
    compiled, go = [], threading.Event()

    def slowly(target: Path) -> None:
        compiled.append(target)
        go.wait(0.2)
        target.write_bytes(b"binary")

    monkeypatch.setattr(build, "compile_all", slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(build.built())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert found == compiled * 4


def test_a_source_that_does_not_compile_says_what_the_compiler_said(made_up_sources):
    made_up_sources.write_text("this is no C++")
    with pytest.raises(RuntimeError, match="does not compile"):
        build.built()


def words(paths):
    return set(re.findall(r'"(\w+)"', "".join(path.read_text() for path in paths)))


def test_every_kind_of_fault_that_the_core_raises_has_a_test():
    raised = set(KINDS) & words(build.sources())
    tested = words(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    assert len(raised) > 12
    assert raised <= tested


def test_a_fault_crosses_processes():
    fault = pickle.loads(pickle.dumps(Fault("race", "two streams")))
    assert (fault.kind, str(fault)) == ("race", "[race] two streams")
