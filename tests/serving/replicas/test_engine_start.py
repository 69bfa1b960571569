"""How an engine is started: what its process is given, what its settings become, and when it says
that it is ready."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.core.errors import ConfigError, WorkerLost, no_space
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.choice import ChosenDevice
from sglcore.engine.disaggregation.disaggregation_start import PageOptions
from sglcore.serving.replicas import engine_process
from sglcore.serving.replicas.engine_launch import LocalLauncher, LocalProcess
from sglcore.serving.replicas.engine_process import fingerprint, model_info, start_service
from sglcore.serving.replicas.ipc import Address, EngineSpec, Failed, Phase, Ready
from sglcore.serving.replicas.warm_up import WarmUpError
from sglcore.worker.model_worker import Limits

LIMITS = Limits(1024, 8, 16, 64, 1024, 2000)
DEVICE = ChosenDevice("acme", "sglcore-acme", "1.5", 1, "", 2)


def started(tmp_path: Any) -> Any:
    ledger = DecisionLedger()
    ledger.record(Row("graphs", "auto", "full", "it can"))
    report = SimpleNamespace(hardware=SimpleNamespace(evidence="a card"))
    return SimpleNamespace(
        worker=SimpleNamespace(limits=LIMITS),
        model_path=tmp_path,
        overlap=False,
        check=int,
        seconds={"weights": 2.0},
        ledger=ledger,
        choice=SimpleNamespace(chosen=DEVICE, report=report),
    )


class Channel:
    """Keeps what is sent and what is watched."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.watched: list[int] = []
        self.send, self.watch = self.sent.append, self.watched.append


