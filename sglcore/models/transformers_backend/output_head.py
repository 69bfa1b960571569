"""The end of a causal class of transformers: its output layer on the engine's kernels, the rest of
what the class runs after its decoder, and the decoder's last norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sglcore.layers.linear import Head, Softcap
from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.deferred_sums import added
from sglcore.models.transformers_backend.kernel_layers import Norm, Rows
from sglcore.models.transformers_backend.module_probes import embedding_scale
from sglcore.models.transformers_backend.shape_walk import lengths_of, walk


class PackedHead(nn.Module):
    """The output layer, with its own weight or the one of the embedding `tied`."""

    def __init__(self, own: nn.Linear, name: str, tied: Rows | None) -> None:
        super().__init__()
        self.name, self.tied = name, tied
        self.is_read = False
        self._own = (own,)  # in a tuple, so that it is not registered as a submodule
        self.logits: Callable[[Tensor], Tensor] | None = None
        """[N, H] to float32 [N, vocab]."""

    @property
    def weight(self) -> Tensor:
        """The original weight, on the meta device. A read sets `is_read`: the class then computes
        with the weight itself."""
        self.is_read = True
        return self.own.weight

    @property
    def own(self) -> nn.Linear:
        """The original layer."""
        return self._own[0]

    def place(self, build: Build) -> None:
        """Declare the weight, and choose the kernel."""
        rows, size = self.own.weight.shape
        self.logits = Head(
            build.at(*self.name.split(".")), rows, size, None if self.tied is None else self.tied.place(build)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[1, N, H] to [1, N, vocab] in the model's dtype."""
        return self.own(x) if self.logits is None else self.logits(x[0])[None].to(x.dtype)


@dataclass(slots=True)
class Ends:
    """The replacements of a model's embedding and output layer; None: the class's own layer
    stays.
    """

    embedding: Rows | None = None
    head: PackedHead | None = None

    def place(self, build: Build) -> None:
        """Declare the weights, and choose the kernels."""
        for each in (self.embedding, self.head):
            if each is not None:
                each.place(build)

    @property
    def is_read(self) -> bool:
        """Whether the class has computed with one of the weights itself."""
        return any(each.is_read for each in (self.embedding, self.head) if each is not None)

    def take_back(self, model: PreTrainedModel) -> None:
        """Restore the class's own layer if its weight was read, or is tied to one that was."""
        is_tied = self.head is not None and self.head.tied is not None
        if self.head is not None and (self.head.is_read or (is_tied and self.is_read)):
            model.set_output_embeddings(self.head.own)
            self.head = None
        if self.embedding is not None and (self.embedding.is_read or (is_tied and self.head is None)):
            model.set_input_embeddings(self.embedding.own)
            self.embedding = None


def replace_ends(model: PreTrainedModel, stored: Mapping[str, Tensor], keeps: Callable[[str], bool]) -> Ends:
    """Replace the embedding and the output layer of a model on the meta device if they are plain
    ones. A layer stays if something else in `stored` shares its weight, other than the two layers
    tied with each other, or if `keeps` holds for the weight's name."""
    given, own = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}

    def shared(module: nn.Module) -> set[str]:
        return {name for name, each in stored.items() if each is module._parameters.get("weight")}

    found, wanted, output = Ends(), {f"{names[id(given)]}.weight"}, {f"{names.get(id(own))}.weight"}
    scale = embedding_scale(given, model.dtype, model._init_weights)
    is_head = type(own) is nn.Linear and own.bias is None and "." not in names[id(own)] and not any(map(keeps, output))
    owners = shared(own) if own is not None and is_head else set()
    is_tied = owners == wanted | output
    if scale is not None and shared(given) == (wanted | output if is_tied else wanted) and not any(map(keeps, wanted)):
        found.embedding = Rows(cast("nn.Embedding", given), names[id(given)], scale)
        model.set_input_embeddings(found.embedding)
    if owners == output or (is_tied and found.embedding is not None):
        found.head = PackedHead(cast("nn.Linear", own), names[id(own)], found.embedding if is_tied else None)
        model.set_output_embeddings(found.head)
    return found


