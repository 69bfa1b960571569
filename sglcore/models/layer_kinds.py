"""The kinds of layers that architectures are built from, for every tensor library; each worker's
library supplies them.

Neither this file nor `decoder.py` nor an architecture's file depends on a tensor library. Arrays
are the library's own; tokens are the first dimension, [T, ...], and every layer accepts T = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.latent_config import LatentConfig
from sglcore.checkpoint.model_config import ModelConfig, MoeConfig, RopeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.ngram_config import NgramConfig
from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore.core.errors import ConfigError

Array: TypeAlias = Any
"""A tensor or an array of the worker's library. The libraries have no common type."""

Parts: TypeAlias = Sequence[tuple[str, int]]
"""(name, outputs) of linear layers with a common input."""


class Batch(Protocol):
    """The tokens of a forward, as the library's layers take them."""

    @property
    def input_ids(self) -> Array:
        """Integers [T]: the token ids."""
        ...

    @property
    def positions(self) -> Array:
        """Integers [T]: each token's position in its request."""
        ...

    @property
    def token_type_ids(self) -> Array | None:
        """Integers [T]: the segment of each token; None if all tokens belong to the first one."""
        ...

    @property
    def features(self) -> Array | None:
        """[T, F]: the features of the token before each token: the target's, or those of the draft
        itself for its own draft tokens."""
        ...


class Layer(Protocol):
    """A callable on token rows: [T, inputs] to [T, outputs]."""

    def __call__(self, x: Array, /) -> Array:
        """[T, inputs] to [T, outputs]."""
        ...


class Norm(Layer, Protocol):
    """A norm that can also add its input to the residual sum."""

    def add(self, x: Array, residual: Array | None, /) -> tuple[Array, Array]:
        """Return the norm of residual + x, and that sum; `residual` None counts as 0. Neither
        argument may be read afterwards."""
        ...


class Embedding(Protocol):
    """A table with a row for each id."""

    def __call__(self, ids: Array, /) -> Array:
        """Integers [T] to [T, size]."""
        ...

    def embed(self, batch: Batch, /) -> Array:
        """Return the rows [T, size] of a batch's tokens, or a copy of the embeddings that the batch
        has instead."""
        ...

    def row(self, index: int, /) -> Array:
        """Return one row of the table, which broadcasts against [T, size]."""
        ...


class Attention(Protocol):
    """Attention over a request's tokens, with everything between the projections and it: norms,
    rotary embedding and the store."""

    @property
    def layer(self) -> Any:
        """Its geometry, as the library's attention backends take it."""
        ...

    def __call__(self, qkv: Array, batch: Batch, /) -> Array:
        """[T, (heads + 2 kv_heads) * head_dim], queries, keys and values concatenated, to [T, heads
        * head_dim]; some kinds of attention have other shapes."""
        ...


class Stateful(Protocol):
    """A layer that keeps a state for each request, in the library's state pool."""

    layer_id: int

    def __call__(self, hidden: Array, batch: Batch, /) -> Array:
        """[T, H] to [T, H]; updates the states of the batch's requests."""
        ...


class IndexProjections(NamedTuple):
    """The projections of an indexer.

    - `queries`: [T, q_lora_rank] to [T, index_heads * index_dim].
    - `weights`: hidden states [T, H] to the weights of queries [T, index_heads].
    - `blocks`: [T, H] to each token's part in blocks, values and gates concatenated, [T, 4 *
      index_dim].
    """

    queries: Layer
    weights: Layer
    blocks: Layer


class CompressedProjections(NamedTuple):
    """The projections of attention over compressed blocks. Queries and keys are neither normed nor
    rotated yet.

    - `latent`: hidden states [T, H] to [T, q_lora_rank].
    - `queries`: [T, q_lora_rank] to [T, heads * head_dim].
    - `keys`: [T, H] to [T, head_dim].
    - `blocks`: [T, H] to values and gates, concatenated; None without blocks.
    - `output`: [T, heads * head_dim] to [T, H].
    - `index`: the indexer's projections; None without one.
    """

    latent: Layer
    queries: Layer
    keys: Layer
    output: Layer
    blocks: Layer | None
    index: IndexProjections | None


class RoutedLayer(Protocol):
    """Routed experts, which may also depend on the token ids."""

    def __call__(self, x: Array, input_ids: Array | None = None, /) -> Array:
        """[T, H] to [T, H]. Routing by a table also needs the token ids, integers [T]."""
        ...