class Start:
    """A start whose parts are played; `asked` keeps what each part was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, has_pages: bool = False) -> None:
        self.asked: dict[str, Any] = {}
        self.channel = Channel()
        self._pages = SimpleNamespace(fileno=lambda: 17) if has_pages else None
        whole = started(tmp_path)
        for name, found in (
            ("start", whole),
            ("adopt", None),
            ("discover", "found"),
            ("eos_token_ids", frozenset({9, 2, 5000})),
            ("Meter", "meter"),
            ("open_pages", "pages"),
            ("_grammars", "grammars"),
            ("EngineService", "service"),
        ):
            monkeypatch.setattr(engine_process, name, self._noting(name, found))
        monkeypatch.setattr(engine_process, "TokenEngine", self._engine)
        monkeypatch.setattr(engine_process, "warm_up", self._warm_up)

    def _noting(self, name: str, found: Any) -> Any:
        def play(*given: Any) -> Any:
            self.asked[name] = given
            return found

        return play

    def _engine(self, *given: Any, **named: Any) -> Any:
        self.asked["engine"] = (given, named)
        self.engine = SimpleNamespace(pages=self._pages, limits=LIMITS, max_requests=24, eos_ids=given[1])
        return self.engine

    def _warm_up(self, engine: Any) -> None:
        assert engine is self.engine
        self.asked["ready before"] = [each for each in self.channel.sent if isinstance(each, Ready)]

    def run(self, chosen: str = "", pages: PageOptions = PageOptions(), **settings: Any) -> Any:
        spec = EngineSpec(Address("ipc://x"), plain_config(EngineConfig(**settings)), 0, chosen, pages)
        return start_service(spec, self.channel, int)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("dp", "caches"), [(1, True), (2, False)])
def test_an_engine_has_the_settings_of_its_configuration_and_is_ready_after_its_first_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, dp: int, caches: bool
) -> None:
    start = Start(monkeypatch, tmp_path)
    assert start.run(dp=dp, prefix_cache=caches, model="m") == "service"
    given, named = start.asked["engine"]
    assert given == ("meter", frozenset({9, 2, 5000}))
    assert (named["overlap"], named["prefix_cache"], named["shards"], named["open_pages"]) == (
        False,
        caches,
        dp,
        "pages",
    )
    assert named["open_grammars"]() == "grammars" and start.asked["start"][0].model == "m"
    phase, ready = start.channel.sent
    assert phase == Phase("warm-up", 0, 1) and isinstance(ready, Ready) and start.asked["ready before"] == []
    assert ready.info.seconds.keys() == {"weights", "warm-up"} and ready.info.seconds["weights"] == 2.0
    assert start.asked["EngineService"] == (start.engine, "meter", start.channel, int, int)


@pytest.mark.parametrize("has_pages", [False, True])
def test_an_engine_that_exchanges_pages_wakes_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, has_pages: bool
) -> None:
    start = Start(monkeypatch, tmp_path, has_pages)
    start.run()
    assert start.channel.watched == ([17] if has_pages else [])


def test_a_device_that_the_parent_chose_is_adopted_and_else_the_engine_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    start = Start(monkeypatch, tmp_path)
    start.run()
    assert "adopt" not in start.asked and start.asked["start"][2] is None
    start.run(DEVICE.encode(), device="acme:2")
    assert start.asked["adopt"] == (DEVICE.encode(), "acme:2", "found") and start.asked["start"][2] == DEVICE


def test_the_facts_of_an_engine_are_plain_values(tmp_path: Any) -> None:
    found = started(tmp_path)
    engine: Any = SimpleNamespace(limits=LIMITS, max_requests=24, eos_ids=frozenset({9, 2}))
    info = model_info(found, engine, {"weights": 2.0})
    assert (info.device, info.device_evidence, info.distribution, info.version) == (
        str(DEVICE),
        "a card",
        "sglcore-acme",
        "1.5",
    )
    assert info.limits == {**asdict(LIMITS), "max_requests": 24} and info.max_model_len == 1024
    assert (info.eos_ids, info.generates, info.seconds) == ((2, 9), True, {"weights": 2.0})
    assert [row["topic"] for row in info.ledger] == ["graphs"]
    rows: list[dict[str, object]] = [dict(row) for row in info.ledger]
    assert info.fingerprint == fingerprint(tmp_path, "acme sglcore-acme 1.5", rows)
    sent = msgspec.msgpack.encode(Ready(info))
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(sent, type=Ready)) == sent


def test_a_grammar_may_end_with_those_end_tokens_that_the_model_can_draw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    asked: list[Any] = []
    codec, made = SimpleNamespace(tokenizer="tokenizer"), ("grammars", Row("grammar", "auto", "one", "it is there"))
    for name, found in (("open_codec", codec), ("Vocabulary", "vocabulary"), ("open_grammars", made)):
        monkeypatch.setattr(
            engine_process, name, lambda *given, found=found, **named: asked.append((given, named)) or found
        )
    whole = started(tmp_path)
    for size in (2000, 5001):
        whole.worker.limits = replace(LIMITS, vocab_size=size)
        ends = frozenset({5000, 9, 2})
        assert engine_process._grammars(EngineConfig(grammar_backend="xgrammar"), whole, ends) == "grammars"
        codec_asked, vocabulary, backend = asked[-3:]
        assert codec_asked == ((tmp_path,), {"skips": False}) and backend[0] == ("xgrammar", "vocabulary")
        assert vocabulary[0] == ("tokenizer", size, (2, 9) if size == 2000 else (2, 9, 5000))
    assert [each["topic"] for each in whole.ledger.as_json()][-2:] == ["grammar"] * 2


def row(topic: str, effective: str) -> dict[str, object]:
    return {"topic": topic, "effective": effective}


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ([row("graphs", "full; fast")], [row("graphs", "full; slow")], True),
        ([row("graphs", "full")], [row("graphs", "none")], False),
        ([row("device", "acme:0")], [row("device", "acme:1")], True),
        ([row("kv cache", "9 pages")], [], True),
        ([row("draft model", "a")], [], True),
        ([row("speculative", "off; by choice"), row("draft model", "a")], [row("speculative", "off")], True),
        ([row("speculative", "eagle3"), row("draft model", "a")], [row("speculative", "eagle3")], False),
        ([row("speculative", "eagle3")], [row("speculative", "ngram")], False),
        ([row("dtype", "float32"), row("graphs", "full")], [row("graphs", "full")], False),
    ],
)
def test_a_fingerprint_has_the_decisions_that_may_change_a_result(
    first: Any, second: Any, is_same: bool, tmp_path: Any
) -> None:
    assert (fingerprint(tmp_path, "x", first) == fingerprint(tmp_path, "x", second)) is is_same


def test_a_fingerprint_is_that_of_all_files_by_name_and_content_and_of_a_single_one(tmp_path: Any) -> None:
    found = set[str]()
    for name, content in (("a.json", "1"), ("a.json", "2"), ("b.txt", "1")):
        (tmp_path / name).write_text(content)
        found.add(fingerprint(tmp_path, "x", []))
    (tmp_path / "folder").mkdir()
    found.add(fingerprint(tmp_path, "x", []))
    assert len(found) == 3, "folders do not count"
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert fingerprint(tmp_path, "x", []) not in found
    single = tmp_path / "c.txt"
    assert fingerprint(single, "x", []) != fingerprint(tmp_path / "a.json", "x", [])


def test_a_child_has_its_own_variables_a_session_of_its_own_and_its_orders_as_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARED", "parent")
    monkeypatch.setenv("KEPT", "parent")
    asked: list[Any] = []
    written: list[bytes] = []

    async def create(*command: str, **given: Any) -> Any:
        asked.append((command, given))
        return SimpleNamespace(stdin=SimpleNamespace(write=written.append), pid=42)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    spec = EngineSpec(Address("ipc://x"), {"model": "a\nb"}, 3)
    process = asyncio.run(LocalLauncher().launch(spec, {"SHARED": "own", "NEW": "1"}))
    ((command, given),) = asked
    assert command == (sys.executable, "-m", "sglcore.serving.replicas.engine_process")
    assert {name: given["env"].get(name) for name in ("SHARED", "KEPT", "NEW")} == {
        "SHARED": "own",
        "KEPT": "parent",
        "NEW": "1",
    }
    assert given["start_new_session"] is True and given["stdin"] == asyncio.subprocess.PIPE
    (line,) = written
    assert line.count(b"\n") == 1 and msgspec.json.decode(line, type=EngineSpec) == spec
    assert (process.name, process.pid, process.last_words) == ("process 42", 42, "") and "NEW" not in os.environ


@pytest.mark.parametrize(("code", "killed"), [(None, 1), (0, 0), (-9, 0)])
def test_a_child_that_has_ended_is_not_killed_and_one_that_just_did_is_no_error(code: int | None, killed: int) -> None:
    kills: list[str] = []

    def kill() -> None:
        kills.append("kill")
        raise ProcessLookupError

    LocalProcess(SimpleNamespace(pid=1, returncode=code, kill=kill)).kill()  # pyright: ignore[reportArgumentType]
    assert len(kills) == killed


class Process:
    """An engine process whose parts are played: `told` has what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: Any) -> None:
        self.told: list[Any] = []
        self.ignored: list[int] = []
        self.lost: Any = None
        self._ends = ends
        line = io.BytesIO(msgspec.json.encode(EngineSpec(Address("tcp://h:1"), {}, 3)) + b"\nmore")
        monkeypatch.setattr(engine_process, "open", lambda *given, **named: line, raising=False)
        monkeypatch.setattr(engine_process.os, "_exit", self._exit)
        monkeypatch.setattr(engine_process.signal, "signal", lambda name, done: self.ignored.append(name))
        monkeypatch.setattr(engine_process.logging, "basicConfig", lambda **named: None)
        for name, play in (
            ("end_with_parent", lambda code: self.told.append(("parent", code))),
            ("Heartbeat", self._heartbeat),
            ("EngineChannel", self._channel),
            ("start_service", self._start),
        ):
            monkeypatch.setattr(engine_process, name, play)

    def _exit(self, code: int) -> None:
        raise SystemExit(code)

    def _heartbeat(self, address: Address) -> Any:
        self.heartbeat = SimpleNamespace(count="count", close=lambda: self.told.append("stop beats"))
        return self.heartbeat

    def _channel(self, address: Address, on_lost: Any) -> Any:
        self.lost = on_lost
        return SimpleNamespace(send=self.told.append, close=lambda: self.told.append("close"))

    def _start(self, spec: EngineSpec, channel: Any, on_round: Any) -> Any:
        assert (spec.replica, on_round) == (3, "count")
        if isinstance(self._ends, Exception):
            raise self._ends
        return SimpleNamespace(run=lambda: self._ends)


