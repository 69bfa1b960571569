"""The folder of one server's socket files. A killed server cannot remove its folder, so the next
server does."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import zmq

from sglcore.serving.replicas.channel import OF_BEATS

PREFIX = "sglcore-"
SHORT_FOLDER = "/tmp"
SOCKET_NAME_BYTES = len(f"/{PREFIX}00000000/0000-00000000{OF_BEATS}") + 1
"""Bytes of a socket file's path after the folder for temporary files, with the terminating byte."""
LOCK = "lock"
"""The file that a server keeps locked while it lives; the system releases the lock however the
server ends."""


class SocketFolder:
    """A new folder that only its owner may enter: in the folder for temporary files, or in /tmp if
    TMPDIR is so long that the system would refuse the path of a socket file there. `name`: its
    path. As a context manager it returns the path, and removes the folder at the end."""

    def __init__(self) -> None:
        """Remove folders of servers that have ended, in both places, and make a new one."""
        temporary = tempfile.gettempdir()
        for place in dict.fromkeys((temporary, SHORT_FOLDER)):
            sweep(Path(place))
        is_long = len(os.fsencode(temporary)) + SOCKET_NAME_BYTES > zmq.IPC_PATH_MAX_LEN
        usable = is_long and os.access(SHORT_FOLDER, os.W_OK | os.X_OK)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=SHORT_FOLDER if usable else None)
        self.name = self._folder.name
        self._lock = _locked(Path(self.name))

    def cleanup(self) -> None:
        """Remove the folder with its files, and release its lock. Idempotent."""
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


def sweep(place: Path) -> None:
    """Remove the folders in `place` that servers of this user left: their lock file is there and no
    process has locked it. Errors are ignored."""
    with suppress(OSError):
        for folder in list(place.glob(f"{PREFIX}*")):
            with suppress(OSError):
                if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and _is_left(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int | None:
    """Lock the folder and return the lock file's descriptor; None if files cannot be locked: then
    the folder gets no lock file, and `sweep` leaves it. The lock file gets its name only once it is
    locked."""
    descriptor = os.open(folder / f"{LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    os.rename(folder / f"{LOCK}.new", folder / LOCK)
    return descriptor


def _is_left(folder: Path) -> bool:
    """Return whether no process has locked the folder's lock file. Raises OSError if it has no lock
    file."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
