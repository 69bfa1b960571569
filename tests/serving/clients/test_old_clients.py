"""Clients that speak HTTP/1.0 or malformed HTTP, as bytes on a socket: each gets an answer that it
can read."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.serving.servers import Server

BODY = {"prompt": "Once", "max_tokens": 6, "temperature": 0}


def asked(server: Server, *parts: bytes) -> tuple[list[str], bytes]:
    """Send the bytes; return the header lines and the body of everything sent until the server
    closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        link.sendall(b"".join(parts))
        found = b""
        while data := link.recv(1 << 16):
            found += data
    head, _, body = found.partition(b"\r\n\r\n")
    return head.decode().lower().split("\r\n"), body


def post(version: str, body: Any, *headers: str) -> bytes:
    """A POST request of an HTTP version. Its length is left out if `headers` give a transfer
    encoding."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = () if any("encoding" in each.lower() for each in headers) else (f"content-length: {len(data)}",)
    lines = (
        f"POST /v1/completions HTTP/{version}",
        "host: 127.0.0.1",
        "content-type: application/json",
        *headers,
        *length,
    )
    return "\r\n".join((*lines, "", "")).encode() + data


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection(server: Server) -> None:
    head, body = asked(server, post("1.0", {**BODY, "stream": True}))
    assert head[0].split()[1] == "200" and not [line for line in head if line.startswith("transfer-encoding")]
    assert "connection: close" in head
    events = body.decode().split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]" and all(each.startswith("data: ") for each in events[:-1])
    text = "".join(json.loads(each[6:])["choices"][0]["text"] for each in events[:-2])
    assert text == server.post("/v1/completions", BODY)["choices"][0]["text"]


def test_a_whole_answer_to_a_client_of_http_1_0_has_its_length(server: Server) -> None:
    head, body = asked(server, post("1.0", BODY))
    assert f"content-length: {len(body)}" in head and json.loads(body)["choices"]


@pytest.mark.parametrize(
    ("encoding", "status", "said"),
    [
        ("gzip", 501, "gzip"),
        ("gzip, chunked", 501, "wanted chunked"),
        ("identity", 501, "identity"),
    ],
)
def test_an_unknown_transfer_encoding_is_refused_by_name(server: Server, encoding: str, status: int, said: str) -> None:
    head, body = asked(server, post("1.1", b"0\r\n\r\n", f"transfer-encoding: {encoding}"))
    assert head[0].split()[1] == str(status) and "connection: close" in head
    assert said in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("chunks", [b"zz\r\n{}\r\n", b"2\r\n{}x\r\n0\r\n\r\n", b"-1\r\n", b"f" * 40 + b"\r\n"])
@pytest.mark.parametrize("before", [b"", b"1\r\n{\r\n"])
def test_a_body_in_bad_chunks_is_refused_and_not_left_without_a_word(
    server: Server, before: bytes, chunks: bytes
) -> None:
    head, body = asked(server, post("1.1", before + chunks, "transfer-encoding: chunked"))
    assert head[0].split()[1] == "400" and json.loads(body)["error"]["code"] == "malformed_request", (head, body)


def test_a_body_in_good_chunks_is_read(server: Server) -> None:
    data = json.dumps(BODY).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:9], data[9:])) + b"0\r\n\r\n"
    head, body = asked(server, post("1.1", chunks, "Transfer-Encoding: Chunked", "connection: close"))
    assert head[0].split()[1] == "200", body