class HyperConnection(Protocol):
    """A hyper-connection: wraps a block in a model with n streams of H elements for each token."""

    def narrow(self, streams: Array, /) -> tuple[Array, Any]:
        """Combine streams [T, n, H] to the block's input [T, H]; also returns the `mix` for
        `widen`."""
        ...

    def widen(self, x: Array, streams: Array, mix: Any, /) -> Array:
        """Distribute the block's result `x` [T, H] over the streams; returns [T, n, H]. `streams`
        and `mix` are the argument and the result of `narrow`."""
        ...


class HyperHead(Protocol):
    """Makes the n streams of each token from its embedding (`begin`), and one row from them after
    the last layer (`end`)."""

    def begin(self, x: Array, /) -> Array:
        """[T, H] to [T, n, H]: n copies."""
        ...

    def end(self, streams: Array, /) -> Array:
        """Combine the streams: [T, n, H] to [T, H]."""
        ...


class Projections(Protocol):
    """The input projections of latent attention."""

    def __call__(self, hidden: Array, /) -> tuple[Array, Array, Array | None]:
        """Return queries, cache entries and query latents of [T, H].

        They are [T, heads * query_dim], [T, width] and [T, q_rank]; the last is None if queries
        have no latent.
        """
        ...


class Build(Protocol):
    """The scope in which a layer is built, and the kinds of layers. `name` is a module of this
    scope, with the checkpoint's own name.

    A kind that a library lacks raises `ConfigError` with the kind's name when a model uses it.
    """

    @property
    def config(self) -> ModelConfig:
        """The model's geometry."""
        ...

    @property
    def weights(self) -> Any:
        """The library's record of the model's weights."""
        ...

    @property
    def dtype(self) -> Any:
        """The library's element type in which the model computes."""
        ...

    @property
    def kernels(self) -> Any:
        """The device's kernel table, or the library's description of the device."""
        ...

    def at(self, *names: str | int) -> Build:
        """Return the scope of a part of this layer; `names` are joined by dots after this scope's
        name.
        """
        ...

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Layer:
        """Return a linear layer, x W^T + b, with the weight `name`.weight [outputs, inputs] and, if
        `bias`, `name`.bias.
        """
        ...

    def fused(self, parts: Parts, inputs: int, bias: bool = False, interleaved: Sequence[str] = ()) -> Layer:
        """Return several linear layers with one input as one product; outputs are concatenated.

        In the checkpoint, heads of `interleaved` layers have rotated pairs next to each other. In
        the output, the two elements of a pair are half of the rotated part apart, as `rotary`
        needs.
        """
        ...

    def ordered(self, parts: Parts, inputs: int, order: Sequence[int], bias: bool = False) -> Layer:
        """Return `fused` with other output order: output i is the checkpoint's output order[i]."""
        ...

    def grouped(self, name: str, groups: int, inputs: int, outputs: int) -> Layer:
        """Return a linear layer for each group of `inputs`: [T, groups * inputs] to [T, groups *
        outputs]. The weight has the rows of group 0 first."""
        ...

    def norm(self, name: str, size: int, offset: float | None = None, eps: float | None = None) -> Norm:
        """Return a root mean square norm; `eps` None: the configuration's.

        The normed row is cast, then multiplied by the weight. With an `offset`, which is added to
        the weight, the product is in float32 and then cast.
        """
        ...

    def layer_norm(self, name: str, size: int, eps: float, bias: bool = True) -> Layer:
        """Return a layer norm with a weight and, if `bias`, a bias."""
        ...

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> Embedding:
        """Return an embedding with a weight [rows, size].

        Its output is multiplied by `scale`, rounded to the model's dtype.
        """
        ...

    def head(self, name: str, rows: int, size: int, tied: Embedding | None = None) -> Layer:
        """Return the output layer: [T, size] to float32 [T, rows], with its own weight or that of
        the embedding `tied`."""
        ...

    def rotary(self, rope: RopeConfig | None = None) -> Any:
        """Return the configuration's rotary embedding, or that of `rope`. Attention layers can
        share it."""
        ...

    def attention(
        self,
        layer_id: int,
        rotary: Any = None,
        *,
        qk_norm: bool = False,
        whole_norm: bool = False,
        norm_offset: float | None = None,
        sinks: bool = False,
        is_encoder: bool = False,
    ) -> Attention:
        """Return attention with the configuration's heads, sliding window, scaling and softcap.

        `qk_norm`: `q_norm` and `k_norm` of this scope norm each query and key head, with
        `norm_offset` as the `offset` of `norm`. `whole_norm`: they norm all queries of a token at
        once, and all keys. Then `rotary` rotates queries and keys. `sinks`: the parameter `sinks`
        [heads] of this scope has the scores of one more key, which has no value. `is_encoder`:
        each token sees its whole request, and nothing is stored.
        """
        ...

    def compressed_attention(
        self,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Any,
        projections: CompressedProjections,
    ) -> Attention:
        """Return attention over a sliding window and, unless `compression` is None, over compressed
        blocks; takes hidden states [T, H] and a batch, returns [T, H].

        Parameters of this scope: `sinks` and `kv_norm`; in `compressor` and `compressor.indexer`,
        `position_bias` and `kv_norm`.
        """
        ...

    def gated_delta_net(self, state_id: int, net: DeltaNetConfig, projection: Layer, output: Layer) -> Stateful:
        """Return a gated delta rule layer with the convolution, norm and gate of this scope.
        `projection` returns queries, keys and values, the gate, and each head's b and a,
        concatenated; `state_id` numbers the layers with states."""
        ...

    def mamba2(self, state_id: int, space: Mamba2Config, projection: Layer, output: Layer) -> Stateful:
        """Return a Mamba 2 layer with the convolution and norm of this scope. `projection` returns
        the gate, the convolution's input, and each head's time step, concatenated; `state_id`
        numbers the layers with states."""
        ...

    def short_conv(self, state_id: int, taps: int, projection: Layer, output: Layer, bias: bool = False) -> Stateful:
        """Return output(c * conv(b * x)), with the convolution `conv` of this scope over `taps`
        tokens. `projection` returns b, c and x, concatenated; `state_id` numbers the layers with
        states."""
        ...

    def latent_attention(
        self, layer_id: int, rotary: Any, latent: LatentConfig, projections: Projections, output: Layer
    ) -> Attention:
        """Return latent attention with the norm, `kv_b_proj` and `indexer` of this scope: [T, H] to
        [T, H]. Rotated pairs are neighbours. `output` maps [T, heads * value_dim] to [T, H]."""
        ...

    def mapped_head(self, name: str, ids: str, rows: int, size: int, outputs: int) -> Layer:
        """Return an output layer with `rows` weights: [T, size] to float32 [T, outputs]. Row i
        gives the logit of token i + `ids`[i]; all others are -inf."""
        ...

    def concat(self) -> Callable[..., Array]:
        """Return a function that concatenates arrays [T, ...] along the last dimension."""
        ...

    def softcap(self, cap: float) -> Layer:
        """Return a layer: cap * tanh(x / cap), for logits."""
        ...

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> Layer:
        """Return down(activation(gate(x)) * up(x)) with the configuration's activation, `size` wide
        inside. `fused` names a weight with the rows of gate, then those of up; empty: `gate_proj`
        and `up_proj`."""
        ...

    def experts(
        self, name: str, moe: MoeConfig, spec: ExpertSpec = ExpertSpec(), routing: RoutingSpec = RoutingSpec()
    ) -> RoutedLayer:
        """Return routed experts: the weighted sum of the experts that the router chooses for each
        token. Raises `ConfigError` for a form or a router that the library does not have."""
        ...

    def limited_mlp(self, name: str, size: int, limit: float) -> Layer:
        """Return down(silu(gate(x)) * up(x)), `size` wide inside.

        gate is at most `limit`, up is from -`limit` to `limit`.
        """
        ...

    def hyper_connection(self, name: str, streams: int, iters: int, eps: float) -> HyperConnection:
        """Return manifold-constrained hyper-connections with the parameters `fn`, `base` and
        `scale`; `iters` and `eps` are those of the mixing of streams (`hc_pre` of the kernel
        table)."""
        ...

    def hyper_head(self, name: str, streams: int, eps: float) -> HyperHead:
        """Return the start and end of the streams, with the parameters `hc_fn`, `hc_base` and
        `hc_scale`."""
        ...

    def gated_residual(self, name: str, streams: int, rank: int) -> HyperConnection:
        """Return a hyper-connection: gates combine the normed streams, with the weights
        `input_mix_weight_down` and `input_mix_weight_up` of `rank` elements between them; the
        result is added to each stream with a factor from `block_inject_weight`."""
        ...

    def gated_mixer(self, name: str, streams: int, rank: int) -> HyperHead:
        """Return the start and end of the streams of `gated_residual`: copies, and the gated mean
        of the normed streams."""
        ...

    def ngram_embedding(self, state_id: int, net: NgramConfig, place: int, streams: int) -> Stateful:
        """Return what the n-grams of each token add to the streams, [T, n, H] to the same shape:
        rows of table `place`, gates and a convolution of this scope. `state_id` numbers the layers
        with states."""
        ...

    def activation(self, name: str) -> Layer:
        """Return an elementwise function: "gelu" (exact), "relu2" (max(x, 0)^2), "sigmoid" or
        "tanh".
        """
        ...