FULL = OSError(errno.ENOSPC, "No space left on device", "/disk/file")


@pytest.mark.parametrize(
    ("ends", "said", "code"),
    [
        (0, None, 0),
        (1, None, 1),
        (ConfigError("no checkpoint"), "no checkpoint", 2),
        (WarmUpError("no token"), "no token", 1),
        (ValueError("odd"), "ValueError: odd", 1),
        (FULL, no_space(FULL), 1),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_engine_process_says_why_it_ends_and_closes_what_it_opened(
    ends: Any, said: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(monkeypatch, ends)
    assert engine_process.main() == code
    failed = [] if said is None else [Failed(said, code)]
    assert process.told == [("parent", engine_process.PARENT_GONE), *failed, "close", "stop beats"]
    assert set(process.ignored) == {signal.SIGINT, signal.SIGTERM}, "the frontend ends it"


def test_an_engine_that_lost_its_worker_or_its_frontend_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, WorkerLost("rank 1 ended"))
    with pytest.raises(SystemExit) as ended:
        engine_process.main()
    (_, failed, closed) = process.told
    assert failed == Failed("rank 1 ended", WorkerLost.exit_code) and closed == "close", "what was said has been sent"
    assert ended.value.code == WorkerLost.exit_code
    with pytest.raises(SystemExit) as lost:
        process.lost()
    assert lost.value.code == engine_process.LINK_BROKE
