"""The reference kernels of DeepSeek's attention, compared with transformers' DeepSeek-V4, and 8-bit
rows compared with their own definition."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ, FLOATS, RowCodec
from sglcore.runtime.kernels.table import KernelTable
from tests.kernels.test_reference_kernels import random
from tests.kernels.test_sparse_plan import int32

TABLE = KernelTable()
TOKENS, PAGE, SIZE, ROTATED = 45, 8, 32, 8
RATIOS = {deepseek.DeepseekV4CSACompressor: (4, 8), deepseek.DeepseekV4HCACompressor: (8, 8)}
"""Tokens per block (the compression ratio), and tokens that a block is computed from (the span)."""


@cache
def config() -> DeepseekV4Config:
    """A small configuration, in which its limits take effect."""
    rope = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    return DeepseekV4Config(
        **{"vocab_size": 40, "hidden_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": SIZE, "partial_rotary_factor": 0.25},
        **{"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 12, "num_experts_per_tok": 3, "n_routed_experts": 8},
        **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4, "sliding_window": 8, "swiglu_limit": 0.3},
        **{"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
        **{"rope_parameters": rope, "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]},
        **{"mlp_layer_types": ["hash_moe", "moe"], "max_position_embeddings": 64},
    )


def made(kind: type[nn.Module], *more: Any) -> Any:
    """Return a module with random weights."""
    module = kind(config(), *more).eval()
    for number, weight in enumerate(module.parameters()):
        weight.data = random(*weight.shape, seed=number) * (weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5)
    return module


def angles(positions: int = 64) -> Tensor:
    """Return the `rotary` table of the compressed layers."""
    parts = deepseek.DeepseekV4RotaryEmbedding(config())(torch.zeros(1), torch.arange(positions)[None], "compress")
    return torch.cat(parts, dim=-1)[0]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_inverse", [False, True])
def test_the_tail_is_rotated_as_the_oracles(is_inverse: bool) -> None:
    x, positions, table = random(9, 4, SIZE), torch.randperm(64)[:9].int(), angles()
    cos, sin = table[positions].chunk(2, dim=-1)
    wanted = deepseek.apply_rotary_pos_emb(x, cos, -sin if is_inverse else sin)
    close(TABLE.rope_tail(x, positions, table, None, is_inverse), wanted)
    normed = deepseek.DeepseekV4UnweightedRMSNorm(1e-6)(x)
    wanted = deepseek.apply_rotary_pos_emb(normed, cos, -sin if is_inverse else sin)
    close(TABLE.rope_tail(x, positions, table, 1e-6, is_inverse), wanted)


@pytest.mark.parametrize("steps", [(TOKENS,), (3, 1, 1, 1, 1, 9, 8, 21), (1,) * TOKENS], ids=len)
@pytest.mark.parametrize("kind", RATIOS)
@torch.inference_mode()
def test_blocks_are_the_oracles_however_the_tokens_come(kind: type[nn.Module], steps: tuple[int, ...]) -> None:
    (ratio, span), module, hidden = RATIOS[kind], made(kind), random(1, TOKENS, 48, seed=7)
    wanted = module(hidden, random(1, TOKENS, 24, seed=8), torch.arange(TOKENS)[None], None, 0)[0][0, 0]
    kv_gate = torch.cat((module.kv_proj(hidden), module.gate_proj(hidden)), dim=-1)[0]
    state = torch.full((99, kv_gate.shape[1]), torch.nan)
    rows = blocks_in_steps(kv_gate, state, module.position_bias, module.kv_norm.weight, ratio, span, steps)
    close(rows[PAGE // ratio :][: len(wanted)], wanted)


def blocks_in_steps(
    kv_gate: Tensor, state: Tensor, ape: Tensor, weight: Tensor, ratio: int, span: int, steps: tuple[int, ...]
) -> Tensor:
    """Compress one request (slot 1, pages 1, 2, ...) in steps and return its block pool. Without
    overlap of blocks, its state is stored by slot instead of by page."""
    table, done = torch.stack((torch.zeros(6), torch.arange(1, 7))).int(), 0
    state_table = table if span > ratio else None
    rows = torch.full((56 // ratio, weight.shape[0]), torch.nan)
    for count in steps:
        events = min(count, count // ratio + 1)
        shapes = (events, span), (events,), (events,), (count,)
        reads, places, out_rows, writes = (torch.empty(shape, dtype=torch.int32) for shape in shapes)
        own, positions = torch.ones(count, dtype=torch.int32), torch.arange(done, done + count).int()
        given = int32(1), int32(done + count), int32(count), int32(0), own, positions, table
        TABLE.compress_plan(*given, state_table, None, PAGE, ratio, span, reads, places, out_rows, writes)
        blocks = TABLE.compress(kv_gate[done : done + count], state, ape, reads, writes)
        TABLE.norm_rope_store(blocks, weight, 1e-6, places, angles(), rows, out_rows, None)
        done += count
    return rows


@torch.inference_mode()
def test_the_indexer_chooses_what_the_oracles_does() -> None:
    module, hidden, latent = made(deepseek.DeepseekV4Indexer), random(1, TOKENS, 48, seed=7), random(1, TOKENS, 24)
    positions = torch.arange(TOKENS)
    wanted = module(hidden, latent, positions[None], None, 0)[0]
    kv_gate = torch.cat((module.kv_proj(hidden), module.gate_proj(hidden)), dim=-1)[0]
    state = torch.full((99, kv_gate.shape[1]), torch.nan)
    keys = blocks_in_steps(kv_gate, state, module.position_bias, module.kv_norm.weight, 4, 8, (TOKENS,))
    q = TABLE.rope_tail(module.q_b_proj(latent).view(TOKENS, 16, 16), positions.int(), angles(), None, False)
    table, own = torch.stack((torch.zeros(6), torch.arange(1, 7))).int(), torch.ones(TOKENS, dtype=torch.int32)
    weights, lens = module.scorer.weights_proj(hidden)[0], ((positions + 1) // 4).int()
    logits = TABLE.index_logits(q, weights, keys, table, own, lens, 2, 16**-0.5 * 16**-0.5, 12, None)
    scores = module.scorer(q[None], keys[2:13][None], hidden)[0]
    is_seen = torch.arange(11) < lens.unsqueeze(1)
    close(logits[:, :11][is_seen], scores[is_seen])
    assert torch.equal(logits[:, :11] > -torch.inf, is_seen) and (logits[:, 11] == -torch.inf).all()
    found = TABLE.index_top_k(logits, lens, table, own, 2, 4)
    for row, places in zip(found.tolist(), wanted.tolist(), strict=True):
        chosen = sorted(place + 2 for place in places if place >= 0)
        assert row == chosen + [-1] * (4 - len(chosen))


def test_of_equal_logits_the_first_are_chosen() -> None:
    table, logits = int32(0, 1).view(2, 1), torch.tensor([[1.0, 3, 1, 1, -torch.inf]])
    found = TABLE.index_top_k(logits, int32(4), table, int32(1), 5, 3)
    assert found.tolist() == [[5, 6, 7]]
    found = TABLE.index_top_k(logits, int32(4), table, int32(1), 5, 7)
    assert found.tolist() == [[5, 6, 7, 8, -1, -1, -1]], "more are wanted than there are columns"


@pytest.mark.parametrize("codec", [None, *(RowCodec(SIZE, exact=ROTATED, group=16, float8=each) for each in FLOATS)])
@torch.inference_mode()
def test_attention_over_two_lists_is_the_oracles(codec: RowCodec | None) -> None:
    """One list may be empty, and lists hold their rows in any order."""
    module, q = made(deepseek.DeepseekV4Attention, 0), random(5, 4, SIZE)
    pools, lists, keys, masks = [], [], [], []
    for seed, width in ((1, 6), (2, 3)):
        values = random(20, SIZE, seed=seed)
        encoded = values if codec is None else codec.encode(values)
        chosen = torch.stack([torch.randperm(20)[:width] for _ in range(5)]).int()
        chosen[torch.arange(width) >= torch.tensor([width, 1, 0, 2, 0]).unsqueeze(1)] = -1
        pools, lists = [*pools, encoded], [*lists, chosen]
        keys.append((values if codec is None else codec.decode(encoded))[chosen.clamp(min=0)])
        masks.append(torch.where(chosen < 0, -torch.inf, 0.0))
    found = TABLE.sparse_mqa(q, pools[0], lists[0], pools[1], lists[1], module.sinks, 0.4, SIZE, codec)
    both, mask = torch.cat(keys, dim=1).unsqueeze(1), torch.cat(masks, dim=1)[:, None, None]
    wanted = deepseek.eager_attention_forward(module, q.unsqueeze(2), both, both, mask, 0.4)[0]
    close(found, wanted[:, 0])
    assert not found[2].any()


def test_attention_without_a_sink_is_the_softmax_over_what_is_chosen() -> None:
    q, rows, table = random(3, 4, SIZE), random(24, SIZE, seed=1), torch.tensor([[0, 0], [2, 1]]).int()
    own, lens = torch.ones(3, dtype=torch.int32), int32(0, 1, 11)
    found = TABLE.paged_mqa(q, rows, table, own, lens, 8, 0.4, 20, None)
    keys = torch.cat((rows[16:24], rows[8:16]))
    for token, size in enumerate(lens.tolist()):
        wanted = F.scaled_dot_product_attention(q[token], keys[:size], keys[:size, :20], scale=0.4)
        close(found[token], wanted if size else torch.zeros(4, 20))
    chosen = torch.full((3, 12), -1)
    for token, size in enumerate(lens.tolist()):
        chosen[token, :size] = torch.tensor([*range(16, 24), *range(8, 16)])[:size]
    close(TABLE.sparse_mqa(q, rows, chosen.int(), None, None, None, 0.4, 20, None), found)


def test_so_many_tokens_at_a_time_as_memory_permits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 7
    q, pools = random(tokens, 4, SIZE), (random(24, SIZE, seed=1), random(24, SIZE, seed=2))
    table, own = int32(0, 0, 2, 1, 1, 2).view(3, 2), torch.arange(tokens).int() % 2 + 1
    lens, chosen = torch.arange(tokens).int() + 3, torch.arange(2 * tokens * 5).view(2, tokens, 5).int() % 24
    paged = table, own, lens

    def found() -> list[Tensor]:
        lists = pools[0], chosen[0], pools[1], chosen[1], random(4, seed=3)
        return [
            TABLE.index_logits(q, random(tokens, 4, seed=4), pools[0], *paged, 8, 0.3, 16, None),
            TABLE.paged_mqa(q, pools[0], *paged, 8, 0.4, 20, None),
            TABLE.sparse_mqa(q, *lists, 0.4, SIZE, None),
        ]

    whole = found()
    monkeypatch.setattr(reference_sparse, "AT_ONCE", 3 * 16 * SIZE)
    for parts, wanted in zip(found(), whole, strict=True):
        close(parts, wanted)


def test_lists_name_the_last_tokens_and_the_complete_blocks() -> None:
    table, own, places = int32(0, 0, 5, 2).view(2, 2), int32(1, 1, 1), int32(1, 6, 9)
    window, blocks = torch.empty(3, 4, dtype=torch.int32), torch.empty(3, 4, dtype=torch.int32)
    TABLE.window_rows(table, own, places, 4, 8, window)
    assert window.tolist() == [[40, 41, -1, -1], [43, 44, 45, 46], [46, 47, 16, 17]]
    TABLE.block_rows(table, own, places, 2, 8, blocks)
    assert blocks.tolist() == [[20, -1, -1, -1], [20, 21, 22, -1], [20, 21, 22, 23]]


def test_keys_of_an_index_are_normalised_and_turned_by_halves_where_they_begin() -> None:
    x, weight, bias, places, table = (
        random(5, 24),
        random(24, seed=1),
        random(24, seed=2),
        int32(3, 0, 9, 1, 4),
        angles(),
    )
    rows = torch.zeros(9, 24)
    TABLE.index_key_store(x, weight, bias, 1e-5, places, table, rows, torch.tensor([4, 1, 8, 2, 5]), None)
    wanted, _ = TABLE.rotary(F.layer_norm(x, (24,), weight, bias, 1e-5), x, places, table, 24)
    close(rows[[4, 1, 8, 2, 5]], wanted)
    assert not rows[[0, 3, 6, 7]].any()


def test_factors_are_held_within_a_limit_before_the_gate_is_bent() -> None:
    x = random(6, 20) * 3
    gate, up = x[:, :10].clamp(max=0.7), x[:, 10:].clamp(-0.7, 0.7)
    close(TABLE.limited_silu_and_mul(x, 0.7), gate * torch.sigmoid(gate) * up)


def test_streams_are_mixed_as_the_oracles() -> None:
    module, h = made(deepseek.DeepseekV4HyperConnection), random(7, 4, 48)
    given = module.fn, module.base, module.scale, module.input_norm.eps, module.hc_eps, module.hc_sinkhorn_iters
    x, post, comb = TABLE.hc_pre(h, *given)
    for found, wanted in zip((post, comb, x), module(h[None]), strict=True):
        close(found, wanted[0])
    result = random(7, 48, seed=1)
    close(TABLE.hc_post(result, h, post, comb), post.unsqueeze(-1) * result.unsqueeze(1) + comb.transpose(1, 2) @ h)
    head = made(deepseek.DeepseekV4HyperHead)
    close(TABLE.hc_head(h, head.hc_fn, head.hc_base, head.hc_scale, head.input_norm.eps, head.eps), head(h[None])[0])


def test_experts_their_choice_and_groups_are_the_oracles() -> None:
    x, ids = random(9, 48), torch.randint(40, (9,))
    chosen, hashed = made(deepseek.DeepseekV4TopKRouter), made(deepseek.DeepseekV4HashRouter)
    chosen.e_score_correction_bias = random(8, seed=3) * 0.1
    hashed.tid2eid = torch.stack([torch.randperm(8)[:3] for _ in range(40)])
    logits, scale = F.linear(x, chosen.weight), config().routed_scaling_factor
    weights, places = TABLE.sqrtsoftplus_routing(logits, chosen.e_score_correction_bias, 3, scale)
    _, wanted, order = chosen(x)
    close(torch.zeros(9, 8).scatter(1, places.long(), weights), torch.zeros(9, 8).scatter(1, order, wanted))
    found = TABLE.hash_routing(F.linear(x, hashed.weight), ids, hashed.tid2eid.int(), scale)
    for one, other in zip(found, hashed(x, ids)[1:], strict=True):
        close(one.float(), other.float())
    experts = made(deepseek.DeepseekV4Experts)
    given = weights, places, experts.gate_up_proj, experts.down_proj, config().swiglu_limit
    close(TABLE.limited_moe(x, *given), experts(x, places.long(), weights))
    grouped = deepseek.DeepseekV4GroupedLinear(24, 14, 2)
    close(TABLE.grouped_linear(x.view(9, 2, 24), grouped.weight.view(2, 7, 24)), grouped(x.view(9, 2, 24)))


# -- rows in eight bits
# ------------------------------------------------------------------------------------------------

CODECS = (
    *(RowCodec(512, exact=64), RowCodec(128, group=128), RowCodec(44, exact=8, group=16), RowCodec(64, exact=64)),
    *(RowCodec(512, exact=64, float8=E4M3FNUZ), RowCodec(44, exact=8, group=16, float8=E4M3FNUZ)),
)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_encoded_comes_back_within_the_error_that_is_stated(codec: RowCodec) -> None:
    values = random(6, codec.size) * torch.tensor([0, 1e-6, 1e-3, 1, 50, 1e4]).unsqueeze(1)
    values[3, 0] = 448.0
    rows = codec.encode(values)
    assert rows.dtype == torch.uint8 and rows.shape == (6, codec.num_bytes) and codec.num_bytes % 8 == 0
    found, rounded = codec.decode(rows), codec.size - codec.exact
    assert torch.equal(found[:, rounded:], values[:, rounded:].bfloat16().float())
    for first in range(0, rounded, codec.group):
        part, back = (each[:, first : min(first + codec.group, rounded)] for each in (values, found))
        scale = part.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
        assert ((part - back).abs() <= torch.maximum(part.abs() / 16, 2 * scale * 2**-10)).all()
    assert torch.equal(codec.decode(codec.encode(found)), found)


def test_rows_of_both_floats_have_the_same_elements_under_scales_one_exponent_apart() -> None:
    """Negative zeros become zeros, because float8_e4m3fnuz has none."""
    one, other = (RowCodec(512, exact=64, float8=each) for each in (E4M3FN, E4M3FNUZ))
    values = random(6, 512) * torch.tensor([0, 1e-6, 1e-3, 1, 50, 1e4]).unsqueeze(1)
    first, second = one.encode(values), other.encode(values)
    assert torch.equal(other.decode(second), one.decode(first)) and not other.decode(second).isnan().any()
    small, scales = slice(0, 448), slice(576, 583)
    assert torch.equal(second[:, small], first[:, small].masked_fill(first[:, small] == 0x80, 0))
    assert torch.equal(second[:, scales], first[:, scales] + 1)
    assert not torch.equal(one.decode(second), one.decode(first))


@pytest.mark.parametrize("codec", CODECS[:3] + CODECS[4:], ids=str)
def test_what_was_not_written_is_no_number(codec: RowCodec) -> None:
    assert codec.unwritten.shape == (codec.num_bytes,) and codec.decode(codec.unwritten[None]).isnan().all()


def test_a_row_has_its_bytes_where_they_are_said_to_be() -> None:
    """The layout is e4m3 elements, bfloat16 elements, exponents of the scales, then padding."""
    codec = RowCodec(44, exact=8, group=16)
    assert (codec.num_scales, codec.num_bytes) == (3, 56)
    values = torch.cat((torch.full((16,), 896.0), torch.full((16,), 448.0), torch.full((12,), 1.0)))
    row = codec.encode(values[None])[0]
    assert row[:32].tolist() == [0x7E] * 32 and row[32:36].tolist() == [0x78] * 4
    assert row[36:52].view(torch.bfloat16).tolist() == [1.0] * 8
    assert row[52:].tolist() == [128, 127, 127 - 8, 0]
    assert RowCodec(512, exact=64).num_bytes == 584 and RowCodec(128, group=128).num_bytes == 136
