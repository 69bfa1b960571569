"""What a model of transformers asks of attention, learned from one forward on shapes alone.

Nothing is read from configurations, whose words differ by model: the model runs on the meta device
under an attention function that writes down what it is called with. Masks tell the windows: a mask
is a function of two places, and is asked.
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

from sglcore.device.errors import ConfigError

WALK = "sglcore_walk"
"""The name of the attention function that writes down."""

LENGTHS = (3, 260)
"""Tokens of the two walks, which must agree: what begins at some length shows in the second."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations call the tokens that a model's positions are defined for."""

FAR = 1 << 18
"""A place far behind every window."""

_KEYS = (1 << 15) - 1
"""So many keys a mask is asked about at once, because torch wakes its threads for more."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of batch, head, query's place and key's place: whether the query sees the key."""

Windows = dict[MaskFunction, int | None]
"""Those of masks that were asked."""

_UNTOUCHED = frozenset(
    {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits", "is_causal"}
)
"""What models pass beside, and attention has no use for."""


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
    """What scores are multiplied with."""
    window: int | None
    """The sliding window in tokens. None: full attention."""
    softcap: float | None
    """The bound to which scores are bent. None: none."""
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
        """`window_of`, once for each mask, which many layers share."""
        if function not in self.windows:
            self.windows[function] = window_of(function)
        return self.windows[function]

    def name(self, parameter: Tensor) -> str:
        """That of one of the model's parameters; few models are asked for any."""
        self.names = self.names or {id(each): name for name, each in self.model.named_parameters()}
        return self.names[id(parameter)]


_walking: ContextVar[_Walk] = ContextVar("sglcore_transformers_walk")


class DoesNotRun(ConfigError):
    """A model that does not run on shapes alone, or otherwise with other lengths, perhaps for what
    stands in place of its own parts."""


class Seen(Tensor):
    """A mask without contents, which knows the function that it stands for; also what is cut from
    it does."""

    function: MaskFunction

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of the mask's own kind where it makes another of it."""
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Seen):
            masks = [each for each in args if isinstance(each, Seen)]
            made.function = masks[0].function
        return made


class Ones(Tensor):
    """A mask without padding and without contents: whoever asks whether all of it is set is told
    so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of the same kind, but for that answer."""
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
    """Every call of attention of a model on the meta device, in order, with texts of `lengths`
    (none: `lengths_of`). `attended` gets the queries, keys and values of each module's, `windows`
    those of masks that it has not; without `is_padded` the model gets no mask. Raises `ConfigError`
    for a model that attends in a way of its own, or nowhere unless it has states beside."""
    AttentionInterface.register(WALK, write_down)
    AttentionMaskInterface.register(WALK, make_mask)
    use_attention(model, WALK)
    lengths = lengths_of(model) if lengths is None else lengths
    attended, windows = {} if attended is None else attended, {} if windows is None else windows
    first, *others = (_calls(_Walk(model, attended, windows), length, is_padded) for length in lengths)
    if not first and not has_states:
        raise refusal(model, "it never calls attention by transformers' interface")
    for length, found in zip(lengths[1:], others, strict=True):
        if found != first:
            what = f"it calls attention otherwise with {length} tokens than with {lengths[0]}"
            raise refusal(model, what, DoesNotRun)
    return first


def lengths_of(model: PreTrainedModel, most: int = LENGTHS[1]) -> tuple[int, int]:
    """The first of `LENGTHS` and `most`, or as many as the model has positions."""
    config = model.config.get_text_config()
    known = [getattr(config, name, None) for name in _POSITIONS]  # foreign: no configuration has them all
    longest = min((each for each in known if type(each) is int and each > LENGTHS[0]), default=most)
    return LENGTHS[0], min(most, longest)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Attention and masks are those of a name, also where a class says that it has but one
    attention, its own."""
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
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim]: what attention gives, without
    contents. The window is the mask's: what is passed beside it binds nobody."""
    del sliding_window
    record = _walking.get()
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _UNTOUCHED)
    if unknown:
        raise refusal(module, f"it calls attention with {', '.join(unknown)}")
    if not isinstance(attention_mask, Seen):
        raise refusal(module, "it makes its masks itself")
    if key.shape[2] != query.shape[2]:
        raise refusal(module, "it attends to other tokens than those of the step")
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
    # A tensor that was written to since is another.
    same = (id(key), key._version, id(value), value._version, *asked)
    record.calls.append(AttentionCall(module, *asked, record.stored.setdefault(same, len(record.calls))))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def make_mask(batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Seen:
    """In place of a mask: its function."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, device="meta").as_subclass(Seen)
    mask.function = mask_function
    return mask


def window_of(mask_function: MaskFunction) -> int | None:
    """The window of a mask `mask_function(batch, head, query, key)`, the token itself counted;
    None: every token before is seen. Raises `ConfigError` for any other mask."""
    windows = {seen_by(mask_function, place) for place in (FAR, FAR + 1, FAR + 4095)}
    if len(windows) > 1:
        raise ConfigError("a mask of the model is neither causal nor a sliding window", remedy="use another model")
    return windows.pop()


def seen_by(mask_function: MaskFunction, place: int) -> int | None:
    """How many tokens the one at a place sees, itself counted; None: all up to it. Raises
    `ConfigError` for others than the last ones."""
    zero, query = torch.zeros((), dtype=torch.int64), torch.tensor(place)
    # Piece by piece, in memory that is there: what is larger comes from the system, page by page.
    pieces = (torch.from_numpy(np.arange(first, min(first + _KEYS, place + 2))) for first in range(0, place + 2, _KEYS))
    parts = [torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys)) for keys in pieces]
    seen = np.concatenate([part.numpy() for part in parts])
    count = int(np.count_nonzero(seen))
    if not 0 < count <= place + 1 or not seen[place + 1 - count : place + 1].all():
        raise ConfigError(
            "a mask of the model does not show a token itself and those before it", remedy="use another model"
        )
    return None if count == place + 1 else count


def refusal(module: nn.Module, what: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """For a module that does something which is not served."""
    return kind(
        f"{type(module).__name__} can not be served by transformers' classes: {what}",
        wanted="attention by transformers' attention interface alone",
        remedy="use another model",
    )
