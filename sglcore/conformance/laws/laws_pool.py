"""A law of level C3 (kernels and attention): the device's pool of keys and values, in any layout.
Every KV slot is separate, and what is stored is read back."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.conformance.inputs.attention_cases import every_cell
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken
from sglcore.conformance.laws.laws_kernels import check_rows
from sglcore.conformance.mutants import mutants_pool
from sglcore.runtime.memory.pools import TokenToKVPool

SAME = MappingProxyType({"float32": 0.0, "bfloat16": 0.0, "float16": 0.0})
"""No error. A pool that rounds what it stores needs a tolerance in its package's
`conformance.toml`."""
STORED = 33
"""KV slots of one store; few, because some kernels are interpreted."""


@torch.inference_mode()
def pool_keeps_cells(trial: Trial) -> None:
    """Write every KV slot of every layer and read it back; then store some, and read all again.
    Raises LawBroken if a slot does not hold what was written last, or if the pool has another
    number of slots than the limits say."""
    harness = trial.kit.harness("dense")
    pool = harness.pool
    cells, generator = every_cell(harness), torch.Generator(device="cpu").manual_seed(3)
    if pool.num_cells != (harness.limits.num_pages + 1) * harness.limits.page_size:
        raise LawBroken(
            f"the pool has {pool.num_cells} KV slots; the limits have {harness.limits.num_pages} pages after page 0"
        )
    order = torch.randperm(pool.num_cells, generator=generator, device="cpu")
    wanted: list[tuple[Tensor, Tensor]] = []
    for layer in range(pool.num_layers):
        like, _ = pool.read_cells(layer, cells[:1])
        drawn = torch.randn((2, pool.num_cells, *like.shape[1:]), generator=generator, device="cpu").to(like.dtype)
        pool.write_cells(layer, cells[order.to(cells.device)], *drawn[:, order].to(cells.device))
        wanted.append((drawn[0], drawn[1]))
    for layer, parts in enumerate(wanted):
        _check(trial, pool, layer, cells, parts, f"layer {layer}, written")
    chosen = order[:STORED]
    for layer, (keys, values) in enumerate(wanted):
        values[chosen], keys[chosen] = -keys[chosen], values[chosen]
        new_keys, new_values = (part[chosen].to(cells.device) for part in (keys, values))
        pool.store(layer, new_keys, new_values, cells[chosen.to(cells.device)])
        _check(trial, pool, layer, cells, (keys, values), f"layer {layer}, stored")


def _check(
    trial: Trial, pool: TokenToKVPool, layer: int, cells: Tensor, wanted: tuple[Tensor, Tensor], text: str
) -> None:
    dtype = trial.kit.harness("dense").geometry.dtype
    for what, found, held in zip(("key", "value"), pool.read_cells(layer, cells), wanted, strict=True):
        if found.shape != held.shape:
            raise LawBroken(f"{text}: read_cells gives {tuple(found.shape)}, wanted {tuple(held.shape)}")
        check_rows(trial, found.cpu(), held, dtype, lambda cell, what=what: f"{text}: the {what} of cell {cell}")


LAWS: tuple[Law, ...] = (
    Law(
        name="pool_keeps_cells",
        level="C3",
        says="What is written or stored to a cell is read from it, in its layer, and no other cell changes.",
        check=pool_keeps_cells,
        mutants=mutants_pool.MUTANTS,
        needs=frozenset({"cells"}),
        tolerance=SAME,
    ),
)
