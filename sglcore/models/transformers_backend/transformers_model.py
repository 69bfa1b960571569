"""Runs any decoder of transformers on the engine's attention, for architectures without a file of
their own.

Transformers' class is built without weights, a walk finds its attention calls
(`shape_walk.py`), and the engine's loader fills its weights. Every attention call goes to
the engine's attention layer of the same number, over the paged pool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.initialization import no_init_weights

from sglcore.core.errors import ConfigError
from sglcore.layers.torch_layers import Build
from sglcore.models.decoder import names_behind
from sglcore.models.layer_kinds import Architecture
from sglcore.models.transformers_backend.alibi_slopes import FARTHEST, Places
from sglcore.models.transformers_backend.attention_adapter import MASKED, PAGED, attend, attention_layers, make_zeros
from sglcore.models.transformers_backend.eager_attention import find_biases, try_own
from sglcore.models.transformers_backend.host_routed_experts import take_routed
from sglcore.models.transformers_backend.kernel_layers import NoDropout
from sglcore.models.transformers_backend.kernel_replacement import Replaced, replace
from sglcore.models.transformers_backend.moe_adapter import choose_experts, serve_experts, turned_weights
from sglcore.models.transformers_backend.output_head import TakenInput, find_last_norm, head_of, output_of
from sglcore.models.transformers_backend.shape_walk import DoesNotRun, use_attention
from sglcore.models.transformers_backend.stateful_layers import Mixer, check_mixers, find_mixers
from sglcore.models.transformers_backend.weight_names import Naming
from sglcore.runtime.forward_batch import ForwardBatch


class TransformersModel(Architecture):
    """A causal language model of transformers. The loader owns its parameters, by the class's
    names."""

    calls_library = True

    def __init__(self, build: Build) -> None:
        """Raise `ConfigError` for a model that can not be served exactly."""
        super().__init__(build)
        AttentionInterface.register(PAGED, attend)
        AttentionInterface.register(MASKED, attend)
        AttentionMaskInterface.register(MASKED, make_zeros)
        model, self.state_layers, replaced, why = _replaced_model(build)
        # Before the walk of `find_biases`: what modules keep of the last walk is compared later.
        self._last_norm = find_last_norm(model, has_states=bool(self.state_layers))
        self.against_norm_inputs = "" if self._last_norm is not None else "its class does not end with a norm"
        self._places = Places(build.dtype)
        self._has_places = find_biases(model, replaced.owns)
        if self._has_places and build.max_positions > FARTHEST:
            raise ConfigError(
                f"the context is {build.max_positions}, and positions in this model's scores are exact up to "
                f"{FARTHEST}",
                remedy=f"set --max-model-len to at most {FARTHEST}",
            )
        use_attention(model, MASKED if self._has_places else PAGED)
        _place(model, build)
        replaced.place(build)
        check_mixers(self.state_layers)
        calls = try_own(replaced.owns, replaced.calls)
        self.attention_layers, self._several = attention_layers(model, calls, replaced.turns, build, self._places)
        self._decoder: Any = model.base_model
        self._head = head_of(model)
        head = replaced.ends.head
        self._output = None if head is None else output_of(model, head, build)
        self._naming = Naming(model, build.weights.targets)
        behind = build.config.raw.get("num_nextn_predict_layers") or 0
        unread = sorted(model._keys_to_ignore_on_load_unexpected or ())
        self.ignored = (*(f".*(?:{each}).*" for each in unread), *names_behind(build.config.num_hidden_layers, behind))
        choose_experts(model, build)
        self.parts = f"{replaced}{why}"

    def named(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        """Map names by transformers' own renamings; tensors that the files have one by one become
        parts of the class's stacked weights. Raises `ConfigError` if rows to reorder are stored in
        parts."""
        found = self._naming(shapes)
        lost = [name for name in self.weights.orders if name.endswith(".weight") and name not in self.weights.targets]
        if lost:
            raise ConfigError(
                f"{lost[0]!r} is stored in parts with rows that cannot be reordered", remedy="use another model"
            )
        return found

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] after the last norm."""
        if not batch.num_tokens:
            return torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.weights.device)
        for each in self._several:
            each.begin()
        if self._has_places:
            self._places.begin(batch.positions)
        # Residual sums are written in place, and the batch's embeddings are not ours.
        given = batch.input_embeds
        ids, embeds = (batch.input_ids[None], None) if given is None else (None, given.clone()[None])
        found = self._decoder(
            input_ids=ids, inputs_embeds=embeds, position_ids=batch.positions[None], use_cache=False, return_dict=True
        )
        return found.last_hidden_state[0]

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, H] after the last norm, and before it. Not to be captured."""
        if self._last_norm is None:
            return super().with_norm_inputs(batch)
        if not batch.num_tokens:
            return self(batch), self(batch)
        with TakenInput(self._last_norm) as taken:
            hidden = self(batch)
        return hidden, taken.rows

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Token ids [T] to embeddings [T, H]."""
        return self._decoder.get_input_embeddings()(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab], with the class's scale or soft cap."""
        if self._output is not None:
            return self._output(hidden)
        return self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0].float()


