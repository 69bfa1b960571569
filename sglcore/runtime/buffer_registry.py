"""The owner of the static input buffers that eager forwards and graphs read, the same on every device.

Slots are plain (a batch field), computed (`post_fill`), structured (a dotted name) or sourced (`source_fn`). Host data
is staged straight into them: all int32 slots filled by the host lie in one block, so a step costs one copy, or none
where host and device share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.fields import Axis, FieldSpec, Fill, Source, Split, specs
from sglcore.runtime.staging import HostBlock

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class FillContext:
    """The sizes of one fill, real and padded."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int


REMEMBERED = 1024
"""Views of so many sizes are remembered: decode sizes keep coming back, prefill sizes hardly do."""

SPARE, SPARE_LEAST = 4, 64
"""Words per request, and at least, that a step's other arrays may use of the block: the page-table differences of a
decode step always fit."""

PostFill = Callable[[Tensor, "ForwardBatch", FillContext], None]
SourceFn = Callable[["ForwardBatch", FillContext], "Tensor | None"]


@dataclass(slots=True)
class Slot:
    """One static buffer: its declaration, who fills it, and the memory. `width` is the size of a slot without an axis,
    `trail` the sizes of the dimensions after the axis.

    `post_fill(view, batch, ctx)` computes the padded view in place after the copies; `source_fn(batch, ctx)` returns
    what to copy into the head (None: nothing this step). A computed or sourced slot is always exposed.
    """

    spec: FieldSpec
    width: int = 1
    trail: tuple[int, ...] = ()
    post_fill: PostFill | None = None
    source_fn: SourceFn | None = None
    buffer: Tensor | None = None
    host: NDArray[np.int32] | None = None

    @property
    def name(self) -> str:
        """The batch field it feeds; dots reach into a nested record."""
        return self.spec.name

    @property
    def is_computed(self) -> bool:
        """Its contents do not come from the batch field of its name."""
        return self.post_fill is not None or self.source_fn is not None

    def length(self, bs: int, num_tokens: int) -> int:
        """Entries along its axis for a batch of these sizes."""
        if self.spec.axis is Axis.TOKENS:
            return num_tokens
        return bs if self.spec.axis is Axis.REQUESTS else self.width

    def head(self, bs: int, num_tokens: int) -> Tensor:
        """The view of its first entries; shares memory."""
        assert self.buffer is not None
        return self.buffer.narrow(self.spec.dim, 0, self.length(bs, num_tokens))

    def pad(self, ctx: FillContext) -> None:
        """Apply the padding rule to the entries between the real and the padded size."""
        first = self.length(ctx.raw_bs, ctx.raw_num_tokens)
        count = self.length(ctx.padded_bs, ctx.padded_num_tokens) - first
        if count > 0 and self.spec.padding.fill is Fill.VALUE:
            assert self.buffer is not None
            self.buffer.narrow(self.spec.dim, first, count).fill_(self.spec.padding.value)


