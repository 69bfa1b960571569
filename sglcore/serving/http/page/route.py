"""The page at `/`: one document made from the files of this folder, which requests nothing from
other hosts.

Its Content-Security-Policy has the hashes of its scripts and its style, so that no others run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Request, Response

LINKED = re.compile(rb'<link rel="stylesheet" href="(\w+\.css)">|<script src="(\w+\.js)"></script>')


def add_routes(router: APIRouter, frontend: object) -> None:
    """Add GET and HEAD `/` to the router. The files are read once. The page requests all its data
    by HTTP, so `frontend` is not used."""
    content = page()
    shown = page_headers(content)

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def show(request: Request) -> Response:
        known = request.headers.get("if-none-match") == shown["etag"]
        return Response(status_code=304, headers=shown) if known else Response(content, headers=shown)


def page() -> bytes:
    """Return the HTML document, in UTF-8, with its style and its scripts in it. Reads the files of
    this folder at each call."""
    folder = files("sglcore.serving.http.page")

    def inlined(found: re.Match[bytes]) -> bytes:
        style, script = found.groups()
        content = (folder / (style or script).decode("ascii")).read_bytes()
        return b"<style>\n%s</style>" % content if style else b"<script>\n%s</script>" % content

    return LINKED.sub(inlined, (folder / "index.html").read_bytes())


def page_headers(content: bytes) -> dict[str, str]:
    """Return the HTTP headers of the page `content`: its type, the Content-Security-Policy of
    `policy`, an ETag of the content, and headers against caching and embedding."""
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy(content),
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
    }


def policy(content: bytes) -> str:
    """Return the value of the Content-Security-Policy that allows only the scripts and the style in
    `content`, and requests only to this server."""
    allowed = {
        "default-src": "'none'",
        "script-src": _hashes(content, b"script"),
        "style-src": _hashes(content, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{what} {whom}" for what, whom in allowed.items())


def _hashes(content: bytes, tag: bytes) -> str:
    """Return the SHA-256 hashes of all blocks between `<tag>` and `</tag>` in the form of the
    policy, separated by spaces; "" if there are none."""
    blocks = re.findall(b"<%s>(.*?)</%s>" % (tag, tag), content, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block).digest()).decode("ascii") for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
