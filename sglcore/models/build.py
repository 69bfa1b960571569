"""What an architecture is built of, whatever the tensor library: the layers that a worker's own
library supplies.

Nothing here, in `decoder.py` or in an architecture's file knows a library. Arrays are what the
library computes with; rows come first, [T, ...], and every layer takes T = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from sglcore.checkpoint.compressed import CompressedConfig, Compression
from sglcore.checkpoint.config import EXPERT_PARTS, ModelConfig, MoeConfig, RopeConfig
from sglcore.checkpoint.latent import LatentConfig
from sglcore.checkpoint.recurrent import DeltaNetConfig, Mamba2Config
from sglcore.device.errors import ConfigError

Array: TypeAlias = Any
"""A tensor or an array of the worker's library: no two have a type in common."""

Parts: TypeAlias = Sequence[tuple[str, int]]
"""Linear layers with one input: (name, outputs) of each."""


class Batch(Protocol):
    """The tokens of a forward, as the library's own layers take them."""

    @property
    def input_ids(self) -> Array:
        """Integers [T]."""
        ...

    @property
    def positions(self) -> Array:
        """Integers [T]: each token's place in its request."""
        ...

    @property
    def token_type_ids(self) -> Array | None:
        """Integers [T]: the segment of each token of its request, or None where all are of the
        first."""
        ...

    @property
    def features(self) -> Array | None:
        """[T, H]: what another model made of the token before each of these, or this one of its own
        proposals."""
        ...


class Layer(Protocol):
    """A function of rows: [T, inputs] to [T, outputs]."""

    def __call__(self, x: Array, /) -> Array:
        """[T, inputs] to [T, outputs]."""
        ...


class Norm(Layer, Protocol):
    """A norm that can add what came before it to the sum of a model's layers."""

    def add(self, x: Array, residual: Array | None, /) -> tuple[Array, Array]:
        """The norm of residual + x, and that sum, which begins with x if there is no residual; uses
        up both."""
        ...


class Embedding(Protocol):
    """A row for each id."""

    def __call__(self, ids: Array, /) -> Array:
        """Integers [T] to [T, size]."""
        ...

    def embed(self, batch: Batch, /) -> Array:
        """The rows [T, size] of a batch's tokens, or a copy of what the batch brings in their
        place."""
        ...

    def row(self, index: int, /) -> Array:
        """One row, which broadcasts against [T, size]."""
        ...


class Attention(Protocol):
    """Attention over a request's tokens, with all that stands between the projections and it."""

    @property
    def layer(self) -> Any:
        """Its geometry, as the library's attention backends take it."""
        ...

    def __call__(self, qkv: Array, batch: Batch, /) -> Array:
        """Queries, keys and values side by side, [T, (heads + 2 kv_heads) * head_dim], to [T, heads
        * head_dim]; or as its kind says."""
        ...


class Stateful(Protocol):
    """A layer that keeps a state of each request, in the library's pool of states."""

    layer_id: int

    def __call__(self, hidden: Array, batch: Batch, /) -> Array:
        """[T, H] to [T, H]; the states of the batch's requests go on."""
        ...


class IndexProjections(NamedTuple):
    """What an indexer is made of: `queries` of the narrow row, [T, index_heads * index_dim], their
    `weights` [T, index_heads] of the hidden state, and what a token gives to its `blocks`, values
    and gates side by side."""

    queries: Layer
    weights: Layer
    blocks: Layer


class CompressedProjections(NamedTuple):
    """What stands around attention over compressed blocks: hidden states [T, H] to a `latent` row
    [T, q_lora_rank], which `queries` makes [T, heads * head_dim], to `keys` [T, head_dim], and to
    values and gates of `blocks`, side by side, where there are any; and [T, heads * head_dim] to
    the `output` [T, H]. Neither queries nor keys are normed or rotated."""

    latent: Layer
    queries: Layer
    keys: Layer
    output: Layer
    blocks: Layer | None
    index: IndexProjections | None


class RoutedLayer(Protocol):
    """Experts, chosen for each row."""

    def __call__(self, x: Array, input_ids: Array, /) -> Array:
        """[T, H] and the tokens, integers [T], to [T, H]."""
        ...


class HyperConnection(Protocol):
    """What stands around a block where each token has n streams of H elements."""

    def narrow(self, streams: Array, /) -> tuple[Array, Any]:
        """[T, n, H] to the block's input [T, H], and how its result comes back."""
        ...

    def widen(self, x: Array, streams: Array, mix: Any, /) -> Array:
        """The block's result [T, H], and what `narrow` took and gave, to [T, n, H]."""
        ...


