"""The log: one line per request, nothing of its content, and no failure from a full disk."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

import pytest
from starlette.types import Receive, Scope, Send

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.serving.http.logs import Logs
from sglcore.serving.http.middleware.exchanges import Exchange, line
from sglcore.serving.replicas.metrics.server_metrics import Metrics
from tests.serving.wrapped import call, echo, wrapped

SECRET = "tell nobody of the treasure"


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Restore the levels of the loggers."""
    loggers = [logging.getLogger(name) for name in ("sglcore", "uvicorn")]
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.level, logger.handlers, logger.propagate = level, handlers, propagate


def written(tmp_path: Path, *paths: str, level: str = "info", **headers: str) -> list[str]:
    """The log lines of requests to a wrapped echo."""
    path = tmp_path / "log"
    logs = Logs(ServerConfig(log_file=str(path), log_level=level))
    app, _ = wrapped(echo, ServerConfig(api_key=("key-of-the-house",)))
    for each in paths:
        asyncio.run(call(app, each, headers={"authorization": f"Bearer {SECRET}", **headers}, chunks=[SECRET.encode()]))
    logs.close()
    assert logs.lost == 0
    return path.read_text().splitlines()


def test_a_request_is_one_line_with_id_status_and_time_and_without_its_secrets(tmp_path: Path) -> None:
    lines = written(tmp_path, "/v1/completions", **{"x-request-id": "my-id"})
    assert len(lines) == 1
    assert ' info sglcore.requests id=my-id client=127.0.0.1 POST "/v1/completions" status=401 ms=' in lines[0]
    assert SECRET not in lines[0] and "key-of-the-house" not in lines[0]


def test_a_path_can_not_make_lines_of_its_own(tmp_path: Path) -> None:
    lines = written(tmp_path, "/a\n2026 forged \x1b[31m\udcff")
    assert len(lines) == 1 and "\\n2026 forged \\u001b[31m\\udcff" in lines[0]


def test_probes_are_logged_only_when_asked_for(tmp_path: Path) -> None:
    quiet = ("/livez", "/readyz", "/startupz", "/health", "/metrics", "/server_info/stats")
    assert [text.split('"')[1] for text in written(tmp_path, *quiet, "/", "/server_info", "/v1/models", "/livez/")] == [
        "/",
        "/server_info",
        "/v1/models",
        "/livez/",
    ]
    assert len(written(tmp_path, *quiet, level="debug")) == 4 + len(quiet)


def test_the_line_has_the_tokens_and_times_of_every_prompt() -> None:
    metrics = Metrics("tiny", "1", list)
    exchange = Exchange("id", "POST", "/v1/completions", status=200)
    for reason in ("stop", "length"):
        clock = metrics.clock()
        clock.on_prompt(10, 4)
        clock.on_first_tokens(1)
        clock.on_tokens(2, 0.1)
        clock.on_end(reason)
        exchange.clocks.append(clock)
    refused = metrics.clock()  # it never reached an engine
    refused.on_prompt(99, 0)
    exchange.clocks.append(refused)
    exchange.clocks[0].first_token_seconds, exchange.clocks[1].first_token_seconds = 0.5, 0.25
    assert "prompt_tokens=20 cached_tokens=8 tokens=6 first_token_ms=250.0 " in line(exchange)
    assert line(exchange).endswith("ended=length,stop")


def test_a_traceback_stays_one_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = Logs(ServerConfig(log_file=str(path)))
    try:
        raise ValueError("planted")
    except ValueError:
        logging.getLogger("sglcore.serving").exception("it failed")
    logs.close()
    lines = path.read_text().splitlines()
    assert lines[0].endswith("error sglcore.serving it failed")
    assert lines[-1] == "    ValueError: planted" and all(each.startswith("    ") for each in lines[1:])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_disturbs_no_request_and_is_counted() -> None:
    logs = Logs(ServerConfig(log_file="/dev/full"))
    app, frontend = wrapped(echo, ServerConfig())
    frontend.metrics.lost_log_records = lambda: logs.lost
    statuses = {asyncio.run(call(app)).status for _ in range(5)}
    logs.close()
    assert statuses == {200} and logs.lost == 5
    assert "sglcore_log_records_lost_total 5.0" in frontend.metrics.page().decode()


