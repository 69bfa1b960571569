"""The server's log: lines go through a bounded queue to a thread that writes them, so that a slow,
full or missing disk or terminal blocks no request. Lines that could not be written are counted."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError

NAMES = ("sglcore", "uvicorn")
"""Names of the loggers whose lines are written."""
_LONGEST_QUEUE, _FLUSH_SECONDS = 10_000, 2.0


class Logs:
    """The open log of the process; there may be one at a time. Until `close`, the loggers NAMES
    write only through its queue; `close` writes the remaining lines."""

    def __init__(self, config: ServerConfig) -> None:
        """Open `log_file` to append to it, or use standard error, start the log's thread, and
        redirect the loggers NAMES, at the level `log_level`. Raises ConfigError if the file cannot
        be opened."""
        self._stream = _opened(config.log_file)
        self._is_file = config.log_file is not None
        self._queue: queue.Queue[str | None] = queue.Queue(_LONGEST_QUEUE)
        self._handler = _Queued(self._queue)
        self._unwritten = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        for logger in map(logging.getLogger, NAMES):
            logger.handlers = [self._handler]
            logger.propagate = False
        level = logging.getLevelNamesMapping()[config.log_level.upper()]
        logging.getLogger("sglcore").setLevel(level)
        logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING) if level > logging.DEBUG else level)

    @property
    def lost(self) -> int:
        """Number of lines so far that could not be written or did not fit into the queue."""
        return self._handler.dropped + self._unwritten

    def close(self) -> None:
        """Write the remaining lines, and let the loggers NAMES pass lines on to the root logger;
        handlers that they had before `Logs` do not come back. Waits at most 2 s for a place in the
        queue, and 2 s for the thread. Idempotent."""
        for logger in map(logging.getLogger, NAMES):
            logger.handlers = [handler for handler in logger.handlers if handler is not self._handler]
            logger.propagate = True
        try:
            self._queue.put(None, timeout=_FLUSH_SECONDS)
        except queue.Full:
            return
        self._thread.join(_FLUSH_SECONDS)

    def _write(self) -> None:
        """Write line by line, on the log's thread, until `close`; an error loses one line only."""
        while (text := self._queue.get()) is not None:
            self._unwritten += not _is_written(self._stream, f"{text}\n")
        if self._is_file and self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.close()


class _Queued(logging.Handler):
    """A logging handler that puts formatted lines into a queue without waiting. `dropped`: number
    of lines that did not fit or could not be formatted."""

    def __init__(self, lines: queue.Queue[str | None]) -> None:
        super().__init__()
        self.setFormatter(_Lines())
        self.dropped = 0
        self._queue = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(self.format(record))
        except Exception:
            self.dropped += 1


class _Lines(logging.Formatter):
    """Formats a record as one line: time in UTC with milliseconds, level, logger, text; further
    lines, as of a traceback, are indented."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
        indented = "\n    ".join(safe.splitlines())
        return f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.name} {indented}"


def _is_written(stream: TextIO | None, text: str) -> bool:
    """Write a text, flush, and return whether all of it was written; False also for None, a process
    without standard error. Raises nothing for an error of the disk."""
    if stream is None:
        return False
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _opened(path: str | None) -> TextIO | None:
    if path is None:
        return sys.stderr
    try:
        return Path(path).open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log_file {path} cannot be opened: {error.strerror}", remedy="correct log_file") from None
