"""The state of a forward that layers need and batches do not carry.

It consists of the attention backend with its pools, and the pool of recurrent states. Contexts are
frozen and nested: `forward_context` enters one and restores the outer one on exit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sglcore.runtime.attention.contract import AttentionBackend
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.memory.pools import ReqToTokenPool, TokenToKVPool
    from sglcore.runtime.memory.states import StatePool


class Segments(Protocol):
    """How layers run a call uncaptured within a forward that is captured in pieces. `Uncaptured`
    and `Captured` (`graphs/graph_segments.py`) implement it.
    """

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """End the segment, run `call(*inputs)` uncaptured, begin the next one with its result.

        At each replay the call runs on the rows of the real batch, with the context of that batch.
        Its tensors have one row per token; the result has the shape and dtype of the first input.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What layers need during one forward, besides the batch's tensors."""

    attn_backend: AttentionBackend
    """The attention backend."""
    batch: ForwardBatch | None = None
    """The batch, for operations that are opaque to a compiler. None: no operation needs it."""
    layers: tuple[Attention, ...] = ()
    """The model's attention layers, by id, for the same operations."""
    segments: Segments | None = None
    """Runs uncaptured calls between captured segments. None: there are no segments."""
    state_pool: StatePool | None = None
    """Pool of recurrent states. None: the model has none."""


_current: ContextVar[ForwardContext | None] = ContextVar("sglcore_forward_context", default=None)


class NoForwardContextError(RuntimeError):
    """A function that needs a running forward was called outside of one."""


class forward_context:
    """Make a context the active one inside a `with` block; restore the previous one on exit."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> ForwardContext:
        self._token = _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def has_forward_context() -> bool:
    """Return whether a forward is running in this context."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """Return the innermost active context; raises NoForwardContextError if there is none."""
    context = _current.get()
    if context is None:
        raise NoForwardContextError(
            "no forward is running here; enter `with forward_context(ForwardContext(attn_backend=...))` around the call"
        )
    return context


def get_attn_backend() -> AttentionBackend:
    """Return the active attention backend; raises as `get_forward_context` does."""
    return get_forward_context().attn_backend


def get_token_to_kv_pool() -> TokenToKVPool:
    """Return the KV pool of the active backend; raises as `get_forward_context` does."""
    return get_forward_context().attn_backend.token_to_kv_pool


def get_req_to_token_pool() -> ReqToTokenPool:
    """Return the page table of the active backend; raises as `get_forward_context` does."""
    return get_forward_context().attn_backend.req_to_token_pool


def get_state_pool() -> StatePool:
    """Return the pool of recurrent states; raises NoForwardContextError if the context has none."""
    pool = get_forward_context().state_pool
    if pool is None:
        raise NoForwardContextError("this forward has no states; give its ForwardContext the model's state_pool")
    return pool