@pytest.mark.parametrize("closed", [True, False])
def test_a_process_without_stderr_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: bool) -> None:
    stream = (tmp_path / "gone").open("w")
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    logs = Logs(ServerConfig())
    assert asyncio.run(call(wrapped(echo, ServerConfig())[0])).status == 200
    logs.close()
    assert logs.lost == 1


def test_a_writer_that_hangs_holds_up_nobody_and_lines_beyond_the_queue_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck:
        def write(self, text: str) -> None:
            release.wait()

        def flush(self) -> None: ...

    release = threading.Event()
    monkeypatch.setattr(sys, "stderr", cast(TextIO, Stuck()))
    monkeypatch.setattr("sglcore.serving.http.logs._LONGEST_QUEUE", 10)
    logs = Logs(ServerConfig())
    app, _ = wrapped(echo, ServerConfig())
    statuses = [asyncio.run(call(app)).status for _ in range(20)]
    assert statuses == [200] * 20 and logs.lost >= 9
    release.set()
    logs.close()


def test_a_log_that_can_not_be_opened_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_file .* cannot be opened: Is a directory"):
        Logs(ServerConfig(log_file=str(tmp_path)))


def test_lines_have_the_time_of_utc_and_other_peoples_information_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        logs = Logs(ServerConfig(log_file=str(tmp_path / "log")))
        record = logging.makeLogRecord(
            {"created": 0.0, "msecs": 7.0, "levelno": logging.INFO, "levelname": "INFO", "msg": "said"}
        )
        logging.getLogger("sglcore").handle(record)
        assert not logging.getLogger("uvicorn").isEnabledFor(logging.INFO)
        logs.close()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert (tmp_path / "log").read_text().startswith("1970-01-01T00:00:00.007Z ")


def test_after_closing_the_loggers_are_free(tmp_path: Path) -> None:
    Logs(ServerConfig(log_file=str(tmp_path / "log"))).close()
    assert logging.getLogger("sglcore").handlers == [] and logging.getLogger("sglcore").propagate


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("planted")


def test_an_error_that_nobody_caught_is_in_the_log_under_the_id_that_the_client_gets(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = Logs(ServerConfig(log_file=str(path)))
    answer = asyncio.run(call(wrapped(fails, ServerConfig())[0]))
    logs.close()
    name = answer.error["message"].rpartition(" ")[2]
    assert name in path.read_text() and "ValueError: planted" in path.read_text()


def test_standard_error_stays_open_and_a_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = (tmp_path / "error").open("w")
    monkeypatch.setattr(sys, "stderr", stream)
    for path in (None, str(tmp_path / "log")):
        logs = Logs(ServerConfig(log_file=path))
        logging.getLogger("sglcore").warning("said")
        written_to = logs._stream
        assert written_to is not None
        logs.close()
        assert written_to.closed is (path is not None) and logs.lost == 0
    stream.close()


def test_a_line_is_in_the_file_before_the_log_is_closed(tmp_path: Path) -> None:
    logs = Logs(ServerConfig(log_file=str(tmp_path / "log")))
    logging.getLogger("sglcore").warning("said")
    end = time.monotonic() + 60.0
    while not (tmp_path / "log").read_text() and time.monotonic() < end:
        time.sleep(0.001)
    assert (tmp_path / "log").read_text().endswith("warning sglcore said\n")
    logs.close()


def test_closing_leaves_the_handlers_of_others() -> None:
    logs, other = Logs(ServerConfig()), logging.NullHandler()
    logging.getLogger("sglcore").addHandler(other)
    logs.close()
    logs.close()
    assert logging.getLogger("sglcore").handlers == [other]


def test_whatever_a_line_holds_it_is_one_record_and_what_can_not_be_written_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = Logs(ServerConfig(log_file=str(path)))
    for mark in ("\n", "\r", "\r\n", "\v", "\x1c", "\x85", "\u2028"):
        logging.getLogger("sglcore").warning("one%stwo", mark)
    logging.getLogger("sglcore").warning("%d", "no number")
    try:
        raise ValueError("planted")
    except ValueError:
        logging.getLogger("sglcore").warning("it went on", exc_info=True)
    logs.close()
    lines = path.read_text().splitlines()
    records = [line for line in lines if not line.startswith("    ")]
    assert len(records) == 8 and all(" warning sglcore " in line for line in records)
    assert lines.count("    two") == 7 and lines[-1] == "    ValueError: planted" and logs.lost == 1