class Architecture(ABC):
    """A decoder, encoder or draft model, built from the layers of a `Build`. `feature_size`: the
    elements of a token's hidden state between layers."""

    calls_library: ClassVar[bool] = False
    """Some operations are the library's own, between the device's kernels."""
    previous_ids: int = 0
    """How many ids before each token its result depends on (`NgramEmbeddingInfo.previous_ids`)."""
    against_norm_inputs: str = "it has no layers that sglcore runs one by one"
    """Why `with_norm_inputs` raises; empty if it does not."""
    parts: str = ""
    """The parts that the device's kernels compute; empty if they compute all."""
    ignored: tuple[str, ...] = ()
    """Patterns of checkpoint names that the model does not read."""
    stripped: ClassVar[str] = ""
    """A prefix that a checkpoint's names may have before the model's names."""
    attention_layers: tuple[Any, ...]
    """The geometry of each attention layer, by its id."""
    state_layers: tuple[Any, ...] = ()
    """The layers that keep a state for each request, by ids of their own."""
    sliced_layers: int = 0
    """The number of layers that a forward can run in slices; 0: none."""

    def __init__(self, build: Build) -> None:
        """Build the layers, in subclasses; weights may still be empty."""
        self.config, self.feature_size = build.config, build.config.hidden_size
        self.weights, self.dtype, self.kernels = build.weights, build.dtype, build.kernels

    @property
    def reads_history(self) -> bool:
        """True if the result for a token depends on the ids before it (`previous_ids`)."""
        return self.previous_ids > 0

    def named(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        """Return, by the checkpoint's name, the model's name of each tensor in the checkpoint's
        files; `shapes` are the tensors' shapes by name.
        """
        own_name = self.naming(self.config)
        return {name: own_name(name) for name in shapes}

    @classmethod
    def naming(cls, config: ModelConfig) -> Callable[[str], str]:
        """Return the function from a tensor's name in the checkpoint to the model's name of it."""
        return cls.own_name

    @classmethod
    def own_name(cls, name: str) -> str:
        """Return the model's name of one tensor, if each is renamed by itself."""
        return name.removeprefix(cls.stripped)

    @abstractmethod
    def __call__(self, batch: Batch) -> Array:
        """Return hidden states [T, H] after the last norm. Queues work and does not wait."""

    def with_norm_inputs(self, batch: Batch) -> tuple[Array, Array]:
        """Return hidden states [T, H] as `__call__`, and the inputs [T, H] of the last norm; raises
        `ConfigError` as `against_norm_inputs` says. Queues work and does not wait."""
        raise ConfigError(f"{self.config.architecture} returns no norm inputs: {self.against_norm_inputs}")

    def logits(self, hidden: Array) -> Array:
        """[N, H] to float32 [N, vocab]; raises `ConfigError` for an encoder."""
        raise ConfigError(f"{self.config.architecture} is an encoder and has no logits", remedy="use its embeddings")

    def embed_ids(self, ids: Array) -> Array:
        """Token ids [T] to the embeddings [T, H] that a batch may have in their place; raises
        `ConfigError` if prompts may not contain embeddings."""
        raise ConfigError(f"{self.config.architecture} takes no embeddings", remedy="give it text or token ids")

    def classify(self, pooled: Array) -> Array:
        """Return [B, labels] of pooled hidden states [B, H], by the classification head; raises
        `ConfigError` without one."""
        raise ConfigError(f"{self.config.architecture} has no classification head", remedy="use its embeddings")
