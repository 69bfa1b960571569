"""The page's headers: what a browser may run, load and keep, computed by another parser."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from importlib.resources import files

from sglcore.serving.http.page.route import page, page_headers, policy
from tests.serving.stubs import Application, make_frontend

PAGE = b"<style>\na {}\n</style><p>b</p><script>\nc()</script><script>d()\n</script>"


class Blocks(HTMLParser):
    """The texts of scripts and styles, and everything that a document would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.loaded: list[str] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        if tag in self.texts:
            self.texts[tag].append("")
        self.loaded += [value or "" for name, value in attrs if name == "src" or (tag == "link" and name == "href")]

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts:
            self.texts[self._tag][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def hashes(texts: list[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def directives(text: str) -> dict[str, str]:
    pairs = (each.partition(" ") for each in text.split("; "))
    return {name: value for name, _, value in pairs}


def test_only_the_pages_own_scripts_and_style_may_run_and_it_asks_its_own_server_alone() -> None:
    for content in (PAGE, page()):
        found = Blocks(content.decode())
        assert directives(policy(content)) == {
            "default-src": "'none'",
            "script-src": hashes(found.texts["script"]),
            "style-src": hashes(found.texts["style"]),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }


def test_the_page_has_all_its_files_within_and_loads_none() -> None:
    content, folder = page(), files("sglcore.serving.http.page")
    parts = [each for each in folder.iterdir() if each.name.endswith((".css", ".js"))]
    found = Blocks(content.decode())
    assert len(parts) > 1 and all(part.read_bytes().strip() in content for part in parts)
    assert not [each for each in found.loaded if not each.startswith("data:")]
    assert len(found.texts["script"]) + len(found.texts["style"]) >= len(parts)


def test_the_page_is_framed_by_none_read_as_what_it_is_and_asked_for_again() -> None:
    first, second = page_headers(PAGE), page_headers(PAGE + b" ")
    assert first.pop("etag") != second.pop("etag") and first == second
    assert first == {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy(PAGE),
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
    }
    served = Application(make_frontend())
    for method, length in (("GET", len(page())), ("HEAD", 0)):
        answer = served.send(method, "/")
        assert (answer.status_code, len(answer.content)) == (200, length)
        assert {name: answer.headers[name] for name in page_headers(page())} == page_headers(page())
