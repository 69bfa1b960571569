"""Loads a model's weights from their sources, one layer at a time, each in the format that the
device's kernels read best.

Memory never holds more than the final weights and the current layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from sglcore.checkpoint.quantization_config import NONE
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.core.ledger import Row
from sglcore.layers.build_scope import Packable, Weights
from sglcore.models.weights.quantized_weight import GROUPS, QuantizedWeight, Stored, fill, joined, packable, rounded
from sglcore.models.weights.weight_sources import CountBytes, PlainSource, Source
from sglcore.runtime.kernels.table import KernelTable

BITS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4})
"""Bits by value of `--quantize`."""


HEAD = "int8"
"""The format of the output layer for any `--quantize` that rounds: it is read once per token and
decides which token is drawn."""

PLAIN = "plain"
NOT_READ = "because these kernels read plain weights only"
PACKING = "a device whose kernels have pack_quantized"
PLAINER = "use the plain version of this model, or leave --quantize out"
EXPERTS = "leave --quantize out, or use a model without experts"
_EXPERT = re.compile(r".*\.experts\.\d+\..*")


def check_quantize(asked: str, kernels: KernelTable) -> None:
    """Raise `ConfigError` if the kernels can not quantise as `asked`, a value of `--quantize`. Only
    "int8" and "int4" need such kernels.
    """
    if asked in BITS and kernels.quantize_linear is None:
        raise ConfigError(
            "this device's kernels do not quantise "
            f"({kernels.origin['linear'].partition(':')[0]} has no quantize_linear)",
            remedy="leave --quantize out, or use a checkpoint that is quantised",
        )


def check_bounds(name: str, parameter: Tensor, bound: int) -> None:
    """Raise `CheckpointError` unless all elements are in 0..bound - 1. Waits."""
    least, most = (int(each) for each in parameter.aminmax())
    if least < 0 or most >= bound:
        raise CheckpointError(
            f"{name} has numbers from {least} to {most}",
            wanted=f"0 to {bound - 1}",
            remedy="the file is damaged, or config.json belongs to another checkpoint",
        )


class Packer:
    """Fills a model's weights. `forms` counts the linear layers by format, `head` is the output
    layer's format, and `notes` counts weights by remarks for the ledger, such as why a quantised
    weight is not kept as stored."""

    def __init__(self, weights: Weights, kernels: KernelTable, quantize: str = "auto") -> None:
        """Raise `ConfigError` if the kernels can not quantise as requested."""
        check_quantize(quantize, kernels)
        self.forms: Counter[str] = Counter()
        self.head: str | None = None
        self.notes: Counter[str] = Counter()
        # Layers that keep their codes, by bits. The output layer counts as 0, because it may be
        # wider than requested.
        self._kept: Counter[int] = Counter()
        self._experts = 0
        self._grown = 0
        self._quantize = quantize
        self._weights = weights
        self._kernels = kernels

    def load(self, sources: Mapping[str, Source], report: CountBytes) -> None:
        """Fill every weight from its source, by the model's name for it; call `report` with the
        bytes of each piece read. Then add offsets, check bounds, call the functions in
        `Weights.derived`, and empty `Weights.targets`.
        """
        weights, head = self._weights, self._weights.head
        in_layers = {name for layer in (*weights.linears, *([head] if head else [])) for name in layer.names}
        for name, source in sources.items():
            if name not in in_layers:
                target = weights.targets.pop(name)
                source.copy(target, report)
                self.notes["dequantised, being outside linear layers"] += source.form is not None
                self.notes["of experts kept in 4-bit floats"] += name.endswith("_blocks")
                self._grown += 0 if source.form is None else target.nbytes - source.num_bytes
                self._experts += _EXPERT.fullmatch(name) is not None
        for layer in weights.linears:
            self.forms[self._load_layer(layer, [sources[name] for name in layer.names], report)] += 1
        if head is not None:
            self.head = self._load_layer(head, [sources[name] for name in head.names], report)
        for parameter, offset in weights.offsets:
            parameter.add_(offset)
        for name, parameter, bound in weights.bounds:
            check_bounds(name, parameter, bound)
        for derive in weights.derived:
            derive()
        weights.targets.clear()

    def row(self) -> Row | None:
        """Return the ledger's row: how many layers have which format. None if every weight is
        plain, as in the checkpoint.

        Weights that stay wider than requested are a downgrade.
        """
        found = [form for form, _ in self.forms.most_common() if form != PLAIN]
        wider = self._wider()
        if not found and self.head in (None, PLAIN) and not any(self.notes.values()) and not wider:
            return None
        rounded = (
            self._kernels.activation_bits if self._kept or any(form in BITS for form in (*found, self.head)) else 0
        )
        total = self.forms.total()
        told = [f"{count} of {total} linear layers {form}" for form, count in self.forms.most_common()]
        told += [f"output layer {self.head}"] if self.head is not None else []
        told += [f"{count} weights {note}" for note, count in self.notes.items() if count]
        if self._grown > 0:
            told.append(f"weights outside linear layers take {self._grown / (1 << 20):.1f} MiB more than in the files")
        if self._kept and self._quantize != "auto":
            told.append("the checkpoint's own codes are kept")
        if rounded:
            told.append(f"their products round activations to {rounded} bits, --quantize {NONE} does not")
        remedy = PACKING if any(NOT_READ in note for note in self.notes) else "--quantize"
        effective = ", ".join(found) or self.head or PLAIN
        effective += f", activations in {rounded} bits" if rounded else ""
        if wider:
            told, remedy = [*told, *wider], EXPERTS if self._experts else PLAINER
        return Row("weights", self._quantize, effective, "; ".join(told), remedy, downgrade=bool(wider))

    def _wider(self) -> list[str]:
        """Return what is kept in more bits than requested. The output layer does not count: it is
        always `HEAD`."""
        if self._quantize not in BITS:
            return []
        kept = {bits: count for bits, count in self._kept.items() if bits > BITS[self._quantize]}
        told = [f"{count} linear layers stay in {bits} bits" for bits, count in kept.items()]
        return [*told, f"{self._experts} expert weights stay plain"] if self._experts else told

    def _load_layer(self, layer: Packable, sources: Sequence[Source], report: CountBytes) -> str:
        """Load a layer's weight; return the name of its format: PLAIN, a quantised one, or that it
        was dequantised.
        """
        if self._pack_in_place(layer, sources, report):
            return PLAIN
        stored = [source.stored(report) if source.form else None for source in sources]
        codes = self._codes(layer, stored)
        if codes is not None and self._kernels.pack_quantized is not None:
            pack, given = self._kernels.pack_quantized, replace(codes, dtype=self._weights.dtype)
            self._place(layer, lambda: pack(given))
            self._kept[0 if layer is self._weights.head else codes.bits] += 1
            return f"{codes.bits}-bit groups of {codes.group}"
        for name, source, given in zip(layer.names, sources, stored, strict=True):
            target = self._weights.targets[name]
            if given is None:
                source.copy(target, report)
            else:
                fill(given, target)
        plain = PLAIN if not any(stored) else f"dequantised to {str(self._weights.dtype).removeprefix('torch.')}"
        return self._pack(layer) or plain

    def _pack_in_place(self, layer: Packable, sources: Sequence[Source], report: CountBytes) -> bool:
        """Pack a plain layer straight from its mapped files without a copy, if the kernels can.
        Returns whether it did."""
        pack = self._kernels.pack_parts
        plain = [source for source in sources if isinstance(source, PlainSource)]
        if pack is None or self._rounds(layer) or not self._may_change(layer) or len(plain) != len(sources):
            return False
        mapped = [source.mapped(self._weights.dtype) for source in plain]
        pieces = [piece for parts in mapped for piece in parts or ()]
        if None in mapped:
            return False
        weight = pack([piece.rows for piece in pieces], lambda place: pieces[place].release(report))
        if weight is not None:
            self._weights.place(layer, weight)
        return weight is not None

    def _codes(self, layer: Packable, stored: Sequence[Stored | None]) -> QuantizedWeight | None:
        """Return the integer codes of all parts as one weight if the kernels read them; else None,
        and a note says why."""
        if not any(stored):
            return None
        if self._quantize == NONE:
            self._note(layer, "as requested")
            return None
        if self._kernels.pack_quantized is None or not self._may_change(layer):
            self._note(layer, NOT_READ)
            return None
        if not all(stored):
            self._note(layer, "being joined with a layer that is not quantised")
            return None
        parts = [self._part(layer, each) for each in stored if each is not None]
        return joined([part for part in parts if part is not None]) if all(parts) else None

    def _part(self, layer: Packable, stored: Stored) -> QuantizedWeight | None:
        codes = stored.as_codes()
        if codes is None:
            remedy = "" if self._rounds(layer) else "; --quantize int8 rounds them"
            self._note(layer, f"being {stored.form}{remedy}")
            return None
        found = packable(codes)
        if found is None and stored.shape[1] % GROUPS[-1] == 0:
            self.notes[f"rounded from groups of {codes.group} to 8 bits in groups of {GROUPS[-1]}"] += 1
            return rounded(stored)
        if found is None:
            self._note(layer, f"being groups of {codes.group}")
        return found

    def _note(self, layer: Packable, why: str) -> None:
        """Count a weight that does not keep its codes, by its new format and the reason."""
        self.notes[f"{f'rounded to {self._kind(layer)}' if self._rounds(layer) else 'dequantised'}, {why}"] += 1

    def _kind(self, layer: Packable) -> str:
        return HEAD if layer is self._weights.head else self._quantize

    def _rounds(self, layer: Packable) -> bool:
        """Whether a layer is quantised after it is filled."""
        return self._quantize in BITS and layer.may_round and self._may_change(layer)

    def _place(self, layer: Packable, make: Callable[[], Tensor]) -> None:
        """Set a layer's weight to the result of `make`. Raises `CheckpointError` for values that
        can not be packed."""
        try:
            weight = make()
        except ValueError as error:
            names = " and ".join(repr(name) for name in layer.names)
            raise CheckpointError(
                f"{names} cannot be packed: {' '.join(str(error).split())}", remedy="download the checkpoint again"
            ) from None
        self._weights.place(layer, weight)

    def _pack(self, layer: Packable) -> str | None:
        """Convert a filled weight to the device's format. Returns the name of the format it was
        quantised to, None if it was not."""
        kernels, is_head = self._kernels, layer is self._weights.head
        if not self._may_change(layer):
            return None
        rounds = kernels.quantize_linear
        if rounds is not None and self._rounds(layer):
            self._place(layer, lambda: rounds(layer.weight, self._kind(layer)))
            return self._kind(layer)
        pack = kernels.pack_head if is_head and kernels.pack_head is not None else kernels.pack_linear
        self._weights.place(layer, pack(layer.weight))
        return None

    def _may_change(self, layer: Packable) -> bool:
        """Whether a layer's weight may change its format: only products read it, or the kernels
        also support the tied embedding."""
        is_shared = layer is self._weights.head and self._weights.is_head_tied
        return not is_shared or self._kernels.pack_head is not None
