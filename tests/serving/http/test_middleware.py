"""Each middleware passes valid requests, gives reasons for its refusals, and lets answers
stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.answer import CUT, WARNINGS
from sglcore.serving.http.middleware.bodies import FILES, FORM_BYTES
from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.server_errors import Failure, Unanswered
from tests.serving import idle_clock
from tests.serving.wrapped import Answered, call, echo, wrapped

KEYS = ("first-key", "second-key")
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def answer_of(config: ServerConfig, *given: Any, numbers: EngineStats | None = None, **named: Any) -> Answered:
    """The answer of a fresh wrapped echo to one request."""
    return run(call(wrapped(echo, config, numbers)[0], *given, **named))


class TestKeys:
    config = ServerConfig(api_key=KEYS)

    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("form", ["Bearer {}", "bearer  {}", "x-api-key"])
    def test_any_key_opens_in_either_header(self, key: str, form: str) -> None:
        headers = {"x-api-key": key} if form == "x-api-key" else {"authorization": form.format(key)}
        assert answer_of(self.config, headers=headers).status == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer "},
            {"authorization": "Bearer first-ke"},
            {"authorization": "Bearer first-keyy"},
            {"authorization": "Basic first-key"},
            {"authorization": "first-key"},
            {"x-api-key": "first-key,second-key"},
        ],
    )
    def test_anything_else_is_401_and_says_how_to_send_one(self, headers: dict[str, str]) -> None:
        answer = answer_of(self.config, headers=headers, chunks=[b"{}"])
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert "Authorization: Bearer" in answer.error["message"] and answer.headers["www-authenticate"] == "Bearer"
        assert "first-key" not in answer.body.decode()

    def test_every_key_is_compared_whichever_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglcore.serving.http.middleware import keys

        real, compared = keys.hmac.compare_digest, []

        def counted(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return real(one, other)

        monkeypatch.setattr(keys.hmac, "compare_digest", counted)
        assert answer_of(self.config, headers={"x-api-key": KEYS[0]}).status == 200
        assert compared == [(32, 32)] * len(KEYS)

    @pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/startupz", "/health"])
    def test_the_page_and_the_probes_are_open_for_reading_only(self, path: str) -> None:
        assert [answer_of(self.config, path, method=each).status for each in ("GET", "HEAD", "POST")] == [200, 200, 401]

    @pytest.mark.parametrize("path", ["/metrics", "/server_info", "/v1/models", "/livez/", "//", "/openapi.json"])
    def test_everything_else_needs_a_key(self, path: str) -> None:
        assert answer_of(self.config, path, method="GET").status == 401

    def test_errors_of_messages_have_the_schema_of_its_clients(self) -> None:
        answer = answer_of(self.config, "/v1/messages")
        assert b'{"type":"error","error":{"type":"authentication_error"' in answer.body

    def test_without_keys_nobody_needs_one(self) -> None:
        assert answer_of(ServerConfig(), "/metrics", method="GET").status == 200


class TestHosts:
    @pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "127.9.9.9", "LOCALHOST.:1"])
    def test_names_of_this_machine_are_answered(self, host: str) -> None:
        assert answer_of(ServerConfig(), headers={"host": host}).status == 200

    @pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "[fe80::1]", "127.evil.example"])
    def test_another_name_is_403_and_names_the_option(self, host: str) -> None:
        answer = answer_of(ServerConfig(), headers={"host": host})
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        assert "--allowed-hosts" in answer.error["message"]

    def test_more_names_can_be_allowed(self) -> None:
        config = ServerConfig(allowed_hosts=("Box.lan",))
        assert answer_of(config, headers={"host": "box.lan:80"}).status == 200
        assert answer_of(config, headers={"host": "other.lan:80"}).status == 403

    def test_a_star_is_any_name_and_any_page(self) -> None:
        config = ServerConfig(allowed_hosts=("*",), cors_origins=("*",))
        assert answer_of(config, headers={"host": "any.example", "origin": "http://other.example"}).status == 200

    def test_a_server_for_others_answers_to_any_name(self) -> None:
        assert answer_of(ServerConfig(host="0.0.0.0"), headers={"host": "any.example"}).status == 200

    def test_a_page_of_another_origin_is_refused_and_the_own_page_is_not(self) -> None:
        for origin in ("http://localhost:1", "http://LOCALHOST:1"):
            assert answer_of(ServerConfig(), headers={"host": "localhost:1", "origin": origin}).status == 200
        answer = answer_of(ServerConfig(), headers={"host": "localhost:1", "origin": "http://evil.example"})
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")

    @pytest.mark.parametrize("origin", ["http://localhost:2", "http://localhost", "http://127.0.0.1:1"])
    def test_a_page_of_another_server_on_this_machine_is_not_ours(self, origin: str) -> None:
        answer = answer_of(ServerConfig(), headers={"host": "localhost:1", "origin": origin})
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")

    @pytest.mark.parametrize("origin", ["null", "http://[", "http://a]b", "localhost:1"])
    def test_what_is_no_origin_is_no_page_of_ours(self, origin: str) -> None:
        assert answer_of(ServerConfig(), headers={"host": "localhost:1", "origin": origin}).status == 403


PREFLIGHT = {"origin": "http://app.example", "access-control-request-method": "POST"}


class TestCors:
    def test_it_is_off_unless_origins_are_named(self) -> None:
        answer = answer_of(ServerConfig(host="0.0.0.0"), headers={"origin": "http://app.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]

    def test_named_origins_may_ask_before_they_have_a_key(self) -> None:
        config = ServerConfig(cors_origins=("http://app.example",), api_key=KEYS)
        answer = answer_of(config, method="OPTIONS", headers=PREFLIGHT)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "http://app.example")
        asked = {**PREFLIGHT, "access-control-request-method": "DELETE"}
        assert answer_of(config, method="OPTIONS", headers=asked).status == 200
        refused = answer_of(config, headers={"origin": "http://app.example"})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "http://app.example")
        assert {"x-request-id", "request-id", WARNINGS, CUT, "retry-after"} == set(
            refused.headers["access-control-expose-headers"].split(", ")
        )

    def test_other_origins_get_no_permission(self) -> None:
        config = ServerConfig(host="0.0.0.0", cors_origins=("http://app.example",))
        answer = answer_of(config, method="OPTIONS", headers={**PREFLIGHT, "origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


class TestBodies:
    config = ServerConfig(max_request_bytes=100, body_timeout=0.05)

    def test_a_body_at_the_limit_arrives_whole(self) -> None:
        assert answer_of(self.config, chunks=[b"x" * 60, b"x" * 40]).body == b"100"

    def test_a_length_over_the_limit_is_413_with_the_number_and_the_remedy(self) -> None:
        answer = answer_of(self.config, headers={"content-length": "101"}, chunks=[b"x" * 101])
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert (
            "101 bytes, and at most 100" in answer.error["message"] and "--max-request-bytes" in answer.error["message"]
        )

    def test_chunks_over_the_limit_are_413_without_a_length(self) -> None:
        answer = answer_of(self.config, chunks=[b"x" * 60, b"x" * 60], ends=True)
        assert answer.status == 413 and "more than 100 bytes" in answer.error["message"]

    def test_a_client_that_is_still_sending_reads_the_answer_before_the_connection_closes(self) -> None:
        answer = answer_of(self.config, headers={"content-length": "9999999"}, chunks=[b"x" * 4096] * 50)
        assert answer.status == 413 and answer.headers["connection"] == "close"
        assert [message.get("more_body") for message in answer.sent] == [None, True, False]

    def test_a_body_that_does_not_come_is_408(self) -> None:
        answer = answer_of(self.config, chunks=[b"abc"], ends=False)
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.error["message"].startswith("3 bytes of the body arrived in 0.05 s")

    def test_a_compressed_body_is_415(self) -> None:
        assert answer_of(self.config, headers={"content-encoding": "gzip"}, chunks=[b"x"]).status == 415
        assert answer_of(self.config, headers={"content-encoding": "Identity"}, chunks=[b"x"]).status == 200

    def test_the_sum_of_arriving_bodies_is_bounded(self) -> None:
        async def crowd() -> list[int]:
            app, _ = wrapped(echo, self.config)
            slow = [asyncio.create_task(call(app, chunks=[b"x" * 99], ends=False)) for _ in range(33)]
            statuses = sorted(answer.status for answer in await asyncio.gather(*slow))
            return [*statuses, (await call(app, chunks=[b"x" * 99])).status]

        assert run(crowd()) == [408] * 32 + [429, 200]

    def test_files_of_batches_have_a_limit_a_time_and_a_sum_of_their_own(self) -> None:
        config = ServerConfig(max_request_bytes=100, max_batch_file_bytes=1000, batch_folder="f", body_timeout=0.05)

        async def sends(app: ASGIApp, size: int, pause: float, path: str = FILES) -> Answered:
            return await call(app, path, chunks=[b"x" * 100] * (size // 100), pause=pause)

        async def play() -> None:
            app, _ = wrapped(hold, config)
            assert (await sends(app, 1000, 0.03)).body == b"1000", "so much time for each hundred bytes"
            assert (await sends(app, 1000, 0.09)).status == 408
            assert (await sends(app, 1000, 0.0, "/v1/completions")).status == 413
            assert (await sends(app, 1000 + FORM_BYTES, 0.0)).body == b"66500"
            none, _ = wrapped(hold, replace(config, batch_folder=None))
            assert (await sends(none, 1000 + FORM_BYTES, 0.0)).status == 413, "where there are no batches"
            assert (await sends(app, 1200 + FORM_BYTES, 0.0)).error["message"].endswith("--max-batch-file-bytes")
            release.clear()
            held = [asyncio.create_task(sends(app, 1000 + FORM_BYTES, 0.0)) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert (await sends(app, 200, 0.0)).status == 429, "what is not on the disk yet counts"
            assert (await sends(app, 100, 0.0, "/v1/completions")).status == 200
            release.set()
            assert [answer.status for answer in await asyncio.gather(*held)] == [200, 200]
            assert (await sends(app, 200, 0.0)).status == 200

        async def hold(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == FILES:
                await release.wait()
            await echo(scope, receive, send)

        release = asyncio.Event()
        release.set()
        idle_clock.run(play(), 60.0)

    def test_the_app_never_sees_what_was_refused(self) -> None:
        seen: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope["path"])

        run(call(wrapped(app, self.config)[0], chunks=[b"x" * 200]))
        assert seen == []


class TestAdmission:
    def test_one_request_too_many_is_429_and_is_told_when_to_come_again(self) -> None:
        async def two() -> tuple[Answered, Answered]:
            app, frontend = wrapped(hold, ServerConfig(max_concurrent_requests=1))
            first = asyncio.create_task(call(app))
            await holding.wait()
            second = await call(app)
            assert (await call(app, "/livez", method="GET")).status == 200
            assert (await call(app, "/resume")).status == 200
            release.set()
            answers = await first, second
            assert (await call(app)).status == 200
            assert frontend.metrics.refusals["overloaded"] == 1
            return answers

        async def hold(scope: Scope, receive: Receive, send: Send) -> None:
            holding.set()
            if scope["path"].startswith("/v1/"):
                await release.wait()
            await echo(scope, receive, send)

        holding, release = asyncio.Event(), asyncio.Event()
        first, second = run(two())
        assert (first.status, second.status, second.error["code"]) == (200, 429, "overloaded")
        assert second.headers["retry-after"] == "1" and "max_concurrent_requests is 1" in second.error["message"]

    def test_a_full_queue_refuses_what_needs_the_model(self) -> None:
        config, numbers = ServerConfig(max_queued_requests=7), EngineStats(waiting=8)
        answer = answer_of(config, numbers=numbers)
        assert answer.status == 429 and "8 prompts wait, where max_queued_requests is 7" in answer.error["message"]
        assert answer_of(config, "/tokenize", numbers=numbers).status == 200
        assert answer_of(config, numbers=EngineStats(waiting=7)).status == 200

    def test_a_place_is_free_again_after_an_error(self) -> None:
        async def fails(scope: Scope, receive: Receive, send: Send) -> None:
            raise ValueError("planted")

        async def twice() -> list[int]:
            app, _ = wrapped(fails, ServerConfig(max_concurrent_requests=1))
            return [(await call(app)).status for _ in range(2)]

        assert run(twice()) == [500, 500]


class TestExchanges:
    @pytest.mark.parametrize("given", ["abc-1:2", "req_9", "x" * 128, "azAZ09._:+=/-"])
    def test_a_request_keeps_its_own_id(self, given: str) -> None:
        assert answer_of(ServerConfig(), headers={"x-request-id": given}).headers["x-request-id"] == given

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b', "a\tb"])
    def test_what_is_no_id_is_replaced(self, given: str) -> None:
        answer = answer_of(ServerConfig(), headers={"x-request-id": given})
        assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])

    def test_refusals_have_an_id_too(self) -> None:
        assert "x-request-id" in answer_of(ServerConfig(api_key=KEYS)).headers

    def test_an_error_that_nobody_caught_is_500_without_its_text(self) -> None:
        async def fails(scope: Scope, receive: Receive, send: Send) -> None:
            raise ValueError("the secret of the house")

        answer = run(call(wrapped(fails, ServerConfig())[0]))
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert b"secret of the house" not in answer.body

    @pytest.mark.parametrize("chunks", [(b"{}",), (b"{", b"}")])
    def test_an_error_after_the_whole_body_is_answered_without_waiting_for_more(
        self, chunks: tuple[bytes, ...]
    ) -> None:
        """The connection sends nothing more until the client has its answer."""

        async def fails(scope: Scope, receive: Receive, send: Send) -> None:
            await echo(scope, receive, none_sent)
            raise Unanswered(Failure(404, "there is no such model", "not_found_error"))

        async def none_sent(message: AsgiEvent) -> None: ...

        answer = run(call(wrapped(fails, ServerConfig())[0], chunks=chunks, asked_again=AssertionError("more is read")))
        assert (answer.status, answer.error["message"]) == (404, "there is no such model")
        assert "connection" not in answer.headers

    def test_chunks_pass_as_they_are_sent(self) -> None:
        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number in range(3):
                await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
                passed.append(number)
            await send({"type": "http.response.body", "body": b""})

        passed: list[int] = []
        config = ServerConfig(api_key=KEYS, cors_origins=("http://app.example",))
        answer = run(call(wrapped(stream, config)[0], headers={"x-api-key": KEYS[0]}))
        assert [message.get("body") for message in answer.sent[1:]] == [b"0", b"1", b"2", b""]
        assert passed == [0, 1, 2]

    def test_a_client_that_leaves_is_seen_through_all_middleware(self) -> None:
        async def watch(scope: Scope, receive: Receive, send: Send) -> None:
            kinds.append((await receive())["type"])
            kinds.append((await receive())["type"])

        kinds: list[str] = []
        messages: list[AsgiEvent] = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]

        async def leave() -> None:
            async def receive() -> AsgiEvent:
                return messages.pop(0)

            async def send(message: AsgiEvent) -> None: ...

            headers = [(b"host", b"localhost"), (b"content-length", b"2")]
            scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/x", "headers": headers}
            await wrapped(watch, ServerConfig())[0](scope, receive, send)

        run(leave())
        assert kinds == ["http.request", "http.disconnect"]

    def test_what_is_in_flight_is_counted_and_gone_at_the_end(self) -> None:
        async def look(scope: Scope, receive: Receive, send: Send) -> None:
            during.append(frontend.metrics.in_flight)
            await echo(scope, receive, send)

        during: list[int] = []
        app, frontend = wrapped(look, ServerConfig())
        run(call(app))
        assert (during, frontend.metrics.in_flight) == ([1], 0)
        assert dict(frontend.metrics.responses) == {("POST", "other", 200): 1}

    def test_methods_that_a_client_makes_up_are_one_series(self) -> None:
        app, frontend = wrapped(echo, ServerConfig())
        known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other")
        for method in (*known, "PROPFIND", "X1", "X2"):
            run(call(app, method=method))
        assert dict(frontend.metrics.responses) == {(each, "other", 200): 1 + 3 * (each == "other") for each in known}


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/reranking", "/v1/rerank"),
        ("/rerank", "/v1/rerank"),
        ("/score", "/v1/score"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/embedding", "/embedding"),
    ],
)
def test_a_path_of_another_server_is_ours_for_the_same_thing(path: str, ours: str) -> None:
    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await echo(scope, receive, send)

    seen: list[str] = []
    run(call(wrapped(look, ServerConfig())[0], path))
    assert seen == [ours]
