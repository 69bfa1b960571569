"""A form with a file, as clients write it: every name and value is read as it was given."""

from __future__ import annotations

from email.message import Message

import httpx
import pytest

from sglcore.serving.apis.batches.upload import read_form
from sglcore.serving.replicas.server_errors import InvalidRequest

FILE = b'--aB\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc\r\n'
END = b"--aB--\r\n"


def part(name: str, value: str, charset: str = "utf-8") -> bytes:
    return f'--aB\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode(charset)


@pytest.mark.parametrize("name", ["a b.jsonl", "über 日.jsonl", "a;b=c.jsonl", "file", "a'b.jsonl", "😀"])
@pytest.mark.parametrize("content", [b"", b"\r\n", b"--", bytes(range(256)), "Grüße\n".encode()])
def test_a_form_of_httpx_is_read_as_it_was_given(name: str, content: bytes) -> None:
    fields = {"purpose": "batch", "expires": "später", "empty": ""}
    request = httpx.Request("POST", "http://test", data=fields, files={"file": (name, content, "text/plain")})
    found, file = read_form(request.headers["content-type"], request.read())
    assert (found, file) == (fields, (name, content))


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=aB", b"aB"),
        ("multipart/form-data;boundary=aB", b"aB"),
        ("MULTIPART/FORM-DATA; BOUNDARY=aB", b"aB"),
        ('multipart/form-data; charset=utf-8; boundary="aB"', b"aB"),
        ("multipart/form-data; boundary=aB; charset=utf-8", b"aB"),
        ('multipart/form-data; boundary="a(.*)+ b"', b"a(.*)+ b"),
    ],
)
def test_a_boundary_is_what_the_header_says_letter_by_letter(kind: str, boundary: bytes) -> None:
    message = Message()
    message["content-type"] = kind
    assert message.get_boundary() == boundary.decode()
    body = (part("purpose", "batch") + FILE + END).replace(b"aB", boundary)
    assert read_form(kind, body) == ({"purpose": "batch"}, ("file", b"abc"))
    with pytest.raises(InvalidRequest, match="no end"):
        read_form(kind, body.replace(boundary, boundary.swapcase()))


def test_of_two_fields_of_one_name_the_last_counts_and_parts_without_a_name_do_not() -> None:
    nameless = b"--aB\r\nContent-Disposition: form-data\r\n\r\nx\r\n"
    body = part("a", "1") + nameless + FILE + part("b", "2") + part("a", "3") + nameless + END
    assert read_form("multipart/form-data; boundary=aB", body) == ({"a": "3", "b": "2"}, ("file", b"abc"))


def test_a_field_that_is_not_utf_8_is_read_with_marks_for_what_is_lost() -> None:
    body = part("a", "für", "latin-1") + FILE + END
    fields, _ = read_form("multipart/form-data; boundary=aB", body)
    assert fields == {"a": "f\ufffdr"}


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("", FILE + END, 415),
        ("application/x-www-form-urlencoded", b"a=b", 415),
        ("text/multipart/form-data; boundary=aB", FILE + END, 415),
        ("multipart/form-data", FILE + END, 400),
        ("multipart/form-data; boundary=aB", FILE, 400),
        ("multipart/form-data; boundary=aB", part("files", "x") + END, 400),
        ("multipart/form-data; boundary=aB", END, 400),
    ],
)
def test_a_body_that_is_no_form_with_a_file_is_refused_about_the_file(kind: str, body: bytes, status: int) -> None:

    with pytest.raises(InvalidRequest) as refused:
        read_form(kind, body)
    assert (refused.value.param, refused.value.status) == ("file", status)