class _HandedOn:
    """A decoder's output that has only the hidden states; other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Decoded(nn.Module):
    """Replaces the decoder: returns `inputs_embeds` as the decoder's output, and has the decoder's
    attributes."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._stood_here = (decoder,)  # in a tuple, so that it is not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stood_here[0], name) if not name.startswith("_") else super().__getattr__(name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **others: Any) -> _HandedOn:
        """Return `inputs_embeds` [1, N, H] as the decoder's output."""
        return _HandedOn(inputs_embeds)

    @property
    def decoder(self) -> _Decoded:
        """Itself: some classes call the decoder's own `decoder`."""
        return self


def head_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a causal model that runs only what follows its decoder: a call with
    `inputs_embeds` [1, N, H] takes them as the decoder's output. Shares all other modules.
    """
    head = copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Decoded(model.base_model)}
    return head


def output_of(model: PreTrainedModel, layer: PackedHead, build: Build) -> Callable[[Tensor], Tensor] | None:
    """Return a function from hidden states [N, H] to logits float32 [N, vocab], if the class passes
    the decoder's output straight to `layer` and applies at most a scale or a soft cap to the
    logits; else None. `layer` must be placed already."""
    found = _Given()
    head = head_of(model)
    head._modules = {name: found if each is layer else each for name, each in head._modules.items()}
    hidden = torch.randn(1, len(_LOGITS), layer.own.in_features, generator=torch.Generator().manual_seed(0))
    try:
        logits = head(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError):
        return None
    own = layer.logits
    if (
        found.given is None
        or not torch.equal(found.given, hidden)
        or own is None
        or logits.shape != (1, len(_LOGITS), 1)
    ):
        return None
    if torch.equal(logits, _LOGITS.view_as(logits)):
        return own
    scale, cap = float(logits[0, 1, 0]), float(logits[0, -1, 0])
    if torch.allclose(logits, scale * _LOGITS.view_as(logits)):
        return lambda hidden: own(hidden) * scale
    if torch.allclose(logits, cap * torch.tanh(_LOGITS / cap).view_as(logits)):
        softcap = Softcap(build, cap)
        return lambda hidden: softcap(own(hidden))
    return None


_LOGITS = torch.tensor([0.0, 1.0, -60.0, -31.0, -12.5, -4.0, -0.75, -0.1, 0.3, 2.5, 7.0, 19.0, 28.0, 50.0, 90.0, 1e9])
"""Logits of the trial: 0, 1 and others, and one so large that any cap turns it into the cap."""


class _Given(nn.Module):
    """Replaces an output layer: keeps its input and returns `_LOGITS`."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, N, H] to [1, N, 1]."""
        self.given = hidden
        return _LOGITS.view(1, -1, 1)


def find_last_norm(model: PreTrainedModel, *, has_states: bool) -> nn.Module | None:
    """Return the norm that makes the decoder's result; None if the decoder does something else at
    its end. Runs the model on the meta device.

    `has_states`: the model keeps recurrent states, as for `walk`.
    """
    decoder: Any = model.base_model
    normed: list[tuple[nn.Module, Any]] = []
    ends: list[Any] = []
    hooks = [
        each.register_forward_hook(lambda module, _, found: normed.append((module, found)))
        for each in decoder.modules()
        if _may_be_norm(each)
    ]
    hooks.append(decoder.register_forward_hook(lambda *given: ends.append(given[-1][0])))
    try:
        walk(model, lengths=lengths_of(model)[1:], has_states=has_states)
    finally:
        for hook in hooks:
            hook.remove()
    if not normed or not ends:
        return None
    module, found = normed[-1]
    return module if found is ends[-1] else None


class TakenInput:
    """Takes the input of a norm while a `with` block runs the model; `rows` [T, H] is that input,
    after the block."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm
        self._taken: list[Tensor] = []

    def __enter__(self) -> TakenInput:
        self._hook = self._norm.register_forward_pre_hook(lambda _, given: self._taken.append(given[0]))
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    @property
    def rows(self) -> Tensor:
        """The input [T, H]. Raises ValueError if the norm did not run once."""
        (taken,) = self._taken
        return added(taken)[0].as_subclass(Tensor)


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module is a norm of the engine, or has only vectors as parameters, and no parts."""
    parameters = [each for each in module._parameters.values() if each is not None]
    has_vectors = bool(parameters) and all(each.dim() == 1 for each in parameters)
    return isinstance(module, Norm) or (has_vectors and not module._modules)
