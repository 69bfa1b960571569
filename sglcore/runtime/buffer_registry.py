"""The static input buffers that eager forwards and graphs read, the same on every device.

A buffer is plain (a batch field), computed (`post_fill`), structured (a dotted name) or sourced
(`source_fn`). The host writes directly into staged buffers, which are parts of one block, so a step
costs one copy, or none if host and device share memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.staging import HostBlock
from sglcore.runtime.torch_fields import torch_dtype
from sglcore.step.batch_field import Axis, FieldSpec, Fill, When, leaves, specs
from sglcore.step.host_values import HostReader, host_reader, idle_values, make_batch
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class FillContext:
    """The real and the padded numbers of requests (`bs`) and tokens when buffers are filled."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int


REMEMBERED = 1024
"""Maximum number of cached views. Decode sizes recur; prefill sizes rarely do."""

SPARE, SPARE_LEAST = 4, 64
"""Spare words of the block for a step's other arrays: the number per request, and the minimum.

The page-table changes of a decode step always fit.
"""

PostFill = Callable[[Tensor, "ForwardBatch", FillContext], None]
SourceFn = Callable[["ForwardBatch", FillContext], "Tensor | None"]


@dataclass(slots=True)
class InputBuffer:
    """One static buffer: the batch field that it feeds, how it is filled, and its memory.

    A padded view (`BufferRegistry.extract_buffer`) always has the buffers with `post_fill` or
    `source_fn`; others only if the batch has the field.
    """

    spec: FieldSpec
    """The declaration of the field."""
    width: int = 1
    """Number of elements, for a buffer without an axis."""
    trail: tuple[int, ...] = ()
    """The sizes of the dimensions after the axis."""
    post_fill: PostFill | None = None
    """`post_fill(view, batch, ctx)` computes the padded view in place after the copies. None: the
    buffer is not computed."""
    source_fn: SourceFn | None = None
    """`source_fn(batch, ctx)` returns the values to copy into the first entries, or None if this
    step has none. None: the values come from the batch's field."""
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    """Device memory; empty until the registry allocates it."""
    host: NDArray | None = None
    """Host side of the buffer. None: not allocated yet, or the host does not stage it."""
    name: str = field(init=False)
    """Name of the batch field that the buffer feeds. Dots reach into a nested record."""
    _record: str = field(init=False)
    """The part of `name` before the last dot; empty without a dot."""
    _field: str = field(init=False)
    """The part of `name` after the last dot."""

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self._record, _, self._field = self.name.rpartition(".")

    @property
    def is_computed(self) -> bool:
        """True if the contents do not come from the batch field of this name."""
        return self.post_fill is not None or self.source_fn is not None

    def value_of(self, batch: Any) -> Tensor | None:
        """Return the batch's value of the field that this buffer serves; None if the field, or the
        nested record that has it, is None.
        """
        if not self._record:
            return getattr(batch, self._field)
        record = getattr(batch, self._record)
        return None if record is None else getattr(record, self._field)

    def length(self, bs: int, num_tokens: int) -> int:
        """Return the number of entries along the axis for a batch of these sizes."""
        if self.spec.axis is Axis.TOKENS:
            return num_tokens
        return bs if self.spec.axis is Axis.REQUESTS else self.width

    def head(self, bs: int, num_tokens: int) -> Tensor:
        """Return a view of the entries that a batch of these sizes uses, the first ones; shares
        memory.
        """
        return self.tensor.narrow(self.spec.dim, 0, self.length(bs, num_tokens))

    def pad(self, ctx: FillContext) -> None:
        """Write the padding value to the entries between the real and the padded size of `ctx`, on
        the device. Does nothing for a field with a padding rule other than `Fill.VALUE`.
        """
        first = self.length(ctx.raw_bs, ctx.raw_num_tokens)
        count = self.length(ctx.padded_bs, ctx.padded_num_tokens) - first
        if count > 0 and self.spec.padding.fill is Fill.VALUE:
            self.tensor.narrow(self.spec.dim, first, count).fill_(self.spec.padding.value)

    def fill(self, value: float) -> None:
        """Write one value to all entries, on host and device, so that no copy is needed."""
        self.tensor.fill_(value)
        if self.host is not None:
            self.host.fill(value)


@dataclass(frozen=True, slots=True)
class Staging:
    """How host batches of one kind of step are copied to the buffers.

    `reader` reads the host batch. `flat` are the one-dimensional host buffers that every such step
    fills, `others` the remaining staged buffers, both by name.
    """

    reader: HostReader
    flat: tuple[tuple[str, NDArray], ...]
    others: tuple[tuple[str, InputBuffer], ...]


