"""Predicted time of a step in each parallel configuration: a roofline for each layer, and the cost
of its collectives.

A prediction is a lower bound from the given numbers: good for comparing configurations, not for
promising times. Experts are chosen evenly, and shards have equal numbers of rows.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from sglcore.engine.layouts.cluster import Cluster
from sglcore.engine.layouts.model_shape import LayerShape, ModelShape
from sglcore.worker.topology import Topology

LAUNCHES = 10
"""Assumed kernels of a layer that run one after the other."""
MEMORY_SHARE = 0.9
"""The assumed part of a device's memory for weights and KV cache; the rest is for intermediate
results of a step."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Predicted seconds of a step by use: reading weights, reading the KV cache, arithmetic,
    collectives (`links`), and kernel launches; the step takes their sum. Of a product's reading and
    arithmetic, only the longer counts; the other is 0."""

    weights: float = 0.0
    cache: float = 0.0
    arithmetic: float = 0.0
    links: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(astuple(self))

    @property
    def most(self) -> str:
        """The name of the field with the largest value, such as "links"."""
        return max(zip(astuple(self), (field.name for field in fields(self)), strict=True))[1]


@dataclass(frozen=True, slots=True)
class Rows:
    """One step: `count` rows (tokens) in each data-parallel shard, of `sequences` requests with
    `context` earlier tokens each."""

    count: int
    sequences: int
    context: int


@dataclass(frozen=True, slots=True)
class Costs:
    """The predicted costs of a model on a cluster in one parallel configuration; `step` returns the
    time of a step by use. A rank is one of the `topology.tp` ranks of one copy of the model."""

    model: ModelShape
    cluster: Cluster
    topology: Topology

    def step(self, rows: Rows) -> Seconds:
        """Return the time of a step of `rows`, by use: all layers and the output layer. Every rank
        takes as long as the slowest."""
        kinds = {layer: self.model.layers.count(layer) for layer in self.model.layers}
        total = self._output(rows)
        for layer, count in kinds.items():
            each = self.attention(layer, rows) + self.blocks(layer, rows) + self.experts(layer, rows)
            total += times(each + Seconds(launches=LAUNCHES * self.cluster.device.launch), count)
        return total

    def halves(self, rows: Rows) -> float:
        """Return the seconds of a step of `rows` run as two micro-batches, where one computes while
        the other waits for its collectives: twice the larger of a half's compute time and its
        collective time."""
        half = Rows(-(-rows.count // 2), -(-rows.sequences // 2), rows.context)
        found = self.step(half)
        return 2 * max(found.total - found.links, found.links)

    def attention(self, layer: LayerShape, rows: Rows) -> Seconds:
        """Return the time of one layer's projections and scores for a shard's rows, and of the
        all-reduce over its ranks."""
        model, width = self.model, self.topology.attn_tp
        held = self._attention_weights(layer)
        seen = layer.seen(rows.context)
        kept = rows.sequences * seen * self._cache_elements(layer) * model.row_bytes
        projected = self._roofline(held * model.attention_bytes, 0, 2 * rows.count * held, model.attention_bytes)
        scored = self._roofline(0, kept, rows.count * seen * layer.score_flops / width, model.row_bytes)
        return projected + scored + self._links(self.cluster.links.all_reduce(width, self._row_bytes(rows.count)))

    def blocks(self, layer: LayerShape, rows: Rows) -> Seconds:
        """Return the time of one layer's dense weights, which are divided among all ranks, and of
        the sums over the ranks; also of its experts, if each rank has a part of every expert (`ep`
        is 1)."""
        tp, every = self.topology.tp, rows.count * self.topology.dp
        found = times(self._links(self._all_rows(rows)), self._sums(layer))
        if layer.block:
            held = layer.block / tp
            found += self._roofline(held * self.model.block_bytes, 0, 2 * every * held, self.model.block_bytes)
        if layer.expert and self.topology.ep == 1:
            touched = distinct(every * self.model.chosen, self.model.experts, self.model.chosen)
            flops = 2 * every * self.model.chosen * layer.expert / tp
            weights = touched * layer.expert / tp * self.model.expert_bytes
            found += self._roofline(weights, 0, flops, self.model.expert_bytes)
        return found

    def experts(self, layer: LayerShape, rows: Rows) -> Seconds:
        """Return the time of one layer's experts, each whole on one rank: rows are sent to experts
        and back, and the rows of a shard are gathered again. Zero if `ep` is 1 or the layer has no
        experts."""
        ep, model = self.topology.ep, self.model
        if ep == 1 or not layer.expert:
            return Seconds()
        own = rows.count / self.topology.attn_tp
        met = own * ep * model.chosen
        touched = distinct(met, model.experts, model.chosen) / ep
        most = self.cluster.imbalance
        work = self._roofline(
            min(touched * most, model.experts / ep) * layer.expert * model.expert_bytes,
            0,
            2 * met / ep * layer.expert * most,
            model.expert_bytes,
        )
        out = model.row_bytes if self.cluster.bytes_out is None else self.cluster.bytes_out
        moved = self.carried(own * most, out) + self.carried(own * most, model.row_bytes)
        together = self.cluster.links.all_gather(self.topology.attn_tp, self._row_bytes(rows.count))
        return work + self._links(moved + together)

    def carried(self, rows: float, element: float) -> float:
        """Return the seconds to send `rows` rows of each rank, of `element` bytes per element, to
        their experts or back."""
        links, ep, chosen = self.cluster.links, self.topology.ep, self.model.chosen
        each = rows * self.model.hidden * element
        if not self.cluster.is_copy_per_rank:
            return links.all_to_all(ep, each * chosen)
        _, hosts = links.levels(ep)
        return links.all_to_all(ep, each * copies_to_ranks(ep, chosen), each * copies_to_ranks(hosts, chosen))

    def weight_bytes(self) -> float:
        """Return the bytes of weights on each rank: its parts of the embedding and output layer,
        attention, dense blocks and experts, without norms and biases."""
        model, tp = self.model, self.topology.tp
        part = self.topology.ep if self.topology.ep > 1 else tp
        found = model.tables / self.topology.attn_tp * model.row_bytes
        for layer in model.layers:
            found += self._attention_weights(layer) * model.attention_bytes + layer.block / tp * model.block_bytes
            found += layer.expert * model.experts / part * model.expert_bytes
        return found

    def request_bytes(self, length: int) -> float:
        """Return the cache bytes of a request of `length` tokens, on each rank of its shard."""
        each = (self._cache_elements(layer) * layer.seen(length) for layer in self.model.layers)
        return sum(each) * self.model.row_bytes

    def cache_tokens(self, length: int) -> int:
        """Return the tokens that fit in the KV caches of one copy, all its shards together, in
        requests of `length` tokens; 0 if the weights leave no room."""
        room = MEMORY_SHARE * self.cluster.device.memory - self.weight_bytes()
        return max(int(room * length / self.request_bytes(length)), 0) * self.topology.dp

    def _attention_weights(self, layer: LayerShape) -> float:
        width = self.topology.attn_tp
        return layer.whole + layer.by_heads / width + layer.by_keys / self._key_parts

    def _cache_elements(self, layer: LayerShape) -> float:
        return layer.cache_whole + layer.cache_by_keys / self._key_parts

    @property
    def _key_parts(self) -> int:
        """Number of parts into which key heads are divided; further ranks hold copies."""
        return min(self.topology.attn_tp, self.model.kv_heads)

    def _output(self, rows: Rows) -> Seconds:
        """Return the time of the output layer on each request's last row; all ranks of its shard
        get the logits, of 4 bytes each."""
        model, width = self.model, self.topology.attn_tp
        held = model.vocabulary * model.hidden / width
        read = self._roofline(held * model.row_bytes, 0, 2 * rows.sequences * held, model.row_bytes)
        return read + self._links(self.cluster.links.all_gather(width, rows.sequences * model.vocabulary * 4))

    def _sums(self, layer: LayerShape) -> int:
        """Return the number of blocks of a layer that end in a sum over all ranks: the dense
        blocks, and the experts if each rank has a part of every expert."""
        return layer.num_blocks + (1 if layer.expert and self.topology.ep == 1 else 0)

    def _all_rows(self, rows: Rows) -> float:
        """Return the seconds to gather the rows of all shards and to scatter their sums; with one
        shard, of the all-reduce alone."""
        links, topology = self.cluster.links, self.topology
        if topology.dp == 1:
            return links.all_reduce(topology.tp, self._row_bytes(rows.count))
        there_and_back = 2 * links.all_gather(topology.tp, self._row_bytes(rows.count * topology.dp))
        return there_and_back + 2 * links.all_gather(topology.attn_tp, self._row_bytes(rows.count))

    def _row_bytes(self, count: float) -> float:
        return count * self.model.hidden * self.model.row_bytes

    def _links(self, seconds: float) -> Seconds:
        return Seconds(links=seconds)

    def _roofline(self, weights: float, cache: float, flops: float, element: float) -> Seconds:
        """Return the time to read `weights` and `cache` bytes or to do `flops` operations,
        whichever is longer (roofline: Williams, Waterman and Patterson 2009). `element`: bytes of
        an operand; with 1, the rate is `flops_8bit`."""
        device = self.cluster.device
        reading = (weights + cache) / device.bandwidth
        computing = flops / (device.flops_8bit if element == 1 else device.flops)
        if computing > reading:
            return Seconds(arithmetic=computing)
        return Seconds(weights=weights / device.bandwidth, cache=cache / device.bandwidth)


def times(seconds: Seconds, count: int) -> Seconds:
    """Return a copy with each part multiplied by `count`."""
    return Seconds(*(each * count for each in astuple(seconds)))


def distinct(choices: float, among: int, at_once: int) -> float:
    """Return the expected number of distinct experts, out of `among`, in `choices` choices.

    Each token chooses `at_once` different experts, and all experts are equally likely.
    """
    tokens = choices / at_once
    return among * (1 - (1 - at_once / among) ** tokens)


def copies_to_ranks(n: int, chosen: int) -> float:
    """Return the expected number of ranks, out of `n`, that a token is sent to if each of its
    `chosen` experts is equally likely on every rank.
    """
    return n * (1 - (1 - 1 / n) ** chosen)
