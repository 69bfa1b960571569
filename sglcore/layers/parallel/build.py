"""Torch's layers on several ranks, as `models/build.py` has their kinds: a model's file builds the same layers, and of each a rank
gets its part.

Heads, the inside of feed-forward blocks and of experts, and the vocabulary are divided; norms, gates and all that is small
is whole on every rank. Rows are the same on all ranks between blocks: each block ends in a sum. Kinds that are not here
are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from sglcore.checkpoint.config import EXPERT_PARTS, MoeConfig
from sglcore.checkpoint.rotary import halves_first, rotary_dim
from sglcore.checkpoint.shards import Shard
from sglcore.device.errors import ConfigError
from sglcore.layers.attention import AttentionLayer
from sglcore.layers.build import Build
from sglcore.layers.linear import Embedding, Head, Linear
from sglcore.layers.mlp import GATE_AND_UP, GatedMlp
from sglcore.layers.moe import GroupLimitedRouting, Routing, SigmoidRouting, SoftmaxRouting, SparseMoe
from sglcore.layers.parallel.blocks import Block, ended
from sglcore.layers.parallel.cut import Cut, Range, clipped
from sglcore.layers.parallel.dispatched import dispatched
from sglcore.layers.parallel.linear import Summed, bias_once
from sglcore.layers.parallel.vocab import SharedEmbedding, SharedHead
from sglcore.layers.scope import Scope
from sglcore.runtime.parallel.group import AnyGroup, Groups

REMEDY = "--tp 1"


@dataclass(frozen=True, slots=True)
class ShardedBuild(Scope):
    """The scope in which a layer is built, and the layers. `attended` are the scopes whose attention is built: the next
    linear layer of each takes the heads, and ends the block."""

    groups: Groups | None = None
    attended: set[str] = field(default_factory=set)

    norm = Build.norm
    layer_norm = Build.layer_norm
    concat = Build.concat
    rotary = Build.rotary
    softcap = Build.softcap
    activation = Build.activation

    @property
    def _every(self) -> Groups:
        assert self.groups is not None
        return self.groups

    @property
    def _ranks(self) -> AnyGroup:
        """Those that share the heads of a request, and its vocabulary."""
        return self._every.attn_tp

    @property
    def shard(self) -> Shard:
        """This rank's part of heads and of the vocabulary."""
        return Shard(self._ranks.rank, self._ranks.size)

    @property
    def inside(self) -> Shard:
        """This rank's part of what is inside of feed-forward blocks and of experts."""
        return Shard(self._every.tp.rank, self._every.tp.size)

    def cut(self, name: str, whole: int, *ranges: Range, dim: int = 0) -> None:
        """Of the tensor `prefix.name` of the checkpoint this rank has some ranges."""
        self.weights.cuts[self.prefix + name] = Cut(dim, whole, ranges)

    def _cut_rows(self, name: str, whole: int, *ranges: Range) -> tuple[str, int]:
        """The same of the weight and the bias of a linear layer; its name and the rows here."""
        for kind in ("weight", "bias"):
            self.cut(f"{name}.{kind}", whole, *ranges)
        return name, sum(last - first for first, last in ranges)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear | Summed:
        """x W^T + b, whole on every rank; behind attention of the same scope, the columns of this rank's heads."""
        if self.prefix not in self.attended:
            return Linear(self, ((name, outputs),), inputs, bias)
        self.attended.discard(self.prefix)
        first, last = self.shard.part(inputs)
        self.cut(f"{name}.weight", inputs, (first, last), dim=1)
        own = Linear(self, ((name, outputs),), last - first, bias)
        bias_once(self, own, self._ranks)
        return Summed(own, self._ranks)

    def fused(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool = False, interleaved: Sequence[str] = ()
    ) -> Linear:
        """Queries, keys and values as one product: the heads of this rank. Raises `ConfigError` for other parts."""
        config, size = self.config, self.config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        queries, keys = self.shard.part(heads), self.shard.kv_heads(kv_heads)
        spans = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
        rows = [count * size for count, _ in spans]
        ranges = [(first * size, last * size) for _, (first, last) in spans]
        if [count for _, count in parts] == rows:
            own = [self._cut_rows(name, count, part) for (name, count), part in zip(parts, ranges, strict=True)]
        elif [count for _, count in parts] == [sum(rows)]:
            starts = (0, rows[0], rows[0] + rows[1])
            moved = [(at + first, at + last) for at, (first, last) in zip(starts, ranges, strict=True)]
            own = [self._cut_rows(parts[0][0], sum(rows), *moved)]
        else:
            raise self._refusal(f"projections of {', '.join(f'{name} ({count})' for name, count in parts)}")
        for name, count in own:
            if name in interleaved:
                self.reorder(name, halves_first(count // size, size, rotary_dim(config)))
        return Linear(self, own, inputs, bias)

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
        """Over the heads of this rank."""
        if whole_norm or is_encoder:
            raise self._refusal("a norm over all heads at once" if whole_norm else "attention of an encoder")
        shard, config = self.shard, self.config
        (first, last), (first_kv, last_kv) = (
            shard.part(config.num_attention_heads),
            shard.kv_heads(config.num_key_value_heads),
        )
        local = replace(config, num_attention_heads=last - first, num_key_value_heads=last_kv - first_kv)
        if sinks:
            self.cut("sinks", config.num_attention_heads, (first, last))
        self.attended.add(self.prefix)
        return AttentionLayer(
            replace(self, config=local), layer_id, rotary, qk_norm=qk_norm, norm_offset=norm_offset, sinks=sinks
        )

    def mlp(self, name: str, size: int, bias: bool = False, fused: str = "") -> Block:
        """The gated feed-forward block, this rank's part of what is inside."""
        scope, part = self.at(name), self.inside.part(size)
        if fused:
            scope._cut_rows(fused, 2 * size, part, (part[0] + size, part[1] + size))
        for each in () if fused else GATE_AND_UP:
            scope._cut_rows(each, size, part)
        scope.cut("down_proj.weight", size, part, dim=1)
        own = GatedMlp(scope, part[1] - part[0], bias, fused)
        bias_once(self, own.down_proj, self._every.tp)
        return ended(own, self._every)

    def experts(
        self,
        name: str,
        moe: MoeConfig,
        *,
        gate: str = "gate",
        parts: Sequence[str] = EXPERT_PARTS,
        is_sigmoid: bool = False,
    ) -> Block:
        """The sparse feed-forward block: some experts whole on each rank, or of every one this rank's part of what is inside."""
        return self._experts(name, moe, gate, parts, SigmoidRouting if is_sigmoid else SoftmaxRouting)

    def group_limited_experts(self, name: str, moe: MoeConfig) -> Block:
        """The same with experts in groups."""
        return self._experts(name, moe, "gate", EXPERT_PARTS, GroupLimitedRouting)

    def _experts(
        self,
        name: str,
        moe: MoeConfig,
        gate: str,
        parts: Sequence[str],
        routing: Callable[[Scope, str, MoeConfig], Routing],
    ) -> Block:
        scope, size = self.at(name), moe.intermediate_size
        if self._every.has_experts_whole:
            return dispatched(scope, moe, gate, parts, routing, self._every)
        part = self.inside.part(size)
        both, down = (part, (part[0] + size, part[1] + size)), parts[-1]
        if len(parts) == 2:
            scope.cut(f"{parts[0]}.weight", 2 * size, *both, dim=1)
            scope.cut(f"{down}.weight", size, part, dim=2)
        else:
            each = scope.at("experts")
            each.cut("gate_up_proj", 2 * size, *both, dim=1)
            each.cut("down_proj", size, part, dim=2)
            for expert in range(moe.num_experts):
                for row in parts[:2]:
                    each.cut(f"{expert}.{row}.weight", size, part)
                each.cut(f"{expert}.{down}.weight", size, part, dim=1)
        own = SparseMoe(scope, replace(moe, intermediate_size=part[1] - part[0]), gate, parts, routing)
        return ended(own, self._every)

    def embedding(self, name: str, rows: int, size: int, scale: float | None = None) -> SharedEmbedding:
        """A row for each id, of this rank's part of the vocabulary."""
        scope, part = self.at(name), self.shard.vocabulary(rows)
        scope.cut("weight", rows, *clipped(part, rows))
        return SharedEmbedding(Embedding(scope, part[1] - part[0], size, scale), part, self._ranks)

    def head(self, name: str, rows: int, size: int, tied: SharedEmbedding | None = None) -> SharedHead:
        """The output layer, of this rank's part of the vocabulary."""
        scope, part = self.at(name), self.shard.vocabulary(rows)
        if tied is None:
            scope.cut("weight", rows, *clipped(part, rows))
        own = Head(scope, part[1] - part[0], size, None if tied is None else tied.own)
        return SharedHead(own, rows, self._ranks)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.config.architecture} has {what}, which is not divided among ranks here", remedy=REMEDY
        )

    if not TYPE_CHECKING:

        def __getattr__(self, kind: str) -> NoReturn:
            if kind.startswith("_"):
                raise AttributeError(kind)
            raise self._refusal(f"a layer of the kind {kind!r}")