class BufferRegistry:
    """Input buffers by name, for batches of `batch_type`.

    Capacity is `max_bs` requests and `max_num_tokens` tokens. It grows by powers of two until
    `freeze` (a graph has captured addresses). After that a larger batch is an error.
    """

    def __init__(
        self,
        batch_type: type[ForwardBatch],
        device: str,
        max_bs: int,
        max_num_tokens: int,
        *,
        shares_host_memory: bool,
        pinned: bool,
    ) -> None:
        self.batch_type = batch_type
        self.device = device
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.frozen = False
        self._shares, self._pinned = shares_host_memory, pinned
        self._buffers: dict[str, InputBuffer] = {}
        self._block: HostBlock | None = None
        self._views: dict[tuple[int, int, bool], dict[str, Tensor]] = {}
        self._heads: dict[tuple[str, int, int], Tensor] = {}
        self._staging: dict[bool, Staging] = {}
        self._computed: tuple[InputBuffer, ...] = ()
        self._optional: tuple[InputBuffer, ...] = ()
        self._copied: tuple[InputBuffer, ...] = ()

    # -- declaring
    # ----------------------------------------------------------------------------------------------

    def register(self, buffer: InputBuffer) -> None:
        """Add an input buffer. Raises ValueError for a second buffer of the same name, and after
        `make_buffers`.

        A device package may add its own buffers; if no batch field has the name,
        `input_buffer(name)` finds them.
        """
        if buffer.name in self._buffers:
            raise ValueError(f"input buffer {buffer.name!r} is registered twice; each batch field has one")
        if self._block is not None:
            raise ValueError(
                f"input buffer {buffer.name!r} is registered after the memory was allocated; register all before"
            )
        self._buffers[buffer.name] = buffer

    def input_buffer(self, name: str) -> InputBuffer:
        """Return the buffer of a name; raises KeyError, with the known names, if there is none."""
        if name not in self._buffers:
            raise KeyError(f"no input buffer {name!r}; registered: {', '.join(self._buffers)}")
        return self._buffers[name]

    @property
    def block(self) -> HostBlock:
        """The block of staged buffers; growth replaces it."""
        assert self._block is not None, "make_buffers comes first"
        return self._block

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all input buffers, in order of registration."""
        return tuple(self._buffers)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all input buffers, in order of registration."""
        return tuple(buffer.tensor for buffer in self._buffers.values())

    def make_buffers(self) -> None:
        """Allocate every buffer at the present capacity and fill it with its padding value. Earlier
        contents and views are lost. Raises ValueError for a buffer on another kind of device.
        """
        self._views.clear()
        self._heads.clear()
        self._staging.clear()
        self._make_block()
        for buffer in self._buffers.values():
            if buffer.host is None:
                dtype = torch_dtype(buffer.spec)
                buffer.tensor = torch.zeros(self._shape(buffer), dtype=dtype, device=self.device)
            if buffer.tensor.device.type != torch.device(self.device).type:
                where = f"lies on {buffer.tensor.device}, the registry on {self.device}"
                raise ValueError(f"input buffer {buffer.name!r} {where}")
            if buffer.spec.padding.fill is not Fill.KEEP:
                buffer.fill(buffer.spec.padding.value)
        self._sort()

    def _make_block(self) -> None:
        staged = [buffer for buffer in self._buffers.values() if buffer.spec.is_staged]
        sizes = [math.prod(self._shape(buffer)) for buffer in staged]
        spare = SPARE * self.max_bs + SPARE_LEAST
        self._block = HostBlock(sum(sizes), self.device, shares_memory=self._shares, pinned=self._pinned, spare=spare)
        for buffer, offset in zip(staged, accumulate(sizes, initial=0), strict=False):
            buffer.tensor, buffer.host = self._block.part(offset, self._shape(buffer), buffer.spec.dtype or "")

    def _sort(self) -> None:
        buffers = tuple(self._buffers.values())
        self._computed = tuple(buffer for buffer in buffers if buffer.post_fill is not None)
        self._copied = tuple(buffer for buffer in buffers if buffer.post_fill is None)
        self._optional = tuple(
            buffer for buffer in self._copied if buffer.source_fn is not None or _is_optional(buffer)
        )

    def _shape(self, buffer: InputBuffer) -> tuple[int, ...]:
        return (*buffer.spec.lead, buffer.length(self.max_bs, self.max_num_tokens), *buffer.trail)

    def ensure(self, bs: int, num_tokens: int) -> None:
        """Make room for a batch of these sizes: each size that is too small grows to the next power
        of two.

        Growing allocates all buffers anew: contents and earlier views are lost. Raises ValueError
        if it would have to grow after `freeze`.
        """
        if bs <= self.max_bs and num_tokens <= self.max_num_tokens:
            return
        if self.frozen:
            raise ValueError(
                f"a batch of {bs} requests and {num_tokens} tokens exceeds the {self.max_bs} and {self.max_num_tokens} "
                "that captured graphs hold addresses of; size the registry for the largest batch before capture"
            )
        before = self.max_bs, self.max_num_tokens
        self.max_bs = max(self.max_bs, 1 << (bs - 1).bit_length())
        self.max_num_tokens = max(self.max_num_tokens, 1 << (num_tokens - 1).bit_length())
        try:
            self.make_buffers()
        except BaseException:
            self.max_bs, self.max_num_tokens = before
            raise

    def freeze(self) -> None:
        """Forbid reallocation, because graphs have captured addresses."""
        self.frozen = True

    # -- filling
    # ----------------------------------------------------------------------------------------------

    def stage(self, name: str, values: NDArray) -> None:
        """Write host values [..., n] to the first n entries of one buffer; they reach the device
        with the next `commit`.
        """
        host = self.input_buffer(name).host
        assert host is not None, f"input buffer {name!r} is not filled by the host"
        host[..., : values.shape[-1]] = values

    def stage_all(self, batch: ScheduleBatch) -> dict[str, Any]:
        """Stage every value of a host batch, growing the buffers first if needed.

        Returns the fields of the device batch by (dotted) name; tensors are the heads of their
        buffers. One-shot values (`worker/schedule_batch.py`) are removed from `batch`, unless
        growing fails.
        """
        if batch.forward_mode is ForwardMode.IDLE:
            return self._stage_nothing(batch)
        is_decode, bs, num_tokens = batch.forward_mode.is_decode, batch.batch_size, batch.num_tokens
        self.ensure(bs, num_tokens)
        staging = self._staging.get(is_decode) or self._compile_staging(is_decode)
        values = staging.reader.read(batch)
        for name, host in staging.flat:
            value = values[name]
            host[: len(value)] = value
        for name, buffer in staging.others:
            if name in values:
                self.stage(name, values[name])
                values[name] = buffer.head(bs, num_tokens)
        values.update(self._heads_of(bs, num_tokens, not is_decode))
        return values

    def _stage_nothing(self, batch: ScheduleBatch) -> dict[str, Any]:
        """Return the fields of a step without rows: each staged field is an empty tensor, also one
        that the host batch does not have.
        """
        empty = {
            buffer.name: buffer.head(0, 0)
            for buffer in self._buffers.values()
            if buffer.spec.is_staged and buffer.spec.axis is not Axis.NONE
        }
        return idle_values(self.batch_type, batch) | empty | self._heads_of(0, 0, True)

    def stage_wide(self, batch: ScheduleBatch, width: int) -> tuple[ForwardBatch, bool]:
        """Stage the values of a decode batch for `width` rows of each request.

        Returns the batch of these rows, in buffers that have room for them, and whether a value was
        staged, which takes a `commit`. Each row has its request's values; those that are placed on
        the device (`Wide.PLACED`) are left to the caller.
        """
        reader, size = host_reader(self.batch_type, True, True), batch.batch_size * width
        values = reader.read(batch)
        given = [spec for spec in reader.staged if spec.name in values]
        for spec in given:
            value = values[spec.name]
            self.stage(spec.name, value if spec.axis is Axis.NONE else np.repeat(value, width, axis=-1))
            values[spec.name] = self._buffers[spec.name].head(size, size)
        values |= {"batch_size": size, "num_tokens": size, **self._heads_of(size, size, False)}
        return make_batch(self.batch_type, values), bool(given)

    def _compile_staging(self, is_decode: bool) -> Staging:
        reader = host_reader(self.batch_type, is_decode)
        buffers = [self.input_buffer(spec.name) for spec in reader.staged]
        flat = {b.name: b.host for b in buffers if b.host is not None and not b.spec.lead and not _is_optional(b)}
        others = tuple((buffer.name, buffer) for buffer in buffers if buffer.name not in flat)
        found = self._staging[is_decode] = Staging(reader, tuple(flat.items()), others)
        return found

    def commit(self) -> None:
        """Copy staged values to the device as `HostBlock.commit` does: one copy, none with shared
        memory.
        """
        self.block.commit()

    def fill_from(self, batch: ForwardBatch, ctx: FillContext, skip: Collection[str] = ()) -> None:
        """Update every buffer for a padded batch, except those named in `skip`: pad, copy values
        that are elsewhere, compute.

        Fields that are already views of their buffers are not copied. Padding is also written to
        buffers in `skip`.
        """
        if (ctx.raw_bs, ctx.raw_num_tokens) != (ctx.padded_bs, ctx.padded_num_tokens):
            for buffer in self._buffers.values():
                buffer.pad(ctx)
        for buffer in self._optional if self.owns(batch) else self._copied:
            if buffer.name not in skip:
                self._copy_in(buffer, batch, ctx)
        for buffer in self._computed:
            if buffer.name not in skip and buffer.post_fill is not None:
                buffer.post_fill(self._head(buffer, ctx.padded_bs, ctx.padded_num_tokens), batch, ctx)

    def _head(self, buffer: InputBuffer, bs: int, num_tokens: int) -> Tensor:
        """Return `buffer.head`, cached by size."""
        key = (buffer.name, bs, num_tokens)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= REMEMBERED:
                self._heads.clear()
            head = self._heads[key] = buffer.head(bs, num_tokens)
        return head

    def owns(self, batch: ForwardBatch) -> bool:
        """Return whether the batch's `input_ids` are at the address of this registry's buffer, as
        in a batch of `init_new`; False for a batch without tokens.
        """
        if batch.input_ids is None or "input_ids" not in self._buffers or not batch.num_tokens:
            return False
        return self._buffers["input_ids"].tensor.data_ptr() == batch.input_ids.data_ptr()

    def _copy_in(self, buffer: InputBuffer, batch: ForwardBatch, ctx: FillContext) -> None:
        value = buffer.source_fn(batch, ctx) if buffer.source_fn is not None else buffer.value_of(batch)
        if value is None:
            return
        head = buffer.head(ctx.raw_bs, ctx.raw_num_tokens)
        if head.data_ptr() != value.data_ptr() or head.device != value.device:
            head.copy_(value, non_blocking=True)

    def poison(self) -> None:
        """Overwrite every buffer, except those with `Fill.ONCE`, with NaN or the largest integer of
        its dtype (bool: False), so that a read of stale data shows.
        """
        for buffer in self._buffers.values():
            if buffer.spec.padding.fill is not Fill.ONCE:
                buffer.fill(_poison_value(buffer.tensor.dtype))

    # -- reading
    # ----------------------------------------------------------------------------------------------

    def view(self, bs: int, num_tokens: int, extend: bool) -> ForwardBatch:
        """Return a batch of the buffers that every step of the kind fills; `extend`: a step with
        prefill rows, otherwise a decode. Optional fields are None.
        """
        heads = self._heads_of(bs, num_tokens, extend)
        return make_batch(self.batch_type, {"batch_size": bs, "num_tokens": num_tokens, **heads})

    def _heads_of(self, bs: int, num_tokens: int, extend: bool) -> dict[str, Tensor]:
        key = (bs, num_tokens, extend)
        heads = self._views.get(key)
        if heads is None:
            heads = {
                spec.name: self._buffers[spec.name].head(bs, num_tokens)
                for spec in leaves(self.batch_type)
                if spec.name in self._buffers and _is_exposed(self._buffers[spec.name], extend)
            }
            if len(self._views) >= REMEMBERED:
                self._views.clear()
            self._views[key] = heads
        return heads

    def extract_buffer(self, template: ForwardBatch, padded_bs: int, padded_num_tokens: int) -> ForwardBatch:
        """Return the padded view of a batch.

        Fields with a buffer become slices of it, others come from `template`. A plain field that is
        None in the template stays None, because its buffer holds an older batch. Computed buffers
        are always exposed if the batch declares a field of their name. The template does not
        change. The plan record keeps the sizes it was made for, so padding after planning is
        detected.
        """
        changes: dict[str, Any] = {"batch_size": padded_bs, "num_tokens": padded_num_tokens}
        for spec in specs(type(template)):
            buffer, value = self._buffers.get(spec.name), getattr(template, spec.name)
            if buffer is not None and (buffer.is_computed or value is not None):
                changes[spec.name] = buffer.head(padded_bs, padded_num_tokens)
            elif spec.record is not None and value is not None:
                changes[spec.name] = self._nested_view(spec.name, value, padded_bs, padded_num_tokens)
        return replace(template, **changes)

    def _nested_view(self, prefix: str, given: Any, bs: int, num_tokens: int) -> Any:
        """Return a nested record of buffer heads; fields that `given` does not have stay None, and
        those without a buffer here stay as they are."""
        heads = {
            spec.name: self._buffers[name].head(bs, num_tokens)
            for spec in specs(type(given))
            if (name := f"{prefix}.{spec.name}") in self._buffers and getattr(given, spec.name) is not None
        }
        return replace(given, **heads)


def _is_optional(buffer: InputBuffer) -> bool:
    """Return whether a step may lack this field, or get it from another source than the host."""
    return not buffer.spec.is_staged or buffer.spec.when in (When.IF_GIVEN, When.WINDOWS)


def _is_exposed(buffer: InputBuffer, extend: bool) -> bool:
    """Return whether every step of the kind fills the buffer (`extend`: with prefill rows,
    otherwise a decode).

    An optional buffer holds values of an older step if this step does not have the field.
    """
    if buffer.is_computed:
        return buffer.post_fill is not None or buffer.spec.when is not When.IF_GIVEN
    return not _is_optional(buffer) and (extend or buffer.spec.is_for_decode)


def _poison_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).max
