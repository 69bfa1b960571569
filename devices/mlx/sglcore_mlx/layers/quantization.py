"""Reads the quantisation of checkpoints in mlx-community's format.

`config.json` has "quantization": the packed format of quantised modules, with overrides by module
name: another format, or false for a module that is not quantised. A module is quantised if the
checkpoint has its scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import ConfigError

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FIXED: Mapping[str, tuple[int, int]] = MappingProxyType({"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)})
"""Modes with one fixed format: (bits, group size). Their scales are bytes, and they have no
biases."""

KEYS = frozenset({"group_size", "bits", "mode"})
"""The keys of a format. Any other key that is set could change the numbers, so it is refused."""

REMEDY = "use the unquantised version of this model, or one that mlx_lm.convert made"


@dataclass(frozen=True, slots=True)
class Form:
    """The packed format of a weight: `bits` per element, one scale per `group_size` elements of a
    row; `mode`: MLX's name."""

    group_size: int
    bits: int
    mode: str

    @property
    def is_affine(self) -> bool:
        """Whether groups have a bias in addition to the scale."""
        return self.mode == "affine"

    def __str__(self) -> str:
        """Return a description such as "4-bit, groups of 64", or "mxfp4, groups of 32" for a mode
        with fixed bits."""
        kind = f"{self.bits}-bit" if self.is_affine else self.mode
        return f"{kind}, groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of quantised modules: `default`, with overrides in `modules` by the model's names
    (None: not quantised)."""

    default: Form
    modules: Mapping[str, Form | None]

    def form_of(self, module: str) -> Form | None:
        """Return the format of a module by the model's name for it, without `.weight`; None: not
        quantised. A module without an entry of its own has the default."""
        return self.modules.get(module, self.default)


def read_quantization(raw: Mapping[str, Any], own_name: Callable[[str], str]) -> Quantization | None:
    """Return the quantisation that `config.json` (`raw`) declares; None for a plain checkpoint, and
    for MXFP4 experts, which are recognised by tensor names. `own_name` maps a checkpoint's weight
    name to the model's. Raises `ConfigError` for an unsupported format."""
    given = raw.get("quantization")
    if given is None:
        foreign = raw.get("quantization_config")
        if foreign is not None:
            method = foreign.get("quant_method", "unnamed") if isinstance(foreign, Mapping) else foreign
            if method == "mxfp4":
                return None  # only experts are packed; their tensors' names show it
            raise ConfigError(f"the checkpoint is quantised by {method!r}", wanted="plain weights", remedy=REMEDY)
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json gives quantization as {given!r}", wanted="group_size and bits", remedy=REMEDY)
    if raw.get("quantize_activations"):
        raise ConfigError("the checkpoint is for quantised activations", wanted="quantised weights", remedy=REMEDY)
    named = {name: value for name, value in given.items() if isinstance(value, (Mapping, bool))}
    default = _form("quantization", {name: value for name, value in given.items() if name not in named})
    modules = {
        name: default if value is True else _form(f"quantization of {name!r}", value) if value else None
        for name, value in named.items()
    }
    own = {own_name(f"{name}.weight").removesuffix(".weight"): form for name, form in modules.items()}
    return Quantization(default, own)


def _form(where: str, given: Mapping[str, Any]) -> Form:
    others = [name for name, value in given.items() if name not in KEYS and value]
    if others:
        raise ConfigError(f"config.json gives the {where} {', '.join(others)}", wanted="none of these", remedy=REMEDY)
    mode = str(given.get("mode", "affine"))
    fixed = FIXED.get(mode)
    bits, group_size = given.get("bits", fixed and fixed[0]), given.get("group_size", fixed and fixed[1])
    is_known = bits in AFFINE_BITS and group_size in AFFINE_GROUPS if mode == "affine" else fixed == (bits, group_size)
    if not is_known:
        raise ConfigError(
            f"config.json gives the {where} the mode {mode!r} with {bits} bits and groups of {group_size}",
            wanted=f"affine with bits {AFFINE_BITS} and groups {AFFINE_GROUPS}, or one of {', '.join(FIXED)}",
            remedy=REMEDY,
        )
    return Form(group_size, bits, mode)
