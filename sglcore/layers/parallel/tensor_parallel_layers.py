"""Torch's layers on several ranks for the kinds in `models/layer_kinds.py`: a model's file builds
the same layers, and each rank gets its part.

Heads, the intermediate size of feed-forward blocks and experts, and the vocabulary are divided;
norms, gates and small layers are whole on every rank. Between blocks all ranks have the same hidden
states: each block ends in an all-reduce. A kind here records which part of the checkpoint's tensors
a rank has, and builds a layer of that size with `Build`. Other kinds are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.latent_config import LatentConfig
from sglcore.checkpoint.model_config import ModelConfig, MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, Form, RoutingSpec
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
from sglcore.checkpoint.parallel.tensor_parallel import Range, Shard, clipped, legal_widths
from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore.core.errors import ConfigError
from sglcore.layers.attention import AttentionLayer
from sglcore.layers.build_scope import Scope
from sglcore.layers.compressed_attention import CompressedAttention, OfAttention
from sglcore.layers.latent_attention import LatentAttention, Projections
from sglcore.layers.linear import Embedding, GroupedLinear, Head, Linear, OrderedLinear
from sglcore.layers.mlp import GATE_AND_UP
from sglcore.layers.moe import reads_mxfp4
from sglcore.layers.parallel.block_reduction import Block, ended
from sglcore.layers.parallel.dispatched_experts import dispatched
from sglcore.layers.parallel.parallel_norms import SharedGroupNorm, SharedNorm
from sglcore.layers.parallel.parallel_vocab import SharedEmbedding, SharedHead
from sglcore.layers.parallel.row_parallel_sum import Summed, bias_once
from sglcore.layers.rank_part import Cut
from sglcore.layers.recurrent_layers import GatedDeltaNet, Mamba2, Rows, ShortConv
from sglcore.layers.torch_layers import Build
from sglcore.runtime.parallel.process_group import AnyGroup
from sglcore.runtime.parallel.rank_groups import Groups

REMEDY = "--tp 1"
NOT_WHOLE: Mapping[Form, str] = MappingProxyType(
    {"limited": "experts within a limit", "relu2": "experts without gates", "clamped": "experts with biases"}
)
"""Forms of experts for which there is no expert parallelism, as an error names them."""


@dataclass(frozen=True, slots=True)
class ShardedBuild(Scope):
    """`layer_kinds.Build` on several ranks: each method returns this rank's part of the layer that
    the method of that name defines there. `given` is that of `torch_layers.Build`."""

    groups: Groups | None = None
    given: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    norm = Build.norm
    layer_norm = Build.layer_norm
    concat = Build.concat
    rotary = Build.rotary
    softcap = Build.softcap
    hyper_connection = Build.hyper_connection
    hyper_head = Build.hyper_head
    gated_residual = Build.gated_residual
    gated_mixer = Build.gated_mixer
    ngram_embedding = Build.ngram_embedding
    mapped_head = Build.mapped_head

    @property
    def _every(self) -> Groups:
        assert self.groups is not None
        return self.groups

    @property
    def _ranks(self) -> AnyGroup:
        """The process group `attn_tp`: its ranks divide the heads of each request, and the
        vocabulary."""
        return self._every.attn_tp

    @property
    def shard(self) -> Shard:
        """This rank's part of heads, of states and of the vocabulary."""
        return Shard(self._ranks.rank, self._ranks.size)

    @property
    def inside(self) -> Shard:
        """This rank's part of the intermediate size of feed-forward blocks and experts."""
        return Shard(self._every.tp.rank, self._every.tp.size)

    def own(self, config: ModelConfig | None = None) -> Build:
        """Return a single-rank `Build` in this scope, with this configuration (None: the model's).
        It shares this build's weights and has no `given`."""
        given = {each.name: getattr(self, each.name) for each in fields(Scope)}
        return Build(**(given if config is None else {**given, "config": config}))

    def cut(self, name: str, whole: int, *ranges: Range, dim: int = 0) -> None:
        """Record that this rank has `ranges` of dimension `dim`, which has `whole` entries, of the
        checkpoint's tensor `prefix.name`."""
        self.weights.cuts[self.prefix + name] = Cut(dim, whole, ranges)

    def _cut_rows(self, name: str, whole: int, *ranges: Range) -> tuple[str, int]:
        """Cut the weight and the bias of a linear layer; return its name and the number of rows
        here. `whole`: the rows in the checkpoint, `ranges`: this rank's."""
        for kind in ("weight", "bias"):
            self.cut(f"{name}.{kind}", whole, *ranges)
        return name, sum(last - first for first, last in ranges)

    def _cut_parts(self, parts: Sequence[tuple[str, int]], ranges: Sequence[Range]) -> list[tuple[str, int]]:
        """Cut each of several fused layers to this rank's ranges of all their outputs,
        concatenated. Returns (name, rows on this rank) of each.
        """
        each = zip(parts, by_part(parts, ranges), strict=True)
        return [self._cut_rows(name, count, *own) for (name, count), own in each]

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return an elementwise function, for this rank's part of the intermediate size: "gelu",
        "relu2", "sigmoid" or "tanh". Raises `ConfigError` for any other name."""
        return self.own(
            replace(self.config, intermediate_size=self.config.intermediate_size // self.shard.size)
        ).activation(name)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear | Summed:
        """Return x W^T + b, divided by its inputs or outputs as `parallel_roles` decides from its
        name; whole on every rank without a rule. Divided by outputs, the result is this rank's
        part. Divided by inputs, it is all-reduced, with the bias added once."""
        if not is_by_inputs(self.prefix, name):
            return self._outputs(
                ((name, outputs),), inputs, bias, sections(self.config, self.prefix, ((name, outputs),))
            )
        first, last = self.shard.part(inputs)
        self.cut(f"{name}.weight", inputs, (first, last), dim=1)
        own = self.own().linear(name, last - first, outputs, bias)
        bias_once(self, own.bias, self._ranks)
        return Summed(own, self._ranks)

    def fused(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool = False, interleaved: Sequence[str] = ()
    ) -> Linear:
        """Return several layers, `parts` (name, outputs in the checkpoint), as one product with
        this rank's outputs, with outputs divided by `sections`, or as queries, keys and values;
        products in `WHOLE` are not divided. Raises `ConfigError` if nothing fits."""
        return self._outputs(parts, inputs, bias, self._divided(parts), interleaved)

    def _divided(self, parts: Sequence[tuple[str, int]]) -> tuple[Section, ...]:
        """Return the sections of a fused product. Raises `ConfigError` if no rule fits."""
        found = sections_of_fused(self.config, self.prefix, parts)
        if found is None:
            raise self._refusal(f"projections of {', '.join(f'{name} ({count})' for name, count in parts)}")
        return found

    def _outputs(
        self,
        parts: Sequence[tuple[str, int]],
        inputs: int,
        bias: bool,
        divided: Sequence[Section],
        interleaved: Sequence[str] = (),
    ) -> Linear:
        """Return one product with this rank's part of the outputs of each section of `divided`;
        with all outputs if `divided` is empty.
        """
        own = self._cut_parts(parts, kept(divided, self.shard)) if divided else parts
        return self.own().fused(own, inputs, bias, interleaved)

    def ordered(
        self, parts: Sequence[tuple[str, int]], inputs: int, order: Sequence[int], bias: bool = False
    ) -> OrderedLinear:
        """Return the product of `fused` with this rank's part of the outputs, in this order: the
        whole product's output i is the checkpoint's output order[i]. The sections by which it is
        divided refer to the new order."""
        ranges, places = reordered(kept(self._divided(parts), self.shard), order)
        return self.own().ordered(self._cut_parts(parts, ranges), inputs, places, bias)

    def grouped(self, name: str, groups: int, inputs: int, outputs: int) -> GroupedLinear:
        """Return a linear layer for each of this rank's groups: [T, own groups * inputs] to [T, own
        groups * outputs]. `groups` counts those of all ranks and must divide evenly; otherwise
        raises `ConfigError`."""
        first, last = self.shard.part(groups)
        self.cut(f"{name}.weight", groups * outputs, (first * outputs, last * outputs))
        return self.own().grouped(name, last - first, inputs, outputs)

    @property
    def _held(self) -> ModelConfig:
        """The model's configuration with the numbers of query heads and key-value heads on this
        rank.
        """
        shard, config = self.shard, self.config
        first, last = shard.part(config.num_attention_heads)
        first_kv, last_kv = shard.kv_heads(config.num_key_value_heads)
        return replace(config, num_attention_heads=last - first, num_key_value_heads=last_kv - first_kv)

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
        """Return attention over this rank's heads; the arguments are those of `AttentionLayer`.
        With `whole_norm`, norms all-reduce their mean squares."""
        if sinks:
            self.cut("sinks", self.config.num_attention_heads, self.shard.part(self.config.num_attention_heads))
        if whole_norm:
            for name, section in zip(("q_norm", "k_norm"), of_attention(self.config), strict=False):
                self.cut(f"{name}.weight", section.outputs, section.part(self.shard))
        how = {"qk_norm": qk_norm, "whole_norm": whole_norm, "norm_offset": norm_offset, "sinks": sinks}
        how |= {"is_encoder": is_encoder}
        own = self.own(self._held).attention(layer_id, rotary, **how)
        if whole_norm and own.q_norm is not None and own.k_norm is not None:
            own.q_norm, own.k_norm = (SharedNorm(norm, self._ranks) for norm in (own.q_norm, own.k_norm))
        return own

    def latent_attention(
        self, layer_id: int, rotary: Tensor, latent: LatentConfig, projections: Projections, output: Rows
    ) -> LatentAttention:
        """Return latent attention with this rank's heads; the arguments are those of
        `LatentAttention`, and `projections` returns this rank's queries. Every rank keeps all cache
        entries and the whole indexer."""
        heads = Section(self.config.num_attention_heads, latent.nope_dim + latent.value_dim)
        self.cut("kv_b_proj.weight", heads.outputs, heads.part(self.shard))
        return self.own(self._held).latent_attention(layer_id, rotary, latent, projections, output)

    def compressed_attention(
        self,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Tensor,
        projections: OfAttention,
    ) -> CompressedAttention:
        """Return compressed attention with this rank's heads; `net` has the heads of all ranks,
        `projections` are those of this rank's heads. Every rank keeps all cache entries, and the
        whole compressor and indexer."""
        first, last = self.shard.part(net.heads)
        self.cut("sinks", net.heads, (first, last))
        local = replace(net, heads=last - first)
        return self.own().compressed_attention(layer_id, local, compression, rotary, projections)

    def gated_delta_net(self, state_id: int, net: DeltaNetConfig, projection: Rows, output: Rows) -> GatedDeltaNet:
        """Return a gated delta rule layer for this rank's heads; the rank keeps the states of these
        heads. `net` has the heads of all ranks; `projection` and `output` are those of this rank's
        heads."""
        keys, values = Section(net.key_heads, net.key_dim), Section(net.value_heads, net.value_dim)
        self._cut_rows("conv1d", 2 * net.keys + net.values, *kept((keys, keys, values), self.shard))
        first, last = self.shard.part(net.value_heads)
        for name in ("A_log", "dt_bias"):
            self.cut(name, net.value_heads, (first, last))
        local = replace(net, key_heads=net.key_heads // self.shard.size, value_heads=last - first)
        return self.own().gated_delta_net(state_id, local, projection, output)

    def mamba2(self, state_id: int, space: Mamba2Config, projection: Rows, output: Rows) -> Mamba2:
        """Return a Mamba 2 layer for this rank's heads. `space` has the heads of all ranks;
        `projection` and `output` are those of this rank's heads.

        With fewer groups than ranks, the norm of a group all-reduces its mean squares over the
        ranks of `attn_tp`.
        """
        first, last = self.shard.part(space.heads)
        heads, groups = Section(space.heads, space.head_dim), Section(space.groups, space.width, shared=True)
        self._cut_rows("conv1d", space.channels, *kept((heads, groups, groups), self.shard))
        self.cut("norm.weight", space.inner, heads.part(self.shard))
        for name in ("A_log", "D", "dt_bias"):
            self.cut(name, space.heads, (first, last))
        local = replace(space, heads=last - first, groups=max(space.groups // self.shard.size, 1))
        own = self.own().mamba2(state_id, local, projection, output)
        if space.groups < self.shard.size:
            own.norm_rows = SharedGroupNorm(space.groups, self._ranks)
        return own

    def short_conv(self, state_id: int, taps: int, projection: Rows, output: Rows, bias: bool = False) -> ShortConv:
        """Return a short convolution between two gates for this rank's part of the hidden size;
        `projection` and `output` are those of this part.
        """
        size = self.config.hidden_size
        first, last = self.shard.part(size)
        self._cut_rows("conv", size, (first, last))
        return self.own(replace(self.config, hidden_size=last - first)).short_conv(
            state_id, taps, projection, output, bias
        )

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> Block:
        """Return the gated feed-forward block with this rank's part of the intermediate size, and
        its reduction, so that every rank gets the whole result. `size` is that of all ranks;
        `fused` names one weight with the rows of gate, then those of up; empty: two weights."""
        part = self._cut_mlp(name, size, fused)
        own = self.own().mlp(name, part[1] - part[0], bias, fused)
        bias_once(self, own.down_proj.bias, self._every.tp)
        return ended(own, self._every)

    def limited_mlp(self, name: str, size: int, limit: float) -> Block:
        """Return the gated feed-forward block of `mlp` with gate at most `limit`, and up from
        -`limit` to `limit`. `size` is that of all ranks.
        """
        part = self._cut_mlp(name, size)
        return ended(self.own().limited_mlp(name, part[1] - part[0], limit), self._every)

    def _cut_mlp(self, name: str, size: int, fused: str = "") -> Range:
        scope, part = self.at(name), self.inside.part(size)
        if fused:
            scope._cut_rows(fused, 2 * size, *both(part, size))
        for each in () if fused else GATE_AND_UP:
            scope._cut_rows(each, size, part)
        scope.cut("down_proj.weight", size, part, dim=1)
        return part

    def _inside(self, moe: MoeConfig) -> tuple[Range, MoeConfig]:
        """Return this rank's part of the intermediate size of experts, and a configuration with
        that size."""
        part = self.inside.part(moe.intermediate_size)
        return part, replace(moe, intermediate_size=part[1] - part[0])

    def experts(
        self, name: str, moe: MoeConfig, spec: ExpertSpec = ExpertSpec(), routing: RoutingSpec = RoutingSpec()
    ) -> Block:
        """Return routed experts, [T, H] to the whole sum [T, H] on every rank: whole experts on
        each rank (expert parallel, gated experts only), or this rank's part of every expert's
        intermediate size (tensor parallel). Raises `ConfigError` for other experts with expert
        parallel, and if a group of MXFP4 codes would be split."""
        if self._every.has_experts_whole:
            self._refuse_whole(spec)
            return dispatched(self.own().at(name), moe, spec, routing, self._every)
        part, local = self._inside(moe)
        self._check_groups(moe, local, spec)
        cut_form(self.at(name).cut, moe, spec, part)
        own = self.own().experts(name, local, spec, routing)
        bias_once(self, own.bias, self._every.tp)
        return ended(own, self._every)

    def _check_groups(self, moe: MoeConfig, local: MoeConfig, spec: ExpertSpec) -> None:
        """Raise ConfigError if this rank's part of MXFP4 experts, `local`, splits a group."""
        if spec.form == "clamped" and reads_mxfp4(self) and local.intermediate_size % GROUP:
            fits = [width for width in legal_widths(self.config) if moe.intermediate_size % (width * GROUP) == 0]
            raise ConfigError(
                f"tp is {self.inside.size}, and {moe.intermediate_size} intermediate features of an expert have "
                f"scales in groups of {GROUP}",
                wanted=f"one of {', '.join(map(str, fits))}",
                remedy="set --tp to one of them",
            )

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> SharedEmbedding | Embedding:
        """Return an embedding with this rank's part of the vocabulary, which returns whole rows, or
        the layer in `given`; tables with another number of rows than the vocabulary are whole on
        every rank."""
        if self.prefix + name in self.given:
            return self.given[self.prefix + name]
        if rows != self.config.vocab_size:
            return self.own().embedding(name, rows, size, scale)
        scope, part = self.at(name), self.shard.vocabulary(rows)
        scope.cut("weight", rows, *clipped(part, rows))
        return SharedEmbedding(Embedding(scope, part[1] - part[0], size, scale), part, self._ranks)

    def head(self, name: str, rows: int, size: int, tied: SharedEmbedding | None = None) -> SharedHead:
        """Return the output layer with this rank's part of the vocabulary, which returns the logits
        of all `rows` on every rank, or the layer in `given`. `tied` is the embedding with the
        weight; None: a weight of its own."""
        if self.prefix + name in self.given:
            return self.given[self.prefix + name]
        scope, part = self.at(name), self.shard.vocabulary(rows)
        if tied is None:
            scope.cut("weight", rows, *clipped(part, rows))
        own = Head(scope, part[1] - part[0], size, None if tied is None else tied.own)
        return SharedHead(own, rows, self._ranks)

    def _refuse_whole(self, spec: ExpertSpec) -> None:
        if spec.form in NOT_WHOLE:
            raise ConfigError(
                f"{self.config.architecture} has {NOT_WHOLE[spec.form]}, which expert parallelism does not support",
                remedy="--ep 1",
            )

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.config.architecture} has {what}, which is not divided among ranks here", remedy=REMEDY
        )

    if not TYPE_CHECKING:

        def __getattr__(self, kind: str) -> NoReturn:
            if kind.startswith("_"):
                raise AttributeError(kind)
            raise self._refusal(f"a layer of the kind {kind!r}")
