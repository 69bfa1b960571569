"""Decoder-only language models for every tensor library: self-attention, layer and model.

The file of an architecture subclasses `CausalLM` and builds its own layers in `make_layer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from sglcore.checkpoint.model_config import ModelConfig, MoeConfig
from sglcore.checkpoint.recurrent_config import mamba2_config
from sglcore.core.errors import ConfigError
from sglcore.models.layer_kinds import Architecture, Array, Attention, Batch, Build, Layer, Norm, Stateful


class LayerState(NamedTuple):
    """The data that one layer passes to the next.

    The layer's output [T, H], the residual sum [T, H] without that output (None before the first
    layer), and the batch.
    """

    hidden: Array
    residual: Array | None
    batch: Batch


class SelfAttention:
    """The `Mixer` of a layer with attention: input projections, attention over KV slots, and the
    output projection."""

    __slots__ = ("attention", "o_proj", "qkv_proj")
    state = None

    def __init__(
        self,
        build: Build,
        layer_id: int,
        rotary: Any,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        whole_norm: bool = False,
        norm_offset: float | None = None,
        sinks: bool = False,
        fused: str = "",
        is_interleaved: bool = False,
        inputs: int | None = None,
    ) -> None:
        """`qkv_bias`, `output_bias`: the input projections, or `o_proj`, have biases.

        `fused` names one weight with the rows of queries, keys and values; empty: there are three,
        `q_proj`, `k_proj` and `v_proj`. `is_interleaved`: rotated pairs are neighbours in the
        checkpoint. `inputs` is the width of the input; None: the hidden size. The others are those
        of `Build.attention`.
        """
        config = build.config
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        parts = (("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size))
        parts = ((fused, (heads + 2 * kv_heads) * size),) if fused else parts
        turned = ("q_proj", "k_proj") if is_interleaved else ()
        self.qkv_proj = build.fused(parts, config.hidden_size if inputs is None else inputs, qkv_bias, turned)
        self.attention = build.attention(
            layer_id, rotary, qk_norm=qk_norm, whole_norm=whole_norm, norm_offset=norm_offset, sinks=sinks
        )
        self.o_proj = build.linear("o_proj", heads * size, config.hidden_size, output_bias)

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        return self.o_proj(self.attention(self.qkv_proj(hidden), batch))


class Recurrent:
    """The `Mixer` of a layer with a recurrent state instead of attention: calls the state layer
    `state`."""

    __slots__ = ("state",)
    attention = None

    def __init__(self, state: Stateful) -> None:
        self.state = state

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        return self.state(hidden, batch)


def make_mamba2(build: Build, state_id: int) -> Recurrent:
    """Return a Mamba 2 mixer with the projections `in_proj` and `out_proj` of this scope.
    `state_id`: its number among the layers with states, from 0.
    """
    space, size = mamba2_config(build.config), build.config.hidden_size
    projection = build.linear("in_proj", size, space.inner + space.channels + space.heads, space.proj_bias)
    output = build.linear("out_proj", space.inner, size, space.proj_bias)
    return Recurrent(build.mamba2(state_id, space, projection, output))


class Mixer(Protocol):
    """The part that mixes the tokens of a request: attention over KV slots, or a state layer. In
    some models a feed-forward block stands in its place."""

    @property
    def attention(self) -> Attention | None:
        """The attention over KV slots; None for any other mixer."""
        ...

    @property
    def state(self) -> Stateful | None:
        """The layer with a state; None for any other mixer."""
        ...

    def __call__(self, hidden: Array, batch: Batch, /) -> Array:
        """[T, H] to [T, H]."""
        ...


class DecoderLayer:
    """Norm, attention, norm, feed-forward. Each norm first adds its input to the residual sum."""

    __slots__ = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(
        self, build: Build, self_attn: Mixer, mlp: Layer, offset: float | None = None, first: Norm | None = None
    ) -> None:
        """`offset` is added to the norms' weights (`Build.norm`); `first` replaces the norm before
        attention.
        """
        size = build.config.hidden_size
        self.input_layernorm = build.norm("input_layernorm", size, offset) if first is None else first
        self.self_attn = self_attn
        self.post_attention_layernorm = build.norm("post_attention_layernorm", size, offset)
        self.mlp = mlp

    def __call__(self, hidden: Array, residual: Array | None, batch: Batch) -> tuple[Array, Array]:
        """Map `hidden` and `residual` of a `LayerState` to those after this layer. Both may be
        overwritten; do not use them afterwards."""
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class AnyLayer(Protocol):
    """A layer of a `CausalLM`."""

    @property
    def self_attn(self) -> Mixer:
        """Its attention, or the mixer that replaces attention."""
        ...

    def __call__(self, hidden: Array, residual: Array | None, batch: Batch, /) -> tuple[Array, Array | None]:
        """Map `hidden` and `residual` of a `LayerState` to those after this layer. Both may be
        overwritten; do not use them afterwards."""
        ...


class SandwichLayer:
    """Attention and feed-forward, each between two norms: results are normed before the sum."""

    __slots__ = ("mlp", "norms", "self_attn")

    def __init__(
        self, build: Build, self_attn: SelfAttention, mlp: Layer, names: Sequence[str], offset: float | None = None
    ) -> None:
        """`names`: the checkpoint's names of the four norms, in the order in which they are
        applied; `offset` is added to their weights (`Build.norm`)."""
        self.norms = tuple(build.norm(name, build.config.hidden_size, offset) for name in names)
        self.self_attn = self_attn
        self.mlp = mlp

    def __call__(self, hidden: Array, residual: Array | None, batch: Batch) -> tuple[Array, Array]:
        """Return `hidden` [T, H] and `residual` [T, H] after this layer, from those before it
        (`residual` None before the first layer). Both arguments may be overwritten; do not use them
        afterwards.
        """
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        hidden, residual = before_attention.add(hidden, residual)
        hidden = after_attention(self.self_attn(hidden, batch))
        hidden, residual = before_mlp.add(hidden, residual)
        return after_mlp(self.mlp(hidden)), residual


class SharedExpert:
    """Routed experts plus a shared block for every token.

    With a gate, the shared block is multiplied by the sigmoid of one number for each token.
    """

    __slots__ = ("experts", "gate", "shared", "sigmoid")

    def __init__(self, build: Build, experts: Layer, shared: Layer, gate: str = "") -> None:
        """`gate` names a linear layer of this scope with one output; empty: there is no gate."""
        self.experts = experts
        self.shared = shared
        self.gate = build.linear(gate, build.config.hidden_size, 1) if gate else None
        self.sigmoid = build.activation("sigmoid") if gate else None

    def __call__(self, hidden: Array) -> Array:
        """[T, H] to [T, H]."""
        shared = self.shared(hidden)
        if self.gate is not None and self.sigmoid is not None:
            shared = self.sigmoid(self.gate(hidden)) * shared
        return self.experts(hidden) + shared


def names_behind(layers: int, behind: int) -> tuple[str, ...]:
    """Return regular expressions for the tensor names in the `behind` MTP layers after a model's
    `layers` layers, which have the next layer numbers."""
    return tuple(rf"model\.layers\.{layer}\..*" for layer in range(layers, layers + behind))


class CausalLM(Architecture):
    """Embedding, layers, norm and head.

    A forward is `embed`, then `run_layers` over all layers, then `finish`.

    - `knows`: the options of the configuration that the architecture applies.
    - `activations`: the activations that its feed-forward blocks support; experts only the first.
    - `norm_offset`: the offset of its norms.
    - `behind`: the number of MTP layers after the last layer, if the configuration does not say.
      They are not read.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu", "gelu_pytorch_tanh")
    against_norm_inputs: str = ""

    knows: ClassVar[frozenset[str]] = frozenset()
    norm_offset: ClassVar[float | None] = None
    behind: ClassVar[int] = 0

    def __init__(self, build: Build) -> None:
        """Raise `ConfigError` for an activation or an option that the model does not support."""
        super().__init__(build)
        config, inner = build.config, build.at("model")
        self._check(config)
        size = config.hidden_size
        behind = config.words.get("num_nextn_predict_layers", self.behind)
        self.ignored = (*self.ignored, *names_behind(config.num_hidden_layers, behind))
        self.rotary = self.make_rotary(build)
        self.local_rotary = self.rotary if config.local_rope is None else build.rotary(config.local_rope)
        self.embed_tokens = inner.embedding("embed_tokens", config.vocab_size, size, self.embedding_scale)
        self.layers = tuple(self.make_layer(inner.at("layers", i), i) for i in range(config.num_hidden_layers))
        self.sliced_layers = 0 if type(self).__call__ is not CausalLM.__call__ else len(self.layers)
        self.norm = self.make_norm(inner)
        cap = config.options.get("final_logit_softcapping")
        self.softcap = None if cap is None else build.softcap(cap)
        self.lm_head = self.score = None
        if config.pooling is None:
            self.lm_head = self.make_head(build)
        elif config.pooling.labels:
            self.score = build.linear("score", size, config.pooling.labels)
        mixers: tuple[Mixer, ...] = tuple(layer.self_attn for layer in self.layers)
        self.attention_layers = tuple(each.attention.layer for each in mixers if each.attention is not None)
        self.state_layers = tuple(each.state for each in mixers if each.state is not None)

    def _check(self, config: ModelConfig) -> None:
        activations = self.activations if config.moe is None else self.activations[:1]
        if config.hidden_act not in activations:
            wanted = " or ".join(map(repr, activations))
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported here", wanted=wanted)
        unknown = {name: value for name, value in config.options.items() if name not in self.knows}
        for name, value in unknown.items():
            raise ConfigError(
                f"{config.file} has {name} = {value!r}, which is not supported for {config.architecture}",
                remedy="use another checkpoint",
            )

    @property
    def moe(self) -> MoeConfig:
        """The configuration of the experts. Raises `ConfigError` if the model has none."""
        if self.config.moe is None:
            raise ConfigError(
                f"{self.config.file} lacks the number of experts or their intermediate size",
                wanted="both",
            )
        return self.config.moe

    @property
    def embedding_scale(self) -> float | None:
        """The factor of the embedded tokens; None: 1."""
        return None

    @classmethod
    def own_name(cls, name: str) -> str:
        """Add `model.` to a name of a decoder that was saved without its head: to any name that
        does not begin with `model.`, `lm_head.` or `score.`.
        """
        return name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"

    @abstractmethod
    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        """Return layer `layer_id`, from 0, of this architecture; `build` is the layer's scope."""

    def make_norm(self, build: Build) -> Norm:
        """Return the norm after the last layer."""
        return build.norm("norm", build.config.hidden_size, self.norm_offset)

    def make_head(self, build: Build) -> Layer:
        """Return the output layer `lm_head`, with the embedding's weight if the configuration ties
        them.
        """
        config = build.config
        tied = self.embed_tokens if config.tie_word_embeddings else None
        return build.head("lm_head", config.vocab_size, config.hidden_size, tied)

    def make_rotary(self, build: Build) -> Any:
        """Return the rotary embedding; None for a model without one."""
        return build.rotary()

    def rotary_of(self, layer_id: int) -> Any:
        """Return the rotary embedding of a layer; sliding-window layers may have their own."""
        return self.rotary if self.config.sliding_windows[layer_id] is None else self.local_rotary

    def __call__(self, batch: Batch) -> Array:
        """Return the hidden states [T, H] of T tokens after the last norm."""
        return self.finish(self.run_layers(self.embed(batch), 0, len(self.layers)))

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: the embedded tokens, or the batch's own embeddings."""
        return LayerState(self.embed_tokens.embed(batch), None, batch)

    def run_layers(self, state: LayerState, first: int, last: int) -> LayerState:
        """Return the state after the layers first <= i < last. Do not use `state` afterwards."""
        hidden, residual, batch = state
        for layer in self.layers[first:last]:
            hidden, residual = layer(hidden, residual, batch)
        return LayerState(hidden, residual, batch)

    def with_norm_inputs(self, batch: Batch) -> tuple[Array, Array]:
        """Return the hidden states [T, H] of T tokens after the last norm, and before it."""
        return self.finish_both(self.run_layers(self.embed(batch), 0, len(self.layers)))

    def finish(self, state: LayerState) -> Array:
        """Return the hidden states [T, H]: the last norm of the last layer's state."""
        return self.finish_both(state)[0]

    def finish_both(self, state: LayerState) -> tuple[Array, Array]:
        """Return the hidden states [T, H] after the last norm, and before it."""
        return self.norm.add(state.hidden, state.residual)

    def logits(self, hidden: Array) -> Array:
        """Return float32 [N, vocab] of hidden states [N, H], after the soft cap if there is one;
        raises `ConfigError` for an embedding model.
        """
        if self.lm_head is None:
            return super().logits(hidden)
        logits = self.lm_head(hidden)
        return logits if self.softcap is None else self.softcap(logits)

    def embed_ids(self, ids: Array) -> Array:
        """Token ids [T] to their embeddings [T, H]."""
        return self.embed_tokens(ids)

    def classify(self, pooled: Array) -> Array:
        """Return [B, labels] of pooled hidden states [B, H]; raises `ConfigError` if there is no
        `score` head.
        """
        return super().classify(pooled) if self.score is None else self.score(pooled)
