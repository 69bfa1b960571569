"""Finds the source of each tensor that a model declares: an entry of a file, or the several tensors
of a quantised layer.

The model declares tensors, the files have tensors; every difference is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from sglcore.checkpoint.quantization_config import Quantization
from sglcore.checkpoint.safetensors_header import Entry
from sglcore.core.errors import CheckpointError
from sglcore.layers.rank_part import Cut
from sglcore.models.weights.formats.format_registry import FORMATS
from sglcore.models.weights.formats.format_tensors import LayerTensors
from sglcore.models.weights.mxfp4_experts import PARTS, mxfp4_source
from sglcore.models.weights.quantized_weight import Stored, fill
from sglcore.models.weights.rank_weight import CutWeight
from sglcore.models.weights.safetensors_file import DTYPES, PIECE_BYTES, READABLE, SafetensorsFile

CountBytes = Callable[[int], None]
"""Called with the number of bytes of each piece read."""

ROWS = 64
"""The rows of a piece are a multiple of this, so that a device's format has whole blocks."""
_WEIGHT = ".weight"
_LEFT_BY_QUANTISERS = (r".*\.(k_scale|v_scale|q_scale|kv_scale|output_scale)",)
"""Scales of activations and of the KV cache."""


class Source(Protocol):
    """The place of one tensor of the model in the checkpoint's files, and how to read it."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        ...

    @property
    def form(self) -> str | None:
        """The name of its quantisation; None for a plain tensor."""
        ...

    def copy(self, target: Tensor, report: CountBytes) -> None:
        """Fill `target`, a tensor of the same shape on any device, with its values, cast to the
        target's dtype. Calls `report` with the number of bytes of each piece read."""
        ...

    def stored(self, report: CountBytes) -> Stored:
        """Read the stored weight to the host. Only if `form` is not None."""
        ...


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Some rows of a matrix as a view of its mapped file, which has them from byte `start` on. Call
    `release` after they were read."""

    file: SafetensorsFile
    rows: Tensor
    start: int

    def release(self, report: CountBytes) -> None:
        """Release the rows' memory after they were read, and report their bytes."""
        self.file.release(self.start, self.start + self.rows.nbytes)
        report(self.rows.nbytes)