def _replaced_model(build: Build) -> tuple[PreTrainedModel, tuple[Mixer, ...], Replaced, str]:
    """Return the model on the meta device with the engine's layers, its mixers, the replaced parts,
    and a note. If the class does not run with all layers, only linear layers are replaced, and the
    note says why."""
    try:
        return *_replaced(build, is_whole=True), ""
    except DoesNotRun as error:
        return *_replaced(
            build, is_whole=False
        ), f"; only linear layers are replaced, because with others: {error.found}"


def _replaced(build: Build, is_whole: bool) -> tuple[PreTrainedModel, tuple[Mixer, ...], Replaced]:
    model = _empty_model(build)
    mixers = find_mixers(model)
    return model, mixers, replace(model, _kept(model, build.dtype), mixers, is_whole=is_whole)


def _empty_model(build: Build) -> PreTrainedModel:
    """Build the causal class of the checkpoint's configuration on the meta device. Raises
    `ConfigError` if the class refuses it."""
    try:
        with torch.device("meta"), no_init_weights():
            model = build.config.library.model(dtype=build.dtype)
    except Exception as error:
        raise ConfigError(
            f"{build.config.architecture} of transformers refuses {build.config.file}: "
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            remedy="download the checkpoint again, or use another model",
        ) from error
    model.tie_weights()
    serve_experts(model)
    take_routed(model)
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = NoDropout
    return model.eval()


def _place(model: PreTrainedModel, build: Build) -> None:
    """Replace the meta tensors of `model` by memory on the device. Parameters, and buffers that are
    in the state dict, become targets that the loader fills later; the class initialises the other
    buffers now."""
    weights, stored = build.weights, model.state_dict(keep_vars=True)
    made: dict[int, Any] = {}
    is_wide, turned = _kept(model, build.dtype), turned_weights(model)
    for name, empty in stored.items():
        if id(empty) not in made:
            dtype = torch.float32 if is_wide(name) else None
            if id(empty) in turned:
                parameter = nn.Parameter(weights.make(empty.mT.shape, dtype).mT, requires_grad=False)
            else:
                parameter = weights.make(empty.shape, dtype)
            made[id(empty)] = weights.targets[name] = parameter
            made[id(empty)]._is_hf_initialized = True
    for module in model.modules():
        for name, empty in (*module._parameters.items(), *module._buffers.items()):
            if empty is None:
                continue
            if name in module._parameters:
                setattr(module, name, made[id(empty)])
            elif id(empty) in made:
                module._buffers[name] = made[id(empty)].data
            else:
                module._buffers[name] = torch.empty_like(empty, device=weights.device)
    model.initialize_weights()


def _kept(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function of a weight's name: whether the class keeps the weight in float32 in a
    model of this `dtype`, as when transformers loads it. Some weights are kept in every half type,
    others only in float16. Always False for a float32 model."""
    if dtype is torch.float32:
        return lambda name: False
    named = [*(model._keep_in_fp32_modules_strict or ())]
    if dtype is torch.float16:
        named += model._keep_in_fp32_modules or ()
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in named) or "(?!)")
    return lambda name: pattern.search(name) is not None
