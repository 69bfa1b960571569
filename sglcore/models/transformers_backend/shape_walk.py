"""Finds how a model of transformers calls attention, from one forward on the meta device: the walk.

Configurations are not read, because their keys differ by model: the model runs under an attention
function that records its arguments. Sliding windows come from the masks: transformers describes a
mask as a function of a query's and a key's position, which is evaluated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sglcore.core.errors import ConfigError

WALK = "sglcore_walk"
"""The name of the attention function that records calls."""

LENGTHS = (3, 260)
"""Tokens of the two walks, which must agree: behaviour that begins at some length shows in the
second."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of configurations for the number of positions that a model is defined for."""

FAR = 1 << 18
"""A position far beyond every window."""

_KEYS = (1 << 15) - 1
"""The most keys for which a mask is evaluated at once: torch starts its threads for more."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query's position, key's position) to whether the query sees the key."""

Windows = dict[MaskFunction, int | None]
"""The sliding windows of masks that were evaluated."""

_UNTOUCHED = frozenset(
    {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits", "is_causal"}
)
"""Arguments that models pass and attention does not need."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention in a model of transformers. `walk` records it."""

    module: nn.Module
    """The module that called."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Elements of a key head."""
    value_dim: int
    """Elements of a value head."""
    scaling: float
    """The factor of the scores."""
    window: int | None
    """The sliding window in tokens. None: full attention."""
    softcap: float | None
    """The soft cap of the scores. None: there is none."""
    sinks: str | None
    """The name of the parameter with the heads' sinks. None: there are none."""
    cells: int
    """The number of the first call with the same keys and values, if that had the same shape. These
    calls share KV slots."""
    slopes: tuple[float, ...] | None = None
    """For each head the slope of its position bias (ALiBi). None: there is none."""


@dataclass(slots=True)
class _Walk:
    model: PreTrainedModel
    attended: dict[nn.Module, list[tuple[Tensor, ...]]]
    windows: Windows
    calls: list[AttentionCall] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    stored: dict[tuple[object, ...], int] = field(default_factory=dict)

    def window(self, function: MaskFunction) -> int | None:
        """Return `window_of`, computed once for each mask: many layers share one."""
        if function not in self.windows:
            self.windows[function] = window_of(function)
        return self.windows[function]

    def name(self, parameter: Tensor) -> str:
        """Return the name of one of the model's parameters. The table is made at the first call:
        few models need it."""
        self.names = self.names or {id(each): name for name, each in self.model.named_parameters()}
        return self.names[id(parameter)]


_walking: ContextVar[_Walk] = ContextVar("sglcore_transformers_walk")


class DoesNotRun(ConfigError):
    """The model does not run on the meta device, or calls attention otherwise with other lengths,
    perhaps because of the layers that replace its own."""


class Seen(Tensor):
    """A mask without contents that carries its function; slices and views of it carry it too."""

    function: MaskFunction

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; if the result is a mask, give it the function."""
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Seen):
            masks = [each for each in args if isinstance(each, Seen)]
            made.function = masks[0].function
        return made


class Ones(Tensor):
    """A mask without padding and without contents: `all` of it is True, everything else runs on
    shapes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return True for `all`; run other operations as usual."""
        if func in (torch.all, Tensor.all):
            return torch.tensor(True)
        return super().__torch_function__(func, types, args, kwargs or {})


def walk(
    model: PreTrainedModel,
    attended: dict[nn.Module, list[tuple[Tensor, ...]]] | None = None,
    lengths: Sequence[int] | None = None,
    *,
    windows: Windows | None = None,
    has_states: bool = False,
    is_padded: bool = True,
) -> tuple[AttentionCall, ...]:
    """Return every attention call of a model on the meta device, in order, for prompts of `lengths`
    tokens (None: `lengths_of`), which must give the same calls.

    `attended` receives the queries, keys and values of each module's calls, `windows` the windows
    of masks that it lacks. Without `is_padded` the model gets no attention mask. Leaves the model's
    attention set to the recording function; `use_attention` sets another. Raises `ConfigError` for
    a model that computes attention in its own way, or that never calls attention unless
    `has_states`; DoesNotRun if it does not run on the meta device, or the calls differ.
    """
    AttentionInterface.register(WALK, write_down)
    AttentionMaskInterface.register(WALK, make_mask)
    use_attention(model, WALK)
    lengths = lengths_of(model) if lengths is None else lengths
    attended, windows = {} if attended is None else attended, {} if windows is None else windows
    first, *others = (_calls(_Walk(model, attended, windows), length, is_padded) for length in lengths)
    if not first and not has_states:
        raise refusal(model, "it never calls attention through transformers' interface")
    for length, found in zip(lengths[1:], others, strict=True):
        if found != first:
            what = f"it calls attention differently with {length} tokens than with {lengths[0]}"
            raise refusal(model, what, DoesNotRun)
    return first


def lengths_of(model: PreTrainedModel, most: int = LENGTHS[1]) -> tuple[int, int]:
    """Return the first of `LENGTHS`, and `most` or the model's number of positions if that is
    lower."""
    config = model.config.get_text_config()
    known = [getattr(config, name, None) for name in _POSITIONS]  # foreign: no configuration has them all
    longest = min((each for each in known if type(each) is int and each > LENGTHS[0]), default=most)
    return LENGTHS[0], min(most, longest)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention and mask functions of all modules, in place, to those registered as `name`,
    also for a class that declares its own attention as the only one."""
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            each.config._attn_implementation = name


def _calls(record: _Walk, length: int, is_padded: bool) -> tuple[AttentionCall, ...]:
    model = record.model
    given = torch.ones(1, length, dtype=torch.int64, device="meta")
    with _walking_over(record), torch.no_grad():
        try:
            model(input_ids=given, attention_mask=given.as_subclass(Ones) if is_padded else None, use_cache=False)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, LookupError, StopIteration) as error:
            what = f"it does not run on shapes alone ({type(error).__name__}: {error})"
            raise refusal(model, what, DoesNotRun) from error
    return tuple(record.calls)


