"""Replaces parts of a model of transformers by the engine's kernels, where trials show that they
compute the same.

Everything happens on the meta device: modules are replaced if their twins match a kernel. Then one
walk finds the layers with a common input, the residual sums that feed a norm, and the readers of
cosines; a second walk with more tokens checks that the model calls attention as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.eager_attention import Own, find_own
from sglcore.models.transformers_backend.kernel_layers import (
    Activation,
    GatedBlock,
    Norm,
    NormForm,
    PackedLinear,
    Product,
    Replacement,
)
from sglcore.models.transformers_backend.layer_trace import Trace, shared_inputs
from sglcore.models.transformers_backend.module_probes import (
    gated_block_of,
    is_linear,
    kind_of,
    may_be_block,
    may_be_norm,
    rms_norm_of,
)
from sglcore.models.transformers_backend.moe_adapter import has_experts
from sglcore.models.transformers_backend.output_head import Ends, replace_ends
from sglcore.models.transformers_backend.rope_tables import check_angles
from sglcore.models.transformers_backend.rotary_adapter import Rotary, RotaryTrace, Turn, put_turns, settle
from sglcore.models.transformers_backend.router_detection import (
    Router,
    RoutingForm,
    SparseBlock,
    as_sparse_block,
    may_route,
    routing_of,
)
from sglcore.models.transformers_backend.shape_walk import LENGTHS, AttentionCall, DoesNotRun, Windows, lengths_of, walk
from sglcore.models.transformers_backend.stateful_layers import Mixer

_CHOOSING = frozenset({"gate", "router", "wg"})
"""Names of layers that choose experts. They, and layers inside them, are not packed: another
rounding would choose other experts, and their classes read their weights."""

Place = tuple[nn.Module, str, str, nn.Module]
"""(owner module, name in the owner, name in the model, module)."""
Layer = TypeVar("Layer", Router, PackedLinear)
Put = tuple[nn.Module, str, Layer]
"""(owner module, name in the owner, replacement)."""


@dataclass(slots=True)
class Replaced:
    """The replaced parts of a model of transformers, and its attention calls. Made by `replace`."""

    calls: tuple[AttentionCall, ...] = ()
    """The calls of attention, in order."""
    layers: list[Replacement] = field(default_factory=list)
    """Linear layers, gated blocks and norms."""
    routers: list[Router] = field(default_factory=list)
    """Routers of experts."""
    blocks: list[SparseBlock] = field(default_factory=list)
    """Blocks with experts."""
    ends: Ends = field(default_factory=Ends)
    """The embedding and the output layer."""
    rotaries: list[Rotary] = field(default_factory=list)
    """Modules that make cosines and sines."""
    turns: Mapping[nn.Module, Turn] = field(default_factory=dict)
    """By attention module, the function that rotates its queries and keys."""
    angles: Mapping[nn.Module, Mapping[Any, tuple[Any, Any]]] = field(default_factory=dict)
    """The calls of each module that makes cosines and sines, as in `RotaryTrace`."""
    owns: list[Own] = field(default_factory=list)
    """Modules that compute attention by themselves."""

    def place(self, build: Build) -> None:
        """Declare weights, choose kernels and make tables, once the other weights are placed.
        Raises `ConfigError` for angles of a position that depend on other positions."""
        for module, calls in self.angles.items():
            for call in calls.values():
                check_angles(module, call, build.max_positions)
        for each in (*self.layers, *self.routers, *self.rotaries, *self.turns.values(), self.ends):
            each.place(build)

    def __str__(self) -> str:
        kinds = Counter(type(each) for each in self.layers)
        products = {id(each.product) for each in self.layers if isinstance(each, PackedLinear)}
        apart = sum(not turn.is_direct for turn in self.turns.values())
        turned = {"turned with the store": len(self.turns) - apart, "turned apart": apart}
        return ", ".join(
            (
                f"{kinds[PackedLinear]} linear layers in {len(products)} products",
                f"{kinds[GatedBlock]} gated blocks",
                f"{kinds[Norm]} norms",
                *([f"{len(self.routers)} routers"] if self.routers else []),
                f"{sum(each.is_addend for each in (*self.layers, *self.blocks))} sums before a norm",
                *([f"{count} {words}" for words, count in turned.items() if count] or ["0 turned"]),
            )
        )


def replace(
    model: PreTrainedModel, keeps: Callable[[str], bool], mixers: Sequence[Mixer] = (), *, is_whole: bool = True
) -> Replaced:
    """Replace parts of a model on the meta device, in place; without `is_whole`, and in `mixers`
    (the layers with states), linear layers only. Parameters stay the class's own if `keeps` holds
    for their name. Raises the errors of `walk`, and with `is_whole` `DoesNotRun` if a replaced
    layer does not fit the model."""
    found, has_states = Replaced(), bool(mixers)
    routers, linears = _put(model, keeps, mixers, found, is_whole)
    modules = list(model.modules())
    turns, trace, seen = put_turns(modules) if is_whole else {}, Trace(), RotaryTrace()
    attended: dict[nn.Module, list[tuple[Tensor, ...]]] = {}
    owns, windows = find_own(modules), Windows()
    with seen.watching(modules), trace.watching(modules):
        found.calls = walk(model, attended, LENGTHS[:1], windows=windows, has_states=has_states)
    found.owns, found.angles = [own for own in owns if own.settle()], seen.calls
    _check_norms(model, found.layers, trace)
    found.routers += _unless(routers, lambda router: router.is_read or trace.is_read(router.logits))
    found.layers += (kept := _unless(linears, lambda linear: linear.is_read))
    found.ends.take_back(model)
    if is_whole:
        _join(trace)
        found.rotaries, found.turns = settle(model, turns, seen, trace, attended)
    _check(model, found, kept, windows, has_states)
    return found


def _put(
    model: PreTrainedModel, keeps: Callable[[str], bool], mixers: Sequence[Mixer], found: Replaced, is_whole: bool
) -> tuple[list[Put[Router]], list[Put[PackedLinear]]]:
    """Replace modules with matching twins, recording most of them in `found`, before the walk on
    the meta device; returns the routers and linear layers that may be restored after it."""
    stored, routers, dtype = model.state_dict(keep_vars=True), [], model.dtype
    places = list(_places(model, stored, keeps))
    if is_whole:
        own = {part for mixer in mixers for part in mixer.module.modules()}
        found.layers += _blocks([place for place in places if place[0] not in own], dtype)
        found.layers += _norms([place for place in _still(model, places) if place[0] not in own], dtype)
        routers = list(_routers(_still(model, places), dtype))
        sparse = [module for module in model.modules() if any(map(has_experts, module.children()))]
        found.blocks += map(as_sparse_block, sparse)
        found.ends = replace_ends(model, stored, keeps)
    return routers, list(_linears(_still(model, places), model.get_output_embeddings()))


def _unless(put: Iterable[Put[Layer]], is_other: Callable[[Layer], bool]) -> list[Layer]:
    """Restore the original module if `is_other` holds for its replacement; return the replacements
    that remain."""
    kept: list[Layer] = []
    for owner, name, layer in put:
        if is_other(layer):
            setattr(owner, name, layer.own)
        else:
            kept.append(layer)
    return kept


def _check_norms(model: PreTrainedModel, norms: Iterable[Replacement], trace: Trace) -> None:
    """Raise `DoesNotRun`, so that only linear layers are replaced, for a model that computes with a
    norm's weight itself.
    """
    if any(isinstance(each, Norm) and trace.is_read(each.weight) for each in norms):
        raise DoesNotRun(
            f"{type(model).__name__} cannot be served by transformers' classes: it computes with a norm's weight",
            remedy="use another model",
        )


def _check(
    model: PreTrainedModel, found: Replaced, linears: Sequence[PackedLinear], windows: Windows, has_states: bool
) -> None:
    """Raise `DoesNotRun`, so that only linear layers are replaced, for a model that does something
    other than `found` with more tokens; also raises the errors of `walk`.
    """
    few, many = lengths_of(model)
    again = walk(model, lengths=(many,), windows=windows, has_states=has_states)
    if again != found.calls or found.ends.is_read or any(each.is_read for each in linears):
        raise DoesNotRun(
            f"{type(model).__name__} cannot be served by transformers' classes: it calls attention differently with "
            f"{many} tokens than with {few}",
            remedy="use another model",
        )


def _places(model: nn.Module, stored: Mapping[str, Tensor], keeps: Callable[[str], bool]) -> Iterator[Place]:
    """Yield (owner, name in the owner, name in the model, module) of the modules with exactly one
    owner, unless one of their parameters (in `stored`) is shared or `keeps` holds for its name."""
    modules = list(model.named_modules())
    owners = Counter(id(child) for _, module in modules for child in module._modules.values())
    uses = Counter(id(parameter) for parameter in stored.values())
    fixed = {id(parameter) for name, parameter in stored.items() if uses[id(parameter)] > 1 or keeps(name)}
    for prefix, owner in modules:
        for name, child in list(owner._modules.items()):
            if child is None or owners[id(child)] > 1:
                continue
            if not fixed or not any(id(parameter) in fixed for parameter in child.parameters()):
                yield owner, name, f"{prefix}.{name}".removeprefix("."), child


def _still(model: nn.Module, places: Iterable[Place]) -> list[Place]:
    """Return the places that still hold their module."""
    modules = set(model.modules())
    return [place for place in places if place[0] in modules and place[0]._modules[place[1]] is place[3]]


def _blocks(places: Iterable[Place], dtype: torch.dtype) -> Iterator[GatedBlock]:
    known: dict[object, tuple[tuple[str, ...], Activation] | None] = {}
    for owner, name, path, module in places:
        if not may_be_block(module):
            continue
        key = kind_of(module)
        if key not in known:
            known[key] = gated_block_of(module, dtype)
        if (form := known[key]) is not None:
            roles, activation = form
            *parts, down = ((f"{path}.{role}", cast("nn.Linear", module._modules[role])) for role in roles)
            block = GatedBlock(Product(parts), Product([down]), activation)
            setattr(owner, name, block)
            yield block


def _norms(places: Iterable[Place], dtype: torch.dtype) -> Iterator[Norm]:
    known: dict[object, NormForm | None] = {}
    for owner, name, path, module in places:
        if not may_be_norm(module):
            continue
        key = kind_of(module)
        if key not in known:
            known[key] = rms_norm_of(module, dtype)
        if (form := known[key]) is not None:
            norm = Norm(path, cast("Tensor", module.weight), form)
            setattr(owner, name, norm)
            yield norm


def _routers(places: Iterable[Place], dtype: torch.dtype) -> Iterator[Put[Router]]:
    known: dict[object, RoutingForm | None] = {}
    for owner, name, path, module in places:
        if not may_route(module):
            continue
        key = kind_of(module)
        if key not in known:
            known[key] = routing_of(module, dtype)
        if (form := known[key]) is not None:
            router = Router(module, path, form)
            setattr(owner, name, router)
            yield owner, name, router


def _linears(places: Iterable[Place], head: nn.Module | None) -> Iterator[Put[PackedLinear]]:
    """Replace the linear layers, except those that choose experts and the output layer, which may
    share the embedding's weight. Yields (owner, name in the owner, replacement)."""
    for owner, name, path, module in places:
        is_choosing = not _CHOOSING.isdisjoint(path.split("."))
        if isinstance(module, nn.Linear) and module is not head and not is_choosing and is_linear(module):
            linear = PackedLinear(module, path)
            setattr(owner, name, linear)
            yield owner, name, linear


def _join(trace: Trace) -> None:
    """Set in the layers what the walk on the meta device found: heads of norms, addends, and joint
    products."""
    for norm, heads in trace.heads().items():
        norm.heads, norm.is_transposed = next(iter(heads)) if len(heads) == 1 else (None, False)
    for layer in trace.addends():
        layer.is_addend = True
    for group in shared_inputs(trace.products):
        product = Product([(each.name, each.own) for each in group])
        for place, each in enumerate(group):
            each.product, each.part = product, place
