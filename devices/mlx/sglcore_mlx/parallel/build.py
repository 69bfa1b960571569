"""MLX's layers on several ranks: a model's file builds the same layers, and each rank gets its
part.

Heads, the intermediate size of feed-forward blocks and experts, and the vocabulary are divided;
norms, gates and small layers are whole on every rank. A kind here records which part of the
checkpoint's tensors a rank has, and builds a layer of that size with `Build`. The parts are those
of the core (`checkpoint/parallel_roles.py`, `expert_parts.py`). What is not divided is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import mlx.core as mx

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.latent_config import LatentConfig
from sglcore.checkpoint.model_config import ModelConfig, MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.parallel.expert_parts import GROUP, both, cut_form
from sglcore.checkpoint.parallel.parallel_roles import (
    Section,
    by_part,
    is_by_inputs,
    kept,
    of_attention,
    reordered,
    sections,
    sections_of_fused,
)
from sglcore.checkpoint.parallel.tensor_parallel import Range, Shard, clipped
from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore.core.errors import ConfigError
from sglcore.models.layer_kinds import CompressedProjections
from sglcore_mlx.layers.attention import AttentionLayer
from sglcore_mlx.layers.build import Build
from sglcore_mlx.layers.compressed import CompressedAttention
from sglcore_mlx.layers.cut import Cut
from sglcore_mlx.layers.latent import LatentAttention
from sglcore_mlx.layers.limited import GroupedLinear
from sglcore_mlx.layers.linear import Embedding, Linear
from sglcore_mlx.layers.mlp import GATE_AND_UP
from sglcore_mlx.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv
from sglcore_mlx.layers.rotary import Rotary
from sglcore_mlx.layers.scope import Scope
from sglcore_mlx.parallel.layers import SharedEmbedding, SharedHead, Summed
from sglcore_mlx.parallel.norms import SharedGatedNorm, SharedWholeNorm
from sglcore_mlx.parallel.ranks import Ranks

PACKED = ("weight", "scales", "biases")
"""The tensors of a linear layer that have its rows and columns; those of a packed one are three."""


@dataclass(frozen=True, slots=True)
class ShardedBuild(Build):
    """`layer_kinds.Build` on several ranks: each method returns this rank's part of the layer that
    the method of that name defines there."""

    ranks: Ranks | None = None

    @property
    def _ranks(self) -> Ranks:
        assert self.ranks is not None
        return self.ranks

    @property
    def shard(self) -> Shard:
        """This rank's part."""
        return Shard(self._ranks.rank, self._ranks.size)

    def own(self, config: ModelConfig | None = None) -> Build:
        """Return a single-rank `Build` in this scope, with this configuration (None: the
        model's)."""
        given = {each.name: getattr(self, each.name) for each in fields(Scope)}
        return Build(**(given if config is None else {**given, "config": config}))

    def cut(self, name: str, whole: int, *ranges: Range, dim: int = 0) -> None:
        """Record that this rank has `ranges` of dimension `dim`, which has `whole` entries, of the
        checkpoint's tensor of this name; a packed weight's scales and biases too."""
        module, dot, last = (self.prefix + name).rpartition(".")
        for kind in PACKED if last == "weight" else (last,):
            self.weights.cuts[f"{module}{dot}{kind}"] = Cut(dim, whole, ranges)

    def _cut_rows(self, name: str, whole: int, *ranges: Range) -> tuple[str, int]:
        """Cut the weight and the bias of a linear layer; return its name and the number of rows
        here."""
        for kind in ("weight", "bias"):
            self.cut(f"{name}.{kind}", whole, *ranges)
        return name, sum(last - first for first, last in ranges)

    def _once(self, *names: str) -> None:
        """Let rank 0 alone have these tensors, which are added to a sum over ranks; the others have
        zeros."""
        if self._ranks.rank:
            self.weights.zeroed.update(self.prefix + name for name in names)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """Return x W^T + b, divided by its inputs or outputs as `parallel_roles` decides from its
        name; whole on every rank without a rule. Divided by inputs, the results are summed."""
        if not is_by_inputs(self.prefix, name):
            parts = ((name, outputs),)
            return self._outputs(parts, inputs, bias, sections(self.config, self.prefix, parts))
        first, last = self.shard.part(inputs)
        self.cut(f"{name}.weight", inputs, (first, last), dim=1)
        self._once(f"{name}.bias")
        return Summed(self.own().linear(name, last - first, outputs, bias), self._ranks)

    def fused(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool = False, interleaved: Sequence[str] = ()
    ) -> Linear:
        """Return several layers with one input, with this rank's outputs. Raises `ConfigError` for
        a product that no rule divides."""
        return self._outputs(parts, inputs, bias, self._divided(parts), interleaved)

    def ordered(
        self, parts: Sequence[tuple[str, int]], inputs: int, order: Sequence[int], bias: bool = False
    ) -> Linear:
        """Return the product of `fused` with this rank's part of the outputs in this order; the
        sections by which it is divided refer to the new order."""
        ranges, places = reordered(kept(self._divided(parts), self.shard), order)
        return self.own().ordered(self._cut_parts(parts, ranges), inputs, places, bias)

    def _divided(self, parts: Sequence[tuple[str, int]]) -> Sequence[Section]:
        """Return the sections of a fused product; none for one that all heads share."""
        found = sections_of_fused(self.config, self.prefix, parts)
        if found is None:
            raise self._not_divided(f"projections of {', '.join(f'{name} ({count})' for name, count in parts)}")
        return found

    def _outputs(
        self,
        parts: Sequence[tuple[str, int]],
        inputs: int,
        bias: bool,
        divided: Sequence[Section],
        interleaved: Sequence[str] = (),
    ) -> Linear:
        own = self._cut_parts(parts, kept(divided, self.shard)) if divided else parts
        return self.own().fused(own, inputs, bias, interleaved)

    def _cut_parts(self, parts: Sequence[tuple[str, int]], ranges: Sequence[Range]) -> list[tuple[str, int]]:
        each = zip(parts, by_part(parts, ranges), strict=True)
        return [self._cut_rows(name, count, *own) for (name, count), own in each]

    def grouped(self, name: str, groups: int, inputs: int, outputs: int) -> GroupedLinear:
        """Return a linear layer for each of this rank's groups."""
        first, last = self.shard.part(groups)
        self.cut(f"{name}.weight", groups * outputs, (first * outputs, last * outputs))
        return self.own().grouped(name, last - first, inputs, outputs)

    @property
    def _held(self) -> ModelConfig:
        """The model's configuration with the numbers of query heads and KV heads on this rank."""
        shard, config = self.shard, self.config
        (first, last), own = shard.part(config.num_attention_heads), shard.kv_heads(config.num_key_value_heads)
        return replace(config, num_attention_heads=last - first, num_key_value_heads=own[1] - own[0])

    def attention(self, layer_id: int, rotary: Rotary | None = None, **how: Any) -> AttentionLayer:
        """Return attention over this rank's heads; the options are those of `Build.attention`."""
        if how.get("sinks"):
            self.cut("sinks", self.config.num_attention_heads, self.shard.part(self.config.num_attention_heads))
        if not how.get("whole_norm"):
            return self.own(self._held).attention(layer_id, rotary, **how)
        for name, section in zip(("q_norm", "k_norm"), of_attention(self.config), strict=False):
            self.cut(f"{name}.weight", section.outputs, section.part(self.shard))
        norm = partial(SharedWholeNorm, ranks=self._ranks)
        return AttentionLayer(self.own(self._held), layer_id, rotary, make_norm=norm, **how)

    def latent_attention(
        self,
        layer_id: int,
        rotary: Rotary,
        latent: LatentConfig,
        projections: Callable[[mx.array], tuple[mx.array, mx.array, mx.array | None]],
        output: Linear,
    ) -> LatentAttention:
        """Return latent attention with this rank's heads. Every rank keeps all cache entries and
        the whole indexer."""
        heads = self.config.num_attention_heads
        rows = Section(heads, latent.nope_dim + latent.value_dim)
        self.cut("kv_b_proj.weight", rows.outputs, rows.part(self.shard))
        for name in ("embed_q", "unembed_out"):
            self.cut(f"{name}.weight", heads, self.shard.part(heads))
        return self.own(self._held).latent_attention(layer_id, rotary, latent, projections, output)

    def compressed_attention(
        self,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Rotary,
        projections: CompressedProjections,
    ) -> CompressedAttention:
        """Return compressed attention with this rank's heads. Every rank keeps all cache entries,
        and the whole compressor and indexer."""
        first, last = self.shard.part(net.heads)
        self.cut("sinks", net.heads, (first, last))
        local = replace(net, heads=last - first)
        return self.own().compressed_attention(layer_id, local, compression, rotary, projections)

    def gated_delta_net(self, state_id: int, net: DeltaNetConfig, projection: Linear, output: Linear) -> GatedDeltaNet:
        """Return a gated delta rule layer for this rank's heads, which keeps their states."""
        keys, values = Section(net.key_heads, net.key_dim), Section(net.value_heads, net.value_dim)
        self._cut_rows("conv1d", 2 * net.keys + net.values, *kept((keys, keys, values), self.shard))
        first, last = self.shard.part(net.value_heads)
        for name in ("A_log", "dt_bias"):
            self.cut(name, net.value_heads, (first, last))
        local = replace(net, key_heads=net.key_heads // self.shard.size, value_heads=last - first)
        return self.own().gated_delta_net(state_id, local, projection, output)

    def mamba2(self, state_id: int, space: Mamba2Config, projection: Linear, output: Linear) -> Mamba2:
        """Return a Mamba 2 layer for this rank's heads, which keeps their states. With fewer groups
        than ranks, several ranks hold the heads of a group, and its norm is over all of them."""
        first, last = self.shard.part(space.heads)
        heads, groups = Section(space.heads, space.head_dim), Section(space.groups, space.width, shared=True)
        self._cut_rows("conv1d", space.channels, *kept((heads, groups, groups), self.shard))
        self.cut("norm.weight", space.inner, heads.part(self.shard))
        for name in ("A_log", "D", "dt_bias"):
            self.cut(name, space.heads, (first, last))
        local = replace(space, heads=last - first, groups=max(space.groups // self.shard.size, 1))
        if space.groups >= self.shard.size:
            return self.own().mamba2(state_id, local, projection, output)
        norm = partial(SharedGatedNorm, ranks=self._ranks, sharing=self.shard.size // space.groups)
        return Mamba2(self.own(), state_id, local, projection, output, norm)

    def short_conv(self, state_id: int, taps: int, projection: Linear, output: Linear, bias: bool = False) -> ShortConv:
        """Return a short convolution between two gates for this rank's part of the hidden size."""
        size = self.config.hidden_size
        first, last = self.shard.part(size)
        self._cut_rows("conv", size, (first, last))
        local = self.own(replace(self.config, hidden_size=last - first))
        return local.short_conv(state_id, taps, projection, output, bias)

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> Summed:
        """Return the gated MLP with this rank's part of the intermediate size, and the sum over
        ranks."""
        part = self._cut_mlp(name, size, fused)
        self.at(name)._once("down_proj.bias")
        return Summed(self.own().mlp(name, part[1] - part[0], bias, fused), self._ranks)

    def limited_mlp(self, name: str, size: int, limit: float) -> Summed:
        """Return the gated MLP of `mlp` with factors within `limit`."""
        part = self._cut_mlp(name, size)
        return Summed(self.own().limited_mlp(name, part[1] - part[0], limit), self._ranks)

    def _cut_mlp(self, name: str, size: int, fused: str = "") -> Range:
        scope, part = self.at(name), self.shard.part(size)
        if fused:
            scope._cut_rows(fused, 2 * size, *both(part, size))
        for each in GATE_AND_UP:
            scope._cut_rows(each, size, part)
        scope.cut("down_proj.weight", size, part, dim=1)
        return part

    def experts(
        self, name: str, moe: MoeConfig, spec: ExpertSpec = ExpertSpec(), routing: RoutingSpec = RoutingSpec()
    ) -> Summed:
        """Return routed experts with this rank's part of every expert's intermediate size, and the
        sum over ranks. Raises `ConfigError` if a group of MXFP4 codes would be split."""
        scope, size = self.at(name), moe.intermediate_size
        part = self.shard.part(size)
        if spec.form == "clamped" and (part[1] - part[0]) % GROUP and _has_codes(scope):
            raise self._not_divided(f"experts with scales in groups of {GROUP}, of {size} elements")
        cut_form(scope.cut, moe, spec, part)
        for stacked, dim in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2), ("fc1", 1), ("fc2", 2)):
            scope.cut(f"switch_mlp.{stacked}.weight", size, part, dim=dim)
        scope._once("experts.down_proj_bias", "fc2_latent_proj.bias")
        local = replace(moe, intermediate_size=part[1] - part[0])
        return Summed(self.own().experts(name, local, spec, routing), self._ranks)

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> Any:
        """Return an embedding with this rank's part of the vocabulary, which returns whole rows;
        tables with another number of rows are whole on every rank."""
        if rows != self.config.vocab_size:
            return self.own().embedding(name, rows, size, scale)
        part = self.shard.vocabulary(rows)
        self.cut(f"{name}.weight", rows, *clipped(part, rows))
        own: Embedding = self.own().embedding(name, part[1] - part[0], size, scale)
        return SharedEmbedding(own, part, self._ranks)

    def head(self, name: str, rows: int, size: int, tied: Any = None) -> Any:
        """Return the output layer with this rank's part of the vocabulary, which returns all
        logits. `tied`: the `SharedEmbedding` with the weight; None: a weight of its own."""
        part = self.shard.vocabulary(rows)
        if tied is None:
            self.cut(f"{name}.weight", rows, *clipped(part, rows))
        own = self.own().head(name, part[1] - part[0], size, None if tied is None else tied.own)
        return SharedHead(own, rows, self._ranks)

    def _not_divided(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.config.architecture} has {what}, which this device does not divide among ranks yet",
            remedy="--tp 1",
        )


def _has_codes(scope: Scope) -> bool:
    return scope.weights.has(f"{scope.prefix}experts.gate_up_proj_blocks")
