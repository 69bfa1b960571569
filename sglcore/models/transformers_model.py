"""Any decoder that transformers has, on the engine's attention: for an architecture without a file of its own.

Transformers' class is built without weights, asked what it wants of attention (`transformers_walk.py`), and given weights by
the engine's loader. Every attention call goes to the engine's attention layer of its number, over the paged pool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from sglcore.device.errors import ConfigError
from sglcore.layers.build import Build
from sglcore.models.build import Architecture
from sglcore.models.transformers_experts import choose_experts, serve_experts
from sglcore.models.transformers_layers import pack_linears
from sglcore.models.transformers_names import Naming
from sglcore.models.transformers_states import check_mixers, find_mixers
from sglcore.models.transformers_walk import AttentionCall, walk
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch

PAGED = "sglcore_paged"
"""The name under which transformers finds the engine's attention. It has no mask function, so no masks are made."""


class TransformersModel(Architecture):
    """A causal language model of transformers. Its parameters are the loader's, by the names that the class gives them."""

    calls_library = True

    def __init__(self, build: Build) -> None:
        """Raises `ConfigError` for a model that can not be served exactly."""
        super().__init__(build)
        AttentionInterface.register(PAGED, _attend)
        model = _empty_model(build)
        serve_experts(model)
        self.state_layers = find_mixers(model)
        calls = walk(model, has_states=bool(self.state_layers))
        model.set_attn_implementation(PAGED)
        _place(model, build)
        model.eval()
        check_mixers(self.state_layers)
        self.attention_layers = _attention_layers(model, calls, cached=not build.config.is_encoder)
        self._decoder = model.base_model
        self._head = _head_of(model)
        pack_linears(model, build, frozenset[nn.Module]().union(*(layer.plain for layer in self.state_layers)))
        self._naming = Naming(model, build.weights.targets)
        self.ignored = tuple(f".*(?:{each}).*" for each in sorted(model._keys_to_ignore_on_load_unexpected or ()))
        choose_experts(model, build)

    def named(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        """By transformers' own renamings; what the files have one by one are parts of what the class has in one."""
        return self._naming(shapes)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H] after the last norm."""
        if not batch.num_tokens:
            return torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.weights.device)
        ids, embeds = (batch.input_ids[None], None) if batch.input_embeds is None else (None, batch.input_embeds[None])
        found = self._decoder(
            input_ids=ids, inputs_embeds=embeds, position_ids=batch.positions[None], use_cache=False, return_dict=True
        )
        return found.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab], with whatever scale or cap the class has."""
        return self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0].float()


def _empty_model(build: Build) -> PreTrainedModel:
    """The causal class of the checkpoint's configuration, on the meta device."""
    config = AutoConfig.from_pretrained(build.config.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=build.dtype, trust_remote_code=False)
    model.tie_weights()
    return model


def _place(model: PreTrainedModel, build: Build) -> None:
    """Parameters of the loader in place of the empty ones, and buffers with what the class puts there. A buffer that
    checkpoints have is a parameter to the loader."""
    weights, stored = build.weights, model.state_dict(keep_vars=True)
    made: dict[int, Any] = {}
    wide = _wide_names(model)
    for name, empty in stored.items():
        if id(empty) not in made:
            dtype = torch.float32 if wide is not None and wide.search(name) else None
            made[id(empty)] = weights.targets[name] = weights.make(empty.shape, dtype)
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


def _wide_names(model: PreTrainedModel) -> re.Pattern[str] | None:
    """The weights that the class keeps in float32 whatever it computes in, as when transformers loads it."""
    if model.dtype is torch.float32:
        return None
    named = [*(model._keep_in_fp32_modules_strict or ())]
    if model.dtype is torch.float16:
        named += model._keep_in_fp32_modules or ()
    return re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in named)) if named else None


def _attention_layers(model: PreTrainedModel, calls: tuple[AttentionCall, ...], cached: bool) -> tuple[Attention, ...]:
    """One layer for each call, which its module finds again; they are numbered by call."""
    parameters = dict(model.named_parameters())
    layers = tuple(
        Attention(
            number,
            call.num_heads,
            call.num_kv_heads,
            max(call.head_dim, call.value_dim),
            call.scaling,
            call.window,
            cached=cached,
            softcap=call.softcap,
            sinks=None if call.sinks is None else parameters[call.sinks],
        )
        for number, call in enumerate(calls)
    )
    own: dict[nn.Module, list[Attention]] = {}
    for call, layer in zip(calls, layers, strict=True):
        own.setdefault(call.module, []).append(layer)
    for module, found in own.items():
        if len(found) > 1:
            raise ConfigError(f"{type(module).__name__} attends {len(found)} times", remedy="use another model")
        module.sglcore_attention = found[0]  # pyright: ignore[reportArgumentType]
    return layers


class _HandedOn:
    """A decoder's output of which only the hidden states are there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Decoded(nn.Module):
    """Stands where the decoder was: it hands on what it is given as the decoder's output, and has the decoder's attributes."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._stood_here = (decoder,)  # no module of this one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stood_here[0], name) if not name.startswith("_") else super().__getattr__(name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **others: Any) -> _HandedOn:
        """[1, N, H]."""
        return _HandedOn(inputs_embeds)

    @property
    def decoder(self) -> _Decoded:
        """Some classes call a part of what stood here."""
        return self


def _head_of(model: PreTrainedModel) -> PreTrainedModel:
    """All that the causal class does behind its decoder."""
    head = copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Decoded(model.base_model)}
    return head


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any
) -> tuple[Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim or less] to [1, T, heads, value's dim]."""
    layer: Any = module.sglcore_attention
    size, wide = value.shape[3], layer.head_dim
    rows = [_rows(part, wide) for part in (query, key, value)]
    found = layer(*rows)
    return found.view(1, query.shape[2], layer.num_heads, wide)[..., :size], None


def _rows(part: Tensor, wide: int) -> Tensor:
    """[1, heads, T, dim] to [T, heads * wide], with zeros where a head is narrower."""
    part = part[0].transpose(0, 1)
    return (part if part.shape[2] == wide else pad(part, (0, wide - part.shape[2]))).reshape(part.shape[0], -1)
