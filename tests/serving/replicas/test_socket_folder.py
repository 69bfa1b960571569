"""The folder of a server's sockets: its path is short enough, and it is removed even if the server
was killed. The channels in it drop no message, and leave no socket open."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from sglcore.core.errors import ConfigError
from sglcore.serving.replicas import socket_folder
from sglcore.serving.replicas.channel import (
    HEARTBEAT_MS,
    OF_BEATS,
    SILENCE_MS,
    EngineChannel,
    FrontendChannel,
    open_channel,
)
from sglcore.serving.replicas.ipc import Abort, Address, Failed, Flush
from sglcore.serving.replicas.socket_folder import PREFIX, SocketFolder, sweep

LONELY = """
import sys
from sglcore.serving.replicas.socket_folder import SocketFolder
folder = SocketFolder()
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("length", [1, 56, 57, 58, 59, 60, 200])
def test_a_channel_opens_however_long_the_path_for_temporary_files_is(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds and continuous integration set TMPDIR to a deeply nested folder."""
    short = tempfile.TemporaryDirectory(dir="/tmp")
    folder = Path(short.name, "x" * length) if length < 200 else tmp_path / ("x" * length)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def play() -> None:
        context = zmq.asyncio.Context()
        with SocketFolder() as name:
            FrontendChannel(context, f"ipc://{name}/9999-00000000").close()
        context.destroy(linger=0)

    asyncio.run(play())
    short.cleanup()


@pytest.fixture
def brief() -> Iterator[Path]:
    """A folder with a path short enough for a socket, wherever pytest has its own."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("is_long", [False, True])
def test_the_folder_of_a_server_that_was_killed_is_swept_at_the_next_start_and_that_of_a_living_one_is_not(
    is_long: bool, brief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TMPDIR, and where TMPDIR is too long for sockets."""
    short, usual = brief / "short", brief / ("x" * 100 if is_long else "t")
    for each in (short, usual):
        each.mkdir()
    monkeypatch.setattr(socket_folder, "SHORT_FOLDER", str(short))
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    killed, living = SocketFolder(), SocketFolder()
    assert Path(killed.name).parent == (short if is_long else usual)
    Path(killed.name, "0-00000000").touch()
    assert killed._lock is not None
    kept = killed._folder
    kept._finalizer.detach()  # pyright: ignore[reportAttributeAccessIssue]
    os.close(killed._lock)  # as the system does for a killed process
    killed._lock = None
    new = SocketFolder()
    assert not Path(killed.name).exists()
    assert Path(living.name).is_dir() and Path(new.name).is_dir()
    for each in (living, new):
        each.cleanup()
        each.cleanup()
        assert not Path(each.name).exists()


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{LONELY}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name = Path(owner.stdout.readline().strip())
        sweep(name.parent)
        assert name.is_dir(), "its owner lives"
        owner.kill()
    sweep(name.parent)
    assert not name.exists()


def test_what_has_no_lock_or_is_a_link_is_left_alone(tmp_path: Path) -> None:
    other, linked = tmp_path / f"{PREFIX}other", tmp_path / "elsewhere"
    for each in (other, linked):
        each.mkdir()
    (other / "data").touch()
    (linked / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(linked)
    sweep(tmp_path)
    sweep(tmp_path / "absent")
    assert (other / "data").exists() and linked.is_dir()


def test_the_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may remove any folder, such as root, must not remove those of others."""
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    sweep(tmp_path)
    assert left.is_dir()
    monkeypatch.undo()
    sweep(tmp_path)
    assert not left.exists()


def test_a_folder_without_locks_is_used_and_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems are."""
    closed: list[int] = []
    close = os.close

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(socket_folder.fcntl, "flock", refuse)
    monkeypatch.setattr(socket_folder.os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    with SocketFolder() as name:
        assert closed and not (Path(name) / "lock").exists()
        sweep(tmp_path)
        assert Path(name).is_dir()
    assert not Path(name).exists()


def test_a_sweep_keeps_no_file_open_and_makes_none(tmp_path: Path) -> None:
    for name in ("left", "bare"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    (tmp_path / f"{PREFIX}left" / "lock").touch()
    (tmp_path / f"{PREFIX}bare" / "data").touch()
    living = SocketFolder.__new__(SocketFolder)
    living.name = str(tmp_path / f"{PREFIX}living")
    Path(living.name).mkdir()
    lock = socket_folder._locked(Path(living.name))
    assert lock is not None and not os.get_inheritable(lock)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sweep(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(lock)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{PREFIX}bare", f"{PREFIX}living"]
    assert [each.name for each in (tmp_path / f"{PREFIX}bare").iterdir()] == ["data"]


def test_a_channel_whose_second_socket_can_not_be_opened_leaves_none_open(brief: Path) -> None:
    async def play() -> None:
        context = zmq.asyncio.Context()
        longest = zmq.IPC_PATH_MAX_LEN - len(f"{brief}/")
        for length in (longest, longest + 1):
            with pytest.raises(ConfigError, match="its path is too long; set TMPDIR"):
                FrontendChannel(context, f"ipc://{brief}/{'x' * length}")
        FrontendChannel(context, f"ipc://{brief}/{'x' * (longest - len(OF_BEATS))}").close()
        sockets = list(context._sockets)
        assert all(each.closed for each in sockets)
        context.destroy(linger=0)

    asyncio.run(play())


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_channel_drops_no_message_and_watches_a_network_alone(is_remote: bool, brief: Path) -> None:
    async def play() -> None:
        context = zmq.asyncio.Context()
        frontend, address = open_channel(context, "tcp://127.0.0.1:0" if is_remote else f"ipc://{brief}/0-0")
        engine = EngineChannel(address, lambda: None)
        assert (engine._watcher is not None) is is_remote
        beats = (engine._socket.heartbeat_ivl, engine._socket.heartbeat_timeout)
        assert beats == ((HEARTBEAT_MS, SILENCE_MS) if is_remote else (0, -1))
        for socket in (engine._socket, frontend._socket, frontend._beats):
            assert (socket.sndhwm, socket.rcvhwm) == (0, 0)
        for socket in (frontend._socket, frontend._beats):
            assert bool(socket.curve_server) is is_remote
        assert address.endpoint != address.beats
        engine.send(Failed("last words", 1))
        engine.close()
        assert await asyncio.wait_for(frontend.receive(), 60) == Failed("last words", 1), "what was sent before the end"
        frontend.close()
        context.destroy(linger=0)

    asyncio.run(play())


def test_an_engine_that_watches_a_descriptor_wakes_for_it_and_for_requests(brief: Path) -> None:
    async def play() -> None:
        context = zmq.asyncio.Context()
        frontend = FrontendChannel(context, f"ipc://{brief}/0-0")
        engine = EngineChannel(Address(frontend.endpoint))
        reading, writing = os.pipe()
        engine.watch(reading)
        assert engine.receive(0) == []
        os.write(writing, b"x")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert await asyncio.to_thread(engine.receive, 60_000) == [] and loop.time() - begin < 30
        os.read(reading, 1)
        for request in (Abort("a"), Flush("f")):
            frontend.send(request)
        found: list[Any] = []
        while len(found) < 2:
            found += await asyncio.to_thread(engine.receive, 60_000)
        assert found == [Abort("a"), Flush("f")] and loop.time() - begin < 30
        engine.close()
        frontend.close()
        for descriptor in (reading, writing):
            os.close(descriptor)
        context.destroy(linger=0)

    asyncio.run(play())
