"""The folder of a server's sockets: its path is short enough, and it is removed even if the server
was killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.asyncio

from sglcore.serving.replicas import socket_folder
from sglcore.serving.replicas.channel import FrontendChannel
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