@contextmanager
def _walking_over(record: _Walk) -> Iterator[None]:
    token = _walking.set(record)
    try:
        yield
    finally:
        _walking.reset(token)


def write_down(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Record an attention call in the walk that is running: query [1, heads, T, dim], key and value
    [1, kv_heads, T, dim]. Returns [1, T, heads, value dim] without contents. The window comes from
    the mask; `sliding_window` is ignored. Raises `ConfigError` for a call that the engine does not
    support."""
    del sliding_window
    record = _walking.get()
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _UNTOUCHED)
    if unknown:
        raise refusal(module, f"it calls attention with {', '.join(unknown)}")
    if not isinstance(attention_mask, Seen):
        raise refusal(module, "it makes its own masks")
    if key.shape[2] != query.shape[2]:
        raise refusal(module, "it attends to tokens outside the step")
    record.attended.setdefault(module, []).append((query, key, value))
    asked = (
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        query.shape[3] ** -0.5 if scaling is None else float(scaling),
        record.window(attention_mask.function),
        softcap,
        None if s_aux is None else record.name(s_aux),
    )
    # The versions distinguish a tensor from itself after a later write.
    same = (id(key), key._version, id(value), value._version, *asked)
    record.calls.append(AttentionCall(module, *asked, record.stored.setdefault(same, len(record.calls))))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def make_mask(batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Seen:
    """Return a mask [batch_size, 1, q_length, kv_length] on the meta device that carries its
    function instead of contents. Transformers calls it in the walk.
    """
    mask = torch.empty(batch_size, 1, q_length, kv_length, device="meta").as_subclass(Seen)
    mask.function = mask_function
    return mask


def window_of(mask_function: MaskFunction) -> int | None:
    """Return the window of a mask `mask_function(batch, head, query, key)` in tokens, the token
    itself included; None for a causal mask. Raises `ConfigError` for any other mask."""
    windows = {seen_by(mask_function, place) for place in (FAR, FAR + 1, FAR + 4095)}
    if len(windows) > 1:
        raise ConfigError("a mask of the model is neither causal nor a sliding window", remedy="use another model")
    return windows.pop()


def seen_by(mask_function: MaskFunction, place: int) -> int | None:
    """Return how many tokens the token at `place` sees, itself included; None if it sees all up to
    itself. Raises `ConfigError` if it sees others than the last ones."""
    zero, query = torch.zeros((), dtype=torch.int64), torch.tensor(place)
    # In pieces that fit memory the allocator has: a larger array would be mapped page by page.
    pieces = (torch.from_numpy(np.arange(first, min(first + _KEYS, place + 2))) for first in range(0, place + 2, _KEYS))
    parts = [torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys)) for keys in pieces]
    seen = np.concatenate([part.numpy() for part in parts])
    count = int(np.count_nonzero(seen))
    if not 0 < count <= place + 1 or not seen[place + 1 - count : place + 1].all():
        raise ConfigError(
            "a mask of the model does not show a token itself and the tokens before it", remedy="use another model"
        )
    return None if count == place + 1 else count


def refusal(module: nn.Module, what: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """Return, do not raise, the error of class `kind` for a module that does something unsupported;
    `what` says what.
    """
    return kind(
        f"{type(module).__name__} cannot be served by transformers' classes: {what}",
        wanted="attention through transformers' attention interface only",
        remedy="use another model",
    )
