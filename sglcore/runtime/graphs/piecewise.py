"""Piecewise graphs: a prefill forward is traced as one graph and split at attention; the pieces are
compiled and captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.graphs.capture import CaptureError, StreamCapture
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.graph_backend import Forward
from sglcore.runtime.graphs.graph_segments import Pieces, record_pieces
from sglcore.runtime.streams import Streams

PieceCompiler: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Compiles one piece for example inputs."""


def as_traced(piece: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the piece as it was traced, without compiling it."""
    return piece


def inductor(piece: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the piece compiled for these example inputs by torch's compiler for the device."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(piece, list(inputs))  # pyright: ignore[reportReturnType]  a callable for a GraphModule


@dataclass(slots=True)
class SplitForward:
    """A traced forward in which each attention call is a module of its own.

    `arguments` are those of the traced call; `compiled` has the pieces compiled so far, by name.
    """

    module: fx.GraphModule
    compiler: PieceCompiler
    compiled: dict[str, Callable[..., Any]]
    arguments: tuple[Any, ...] = ()

    def run(self) -> Tensor:
        """Run the pieces in order, with attention between segments if the forward context has
        `segments`; return the hidden states.

        Each value is dropped after its last use. A piece is compiled when it is first reached.
        """
        values: dict[fx.Node, Any] = {}
        arguments = iter(self.arguments)
        last = _last_uses(self.module.graph)
        for node in self.module.graph.nodes:
            inputs, named = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            for passed in node.all_input_nodes:
                if last[passed] is node:
                    del values[passed]
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "get_attr":
                values[node] = _attribute(self.module, node.target)
            elif node.op == "call_function":
                values[node] = node.target(*inputs, **named)
            elif node.op == "output":
                return _hidden(inputs[0])
            elif _attention_in(_attribute(self.module, node.target)) is not None:
                values[node] = _between(_attribute(self.module, node.target), inputs)
            else:
                values[node] = self._piece(node.target, inputs)(*inputs)
        raise CaptureError("a traced forward without an output")

    def _piece(self, name: str, inputs: Sequence[Any]) -> Callable[..., Any]:
        if name not in self.compiled:
            self.compiled[name] = self.compiler(_attribute(self.module, name), inputs)
        return self.compiled[name]


class PiecewiseGraphs(FullGraphs):
    """A `PromptBackend`: full decode graphs and compiled prefill graphs in one pool.

    `prompt_kind` is the name of the latter in `StepOutput.path`.
    """

    prompt_kind: str = "piecewise"

    def __init__(self, capture: StreamCapture, streams: Streams, compiler: PieceCompiler = inductor) -> None:
        super().__init__(capture, streams)
        self._compiler = compiler

    def capture_prompt(self, forward: Forward, batch: ForwardBatch) -> Pieces:
        """Implements `PromptBackend.capture_prompt`: trace the forward, split it at attention,
        compile and capture each piece.

        Takes seconds or more.
        """
        return record_pieces(self.recorder, trace(lambda: forward(batch), self._compiler).run)


def _between(attention: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Tensor:
    segments = get_forward_context().segments
    return attention(*inputs) if segments is None else segments.run_between(attention, *inputs)


def trace(step: Callable[[], Tensor], compiler: PieceCompiler = as_traced) -> SplitForward:
    """Return one call of `step`, a plain Python function without arguments, as a split graph,
    without running it.

    Raises if it cannot be traced whole.
    """
    found: list[SplitForward] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(SplitForward(split_at_attention(module), compiler, {}))

        def remember(*arguments: Any) -> Any:
            found[-1].arguments = arguments
            return _fake_outputs(module)

        return remember

    # A bucket has one shape and fixed buffers: no guards are needed.
    torch.compile(_alone(step), fullgraph=True, dynamic=False, backend=backend)()
    if len(found) != 1:
        raise CaptureError(f"the forward was traced as {len(found)} graphs; it must be one")
    # Torch keeps every backend that it received: remove the traced graph from this one.
    return found.pop()


def _alone(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a copy of the function with its own code object.

    Torch caches compiled code, and limits recompilation, by code object.
    """
    assert isinstance(step, FunctionType)
    code = step.__code__.replace()
    return FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)


def split_at_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with attention calls, and the runs of nodes between them, as modules."""
    part = 0
    parts: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if _is_attention(node):
            parts[node] = part + 1
            part += 2
        else:
            parts[node] = part
    return split_module(module, None, parts.__getitem__, keep_original_order=True)  # pyright: ignore[reportArgumentType]


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (
        torch.ops.sglcore.attention,
        torch.ops.sglcore.attention.default,
    )


def _attention_in(module: Any) -> fx.Node | None:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return next((node for node in nodes if _is_attention(node)), None)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the last user of each node's value, by node; nodes without a user are left out."""
    return {passed: node for node in graph.nodes for passed in node.all_input_nodes}


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _hidden(outputs: Any) -> Tensor:
    """Return the only output of a forward; raises CaptureError if there are several or none."""
    if isinstance(outputs, Tensor):
        return outputs
    if len(outputs) != 1:
        raise CaptureError(f"a forward returns only hidden states; this one returns {len(outputs)} values")
    return outputs[0]


def _fake_outputs(module: fx.GraphModule) -> tuple[Tensor, ...]:
    """Return uninitialised tensors with the shapes of the graph's outputs."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    fakes = [node.meta["example_value"] for node in output.args[0]]
    return tuple(torch.empty(fake.shape, dtype=fake.dtype, device=fake.device) for fake in fakes)
