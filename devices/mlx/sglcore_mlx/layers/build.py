"""Builds the layers of all models on MLX: the kinds of `sglcore.models.layer_kinds`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, Self

import mlx.core as mx

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.latent_config import LatentConfig
from sglcore.checkpoint.model_config import MoeConfig, RopeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore.core.errors import ConfigError
from sglcore.models.layer_kinds import CompressedProjections
from sglcore_mlx.layers.attention import AttentionLayer
from sglcore_mlx.layers.compressed import CompressedAttention
from sglcore_mlx.layers.hyper import HyperConnection, HyperHead
from sglcore_mlx.layers.latent import LatentAttention
from sglcore_mlx.layers.limited import GroupedLinear, LimitedExperts, LimitedMlp, SqrtSoftplusMoe
from sglcore_mlx.layers.linear import Linear
from sglcore_mlx.layers.mlp import GatedMlp, gelu, relu2
from sglcore_mlx.layers.moe import (
    ClampedExperts,
    GatedExperts,
    GroupLimitedRouting,
    LatentMoe,
    Relu2Experts,
    Routing,
    SigmoidRouting,
    SoftmaxRouting,
    SparseMoe,
)
from sglcore_mlx.layers.norm import LayerNorm, RMSNorm
from sglcore_mlx.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv
from sglcore_mlx.layers.rotary import Rotary
from sglcore_mlx.layers.scope import Scope


@dataclass(frozen=True, slots=True)
class Build(Scope):
    """Implements `sglcore.models.layer_kinds.Build`: makes the layers of a scope (a name prefix of
    the checkpoint), with their weights; `Scope` makes those with single weights. Asking for a kind
    of layer that MLX lacks raises ConfigError."""

    def norm(self, name: str, size: int, offset: float | None = None, eps: float | None = None) -> RMSNorm:
        """Implements `layer_kinds.Build.norm`: return an RMS norm over `size` elements with the
        weight below `name`. `offset` is added to the weight; `eps` None: the configuration's."""
        return RMSNorm(self.at(name), size, self.config.rms_norm_eps if eps is None else eps, offset)

    def layer_norm(self, name: str, size: int, eps: float, bias: bool = True) -> LayerNorm:
        """Implements `layer_kinds.Build.layer_norm`: return a layer norm over `size` elements with
        the weight, and the bias if `bias`, below `name`."""
        return LayerNorm(self.at(name), size, eps, bias)

    def rotary(self, rope: RopeConfig | None = None) -> Rotary:
        """Implements `layer_kinds.Build.rotary`: return the rotary embedding of the configuration,
        or of `rope` instead."""
        config = self.config if rope is None else replace(self.config, rope=rope)
        return Rotary(config, self.max_positions, self.dtype, self.kernels.fused_rotary)

    def attention(
        self,
        layer_id: int,
        rotary: Rotary | None = None,
        *,
        qk_norm: bool = False,
        whole_norm: bool = False,
        norm_offset: float | None = None,
        sinks: bool = False,
        is_encoder: bool = False,
    ) -> AttentionLayer:
        """Implements `layer_kinds.Build.attention`: return an attention layer. `rotary` None: no
        rotary embedding. `qk_norm`: RMS norm of each query and key head; `whole_norm`: of all heads
        of a token together; `norm_offset`: added to the norm's weight; `sinks`: load attention
        sinks; `is_encoder`: tokens see later ones too."""
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

    def latent_attention(
        self,
        layer_id: int,
        rotary: Rotary,
        latent: LatentConfig,
        projections: Callable[[mx.array], tuple[mx.array, mx.array, mx.array | None]],
        output: Linear,
    ) -> LatentAttention:
        """Implements `layer_kinds.Build.latent_attention`: make attention over one entry for each
        token."""
        return LatentAttention(self, layer_id, rotary, latent, projections, output)

    def compressed_attention(
        self,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Rotary,
        projections: CompressedProjections,
    ) -> CompressedAttention:
        """Implements `layer_kinds.Build.compressed_attention`: make attention over a sliding window
        and compressed blocks."""
        return CompressedAttention(self, layer_id, net, compression, rotary, projections)

    def grouped(self, name: str, groups: int, inputs: int, outputs: int) -> GroupedLinear:
        """Implements `layer_kinds.Build.grouped`: return a linear layer for each group of
        inputs."""
        return GroupedLinear(self, name, groups, inputs, outputs)

    def limited_mlp(self, name: str, size: int, limit: float) -> LimitedMlp:
        """Implements `layer_kinds.Build.limited_mlp`: return a gated MLP with factors within
        `limit`."""
        return LimitedMlp(self.at(name), size, limit)

    def hyper_connection(self, name: str, streams: int, iters: int, eps: float) -> HyperConnection:
        """Implements `layer_kinds.Build.hyper_connection`: return the combination of `streams`
        before a block, and the distribution of its result."""
        return HyperConnection(self.at(name), streams, iters, eps)

    def hyper_head(self, name: str, streams: int, eps: float) -> HyperHead:
        """Implements `layer_kinds.Build.hyper_head`: return the start and the end of `streams`."""
        return HyperHead(self.at(name), streams, eps)

    def gated_delta_net(self, state_id: int, net: DeltaNetConfig, projection: Linear, output: Linear) -> GatedDeltaNet:
        """Implements `layer_kinds.Build.gated_delta_net`: return a layer with the gated delta rule.
        `state_id`: its number among the layers with recurrent states."""
        return GatedDeltaNet(self, state_id, net, projection, output)

    def mamba2(self, state_id: int, space: Mamba2Config, projection: Linear, output: Linear) -> Mamba2:
        """Implements `layer_kinds.Build.mamba2`: return a Mamba 2 layer. `state_id`: its number
        among the layers with recurrent states."""
        return Mamba2(self, state_id, space, projection, output)

    def short_conv(self, state_id: int, taps: int, projection: Linear, output: Linear, bias: bool = False) -> ShortConv:
        """Implements `layer_kinds.Build.short_conv`: return a causal convolution of `taps` tokens
        between two gates. `state_id`: its number among the layers with recurrent states."""
        return ShortConv(self, state_id, taps, projection, output, bias)

    def softcap(self, cap: float) -> Callable[[mx.array], mx.array]:
        """Implements `layer_kinds.Build.softcap`: return the function cap * tanh(x / cap)."""
        return lambda x: mx.tanh(x / cap) * cap

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> GatedMlp:
        """Implements `layer_kinds.Build.mlp`: return a gated MLP of intermediate size `size`.
        `fused`: the checkpoint's name of one weight with gate's rows, then up's; empty, or not in
        the checkpoint: they are two weights."""
        return GatedMlp(self.at(name), size, bias, fused)

    def experts(
        self, name: str, moe: MoeConfig, spec: ExpertSpec = ExpertSpec(), routing: RoutingSpec = RoutingSpec()
    ) -> SparseMoe | LatentMoe | SqrtSoftplusMoe:
        """Implements `layer_kinds.Build.experts`: return a mixture of experts with its router.
        Raises `ConfigError` for limited experts with another router than sqrtsoftplus or a table,
        and for these routers with other experts."""
        scope = self.at(name)
        if spec.form == "limited" and routing.score in ("sqrtsoftplus", "table"):
            return SqrtSoftplusMoe(scope, moe, routing, LimitedExperts(scope, moe, spec.parts, spec.limit))
        route = self._routing(scope, moe, routing)
        if spec.form == "limited":
            raise self._refusal(f"limited experts with {routing.score} routing")
        if spec.form == "clamped":
            return SparseMoe(route, ClampedExperts(scope, moe, spec.alpha, spec.limit))
        if spec.form == "gated":
            return SparseMoe(route, GatedExperts(scope, moe, spec.parts))
        return (
            LatentMoe(scope, moe, spec.latent, route)
            if spec.latent
            else SparseMoe(route, Relu2Experts(scope, moe, self.config.hidden_size))
        )

    def _routing(self, scope: Self, moe: MoeConfig, routing: RoutingSpec) -> Routing:
        if routing.score == "softmax":
            return SoftmaxRouting(scope, routing.gate, moe, routing.bias)
        if routing.score == "sigmoid":
            return SigmoidRouting(scope, routing.gate, moe)
        if routing.score == "group_limited":
            return GroupLimitedRouting(scope, routing.gate, moe)
        raise self._refusal(f"{routing.score} routing")

    def activation(self, name: str) -> Callable[[mx.array], mx.array]:
        """Implements `layer_kinds.Build.activation`: return the elementwise function of this name:
        gelu, relu2, sigmoid or tanh. Raises `ConfigError` for another name."""
        activations = {"gelu": gelu, "relu2": relu2, "sigmoid": mx.sigmoid, "tanh": mx.tanh}
        if name not in activations:
            raise ConfigError(f"MLX's layers have no activation {name!r}", wanted=", ".join(activations))
        return activations[name]

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.config.architecture} needs {what}, which MLX's layers do not have",
            remedy="choose another --device, or another model",
        )

    if not TYPE_CHECKING:

        def __getattr__(self, kind: str) -> NoReturn:
            if kind.startswith("_"):
                raise AttributeError(kind)
            raise self._refusal(f"a layer of kind {kind!r}")
