"""What the server tells of itself: counters under their names, and each probe in each state."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.core.ledger import Row
from sglcore.serving.apis.server.info import OF_ENGINE
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.replicas.metrics.health import Health
from tests.serving.replicas.test_metrics import NUMBERS, STATS
from tests.serving.stubs import Application, call, make_frontend

COUNTED = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "running": "running",
    "waiting": "waiting",
    "cached_tokens": "hit_tokens",
    "prompt_tokens_computed": "computed_prompt_tokens",
    "requests": "requests",
    "hisparse_rows": "swap_rows",
    "hisparse_hits": "swap_hits",
}
"""Names in the answer -> fields of the numbers."""


def counted(numbers: Any) -> dict[str, Any]:
    return {name: getattr(numbers, field) for name, field in COUNTED.items()}


def with_engines() -> ChatFrontend:
    """A frontend whose only engine has other numbers than the sum over those that ended too."""
    process = SimpleNamespace(name="process 7")
    engine = SimpleNamespace(number=3, process=process, report_age=0.12345, state="silent", stats=STATS)
    frontend: Any = make_frontend()
    frontend.supervisor = SimpleNamespace(replicas={3: engine}, deaths=2)
    frontend.stats = lambda: NUMBERS
    return frontend


def test_counters_are_the_sums_of_all_engines_and_those_of_each() -> None:
    before = time.time()
    found = call(with_engines(), "GET", "/server_info/stats").json()
    (engine,) = found.pop("replicas")
    assert before <= found.pop("time") <= time.time() and found.pop("deaths") == 2
    used = 1 - (NUMBERS.free_pages + NUMBERS.unused_cached_pages) / NUMBERS.num_pages
    assert found.pop("kv_used") == pytest.approx(used)
    assert found == {**counted(NUMBERS), "verified_steps": 0, "proposed_tokens": 0, "accepted_tokens": 0}
    assert engine == {
        "number": 3,
        "process": "process 7",
        "report_age": 0.123,
        "state": "silent",
        **counted(STATS),
        "kv_used": 0.5,
        "verified_steps": 10,
        "proposed_tokens": 21,
        "accepted_tokens": 7,
    }


def test_each_probe_answers_for_its_own_question() -> None:
    health = Health()
    served = Application(make_frontend(health=health))
    for change, well in (
        (lambda: health.begin("weights"), {"/livez"}),
        (health.become_ready, {"/livez", "/readyz", "/startupz", "/health"}),
        (lambda: health.begin("silent"), {"/livez", "/startupz"}),
        (health.drain, {"/livez", "/startupz"}),
        (lambda: health.die("the engine ended"), {"/startupz"}),
    ):
        change()
        for path in ("/livez", "/readyz", "/startupz", "/health"):
            answers = [served.send(method, path) for method in ("GET", "HEAD")]
            statuses = [each.status_code for each in answers]
            assert statuses == [200 if path in well else 503] * 2, (path, health.phase)
            assert answers[0].json()["phase"] == health.phase


def test_the_page_is_sent_again_only_to_who_has_another_one() -> None:
    served = Application(make_frontend())
    first = served.send("GET", "/")
    mark, length = first.headers["etag"], len(first.content)
    again, other = (served.send("GET", "/", if_none_match=each) for each in (mark, '"another"'))
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", mark)
    assert (other.status_code, len(other.content)) == (200, length) and length > 0
    assert {each.headers["cache-control"] for each in (first, again, other)} == {"no-cache"}


@pytest.mark.parametrize("keys", [(), ("a-key",)])
def test_the_document_has_keys_where_the_server_has_and_no_status_that_it_never_sends(keys: tuple[str, ...]) -> None:
    frontend: Any = make_frontend()
    frontend.config = ServerConfig(api_key=keys)
    document = call(frontend, "GET", "/openapi.json").json()
    schemes = document["components"].get("securitySchemes", {})
    kinds = [(each["type"], each.get("scheme") or each["name"]) for each in schemes.values()]
    assert kinds == ([("http", "bearer"), ("apiKey", "x-api-key")] if keys else [])
    assert document.get("security", []) == [{name: []} for name in schemes], "one of them is enough"
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) > 40 and not [each for each in operations if "422" in each["responses"]]
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()


def test_what_runs_and_why_is_told_under_its_own_names() -> None:
    frontend: Any = make_frontend()
    row = Row("tool parser", "auto", "hermes", "its template", "--tool-parser")
    kept = {"tool_parser": "hermes", "tool_reason": "tools", "reasoning_parser": "think", "reasoning_reason": "thinks"}
    frontend.format = SimpleNamespace(rows=(row,), **kept)
    frontend.names, frontend.config = ("first", "second"), ServerConfig(port=1234, max_n=7, replicas=3)
    facts: dict[str, Any] = {name: name for name in OF_ENGINE}
    known = {
        "ledger": ({"topic": "graphs"},),
        "seconds": {"weights": 1.5},
        "limits": {"vocab_size": 9},
        "max_model_len": 64,
    }
    frontend.info = SimpleNamespace(**{**facts, **known, "generates": True})
    found = call(frontend, "GET", "/server_info").json()
    assert {name: found[name] for name in kept} == kept
    assert (found["model"], found["served_model_names"], found["phase"]) == ("first", ["first", "second"], "ready")
    assert [each["topic"] for each in found["ledger"]] == ["graphs", "tool parser"]
    assert (found["seconds"], found["limits"]) == ({"weights": 1.5}, {"vocab_size": 9})
    assert {name: found[name] for name in facts if name not in known} == {
        **{name: name for name in facts if name not in known},
        "generates": True,
    }
    limits = found["server_limits"]
    assert limits["max_n"] == 7 and limits["drain_timeout"] == 30.0 and not {"port", "replicas", "host"} & limits.keys()
    frontend.info = None
    before = call(frontend, "GET", "/server_info").json()
    assert [each["topic"] for each in before["ledger"]] == ["tool parser"] and before["seconds"] == {}
    assert {before[name] for name in OF_ENGINE if name not in ("ledger", "seconds")} == {None}


def test_the_metrics_are_text_of_their_own_kind() -> None:
    answer = call(make_frontend(), "GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "sglcore_build_info" in answer.text


def test_each_engine_has_its_own_counters_in_the_order_of_the_engines() -> None:
    frontend: Any = with_engines()
    (first,) = frontend.supervisor.replicas.values()
    process = SimpleNamespace(name="process 8")
    frontend.supervisor.replicas[5] = SimpleNamespace(
        number=5, process=process, report_age=2.0, state="ready", stats=NUMBERS
    )
    engines = call(frontend, "GET", "/server_info/stats").json()["replicas"]
    assert [(each["number"], each["process"], each["state"]) for each in engines] == [
        (3, first.process.name, "silent"),
        (5, "process 8", "ready"),
    ]
    assert [each["prompt_tokens"] for each in engines] == [STATS.prompt_tokens, NUMBERS.prompt_tokens]
