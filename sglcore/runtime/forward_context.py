"""What a forward needs at depth without carrying it on the batch: the active attention backend and so its pools.

Frozen and nested: a scope is entered with `forward_context`, and the outer one is restored on every way out.
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
    """The captured segments of a forward that is captured piece by piece."""

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """End the segment, and begin the next with what `call(*inputs)` gives: it is never captured, and runs on the rows of
        the real batch at each replay, under that batch's context. Its tensors have one row per token; the result has the
        shape and dtype of the first."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward's control configuration."""

    attn_backend: AttentionBackend
    """The attention backend."""
    batch: ForwardBatch | None = None
    """The batch, for operations that are opaque to a compiler. None: no operation needs it."""
    layers: tuple[Attention, ...] = ()
    """The model's attention layers, by id, for the same operations."""
    segments: Segments | None = None
    """Runs between two graphs what must not be captured. None: nothing is captured in pieces."""
    state_pool: StatePool | None = None
    """The states, of models that have layers with states. None: the model has none."""
    history: Tensor | None = None
    """int32[slots + 1, context + 1]: the tokens of each slot. None: the model does not read it."""


_current: ContextVar[ForwardContext | None] = ContextVar("sglcore_forward_context", default=None)


class NoForwardContextError(RuntimeError):
    """Something that belongs inside a forward was called outside of one."""


class forward_context:
    """Make a context the active one inside a `with` block; the previous one returns however the block ends."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> ForwardContext:
        self._token = _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def has_forward_context() -> bool:
    """A forward is running here."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """The innermost active context."""
    context = _current.get()
    if context is None:
        raise NoForwardContextError(
            "no forward is running here; enter `with forward_context(ForwardContext(attn_backend=...))` around the call"
        )
    return context


def get_attn_backend() -> AttentionBackend:
    """The active attention backend."""
    return get_forward_context().attn_backend


def get_token_to_kv_pool() -> TokenToKVPool:
    """The active backend's KV pool."""
    return get_forward_context().attn_backend.token_to_kv_pool


def get_req_to_token_pool() -> ReqToTokenPool:
    """The active backend's page table."""
    return get_forward_context().attn_backend.req_to_token_pool


def get_state_pool() -> StatePool:
    """The pool of the model's states. Raises NoForwardContextError for a context without one."""
    pool = get_forward_context().state_pool
    if pool is None:
        raise NoForwardContextError("this forward has no states; give its ForwardContext the model's state_pool")
    return pool
