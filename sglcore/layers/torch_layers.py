"""Torch's layers for the kinds in `models/layer_kinds.py`: every model on a torch device is built
from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.frozen_draft_config import FrozenCells
from sglcore.checkpoint.latent_config import LatentConfig
from sglcore.checkpoint.model_config import MoeConfig, RopeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.ngram_config import NgramConfig
from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore.checkpoint.rope_config import halves_first, rotary_dim
from sglcore.core.errors import ConfigError
from sglcore.layers.attention import AttentionLayer
from sglcore.layers.build_scope import Scope
from sglcore.layers.clamped_mlp import LimitedMlp
from sglcore.layers.compressed_attention import CompressedAttention, OfAttention
from sglcore.layers.frozen_draft import ChosenHead, FrozenAttention, Scale
from sglcore.layers.gated_residual import GatedMixer, GatedResidual
from sglcore.layers.hyper_connections import HyperConnection, HyperHead
from sglcore.layers.latent_attention import LatentAttention, Projections
from sglcore.layers.linear import Embedding, GroupedLinear, Head, Linear, MappedHead, OrderedLinear, Softcap
from sglcore.layers.mlp import GatedMlp
from sglcore.layers.moe import Experts
from sglcore.layers.ngram_embedding import NgramEmbedding
from sglcore.layers.norm import LayerNorm, RMSNorm
from sglcore.layers.recurrent_layers import GatedDeltaNet, Mamba2, Rows, ShortConv
from sglcore.layers.rotary import cos_sin_cache
from sglcore.runtime.kernels.reference_kernels import relu2
from sglcore.runtime.kernels.table import KernelTable


@dataclass(frozen=True, slots=True)
class Build(Scope):
    """`layer_kinds.Build` in torch: each method returns the layer that the method of that name
    defines there. `given`: layers of another model that replace embeddings and output layers, by
    full name."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """Return the linear layer x W^T + b with the weight `name`.weight [outputs, inputs] and, if
        `bias`, `name`.bias.
        """
        return Linear(self, ((name, outputs),), inputs, bias)

    def fused(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool = False, interleaved: Sequence[str] = ()
    ) -> Linear:
        """Return several linear layers with one input as one product, outputs concatenated. `parts`
        are (name, outputs). Heads of the layers in `interleaved` have rotated pairs next to each
        other in the checkpoint; loading moves them half of the rotated part apart."""
        for name, size in parts:
            if name in interleaved:
                head = self.config.head_dim
                self.reorder(name, halves_first(size // head, head, rotary_dim(self.config)))
        return Linear(self, parts, inputs, bias)

    def ordered(
        self, parts: Sequence[tuple[str, int]], inputs: int, order: Sequence[int], bias: bool = False
    ) -> OrderedLinear:
        """Return the product of `fused`, with the checkpoint's output order[i] as output i."""
        return OrderedLinear(self, parts, inputs, order, bias)

    def grouped(self, name: str, groups: int, inputs: int, outputs: int) -> GroupedLinear:
        """Return a linear layer without bias for each group of inputs: [T, groups * inputs] to [T,
        groups * outputs]. The weight has the rows of group 0 first.
        """
        return GroupedLinear(self.at(name), groups, inputs, outputs)

    def norm(self, name: str, size: int, offset: float | None = None, eps: float | None = None) -> RMSNorm:
        """Return a root mean square norm of the module `name`; `eps` None: the configuration's.
        `offset` is added to the weight; with one, the product with the weight is in float32.
        """
        return RMSNorm(self.at(name), size, self.config.rms_norm_eps if eps is None else eps, offset=offset)

    def layer_norm(self, name: str, size: int, eps: float, bias: bool = True) -> LayerNorm:
        """Return a layer norm with a weight and, if `bias`, a bias."""
        return LayerNorm(self.at(name), size, eps, bias)

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> Embedding:
        """Return an embedding with a weight [rows, size], or the layer in `given`. Rows are
        multiplied by `scale`, if given, which is first rounded to the model's dtype."""
        return self.given.get(self.prefix + name) or Embedding(self.at(name), rows, size, scale)

    def head(self, name: str, rows: int, size: int, tied: Embedding | None = None) -> Head:
        """Return the output layer, [N, size] to float32 [N, rows], or the layer in `given`. Its
        weight is that of the embedding `tied`, or its own (None).
        """
        return self.given.get(self.prefix + name) or Head(self.at(name), rows, size, tied)

    def mapped_head(self, name: str, ids: str, rows: int, size: int, outputs: int) -> MappedHead:
        """Return an output layer with `rows` weights: [N, size] to float32 [N, outputs]. Row i
        gives the logit of token i + `ids`[i], a parameter of this scope; all others are -inf."""
        return MappedHead(self, name, ids, rows, size, outputs)

    def concat(self) -> Callable[..., Tensor]:
        """Return a function that concatenates tensors along the last dimension."""
        return lambda *parts: torch.cat(parts, -1)

    def rotary(self, rope: RopeConfig | None = None, head_dim: int | None = None) -> Tensor:
        """Return the cosines and sines of every position, as `cos_sin_cache` does, for heads of
        `head_dim` elements and the rotary embedding `rope` (None: the configuration's)."""
        config = self.config if rope is None else replace(self.config, rope=rope)
        config = config if head_dim is None else replace(config, head_dim=head_dim)
        return cos_sin_cache(config, self.max_positions, self.weights.device)

    def attention(
        self,
        layer_id: int,
        rotary: Tensor | None = None,
        *,
        qk_norm: bool = False,
        whole_norm: bool = False,
        norm_offset: float | None = None,
        sinks: bool = False,
        is_encoder: bool = False,
    ) -> AttentionLayer:
        """Return attention with norms and rotary embedding, in as few kernels as the device allows.
        The arguments are those of `AttentionLayer`."""
        return AttentionLayer(
            self,
            layer_id,
            rotary,
            qk_norm=qk_norm,
            whole_norm=whole_norm,
            norm_offset=norm_offset,
            sinks=sinks,
            is_encoder=is_encoder,
        )

    def frozen_attention(self, cells: FrozenCells, rotary: Tensor, scaling: float) -> FrozenAttention:
        """Return attention over the KV slots of another model's layer, `cells`: [T, heads *
        head_dim] to the same shape. Queries pass `q_norm` of this scope, then `rotary`; `scaling`
        is the factor of scores."""
        return FrozenAttention(self, cells, rotary, scaling)

    def chosen_head(self, name: str, groups: int, most: int, head: Callable[[Tensor], Tensor]) -> ChosenHead:
        """Return an output layer with the logits of `head`, float32 [N, vocab], but -inf for tokens
        outside the `most` groups (of `groups`) that `centroids` of the module `name` select."""
        return ChosenHead(self.at(name), groups, most, head)

    def scale(self, name: str) -> Scale:
        """Return a layer that multiplies its input by the one number `name` of this scope."""
        return Scale(self, name)

    def compressed_attention(
        self,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Tensor,
        projections: OfAttention,
    ) -> CompressedAttention:
        """Return attention over a sliding window and, unless `compression` is None, over compressed
        blocks: [T, H] to [T, H], projections included. `rotary` is a result of this class's
        `rotary`."""
        return CompressedAttention(self, layer_id, net, compression, rotary, projections)

    def gated_delta_net(self, state_id: int, net: DeltaNetConfig, projection: Rows, output: Rows) -> GatedDeltaNet:
        """Return a gated delta rule layer, [T, H] to [T, H], with the convolution, norm and gate of
        this scope. `projection` returns queries, keys and values, the gate, b and a, concatenated;
        `state_id` numbers the layers with states.
        """
        return GatedDeltaNet(self, state_id, net, projection, output)

    def mamba2(self, state_id: int, space: Mamba2Config, projection: Rows, output: Rows) -> Mamba2:
        """Return a Mamba 2 layer, [T, H] to [T, H], with the convolution and norm of this scope.
        `projection` returns the gate, the convolution's input and the time steps, concatenated;
        `state_id` numbers the layers with states.
        """
        return Mamba2(self, state_id, space, projection, output)

    def short_conv(self, state_id: int, taps: int, projection: Rows, output: Rows, bias: bool = False) -> ShortConv:
        """Return output(c * conv(b * x)) with the convolution `conv` of this scope over `taps`
        tokens. `projection` returns b, c and x, concatenated; `state_id` numbers the layers with
        states.
        """
        return ShortConv(self, state_id, taps, projection, output, bias)

    def latent_attention(
        self, layer_id: int, rotary: Tensor, latent: LatentConfig, projections: Projections, output: Rows
    ) -> LatentAttention:
        """Return latent attention (MLA), [T, H] to [T, H], with the norm, `kv_b_proj` and `indexer`
        of this scope. The other arguments are those of `LatentAttention`.
        """
        return LatentAttention(self, layer_id, rotary, latent, projections, output)

    def softcap(self, cap: float) -> Softcap:
        """Return the layer cap * tanh(x / cap), for logits."""
        return Softcap(self, cap)

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> GatedMlp:
        """Return down(activation(gate(x)) * up(x)) with the configuration's activation, `size` wide
        inside. `fused` names one weight with the rows of gate, then those of up; empty: two
        weights.
        """
        return GatedMlp(self.at(name), size, bias, fused)

    def experts(
        self, name: str, moe: MoeConfig, spec: ExpertSpec = ExpertSpec(), routing: RoutingSpec = RoutingSpec()
    ) -> Experts:
        """Return a router and experts, all on this device: [T, H] to the weighted sum [T, H] of the
        experts that the router chooses for each token. Raises `ConfigError` for MXFP4 codes in a
        form that no kernel takes.
        """
        return Experts(self.at(name), moe, spec, routing)

    def limited_mlp(self, name: str, size: int, limit: float) -> LimitedMlp:
        """Return down(silu(gate(x)) * up(x)), `size` wide inside, with gate at most `limit`, and up
        from -`limit` to `limit`."""
        return LimitedMlp(self.at(name), size, limit)

    def hyper_connection(self, name: str, streams: int, iters: int, eps: float) -> HyperConnection:
        """Return a hyper-connection that wraps a block in a model with `streams` rows per token.
        `iters` and `eps` are those of the mixing of streams (`KernelTable.hc_pre`)."""
        return HyperConnection(self.at(name), streams, iters, eps)

    def hyper_head(self, name: str, streams: int, eps: float) -> HyperHead:
        """Return the start and the end of the streams: `begin` copies each embedding `streams`
        times, `end` combines the streams of a token after the last layer.
        """
        return HyperHead(self.at(name), streams, eps)

    def gated_residual(self, name: str, streams: int, rank: int) -> GatedResidual:
        """Return a hyper-connection that wraps a block in a model with `streams` rows per token:
        gates of the given rank combine them, and the block's result is added to each."""
        return GatedResidual(self.at(name), streams, rank)

    def gated_mixer(self, name: str, streams: int, rank: int) -> GatedMixer:
        """Return the start and the end of such streams: `begin` copies each embedding `streams`
        times, `end` combines the streams of a token by gates of the given rank."""
        return GatedMixer(self.at(name), streams, rank)

    def ngram_embedding(self, state_id: int, net: NgramConfig, place: int, streams: int) -> NgramEmbedding:
        """Return what table `place` of hashed n-grams adds to the streams of a layer: [T, n, H] to
        the same shape. `state_id` numbers the layers with states."""
        return NgramEmbedding(self, state_id, net, place, streams)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return an elementwise function: "gelu" (exact), "relu2" (max(x, 0)^2), "sigmoid" or
        "tanh". Raises `ConfigError` for any other name."""
        if name == "tanh":
            return torch.tanh
        if name == "relu2":
            return relu2
        if name == "sigmoid":
            return self.kernel(KernelTable.sigmoid, self.rows(1))
        if name != "gelu":
            raise ConfigError(
                f"torch's layers have no activation {name!r}", wanted="'gelu', 'relu2', 'sigmoid' or 'tanh'"
            )
        return self.kernel(KernelTable.gelu, self.rows(self.config.intermediate_size))

    if not TYPE_CHECKING:

        def __getattr__(self, kind: str) -> NoReturn:
            if kind.startswith("_"):
                raise AttributeError(kind)
            raise ConfigError(
                f"{self.config.architecture} needs a layer of kind {kind!r}, which torch's layers do not have"
            )
