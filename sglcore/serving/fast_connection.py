"""A bounded connection whose parser is httptools, which is compiled."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sglcore.serving.connection import Bounded, HeadTooLarge


class FastConnection(Bounded, HttpToolsProtocol):
    """Heads that came at once are measured too, and trailers are dropped: nobody reads them."""

    _in_head = True

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there; raises HeadTooLarge, which the parser hands on as its own error."""
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.bounds.head_bytes:
            self._failure = self._too_large()
            raise HeadTooLarge
        super().on_headers_complete()