@dataclass(frozen=True, slots=True)
class PlainSource:
    """The `Source` of a plain (not quantised) tensor: its entry in an open file."""

    file: SafetensorsFile
    entry: Entry
    form: None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.entry.num_bytes

    def copy(self, target: Tensor, report: CountBytes) -> None:
        """Fill `target`, a tensor of the same shape on any device, cast to its dtype; calls
        `report` with the number of bytes of each piece that was read.
        """
        self.file.copy(self.entry, target, report)

    def mapped(self, dtype: torch.dtype) -> list[MappedRows] | None:
        """Return a matrix as views of the mapped file, in pieces of some MiB; None if the file has
        another dtype, or it is empty or no matrix."""
        entry = self.entry
        if DTYPES[entry.dtype] is not dtype or len(entry.shape) != 2 or not self.num_bytes:
            return None
        row = self.num_bytes // entry.shape[0]
        count = max(PIECE_BYTES // row // ROWS * ROWS, ROWS)
        pieces = self.file.mapped(entry).split(count)
        starts = [entry.start + place * count * row for place in range(len(pieces))]
        return [MappedRows(self.file, piece, start) for piece, start in zip(pieces, starts, strict=True)]

    def stored(self, report: CountBytes) -> Stored:
        """Raise TypeError: a plain tensor has only values."""
        raise TypeError(f"{self.entry.name!r} is plain")


@dataclass(frozen=True, slots=True)
class CutSource:
    """The `Source` of the part `cut` of a plain tensor, which this rank holds."""

    whole: PlainSource
    cut: Cut
    form: None = None

    @property
    def num_bytes(self) -> int:
        """Approximate bytes read from the file."""
        kept = sum(last - first for first, last in self.cut.ranges)
        return self.whole.num_bytes * kept // max(self.cut.whole, 1)

    def copy(self, target: Tensor, report: CountBytes) -> None:
        """Copy the part from the mapped file to `target`; reads only the pages that hold it.
        Reports once."""
        file, entry = self.whole.file, self.whole.entry
        self.cut.copy(file.mapped(entry), target)
        file.release(entry.start, entry.start + entry.num_bytes)
        report(self.num_bytes)

    def stored(self, report: CountBytes) -> Stored:
        """Raise TypeError: a plain tensor has only values."""
        raise TypeError(f"{self.whole.entry.name!r} is plain")


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """The `Source` of the weight of a quantised layer, or of a rank's part of it; `shape` is that
    of the part."""

    layer: LayerTensors
    num_bytes: int
    shape: tuple[int, int]
    cut: Cut | None = None

    @property
    def form(self) -> str:
        """The name of its quantisation: bits and groups."""
        return self.layer.scheme.text

    def copy(self, target: Tensor, report: CountBytes) -> None:
        """Dequantise the weight, or the rank's part of it, into `target`, cast to its dtype. The
        stored tensors are read whole and reported once.
        """
        fill(self.stored(report), target)

    def stored(self, report: CountBytes) -> Stored:
        """Read its codes or floats to the host; with a `cut`, return the rank's part of them."""
        found = FORMATS[self.layer.scheme.kind].read(self.layer)
        report(self.num_bytes)
        return found if self.cut is None else CutWeight(found, self.cut, self.shape)


@dataclass(frozen=True, slots=True)
class PartSource:
    """The `Source` of a part of another source: the whole tensor is read to the host, then cut.

    `shape` is the shape of the whole tensor, `part` the shape of the part.
    """

    source: Source
    cut: Cut
    shape: tuple[int, ...]
    part: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.source.num_bytes

    @property
    def form(self) -> str | None:
        """The name of its quantisation; None for a plain tensor."""
        return self.source.form

    def copy(self, target: Tensor, report: CountBytes) -> None:
        """Fill `target`, a tensor of the part's shape, cast to its dtype; reads the whole
        tensor.
        """
        if self.form is not None:
            fill(self.stored(report), target)
            return
        whole = torch.empty(self.shape, dtype=target.dtype, device="cpu")
        self.source.copy(whole, report)
        self.cut.copy(whole, target)

    def stored(self, report: CountBytes) -> Stored:
        """Read the stored weight to the host and return the part of it. Only if `form` is not
        None.
        """
        return CutWeight(self.source.stored(report), self.cut, (self.part[0], self.part[1]))


def find_sources(
    files: Sequence[SafetensorsFile],
    targets: Mapping[str, Tensor],
    named: Mapping[str, str],
    harmless: Iterable[str],
    quantization: Quantization | None,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> dict[str, Source]:
    """Return the source of each target, in the order of the files. `targets`: the model's tensors
    by name; `harmless`: patterns of names that the files may have without a target; `named`: the
    target's name of each tensor in the files; `cuts`: the part that a target holds, for targets
    that hold a part.

    Raises `CheckpointError` for missing, unknown, duplicate and wrongly shaped tensors.
    """
    places = _by_name(files, named)
    used: set[str] = set()
    found: dict[str, Source] = {}
    for name, target in targets.items():
        cut = cuts.get(name)
        shape = tuple(target.shape) if cut is None else cut.shape(target)
        layer = _layer(name, shape, places, quantization)
        if layer is not None:
            names = [f"{layer.module}.{suffix}" for suffix in layer.stored]
            taken = sum(places[each].num_bytes for each in names)
            found[name] = QuantizedSource(layer, taken, (target.shape[0], target.shape[1]), cut)
            used.update(names)
        elif (experts := mxfp4_source(name, shape, places, cut)) is not None:
            found[name] = experts
            used.update(f"{name}_{part}" for part in PARTS)
        elif name in places:
            found[name] = places[name] if cut is None else CutSource(places[name], cut)
            _check_plain(places[name], target, shape)
            used.add(name)
    check_missing(targets, found, [file.path.name for file in files])
    patterns = (*harmless, *(_LEFT_BY_QUANTISERS if quantization else ()))
    is_harmless = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)).fullmatch
    unknown = [name for name in places if name not in used and not is_harmless(name)]
    check_unknown([places[name].entry.name for name in unknown if not _is_empty_bias(places[name], quantization)])
    order = {name: place for place, name in enumerate(places)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def check_missing(wanted: Iterable[str], found: Mapping[str, object], files: Sequence[str]) -> None:
    """Raise `CheckpointError` for the names in `wanted` that are not in `found`; the error names
    the `files`."""
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"{some(missing)} not in the checkpoint ({', '.join(files)})",
            remedy="check config.json, or download it again",
        )