class HyperHead(Protocol):
    """Where the streams begin and where they end."""

    def begin(self, x: Array, /) -> Array:
        """[T, H] to [T, n, H], all alike."""
        ...

    def end(self, streams: Array, /) -> Array:
        """[T, n, H] to [T, H]."""
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
    """The scope in which a layer is built, and the kinds of layers that there are. `name` is a
    module of this scope, by the checkpoint's own name.

    A kind that a library lacks raises `ConfigError` with its name when a model asks for it.
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
        """The library's element type that the model is computed in."""
        ...

    @property
    def kernels(self) -> Any:
        """What computes the layers here: the device's kernel table, or what the library is told of
        the device."""
        ...

    def at(self, *names: str | int) -> Build:
        """The scope of a part of this layer."""
        ...

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Layer:
        """x W^T + b."""
        ...

    def fused(self, parts: Parts, inputs: int, bias: bool = False, interleaved: Sequence[str] = ()) -> Layer:
        """Return several linear layers with one input as one product; outputs are concatenated.

        The heads of `interleaved` layers have rotated pairs next to each other in the checkpoint.
        In the output they are half of the rotated part apart, as `rotary` needs them.
        """
        ...

    def ordered(self, parts: Parts, inputs: int, order: Sequence[int], bias: bool = False) -> Layer:
        """Return `fused` with its outputs in this order."""
        ...

    def grouped(self, name: str, groups: int, inputs: int, outputs: int) -> Layer:
        """A linear layer for each group of `inputs`, [T, groups * inputs] to [T, groups * outputs];
        the weight has group after group."""
        ...

    def norm(self, name: str, size: int, offset: float | None = None, eps: float | None = None) -> Norm:
        """Return a root mean square norm; `eps` None: the configuration's.

        The normed row is cast, then multiplied by the weight. With an `offset`, which is added to
        the weight, the product is in float32 and then cast.
        """
        ...

    def layer_norm(self, name: str, size: int, eps: float, bias: bool = True) -> Layer:
        """Layer norm with weight, and with bias or without."""
        ...

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> Embedding:
        """Return an embedding with a weight [rows, size].

        Its output is multiplied by `scale`, rounded to the model's dtype.
        """
        ...

    def head(self, name: str, rows: int, size: int, tied: Embedding | None = None) -> Layer:
        """The output layer [T, size] to float32 [T, rows], by its own weight or that of `tied`."""
        ...

    def rotary(self, rope: RopeConfig | None = None) -> Any:
        """The rotary embedding that the configuration describes, or another, for any number of
        attention layers."""
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
        """Attention over a window and over blocks, called with hidden states [T, H] and their
        batch, to [T, H]. Of this scope it has `sinks`, `kv_norm`, and of `compressor` and its
        `indexer` the `position_bias` and `kv_norm`."""
        ...

    def gated_delta_net(self, state_id: int, net: DeltaNetConfig, projection: Layer, output: Layer) -> Stateful:
        """The gated delta rule between two projections, with the convolution, norm and gate of this
        scope. `projection` gives queries, keys and values, the gate, and each head's b and a;
        `state_id` numbers the layers with states."""
        ...

    def mamba2(self, state_id: int, space: Mamba2Config, projection: Layer, output: Layer) -> Stateful:
        """Mamba 2 between two projections, with the convolution and norm of this scope.
        `projection` gives the gate, what the convolution takes, and each head's time step."""
        ...

    def short_conv(self, state_id: int, taps: int, projection: Layer, output: Layer, bias: bool = False) -> Stateful:
        """The convolution `conv` of this scope over `taps` tokens: output(c * conv(b * x)), of what
        `projection` gives: b, c and x."""
        ...

    def latent_attention(
        self, layer_id: int, rotary: Any, latent: LatentConfig, projections: Projections, output: Layer
    ) -> Attention:
        """Latent attention with the norm, `kv_b_proj` and `indexer` of this scope: [T, H] to [T,
        H]. Rotated pairs are neighbours."""
        ...

    def mapped_head(self, name: str, ids: str, rows: int, size: int, outputs: int) -> Layer:
        """The output layer [T, size] to float32 [T, outputs] with `rows` weights: i + `ids`[i] by
        its row i, -inf for the others."""
        ...

    def concat(self) -> Callable[..., Array]:
        """Any number of arrays [T, ...] to one with all their columns, in order."""
        ...

    def softcap(self, cap: float) -> Layer:
        """cap * tanh(x / cap), of logits."""
        ...

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> Layer:
        """down(activation(gate(x)) * up(x)) with the configuration's activation, `size` wide
        inside. `fused` names a weight that has the rows of gate, then of up."""
        ...

    def experts(
        self,
        name: str,
        moe: MoeConfig,
        *,
        gate: str = "gate",
        parts: Sequence[str] = EXPERT_PARTS,
        is_sigmoid: bool = False,
    ) -> Layer:
        """The weighted sum of the experts that `gate` chooses for each token, by softmax, or by the
        sigmoid and a bias, `e_score_correction_bias`. `parts` are the projections of each of
        `experts`, or two, each for all experts in one weight: gate over up, and down."""
        ...

    def group_limited_experts(self, name: str, moe: MoeConfig) -> Layer:
        """As `experts`, chosen by softmax of logits in float32, in the groups that have the
        largest."""
        ...

    def clamped_experts(self, name: str, moe: MoeConfig, alpha: float, limit: float) -> Layer:
        """Return `experts` with biases of `router` and of `experts`, and clamped factors.

        `gate_up_proj` [experts, size, 2 * inner] has gate and up interleaved. The result is
        down((up + 1) * gate * sigmoid(alpha * gate)); gate is at most `limit`, up is from
        -`limit` to `limit`.
        """
        ...

    def relu2_experts(self, name: str, moe: MoeConfig, latent: int = 0) -> Layer:
        """Return `experts` selected by sigmoids, each down(max(up(x), 0)^2).

        With a `latent` size, `fc1_latent_proj` comes before the experts and `fc2_latent_proj` after
        their sum.
        """
        ...

    def limited_mlp(self, name: str, size: int, limit: float) -> Layer:
        """Return down(silu(gate(x)) * up(x)), `size` wide inside.

        gate is at most `limit`, up is from -`limit` to `limit`.
        """
        ...

    def limited_experts(self, name: str, moe: MoeConfig, limit: float, is_hashed: bool) -> RoutedLayer:
        """Return `experts`, each a `limited_mlp`, weighted by sqrt(softplus) of `gate`.

        The same score plus a bias, `e_score_correction_bias`, selects the experts. `is_hashed`: the
        table `tid2eid` [vocab, K] has the experts of each token instead.
        """
        ...

    def hyper_connection(self, name: str, streams: int, iters: int, eps: float) -> HyperConnection:
        """Manifold-constrained hyper-connections, by `fn`, `base` and `scale`; see `hc_pre` of the
        kernel table."""
        ...

    def hyper_head(self, name: str, streams: int, eps: float) -> HyperHead:
        """By `hc_fn`, `hc_base` and `hc_scale`."""
        ...

    def activation(self, name: str) -> Layer:
        """An elementwise function: "gelu", "relu2" (max(x, 0)^2), "sigmoid" or "tanh"."""
        ...


