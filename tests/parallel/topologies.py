"""The body of a rank's process in tests of topologies: its groups, and the layers of a small model
built on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglcore.checkpoint.model_config import read_config
from sglcore.layers.parallel.dispatched_experts import DispatchedMoe
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.parallel.expert_dispatch import FixedDispatcher, MakeDispatcher, RaggedDispatcher
from sglcore.runtime.parallel.process_group import join
from sglcore.runtime.parallel.rank_groups import Groups, divided
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.topology import Communication, Place, Topology
from tests.parallel.forked import forking

Body = Callable[[Groups, dict[str, Any]], Any]


def on_topology(
    topology: Topology, folder: Path, body: Body, /, *, defect: Callable[[], None] | None = None, **given: Any
) -> list[Any]:
    """The result of `body(groups, given)` on each rank, by rank; an error as its text."""
    context = forking()
    pipes = [context.Pipe() for _ in range(topology.world)]
    processes = []
    for rank, (_, theirs) in enumerate(pipes):
        place = Place(rank, topology, f"file://{folder / 'meeting'}", rank, topology.world)
        processes.append(context.Process(target=_be, args=(place, body, defect, given, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        return [torch.load(BytesIO(ours.recv_bytes()), weights_only=False) for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def _be(place: Place, body: Body, defect: Callable[[], None] | None, given: dict[str, Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if defect is not None:
        defect()
    communication = Communication("gloo")
    world = join(place, communication)
    make: MakeDispatcher = FixedDispatcher if given.get("capacity") else RaggedDispatcher
    groups = divided(world, place, communication, make, given.get("capacity", 0))
    try:
        with torch.inference_mode():
            found = body(groups, given)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    told = BytesIO()
    torch.save(found, told)
    pipe.send_bytes(told.getvalue())
    groups.close()


def in_step(plan: StepPlan) -> forward_context:
    """A context for a forward of a step with this plan."""
    backend: Any = None
    batch: Any = SimpleNamespace(step_plan=plan)
    return forward_context(ForwardContext(backend, batch))


def rows_of(shard: int, count: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The rows of a shard: the same in every process."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(100 * shard + count), dtype=dtype)


def sparse_block(folder: Path, groups: Groups, layer: int, dtype: torch.dtype) -> Any:
    """This rank's part of a checkpoint layer's feed-forward block."""
    config, kernels = read_config(folder), KernelTable()
    model: Any = load_model(folder, config, kernels=kernels, device="cpu", dtype=dtype, groups=groups)
    return model.layers[layer].mlp


class SeesRouting:
    """Wraps a router and records the experts that it chose."""

    def __init__(self, route: Any) -> None:
        self._route = route
        self.chosen: list[torch.Tensor] = []

    def __call__(
        self, hidden: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self._route(hidden, input_ids)
        self.chosen.append(chosen.clone())
        return weights, chosen


def block_on_rows(groups: Groups, given: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each step in `plans`: the block's output for this shard's rows, and the experts that this
    rank chose."""
    block = sparse_block(given["folder"], groups, 0, given["dtype"])
    inner = block if groups.has_experts_whole else block._inner
    inner._route = seen = SeesRouting(inner._route)
    found = []
    plans: Sequence[StepPlan] = given["plans"]
    for plan in plans:
        x = rows_of(groups.shard, plan.global_num_tokens[groups.shard], given["hidden"], given["dtype"])
        with in_step(plan.of_shard(groups.shard)):
            made = block(x)
        found.append((made.clone(), torch.cat(seen.chosen).int()))
        seen.chosen.clear()
    return found


def held_experts(groups: Groups, given: dict[str, Any]) -> torch.Tensor:
    """The second weights (w2) of the experts on this rank, in the second layer."""
    block = sparse_block(given["folder"], groups, 1, torch.float32)
    return (block if isinstance(block, DispatchedMoe) else block.experts).w2.clone()
