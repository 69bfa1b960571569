"""What a layer receives when it is built: the configuration, the kernels, and where its weights are
declared.

A layer declares each weight once, by the checkpoint's own name; the loader, the memory count and
the error messages follow from that declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.layers.rank_part import Cut
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable

K = TypeVar("K")


class Packable(Protocol):
    """A layer with a weight that may be packed, because only the kernel table's entries for linear
    layers read it.

    `names`: the tensors of the checkpoint that hold the rows of the weight, in order.
    `may_round`: the weight may be quantised to fewer bits with little loss.
    """

    may_round: bool
    names: tuple[str, ...]
    weight: Tensor


class Weights:
    """The parameters of a model, empty until loaded, and where each tensor of the checkpoint goes.

    - `parameters`: all parameters, in the order in which they were made.
    - `targets`: the parameter for each tensor of the checkpoint, by name.
    - `linears`: the layers with weights to pack after loading.
    - `head`: the output layer, or None. It has packing rules of its own: if `is_head_tied`, its
      weight is the embedding's too.
    - `offsets`: numbers to add to parameters after loading.
    - `derived`: functions to call when all parameters are loaded.
    - `orders`: int64 [N] by target; row i of the target is row order[i] of the checkpoint's tensor.
    - `cuts`: the part of a checkpoint tensor that this rank holds, by target name.
    - `elsewhere`: patterns of names of tensors that the checkpoint may have although this rank
      declares none of them: other ranks hold them.
    - `bounds`: integer parameters with name and upper bound; each element is from 0 to below it.
    - `stacks`: parameters that some checkpoints store whole and others in parts, with the names of
      the parts.
    """

    __slots__ = (
        "bounds",
        "cuts",
        "derived",
        "device",
        "dtype",
        "elsewhere",
        "head",
        "is_head_tied",
        "linears",
        "offsets",
        "orders",
        "parameters",
        "stacks",
        "targets",
    )

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.head: Packable | None = None
        self.is_head_tied = False
        self.linears: list[Packable] = []
        self.bounds: list[tuple[str, Tensor, int]] = []
        self.cuts: dict[str, Cut] = {}
        self.elsewhere: list[str] = []
        self.derived: list[Callable[[], None]] = []
        self.offsets: list[tuple[Tensor, float | Tensor]] = []
        self.orders: dict[str, Tensor] = {}
        self.parameters: list[Tensor] = []
        self.stacks: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
        self.targets: dict[str, Tensor] = {}

    def make(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Make a parameter on the device with undefined content, in the final dtype (None: the
        model's), add it to `parameters`, and return it."""
        made = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        parameter = nn.Parameter(made, requires_grad=False)
        self.parameters.append(parameter)
        return parameter

    def choose_stacks(self, stored: Container[str]) -> None:
        """Declare as whole the stacks that the checkpoint stores whole; `stored` are the model's
        names of its tensors."""
        for name, (whole, parts) in self.stacks.items():
            if name in stored:
                for part in parts:
                    del self.targets[part]
                self.targets[name] = whole

    def place(self, layer: Packable, weight: Tensor) -> None:
        """Replace a layer's weight by `weight`, in another format. Removes the old weight, and its
        targets, so that its tensors are not loaded again."""
        for name in layer.names:
            self.targets.pop(name, None)
        place = next(place for place, parameter in enumerate(self.parameters) if parameter is layer.weight)
        layer.weight = self.parameters[place] = weight


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope in which a layer is built: its name, and what all layers of a model share."""

    config: ModelConfig
    """The model's configuration."""
    kernels: KernelTable
    """The device's kernel table."""
    weights: Weights
    """The weights that layers declare."""
    max_positions: int
    """The upper bound of positions."""
    index_dtype: torch.dtype = torch.int64
    """The type of KV slot indices."""
    refusals: Refusals | None = None
    """Records the kernels that do not take a layer's calls. None: no record."""
    kv_cache_dtype: str = "auto"
    """The element type of the KV cache, as in EngineConfig."""
    drafts: int = 1
    """The most tokens of a request in a decode step: the last sampled token and the draft
    tokens."""
    hisparse: bool = False
    """Cache entries of layers that attend to a selection of them are in host memory."""
    prefix: str = field(default="")
    """The layer's name in the checkpoint, with a dot at the end unless it is empty."""

    def at(self, *names: str | int) -> Self:
        """Return the scope of a part of this layer, with `prefix` extended by these names."""
        return replace(self, prefix=self.prefix + "".join(f"{name}." for name in names))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return self.weights.dtype

    def kernel(self, entry: Entry[K], *call: object) -> K:
        """Return the kernel table's function for calls like `call`, chosen by dtypes and sizes;
        None if the entry is optional and no function takes them. See `choose`."""
        return choose(self.kernels, entry, call, refusals=self.refusals)

    def rows(self, *sizes: int) -> Tensor:
        """Return a sample argument for `kernel`: [1, *sizes] in the model's dtype, on the meta
        device."""
        return torch.empty(1, *sizes, dtype=self.dtype, device="meta")

    def indices(self, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return a sample argument of indices for `kernel`: [1, *sizes] on the meta device."""
        return torch.empty(1, *sizes, dtype=dtype, device="meta")

    def parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Declare one weight of this shape, `prefix.name` in the checkpoint, in `dtype` (None: the
        model's). Returns the parameter, with undefined content until loaded."""
        return self.stacked(((name, shape[0]),), *shape[1:], dtype=dtype)

    def reorder(self, name: str, order: NDArray[np.int64]) -> None:
        """Record that loading reorders the weight and the bias of `prefix.name`: row i is row
        order[i] of the checkpoint's."""
        rows = torch.from_numpy(order)
        self.weights.orders |= {f"{self.prefix}{name}.{kind}": rows for kind in ("weight", "bias")}

    def stacked(self, parts: Sequence[tuple[str, int]], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Declare one weight [sum of rows, *shape] that concatenates the rows of several; `parts`
        are (name, rows), in order, `prefix.name` in the checkpoint. Returns the parameter."""
        parameter = self.weights.make((sum(rows for _, rows in parts), *shape), dtype)
        for (name, _), target in zip(parts, parameter.split([rows for _, rows in parts]), strict=True):
            self.weights.targets[self.prefix + name] = target
        return parameter

    def turned(self, name: str, experts: int, outputs: int, inputs: int) -> Tensor:
        """Declare one weight [experts, outputs, inputs], `prefix.name`, that the checkpoint stores
        as [experts, inputs, outputs]. Returns the parameter."""
        parameter = self.weights.make((experts, outputs, inputs))
        self.weights.targets[self.prefix + name] = parameter.transpose(1, 2)
        return parameter

    def expert_stacked(
        self, whole: str, experts: int | Sequence[int], parts: Sequence[tuple[str, int]], *shape: int
    ) -> Tensor:
        """Declare one weight [experts, rows, *shape] and return it. `parts` are (name, rows) of one
        expert. The checkpoint stores it as `prefix.N.name` for each expert N and each part, in
        order; or whole, as `prefix.whole`. `experts`: their number, or the numbers of those on this
        rank."""
        held = range(experts) if isinstance(experts, int) else experts
        each = [(f"{expert}.{name}", rows) for expert in held for name, rows in parts]
        weight = self.stacked(each, *shape).unflatten(0, (len(held), -1))
        self.weights.stacks[self.prefix + whole] = weight, tuple(self.prefix + name for name, _ in each)
        return weight