class BufferRegistry:
    """Slots by name over `max_bs` requests and `max_num_tokens` tokens.

    Capacity may grow by powers of two until `freeze` (a graph has captured addresses); then a larger batch is an error.
    """

    def __init__(
        self, device: str, max_bs: int, max_num_tokens: int, *, shares_host_memory: bool, pinned: bool
    ) -> None:
        self.device = device
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.frozen = False
        self._shares, self._pinned = shares_host_memory, pinned
        self._slots: dict[str, Slot] = {}
        self._block: HostBlock | None = None
        self._views: dict[tuple[int, int, bool], dict[str, Tensor]] = {}
        self._heads: dict[tuple[str, int, int], Tensor] = {}
        self._computed: tuple[Slot, ...] = ()
        self._optional: tuple[Slot, ...] = ()
        self._copied: tuple[Slot, ...] = ()

    # -- declaring -----------------------------------------------------------------------------------------------

    def register_slot(self, slot: Slot) -> None:
        """Add a slot; a device package may add its own, which it finds by `slot(name)` if no batch field has the name.

        A second one of the same name is an error.
        """
        if slot.name in self._slots:
            raise ValueError(f"slot {slot.name!r} is registered twice; each batch field has one slot")
        if self._block is not None:
            raise ValueError(f"slot {slot.name!r} comes after the buffers were made; register all slots first")
        self._slots[slot.name] = slot

    def slot(self, name: str) -> Slot:
        """One slot; an unknown name is an error that lists the known ones."""
        if name not in self._slots:
            raise KeyError(f"no slot {name!r}; registered: {', '.join(self._slots)}")
        return self._slots[name]

    @property
    def block(self) -> HostBlock:
        """The block that holds what the host stages; another one after growth."""
        assert self._block is not None, "make_buffers comes first"
        return self._block

    @property
    def slot_names(self) -> tuple[str, ...]:
        """All slots, in order of registration."""
        return tuple(self._slots)

    def make_buffers(self) -> None:
        """Allocate every slot at the present capacity and check that each lies on this registry's device."""
        staged = [slot for slot in self._slots.values() if _is_staged(slot)]
        sizes = [int(np.prod(self._shape(slot))) for slot in staged]
        self._block = HostBlock(
            sum(sizes),
            self.device,
            shares_memory=self._shares,
            pinned=self._pinned,
            spare=SPARE * self.max_bs + SPARE_LEAST,
        )
        offset = 0
        for slot, size in zip(staged, sizes, strict=True):
            slot.buffer, slot.host = self._block.part(offset, self._shape(slot))
            offset += size
        for slot in self._slots.values():
            if not _is_staged(slot):
                slot.buffer = torch.zeros(self._shape(slot), dtype=slot.spec.dtype, device=self.device)
            assert slot.buffer is not None
            if slot.buffer.device.type != torch.device(self.device).type:
                raise ValueError(f"slot {slot.name!r} lies on {slot.buffer.device}, the registry on {self.device}")
            if slot.spec.padding.fill is not Fill.KEEP:
                _fill(slot, slot.spec.padding.value)
        self._views.clear()
        self._heads.clear()
        slots = tuple(self._slots.values())
        self._computed = tuple(slot for slot in slots if slot.post_fill is not None)
        self._copied = tuple(slot for slot in slots if slot.post_fill is None)
        self._optional = tuple(
            slot for slot in self._copied if slot.source_fn is not None or slot.name not in (_ALWAYS | _EXTEND)
        )

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return (*slot.spec.lead, slot.length(self.max_bs, self.max_num_tokens), *slot.trail)

    def ensure(self, bs: int, num_tokens: int) -> None:
        """Make room for a batch of these sizes, growing by powers of two, unless a graph holds the addresses."""
        if bs <= self.max_bs and num_tokens <= self.max_num_tokens:
            return
        if self.frozen:
            raise ValueError(
                f"a batch of {bs} requests and {num_tokens} tokens exceeds the {self.max_bs} and {self.max_num_tokens} "
                "that captured graphs hold addresses of; size the registry for the largest batch before capture"
            )
        self.max_bs = max(self.max_bs, 1 << (bs - 1).bit_length())
        self.max_num_tokens = max(self.max_num_tokens, 1 << (num_tokens - 1).bit_length())
        self._block = None
        self.make_buffers()

    def freeze(self) -> None:
        """Addresses have been captured: never reallocate again."""
        self.frozen = True

    # -- filling -------------------------------------------------------------------------------------------------

    def stage(self, name: str, values: NDArray) -> None:
        """Write host values into a slot's head; they reach the device with the next `commit`."""
        host = self.slot(name).host
        assert host is not None, f"slot {name!r} is not filled by the host"
        host[..., : values.shape[-1]] = values

    def commit(self) -> None:
        """Send what was staged: one asynchronous copy, or nothing where memory is shared."""
        assert self._block is not None
        self._block.commit()

    def fill_from(self, batch: ForwardBatch, ctx: FillContext, skip: Iterable[str] = ()) -> None:
        """Bring every slot up to date for a padded batch: pad the tails, copy what the batch holds elsewhere, compute.

        Fields that already are views of their slots are not copied.
        """
        skipped = frozenset(skip)
        if (ctx.raw_bs, ctx.raw_num_tokens) != (ctx.padded_bs, ctx.padded_num_tokens):
            for slot in self._slots.values():
                slot.pad(ctx)
        for slot in self._optional if self.owns(batch) else self._copied:
            if slot.name not in skipped:
                self._copy_in(slot, batch, ctx)
        for slot in self._computed:
            if slot.name not in skipped and slot.post_fill is not None:
                slot.post_fill(self._head(slot, ctx.padded_bs, ctx.padded_num_tokens), batch, ctx)

    def _head(self, slot: Slot, bs: int, num_tokens: int) -> Tensor:
        """`slot.head`, remembered for the sizes that keep coming back."""
        key = (slot.name, bs, num_tokens)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= REMEMBERED:
                self._heads.clear()
            head = self._heads[key] = slot.head(bs, num_tokens)
        return head

    def owns(self, batch: ForwardBatch) -> bool:
        """The batch is a view of these buffers, as `init_new` makes it."""
        if batch.input_ids is None or "input_ids" not in self._slots:
            return False
        buffer = self._slots["input_ids"].buffer
        return buffer is not None and batch.num_tokens > 0 and buffer.data_ptr() == batch.input_ids.data_ptr()

    def _copy_in(self, slot: Slot, batch: ForwardBatch, ctx: FillContext) -> None:
        value = slot.source_fn(batch, ctx) if slot.source_fn is not None else _read(batch, slot.name)
        if value is None:
            return
        head = slot.head(ctx.raw_bs, ctx.raw_num_tokens)
        if head.data_ptr() != value.data_ptr() or head.device != value.device:
            head.copy_(value, non_blocking=True)

    def poison(self) -> None:
        """Overwrite every buffer with values that no kernel survives reading: stale data cannot pass for fresh."""
        for slot in self._slots.values():
            assert slot.buffer is not None
            if slot.spec.padding.fill is not Fill.ONCE:
                _fill(slot, _poison_value(slot.buffer.dtype))

    # -- reading -------------------------------------------------------------------------------------------------

    def view(self, batch_type: type[ForwardBatch], bs: int, num_tokens: int, extend: bool) -> ForwardBatch:
        """A batch over the heads of the slots that every step fills; optional slots are left None."""
        key = (bs, num_tokens, extend)
        heads = self._views.get(key)
        if heads is None:
            declared = _names(batch_type)
            heads = {
                slot.name: slot.head(bs, num_tokens)
                for slot in self._slots.values()
                if slot.name in _ALWAYS or (extend and slot.name in _EXTEND) or slot.post_fill is not None
                if slot.name in declared
            }
            if len(self._views) >= REMEMBERED:
                self._views.clear()
            self._views[key] = heads
        return batch_type(batch_size=bs, num_tokens=num_tokens, **heads)  # pyright: ignore[reportArgumentType]

    def nested_view(self, prefix: str, given: Any, bs: int) -> Any:
        """A nested record over the heads of its structured slots; what `given` does not hold this step stays None."""
        heads = {
            spec.name: self.slot(f"{prefix}.{spec.name}").head(bs, 0)
            for spec in specs(type(given))
            if getattr(given, spec.name) is not None
        }
        return replace(given, **heads)

    def extract_buffer(self, template: ForwardBatch, padded_bs: int, padded_num_tokens: int) -> ForwardBatch:
        """The padded view: fields with a slot become slices of the buffers, others are carried from `template`.

        A plain field that is None in the template stays None (its buffer holds an older batch); computed slots are
        always exposed, if the batch declares a field of their name; the template is left as it is. The plan marker is
        carried with the sizes it was made for, so padding after planning does not pass unseen.
        """
        changes: dict[str, Any] = {"batch_size": padded_bs, "num_tokens": padded_num_tokens}
        declared = _names(type(template))
        for slot in self._slots.values():
            if slot.name not in declared:
                continue
            if slot.is_computed or _read(template, slot.name) is not None:
                changes[slot.name] = slot.head(padded_bs, padded_num_tokens)
        for spec in specs(type(template)):
            value = getattr(template, spec.name)
            if spec.split is Split.NESTED and value is not None and self._has_nested(spec.name):
                changes[spec.name] = self.nested_view(spec.name, value, padded_bs)
        return replace(template, **changes)

    def _has_nested(self, prefix: str) -> bool:
        return any(name.startswith(f"{prefix}.") for name in self._slots)


_ALWAYS = frozenset({"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"})
_EXTEND = frozenset({"extend_prefix_lens", "extend_seq_lens", "extend_start_loc"})


@cache
def _names(batch_type: type) -> frozenset[str]:
    return frozenset(spec.name for spec in specs(batch_type))


def _fill(slot: Slot, value: float) -> None:
    """Both sides of a slot, so that neither need be read back."""
    assert slot.buffer is not None
    slot.buffer.fill_(value)
    if slot.host is not None:
        slot.host.fill(int(value))


def _is_staged(slot: Slot) -> bool:
    return slot.spec.source is Source.HOST and slot.spec.dtype is torch.int32


def _read(batch: Any, dotted: str) -> Tensor | None:
    value = batch
    for part in dotted.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return value


def _poison_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).max
