"""A tiny model with three kinds of layers (sliding window only, all compressed blocks, selected
blocks), the host that hands out pages, and a dense oracle by the formulas alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.model_config import RopeConfig
from sglcore.layers.build_scope import Scope, Weights
from sglcore.layers.compressed_attention import CompressedAttention
from sglcore.runtime.attention.backend_selection import shape_of
from sglcore.runtime.attention.contract import AttentionShape
from sglcore.runtime.attention.sparse.compressed import DeepseekV4AttnBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.deepseek_v4_rows import DeepSeekV4TokenToKVPool
from sglcore.runtime.memory.kv_rows import Place, RowCounts
from sglcore.runtime.memory.pools import ReqToTokenPool, WindowTable
from tests.runtime.tiny import CONTEXT, HIDDEN, PAGE, PAGES, SLOTS, Desk, Site, TinyModel, make_site
from tests.runtime.windows import STEP, WindowDesk

WINDOW, ROPE, HEADS, DIM, LATENT, INDEX_HEADS, INDEX_DIM, TOP_K, EPS = 6, 4, 2, 8, 8, 16, 8, 3, 1e-6
SLIDING, SPARSE, HEAVY = None, Compression(2, True), Compression(4, False)
LAYERS = (SLIDING, HEAVY, SPARSE)
ROPES = RopeConfig(10000.0, "default", 1.0, CONTEXT, {})


def net_of(compressions: Sequence[Compression | None]) -> CompressedConfig:
    """The geometry of a model with these layers."""
    return CompressedConfig(
        heads=HEADS,
        head_dim=DIM,
        rope_dim=ROPE,
        q_lora_rank=LATENT,
        groups=1,
        o_lora_rank=1,
        window=WINDOW,
        index_heads=INDEX_HEADS,
        index_dim=INDEX_DIM,
        index_topk=TOP_K,
        compressions=tuple(compressions),
        main_rope=ROPES,
        block_rope=ROPES,
        is_hashed=(False,) * len(compressions),
        streams=1,
        sinkhorn_iters=1,
        hc_eps=EPS,
        limit=1.0,
    )


def _linear(inputs: int, outputs: int) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(inputs, outputs) * inputs**-0.5
    return lambda x: x @ weight


class SparseModel(TinyModel):
    """Embedding, compressed attention layers with a residual, head."""

    def __init__(self, compressions: Sequence[Compression | None] = LAYERS, seed: int = 0) -> None:
        super().__init__(seed, windows=(WINDOW,) * len(compressions))
        angles = torch.arange(CONTEXT + 8)[:, None] * 100.0 ** (-torch.arange(ROPE // 2) * 2 / ROPE)
        self.rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.parameters = Weights(torch.float32, torch.device("cpu"))
        scope: Any = Scope(SimpleNamespace(rms_norm_eps=EPS), KernelTable(), self.parameters, CONTEXT)  # pyright: ignore[reportArgumentType]
        self.net = net_of(compressions)
        self.layers = tuple(self._layer(scope.at(i), i, each) for i, each in enumerate(compressions))
        self.attention_layers = self.layers
        for weight in self.parameters.parameters:
            weight.copy_(torch.randn(weight.shape))

    def _layer(self, scope: Scope, layer_id: int, compression: Compression | None) -> CompressedAttention:
        series = 0 if compression is None else compression.series
        index = SimpleNamespace(
            queries=_linear(LATENT, INDEX_HEADS * INDEX_DIM),
            weights=_linear(HIDDEN, INDEX_HEADS),
            blocks=_linear(HIDDEN, 2 * series * INDEX_DIM),
        )
        projections: Any = SimpleNamespace(
            latent=_linear(HIDDEN, LATENT),
            queries=_linear(LATENT, HEADS * DIM),
            keys=_linear(HIDDEN, DIM),
            output=_linear(HEADS * DIM, HIDDEN),
            blocks=_linear(HIDDEN, 2 * series * DIM) if series else None,
            index=index if series == 2 else None,
        )
        return CompressedAttention(scope, layer_id, self.net, compression, self.rotary, projections)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, HIDDEN]."""
        self.seen.append(batch)
        hidden = self.embedding[batch.input_ids]
        for layer in self.layers:
            hidden = hidden + layer(hidden, batch)
        return hidden

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """The oracle: hidden states [n, HIDDEN] of one request alone, without pages, plans or
        pools."""
        hidden = self.embedding[torch.tensor(tokens)]
        for layer, compression in zip(self.layers, self.net.compressions, strict=True):
            hidden = hidden + self._attend(layer, compression, hidden)
        return hidden

    def _attend(self, layer: Any, compression: Compression | None, hidden: Tensor) -> Tensor:
        count, given = len(hidden), layer.projections
        places = torch.arange(count)
        latent = given.latent(hidden)
        q = self._turn(_rms(given.queries(latent).view(count, HEADS, DIM)), places)
        keys = self._turn((_rms(given.keys(hidden)) * layer.kv_norm)[:, None], places)[:, 0]
        seen = (places[None] <= places[:, None]) & (places[None] > places[:, None] - WINDOW)
        if compression is not None:
            blocks = self._blocks(layer.compressor, given.blocks(hidden), compression)
            visible = torch.arange(len(blocks))[None] < ((places + 1) // compression.ratio)[:, None]
            if compression.is_sparse:
                visible = visible & self._chosen(layer, latent, hidden, compression, visible)
            keys, seen = torch.cat((keys, blocks)), torch.cat((seen, visible), dim=1)
        scores = torch.einsum("thd,kd->thk", q, keys) * DIM**-0.5
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        weights = torch.cat((scores, layer.sinks.view(1, HEADS, 1).expand(count, HEADS, 1)), dim=2).softmax(2)
        out = torch.einsum("thk,kd->thd", weights[..., :-1], keys)
        return given.output(self._turn(out, -places).flatten(1))

    def _blocks(self, compressor: Any, kv_gate: Tensor, compression: Compression) -> Tensor:
        ratio, found = compression.ratio, []
        kv, gate = kv_gate.chunk(2, dim=1)
        size = kv.shape[1] // compression.series
        for block in range(len(kv) // ratio):
            own = slice(block * ratio, (block + 1) * ratio)
            values, gates = [kv[own, -size:]], [gate[own, -size:] + compressor.ape[:, -size:]]
            if compression.is_sparse and block:
                before = slice((block - 1) * ratio, block * ratio)
                values.append(kv[before, :size])
                gates.append(gate[before, :size] + compressor.ape[:, :size])
            found.append((torch.cat(gates).softmax(0) * torch.cat(values)).sum(0))
        if not found:
            return kv.new_zeros(0, size)
        rows = _rms(torch.stack(found)) * compressor.weight
        return self._turn(rows[:, None], torch.arange(len(rows)) * ratio)[:, 0]

    def _chosen(self, layer: Any, latent: Tensor, hidden: Tensor, compression: Compression, visible: Tensor) -> Tensor:
        count, index = len(hidden), layer.projections.index
        q = self._turn(index.queries(latent).view(count, INDEX_HEADS, INDEX_DIM), torch.arange(count))
        keys = self._blocks(layer.indexer.compressor, index.blocks(hidden), compression)
        scores = torch.einsum("th,thb->tb", index.weights(hidden), torch.einsum("thd,bd->thb", q, keys).relu())
        scores = scores.masked_fill(~visible, -torch.inf)
        best = scores.topk(min(TOP_K, len(keys)), dim=1).indices
        return torch.zeros_like(visible).scatter(1, best, True)

    def _turn(self, x: Tensor, places: Tensor) -> Tensor:
        cos, sin = self.rotary[places.abs()][:, None].chunk(2, dim=-1)
        turns = torch.complex(cos, sin * places.sign().view(-1, 1, 1))
        last = torch.view_as_complex(x[..., -ROPE:].unflatten(-1, (ROPE // 2, 2)).contiguous()) * turns
        return torch.cat((x[..., :-ROPE], torch.view_as_real(last).flatten(-2)), dim=-1)


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def make_sparse(
    compressions: Sequence[Compression | None] = LAYERS,
    *,
    own_pages: int = 24,
    backend: type[DeepseekV4AttnBackend] = DeepseekV4AttnBackend,
    poison: bool = True,
    **options: Any,
) -> Site:
    """A site with a pool full of NaN. `own_pages`: number of window pages; 0: the window's rows are
    in the pages of all tokens."""
    model = SparseModel(compressions)
    table = WindowTable(SLOTS, WINDOW, STEP, PAGE, "cpu") if own_pages else None

    def attention(shape: AttentionShape, main: ReqToTokenPool, cells: Any, kernels: KernelTable) -> Any:
        layers = [layer.rows for layer in model.layers]
        counts = RowCounts(PAGES, own_pages, SLOTS)
        pool = DeepSeekV4TokenToKVPool(layers, PAGE, counts, "cpu", poison, window_table=table)
        return backend(shape_of(model.layers, is_encoder=False), main, pool, kernels)

    return make_site(model, attention=attention, window_table=table, **options)


class SparseDesk(WindowDesk):
    """Fills freed window pages with NaN."""

    def _give(self, pages: list[int]) -> None:
        pool = self.site.attention.token_to_kv_pool
        for layer_id, layer in enumerate(pool.layers):
            for name, kept in layer.items():
                if kept.place is Place.WINDOW_PAGES:
                    count = kept.count(pool.page_size)
                    pool.rows(layer_id, name).view(-1, count, kept.size)[pages] = torch.nan
        self.free_windows += pages


def desk_of(site: Site, seed: int = 0) -> Desk:
    """The host of a site, with window pages if the site has them."""
    has_pages = site.attention.token_to_kv_pool.window_table is not None
    return SparseDesk(site, WINDOW, seed) if has_pages else Desk(seed)
