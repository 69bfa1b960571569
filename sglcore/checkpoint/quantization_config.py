"""How the linear layers of a checkpoint are quantised, from its `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglcore.core.errors import CheckpointError

SUPPORTED = (
    "gptq, awq (gemm), fp8, mxfp4 (experts), "
    "and compressed-tensors that are pack-quantized, int-quantized or float-quantized"
)
NONE = "none"
"""A value of EngineConfig's `quantize`: weights are dequantised, and products are as exact as the
model's dtype."""
_REMEDY = "use another quantisation of this model, or the plain one with --quantize int8 or int4"
_UNPACKED = ("naive-quantized", "int-quantized", "float-quantized")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one linear layer is quantised.

    `kind` is the tensor layout: "gptq", "awq", "packed", "integers" or "float8". `block`: the
    (rows, columns) that share a scale, None for all of them; `zero_offset` is added to the stored
    zeros.
    """

    kind: str
    bits: int
    block: tuple[int | None, int | None]
    is_symmetric: bool = True
    zero_offset: int = 0

    @property
    def text(self) -> str:
        """Return a description for a person, such as "4 bits in groups of 128"."""
        rows, columns = self.block
        where = f"groups of {columns}" if rows == 1 and columns else f"blocks of {rows} x {columns}" if columns else ""
        what = f"{self.bits}-bit floats" if self.kind == "float8" else f"{self.bits} bits"
        return f"{what} in {where}" if where else f"{what} with a scale for each {'row' if rows == 1 else 'tensor'}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantised checkpoint: its `method`, and the scheme of each module by the first target that
    matches it.

    A target is "Linear", a module's name or its end, or "re:" with a regular expression.
    """

    method: str
    schemes: tuple[tuple[str, Scheme], ...]

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a quantised module; None if no target matches."""
        return next((scheme for target, scheme in self.schemes if _matches(target, module)), None)


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Return the quantisation in `config.json`, None for a plain checkpoint. Raises
    `CheckpointError` for an unsupported scheme."""
    given = raw.get("quantization_config", raw.get("compression_config"))
    if given is None and "quantization" in raw:
        raise CheckpointError("config.json has 'quantization'", wanted=f"one of {SUPPORTED}", remedy=_REMEDY)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    readers = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed, "mxfp4": _mxfp4}
    if not isinstance(given, Mapping) or not isinstance(method, str) or method not in readers:
        raise CheckpointError(f"the checkpoint is quantised by {method!r}", wanted=SUPPORTED, remedy=_REMEDY)
    try:
        return Quantization(method, tuple(readers[method](given)))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, re.error) as error:
        raise CheckpointError(
            f"the quantization_config of {method!r} is damaged: {type(error).__name__} {error}",
            remedy="download config.json again",
        ) from None


def has_mxfp4_experts(raw: Mapping[str, Any]) -> bool:
    """Return whether the experts are stored in MXFP4. Raises what `read_quantization` raises."""
    found = read_quantization(raw)
    return found is not None and found.method == "mxfp4"


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == "Linear" or module == target or module.endswith(f".{target}")


def _refuse(found: str, wanted: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint is quantised with {found}", wanted=wanted, remedy=_REMEDY)


def _columns(size: Any) -> tuple[int, int | None]:
    """Return the (rows, columns) that share a scale for a group size: (1, size), or (1, None), the
    whole row, for None and negative sizes. Raises ValueError for 0.
    """
    return 1, None if size is None or int(size) < 0 else _positive(size)


def _positive(size: Any) -> int:
    if int(size) < 1:
        raise ValueError(f"a block of {size!r}")
    return int(size)


def _pair(sizes: Any) -> tuple[int, int]:
    """Return (rows, columns) of a block from two numbers or their texts. Raises ValueError for a
    number below 1.
    """
    rows, columns = sizes
    return _positive(rows), _positive(columns)


def _listed(targets: Any) -> Sequence[Any]:
    if not isinstance(targets, Sequence) or isinstance(targets, str):
        raise TypeError(f"the targets {targets!r}")
    return targets


def _target(text: Any) -> str:
    """Return `text`, a target, unchanged. Raises TypeError if it is no text, `re.error` for a bad
    expression.
    """
    if not isinstance(text, str):
        raise TypeError(f"the target {text!r}")
    if text.startswith("re:"):
        re.compile(text.removeprefix("re:"))
    return text


def _mxfp4(given: Mapping[str, Any]) -> Sequence[tuple[str, Scheme]]:
    """Return no schemes: only experts are quantised, and their tensors' names show it."""
    return ()


def _gptq(given: Mapping[str, Any]) -> Sequence[tuple[str, Scheme]]:
    bits, form = given["bits"], given.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8):
        raise _refuse(f"{bits} bits of gptq", "2, 4 or 8")
    if form not in ("gptq", "gptq_v2"):
        raise _refuse(f"the gptq format {form!r}", "gptq or gptq_v2")
    if given.get("dynamic"):
        raise _refuse("gptq settings that differ by layer ('dynamic')", "one setting for all layers")
    return [("Linear", Scheme("gptq", bits, _columns(given["group_size"]), zero_offset=1 if form == "gptq" else 0))]


def _awq(given: Mapping[str, Any]) -> Sequence[tuple[str, Scheme]]:
    bits, version = given.get("bits", given.get("w_bit")), str(given.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refuse(f"{bits} bits of awq in the version {version!r}", "4 bits, gemm")
    group = given.get("group_size", given.get("q_group_size"))
    return [("Linear", Scheme("awq", 4, _columns(group), is_symmetric=False))]


def _fp8(given: Mapping[str, Any]) -> Sequence[tuple[str, Scheme]]:
    form = given.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise _refuse(f"the fp8 format {form!r}", "e4m3")
    block = given.get("weight_block_size")
    return [("Linear", Scheme("float8", 8, _pair(block) if block else (None, None)))]


def _compressed(given: Mapping[str, Any]) -> Sequence[tuple[str, Scheme]]:
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refuse(f"the sparsity format {sparsity!r}", "dense")
    if given.get("transform_config"):
        raise _refuse("transforms of the activations (transform_config)", "none")
    found = [
        (_target(target), _group_scheme(group, group.get("format") or given.get("format")))
        for group in given["config_groups"].values()
        for target in _listed(group["targets"])
    ]
    # A module's name is more specific than "Linear", the class of all linear layers.
    return sorted(found, key=lambda item: item[0] == "Linear")


def _group_scheme(group: Mapping[str, Any], form: str | None) -> Scheme:
    weights = group.get("weights")
    if not weights:
        raise _refuse("activations alone", "quantised weights")
    bits, kind = weights["num_bits"], weights.get("type", "int")
    block = _block(weights)
    symmetric = bool(weights.get("symmetric", True))
    if form == "pack-quantized" and kind == "int" and bits in (2, 4, 8):
        return Scheme("packed", bits, block, symmetric)
    if form in _UNPACKED and kind == "int" and bits == 8:
        return Scheme("integers", 8, block, symmetric)
    if form in _UNPACKED and kind == "float" and bits == 8 and symmetric:
        return Scheme("float8", 8, block)
    raise _refuse(f"{bits} bits of {kind} in the format {form!r} of compressed-tensors", SUPPORTED)


def _block(weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return _columns(weights["group_size"])
    if strategy == "block":
        shape = weights["block_structure"]
        return _pair(shape.split("x") if isinstance(shape, str) else shape)
    raise _refuse(f"the strategy {strategy!r}", "tensor, channel, group or block")