def check_unknown(unknown: Sequence[str]) -> None:
    """Raise `CheckpointError` that names the tensors in `unknown`, which the model does not use;
    does nothing if there are none.
    """
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {some(unknown)}, which this architecture does not use",
            remedy="check that config.json belongs to these weights",
        )


def some(names: Sequence[str], shown: int = 8) -> str:
    """Return a text with the first `shown` names, and the number of the others."""
    listed = ", ".join(repr(name) for name in names[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"


def _by_name(files: Sequence[SafetensorsFile], named: Mapping[str, str]) -> dict[str, PlainSource]:
    places: dict[str, PlainSource] = {}
    for file in files:
        for entry in file.entries:
            name = named[entry.name]
            if name in places:
                raise CheckpointError(
                    f"{entry.name!r} is in both {places[name].file.path.name} and {file.path.name}",
                    wanted="it once",
                    remedy="download the checkpoint again",
                )
            places[name] = PlainSource(file, entry)
    return places


def _layer(
    name: str, shape: tuple[int, ...], places: Mapping[str, PlainSource], quantization: Quantization | None
) -> LayerTensors | None:
    """Return the stored tensors of a quantised layer with a weight of this shape.

    None if the weight is plain or the files have none of the format's tensors for it. Raises
    `CheckpointError` if they have only some of those that the format needs.
    """
    is_plain = name in places and places[name].entry.dtype in DTYPES
    if quantization is None or is_plain or not name.endswith(_WEIGHT) or len(shape) != 2:
        return None
    module = name.removesuffix(_WEIGHT)
    scheme = quantization.scheme(module)
    if scheme is None:
        return None
    form = FORMATS[scheme.kind]
    there = {s: places[f"{module}.{s}"] for s in (*form.needs, *form.may_have) if f"{module}.{s}" in places}
    if not any(suffix in there for suffix in form.needs):
        return None
    check_missing([f"{module}.{s}" for s in form.needs], {f"{module}.{s}": 0 for s in there}, _names(there.values()))
    stored = {suffix: partial(_read, place) for suffix, place in there.items()}
    return LayerTensors(module, shape[0], shape[1], scheme, stored)


def _names(places: Iterable[PlainSource]) -> list[str]:
    return sorted({place.file.path.name for place in places})


def _read(place: PlainSource) -> Tensor:
    if place.entry.dtype not in READABLE:
        raise CheckpointError(
            f"{place.entry.name!r} in {place.file.path.name} has the type {place.entry.dtype}",
            wanted=f"one of {', '.join(READABLE)}",
            remedy="use another quantisation of this model",
        )
    return place.file.read(place.entry)


def _is_empty_bias(place: PlainSource, quantization: Quantization | None) -> bool:
    """Return whether a bias is zeros that GPTQ's tools wrote for a layer without a bias."""
    if quantization is None or quantization.method != "gptq" or not place.entry.name.endswith(".bias"):
        return False
    return place.entry.dtype in READABLE and not bool(place.file.read(place.entry).any())


IDS_REMEDY = "they are ids: convert them to whole numbers, or download the checkpoint again"


def _check_plain(place: PlainSource, target: Tensor, shape: tuple[int, ...]) -> None:
    entry, where = place.entry, place.file.path.name
    integers = {torch.uint8: ("U8",), torch.int32: ("I32", "I64"), torch.int64: ("I64",)}
    wanted = integers.get(target.dtype, tuple(DTYPES))
    if entry.dtype not in wanted:
        raise CheckpointError(
            f"{entry.name!r} in {where} has the type {entry.dtype}",
            wanted="one of " * (len(wanted) > 1) + ", ".join(wanted),
            remedy="use the unquantised version of this model"
            if target.dtype not in (torch.int32, torch.int64)
            else IDS_REMEDY,
        )
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.name!r} in {where} has the shape {list(entry.shape)}",
            wanted=f"{list(shape)} as config.json implies",
            remedy="check that config.json belongs to these weights",
        )
