"""A model's answer as blocks that open, grow and close: reasoning, text and tool calls, one after
another.

Independent of protocols; each protocol writes its own events for each change of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import from_json

from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.chat.conversation import UNREADABLE
from sglcore.serving.chat.parsers.delta import Delta

BlockKind = Literal["reasoning", "text", "tool"]


@dataclass(slots=True)
class Block:
    """One block of an answer: its index among all blocks, its kind, and the pieces of its text so
    far (for a tool call: the arguments as JSON text). `name` and `call_id`: the tool call's (empty
    for other kinds); `logprobs`: of its tokens, for text only; `id`: the block's own, which a
    protocol may set."""

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    id: str = ""
    """An id that a protocol may set. Empty: none."""

    @property
    def text(self) -> str:
        """The text so far: the pieces, joined."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """A tool call's arguments as an object; of incomplete JSON, the part so far, unfinished
        strings included. Empty for a call without arguments.

        Text that is no JSON object is returned whole, as the value of the only key `UNREADABLE`.
        """
        try:
            found = from_json(self.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {UNREADABLE: self.text}


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A change of a block, as `Blocks` returns it, for which a protocol writes events. `block`: the
    growing block itself, not a copy; `text` and `logprobs`: the part that was added, if it "grew",
    else empty."""

    kind: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class Blocks:
    """Collects the blocks of one answer: `take` is called with each delta and returns the changes
    that it causes. At most one block is open; `all` has all blocks in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: tuple[Block, int] | None = None
        self._early: list[TokenLogprob] = []

    def take(self, delta: Delta | None, logprobs: Sequence[TokenLogprob] = ()) -> list[BlockChange]:
        """Return the changes that a delta causes, in order: the open block is closed and another is
        opened if the delta does not continue it; then the block grows. None: tokens without visible
        text; no change, and their log-probabilities are kept for the next delta if that is text.
        Log-probabilities of other blocks than text are dropped."""
        if delta is None:
            self._early += logprobs
            return []
        kind = _KINDS[delta.kind]
        changes = [] if self._continues(kind, delta) else [*self.finish(), self._start(kind, delta)]
        assert self._open is not None
        block = self._open[0]
        known = (*self._early, *logprobs) if kind == "text" else ()
        self._early.clear()
        if not delta.text and not known:
            return changes
        block.pieces.append(delta.text)
        block.logprobs += known
        return [*changes, BlockChange("grew", block, delta.text, known)]

    def finish(self) -> list[BlockChange]:
        """Close the open block and return this change; an empty list if no block is open."""
        if self._open is None:
            return []
        block, self._open = self._open[0], None
        return [BlockChange("closed", block)]

    def force_text(self) -> list[BlockChange]:
        """Open an empty text block if the answer has no block yet, and return this change; else an
        empty list."""
        return [] if self.all else [self._start("text", None)]

    def _continues(self, kind: BlockKind, delta: Delta) -> bool:
        if self._open is None or delta.kind == "tool_start":
            return False
        block, call = self._open
        return block.kind == kind and (kind != "tool" or call == delta.index)

    def _start(self, kind: BlockKind, delta: Delta | None) -> BlockChange:
        block = Block(len(self.all), kind)
        if delta is not None and kind == "tool":
            block.name, block.call_id = delta.name, delta.call_id
        self.all.append(block)
        self._open = (block, delta.index if delta is not None else 0)
        return BlockChange("opened", block)


_KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {"reasoning": "reasoning", "content": "text", "tool_start": "tool", "tool_arguments": "tool"}
)