class Architecture(ABC):
    """A model. `ignored` are patterns of checkpoint names that it leaves unread; `stripped` is a
    prefix that a checkpoint's names may have before ours. `attention_layers` has each layer's
    geometry, by its id, and `state_layers` those that keep a state of each request, by an id of
    their own; `feature_size` are the numbers of a token between layers. `reads_history`: what it
    makes of a token depends on the ids before it, which are in the forward's context.
    `calls_library`: some of its operations are the library's own, between those of the device's
    kernels. `parts` says what of it the device's kernels compute, if not all. `sliced_layers`: its
    forward may be run by slices of so many layers."""

    calls_library: ClassVar[bool] = False
    reads_history: ClassVar[bool] = False
    parts: str = ""
    ignored: tuple[str, ...] = ()
    stripped: ClassVar[str] = ""
    attention_layers: tuple[Any, ...]
    state_layers: tuple[Any, ...] = ()
    sliced_layers: int = 0

    def __init__(self, build: Build) -> None:
        """Subclasses build their layers; weights may still be empty."""
        self.config, self.feature_size = build.config, build.config.hidden_size
        self.weights, self.dtype, self.kernels = build.weights, build.dtype, build.kernels

    def named(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        """What each tensor in the checkpoint's files, of these shapes, is called in the model's
        record of its weights."""
        return {name: self.own_name(name) for name in shapes}

    @classmethod
    def own_name(cls, name: str) -> str:
        """The same for one name, where each is renamed by itself."""
        return name.removeprefix(cls.stripped)

    @abstractmethod
    def __call__(self, batch: Batch) -> Array:
        """Hidden states [T, H] after the last norm. Queues only."""

    def logits(self, hidden: Array) -> Array:
        """[N, H] to float32 [N, vocab]; raises `ConfigError` for an encoder."""
        raise ConfigError(f"{self.config.architecture} is an encoder and has no logits", remedy="use its embeddings")

    def embed_ids(self, ids: Array) -> Array:
        """Token ids [T] to the rows [T, H] that the first layer takes; raises `ConfigError` where
        prompts may bring no others."""
        raise ConfigError(f"{self.config.architecture} takes no embeddings", remedy="give it text or token ids")

    def classify(self, pooled: Array) -> Array:
        """[B, labels] from pooled hidden states [B, H], by the classification head; raises
        `ConfigError` without one."""
        raise ConfigError(f"{self.config.architecture} has no classification head", remedy="use its embeddings")
