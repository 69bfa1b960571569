"""The names of the functions for each operation, for the ledger. Models and samplers of this
package call the functions directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

OWN: Mapping[str, str] = MappingProxyType(
    {
        "linear": "sglcore_mlx.layers.linear:Linear",
        "rms_norm": "mlx.core.fast:rms_norm",
        "layer_norm": "mlx.core.fast:layer_norm",
        "rotary": "sglcore_mlx.layers.rotary:Rotary",
        "moe": "sglcore_mlx.layers.moe:SparseMoe",
        "gated_delta_rule": "sglcore_mlx.layers.recurrence:gated_delta_rule",
        "selective_scan": "sglcore_mlx.layers.recurrence:selective_scan",
        "attention of prompts": "mlx.core.fast:scaled_dot_product_attention",
        "store_kv": "sglcore_mlx.pool:store",
        "draw": "sglcore_mlx.sampling.sampler:Sampler",
    }
)


@dataclass(frozen=True, slots=True)
class KernelNames:
    """What this package has instead of a kernel table: `origin`, the function of each operation, as
    `module:name`. Names only, for the ledger: the functions take MLX arrays, so the core does not
    call them."""

    origin: Mapping[str, str] = field(default_factory=lambda: OWN)


def kernels() -> KernelNames:
    """Implements `DevicePackage.kernels`: return the function of each operation, as
    `module:name`."""
    return KernelNames()
