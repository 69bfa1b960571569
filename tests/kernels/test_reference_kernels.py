"""The reference kernels, compared with torch's own functions and with modules of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from sglcore.models.weights.quantized_weight import QuantizedWeight
from sglcore.runtime.kernels.grouped_moe import grouped_clamped_moe, grouped_relu2_moe
from sglcore.runtime.kernels.table import KernelTable
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.sampler import Sampler
from tests.sampling.rows import staged

TABLE = KernelTable.complete()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS = pytest.mark.parametrize("tokens", [0, 1, 7])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return seeded normal values."""
    print(f"random {shape}, seed {seed}")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache(positions: int, size: int) -> torch.Tensor:
    """Return cosines and sines of a rotary embedding with base 10000."""
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@DTYPES
@TOKENS
def test_rms_norm_is_the_oracles_to_the_bit(dtype, tokens: int) -> None:
    oracle, x = LlamaRMSNorm(24, eps=1e-5).to(dtype), random(tokens, 24, dtype=dtype)
    oracle.weight.data = random(24, dtype=dtype, seed=1)
    assert torch.equal(TABLE.rms_norm(x, oracle.weight, 1e-5), oracle(x))
    heads = x.view(tokens, 3, 8)
    assert torch.equal(TABLE.rms_norm(heads, oracle.weight[:8], 0.0), rms_norm_oracle(heads, oracle.weight[:8]))


@DTYPES
def test_rms_norm_with_a_wide_weight_is_gemmas_to_the_bit(dtype) -> None:
    oracle, x = Gemma3RMSNorm(24, eps=1e-5).to(dtype), random(7, 24, dtype=dtype)
    oracle.weight.data = random(24, dtype=dtype, seed=1)
    found = TABLE.rms_norm(x, oracle.weight.data.float() + 1, 1e-5)
    assert torch.equal(found, oracle(x))
    assert dtype is torch.float32 or not torch.equal(found, TABLE.rms_norm(x, oracle.weight.data + 1, 1e-5))


def rms_norm_oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply the oracle over the last dimension of any shape."""
    oracle = LlamaRMSNorm(x.shape[-1], eps=0.0)
    oracle.weight.data = weight
    return oracle(x)


@DTYPES
@TOKENS
def test_add_rms_norm_is_a_sum_and_a_norm(dtype, tokens: int) -> None:
    x, residual, weight = (
        random(tokens, 24, dtype=dtype),
        random(tokens, 24, dtype=dtype, seed=1),
        random(24, dtype=dtype),
    )
    total = x + residual
    normed, new_residual = TABLE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert torch.equal(normed, TABLE.rms_norm(total, weight, 1e-5))


@DTYPES
@TOKENS
@pytest.mark.parametrize("rotated", [12, 8])
def test_rotary_is_the_oracles_to_the_bit_and_leaves_the_rest_of_a_head(dtype, tokens: int, rotated: int) -> None:
    size, heads, kv_heads = 12, 4, 2
    both = random(tokens, (heads + kv_heads) * size, dtype=dtype)
    q, k = both.split([heads * size, kv_heads * size], dim=-1)
    positions = torch.tensor([3, 0, 9, 9, 1, 2, 30][:tokens], dtype=torch.int32)
    table = cache(32, rotated)
    cos, sin = (table[positions.long()].to(dtype).chunk(2, dim=-1)[i].repeat(1, 2) for i in (0, 1))
    got_q, got_k = TABLE.rotary(q, k, positions, table, size)
    part_q, part_k = q.reshape(tokens, heads, size), k.reshape(tokens, kv_heads, size)
    want_q, want_k = apply_rotary_pos_emb(part_q[..., :rotated], part_k[..., :rotated], cos, sin)
    for got, want, whole in ((got_q, want_q, part_q), (got_k, want_k, part_k)):
        assert torch.equal(got, torch.cat((want, whole[..., rotated:]), dim=-1).reshape(got.shape))


@DTYPES
@TOKENS
def test_silu_and_mul_puts_the_gate_first(dtype, tokens: int) -> None:
    x = random(tokens, 10, dtype=dtype)
    assert torch.equal(TABLE.silu_and_mul(x), F.silu(x[:, :5]) * x[:, 5:])
    if tokens:
        assert not torch.equal(TABLE.silu_and_mul(x), F.silu(x[:, 5:]) * x[:, :5])


@DTYPES
@TOKENS
def test_gelu_tanh_and_mul_puts_the_gate_first(dtype, tokens: int) -> None:
    x = random(tokens, 10, dtype=dtype)
    assert torch.equal(TABLE.gelu_tanh_and_mul(x), F.gelu(x[:, :5], approximate="tanh") * x[:, 5:])


def test_softcap_bends_to_its_cap() -> None:
    x = random(3, 10)
    assert torch.equal(TABLE.softcap(x, 1.5), torch.tanh(x / 1.5) * 1.5)


def test_sigmoid_is_the_logistic_function() -> None:
    assert torch.equal(TABLE.sigmoid(random(3, 10)), F.sigmoid(random(3, 10)))


@TOKENS
def test_sigmoid_routing_is_glms(tokens: int) -> None:
    rules = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    oracle = Glm4MoeTopkRouter(Glm4MoeConfig(n_routed_experts=16, hidden_size=16, **rules))
    oracle.weight.data, bias = torch.eye(16), random(16, seed=2) * 0.3
    oracle.e_score_correction_bias.copy_(bias)
    logits = random(tokens, 16)
    weights, ids = TABLE.sigmoid_routing(logits, bias, 3, 4, 2, True, 2.5)
    wanted = torch.zeros(tokens, 16).scatter_(1, oracle(logits)[2], oracle(logits)[1])
    torch.testing.assert_close(torch.zeros(tokens, 16).scatter_(1, ids.long(), weights), wanted)


@TOKENS
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_group_limited_routing_is_deepseeks(tokens: int, method: str) -> None:
    rules = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    oracle = DeepseekV2TopkRouter(
        DeepseekV2Config(n_routed_experts=16, hidden_size=16, num_attention_heads=4, topk_method=method, **rules)
    )
    oracle.weight.data, logits = torch.eye(16), random(tokens, 16)
    weights, ids = TABLE.group_limited_routing(logits, 3, *((1, 1) if method == "greedy" else (4, 2)), 2.5)
    wanted = torch.zeros(tokens, 16).scatter_(1, oracle(logits)[2], oracle(logits)[1])
    torch.testing.assert_close(torch.zeros(tokens, 16).scatter_(1, ids.long(), weights), wanted)


@TOKENS
def test_mxfp4_moe_is_clamped_moe_of_the_values(tokens: int) -> None:
    source, packed, plain = torch.Generator().manual_seed(3), [], []
    for outputs, inputs in ((192, 64), (64, 96)):
        blocks = torch.randint(0, 256, (5, outputs, inputs // 32, 16), generator=source, dtype=torch.uint8)
        scales = torch.randint(121, 126, (5, outputs, inputs // 32), generator=source, dtype=torch.uint8)
        bias = random(5, outputs)
        packed += [blocks, scales, bias]
        plain += [convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2), bias]
    hidden, weights = random(tokens, 64), random(tokens, 2, seed=1)
    ids = torch.tensor([[0, 3], [4, 1], [2, 0], [3, 4], [1, 2], [0, 4], [3, 1]], dtype=torch.int32)[:tokens]
    assert TABLE.mxfp4_moe is not None
    codes: list[Any] = [hidden, weights, ids, *packed, 1.702, 0.9]
    values: list[Any] = [hidden, weights, ids, *plain, 1.702, 0.9]
    torch.testing.assert_close(TABLE.mxfp4_moe(*codes), TABLE.clamped_moe(*values))


@TOKENS
def test_relu2_moe_is_nemotron_hs(tokens: int) -> None:
    oracle = NemotronHExperts(NemotronHConfig(hidden_size=16, moe_intermediate_size=24, n_routed_experts=5))
    for seed, parameter in enumerate(oracle.parameters()):
        parameter.data = random(*parameter.shape, seed=seed)
    hidden, weights = random(tokens, 16), random(tokens, 2, seed=1)
    ids = torch.tensor([[0, 3], [4, 1], [2, 0], [3, 4], [1, 2], [0, 4], [3, 1]], dtype=torch.int32)[:tokens]
    wanted = oracle(hidden, ids.long(), weights)
    given = hidden, weights, ids, oracle.up_proj, oracle.down_proj
    torch.testing.assert_close(TABLE.relu2_moe(*given), wanted, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(grouped_relu2_moe(*given), wanted, rtol=1e-5, atol=5e-5)


@TOKENS
def test_clamped_moe_is_gpt_oss(tokens: int) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 5, "swiglu_limit": 0.8}
    oracle = GptOssExperts(GptOssConfig(**sizes))
    for seed, parameter in enumerate(oracle.parameters()):
        parameter.data = random(*parameter.shape, seed=seed)
    hidden, weights = random(tokens, 16), random(tokens, 2, seed=1)
    ids = torch.tensor([[0, 3], [4, 1], [2, 0], [3, 4], [1, 2], [0, 4], [3, 1]], dtype=torch.int32)[:tokens]
    w13, b13, w2, b2 = (oracle.gate_up_proj, oracle.gate_up_proj_bias, oracle.down_proj, oracle.down_proj_bias)
    given = w13.transpose(1, 2), b13, w2.transpose(1, 2), b2, oracle.alpha, oracle.limit
    wanted = oracle(hidden, ids.long(), weights)
    torch.testing.assert_close(TABLE.clamped_moe(hidden, weights, ids, *given), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grouped_clamped_moe(hidden, weights, ids, *given), wanted, rtol=1e-5, atol=1e-5)


def test_gelu_is_the_exact_one() -> None:
    x = random(7, 10).double()
    assert torch.allclose(TABLE.gelu(x), x * torch.special.ndtr(x))
    assert not torch.allclose(TABLE.gelu(x), F.gelu(x, approximate="tanh"), atol=1e-6)


@TOKENS
def test_layer_norm_follows_its_formula(tokens: int) -> None:
    x, weight, bias = random(tokens, 24), random(24, seed=1), random(24, seed=2)
    centred = x - x.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    assert torch.allclose(TABLE.layer_norm(x, weight, bias, 1e-5), want, atol=1e-5)


@pytest.mark.parametrize("with_bias", [True, False])
@TOKENS
def test_linear_and_embedding_follow_their_formulas(tokens: int, with_bias: bool) -> None:
    x, weight, bias = random(tokens, 6), random(4, 6), random(4, seed=1) if with_bias else None
    assert torch.allclose(TABLE.linear(x, weight, bias), x @ weight.T + (0 if bias is None else bias), atol=1e-6)
    ids = torch.tensor([3, 0, 3, 1, 2, 0, 1][:tokens], dtype=torch.int32)
    assert torch.equal(TABLE.embedding(ids, weight), weight[ids.long()])


def moe_parts(dtype: torch.dtype, normalize: bool) -> tuple[Any, Any]:
    """Return the oracle's router and experts with random weights."""
    config = Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=10, num_experts=6, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    config._experts_implementation = "eager"
    router, experts = Qwen3MoeTopKRouter(config).to(dtype), Qwen3MoeExperts(config).to(dtype)
    router.weight.data = random(6, 16, dtype=dtype, seed=2)
    experts.gate_up_proj.data = random(6, 20, 16, dtype=dtype, seed=3)
    experts.down_proj.data = random(6, 16, 10, dtype=dtype, seed=4)
    return router, experts


@DTYPES
@TOKENS
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_and_experts_are_the_oracles(dtype, tokens: int, normalize: bool) -> None:
    router, experts = moe_parts(dtype, normalize)
    hidden = random(tokens, 16, dtype=dtype)
    logits, want_weights, want_ids = router(hidden)
    weights, ids = TABLE.top_k_routing(logits, 3, normalize)
    assert torch.equal(ids.long(), want_ids) and torch.equal(weights, want_weights) and weights.dtype == dtype
    got = TABLE.moe(hidden, weights, ids, experts.gate_up_proj, experts.down_proj)
    torch.testing.assert_close(
        got, experts(hidden, want_ids, weights), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
    )


def test_no_expert_adds_nothing_whatever_its_row_contains() -> None:
    _, experts = moe_parts(torch.float32, True)
    hidden, weights = random(3, 16), torch.full((3, 2), 0.5)
    hidden[1] = float("nan")
    ids = torch.tensor([[0, 1], [-1, -1], [4, -1]])
    got = TABLE.moe(hidden, weights, ids, experts.gate_up_proj, experts.down_proj)
    assert torch.equal(got[1], torch.zeros(16))
    alone = TABLE.moe(hidden[2:], weights[2:, :1], ids[2:, :1], experts.gate_up_proj, experts.down_proj)
    torch.testing.assert_close(got[2:], alone)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@TOKENS
def test_store_kv_writes_its_cells_and_no_others(tokens: int, index_dtype) -> None:
    key, value = random(tokens, 2 * 3).view(tokens, 2, 3), random(tokens, 2, 3, seed=1)
    caches = [torch.full((12, 2, 3), 5.0, dtype=torch.bfloat16) for _ in range(2)]
    cells = torch.tensor([11, 4, 0, 0, 7, 2, 1][:tokens], dtype=index_dtype)
    TABLE.store_kv(key, value, caches[0], caches[1], cells)
    for cell in range(1, 12):
        rows = (cells == cell).nonzero().flatten().tolist()
        for cache_of, rows_of in zip(caches, (key, value), strict=True):
            want = rows_of[rows[0]].bfloat16() if rows else torch.full((2, 3), 5.0).bfloat16()
            assert torch.equal(cache_of[cell], want)


@DTYPES
@TOKENS
def test_rotary_and_store_stores_what_rotary_gives_and_returns_its_queries(dtype, tokens: int) -> None:
    q, k, v = random(tokens, 8 * 12, dtype=dtype).split([48, 24, 24], dim=-1)
    positions = torch.tensor([3, 0, 9, 9, 1, 2, 30][:tokens], dtype=torch.int32)
    caches = [torch.full((12, 2, 12), 5.0, dtype=torch.bfloat16) for _ in range(2)]
    cells = torch.tensor([11, 4, 0, 0, 7, 2, 1][:tokens], dtype=torch.int64)
    table = cache(32, 8)
    assert TABLE.rotary_and_store is not None
    got = TABLE.rotary_and_store(q, k, v, positions, table, 12, caches[0], caches[1], cells)
    want, keys = TABLE.rotary(q, k, positions, table, 12)
    assert torch.equal(got, want)
    for row, cell in enumerate(cells.tolist()):
        if cell:
            assert torch.equal(caches[0][cell], keys[row].view(2, 12).bfloat16())
            assert torch.equal(caches[1][cell], v[row].view(2, 12).bfloat16())
    untouched = [cell for cell in range(1, 12) if cell not in cells.tolist()]
    assert all((cache_of[untouched] == 5).all() for cache_of in caches)


def test_cache_locations_follow_the_page_table() -> None:
    table = torch.tensor([[0, 0, 0], [7, 3, 5]], dtype=torch.int32)
    slots, positions = torch.tensor([1, 1, 0], dtype=torch.int32), torch.tensor([0, 9, 0], dtype=torch.int32)
    out = torch.zeros(3, dtype=torch.int64)
    TABLE.cache_locations(table, slots, positions, 4, out)
    assert out.tolist() == [7 * 4, 5 * 4 + 1, 0]


def test_the_draw_is_the_samplers() -> None:
    logits, state = random(3, 40), staged([(SamplingParams(temperature=0.8, top_k=9), 5)] * 3, [1, 2, 3])
    sampler = Sampler(40, "cpu")
    tokens, bad = TABLE.draw(logits, state, sampler.tables)
    assert torch.equal(tokens, sampler.sample(logits, state).token_ids) and not bad.any()


def test_packing_keeps_the_plain_weight() -> None:
    weight = random(5, 3)
    assert TABLE.pack_linear(weight) is weight
    assert TABLE.pack_parts is not None
    read: list[int] = []
    joined = TABLE.pack_parts(weight.split([1, weight.shape[0] - 1]), read.append)
    assert joined is not None and torch.equal(joined, weight)
    assert read == [0, 1]


@DTYPES
@TOKENS
def test_a_gated_layer_is_a_product_and_its_activation(dtype, tokens: int) -> None:
    x, weight = random(tokens, 24, dtype=dtype), random(32, 24, dtype=dtype, seed=1)
    gate, up = F.linear(x, weight[:16]), F.linear(x, weight[16:])
    assert TABLE.gated_linear is not None
    assert torch.allclose(TABLE.gated_linear(x, weight), F.silu(gate) * up, rtol=2e-2, atol=2e-2)


def test_heads_are_normed_before_they_are_rotated_and_stored() -> None:
    q, k, v = random(5, 32), random(5, 16, seed=1), random(5, 16, seed=2)
    q_weight, k_weight = random(8, seed=3), random(8, seed=4)
    positions, table = torch.tensor([0, 4, 1, 9, 3]), cache(16, 8)
    cells = torch.tensor([3, 1, 7, 2, 9])
    k_cache, v_cache = torch.zeros(12, 2, 8), torch.zeros(12, 2, 8)
    assert TABLE.norm_rotary_and_store is not None
    got = TABLE.norm_rotary_and_store(
        q, k, v, positions, table, 8, k_cache, v_cache, cells, q_weight, k_weight, 1e-5
    )  # fmt: skip
    normed_q = F.rms_norm(q.view(5, 4, 8), (8,), q_weight, 1e-5).view(5, 32)
    normed_k = F.rms_norm(k.view(5, 2, 8), (8,), k_weight, 1e-5).view(5, 16)
    wanted_q, wanted_k = TABLE.rotary(normed_q, normed_k, positions, table, 8)
    assert torch.allclose(got, wanted_q, atol=1e-6)
    assert torch.allclose(k_cache[cells], wanted_k.view(5, 2, 8), atol=1e-6)
    assert torch.equal(v_cache[cells], v.view(5, 2, 8))


@pytest.mark.parametrize("zeros", [None, torch.tensor([[1.5, 2.0], [0.0, 9.0]])])
def test_codes_become_what_they_mean(zeros) -> None:
    codes = torch.arange(80, dtype=torch.uint8).view(2, 40) % 16
    scales = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    weight = QuantizedWeight(codes, scales, zeros, 4, 32, torch.bfloat16)
    assert TABLE.pack_quantized is not None
    found = TABLE.pack_quantized(weight)
    assert found.dtype == torch.bfloat16
    for row in range(2):
        for column in range(40):
            group = column // 32
            zero = 8 if zeros is None else float(zeros[row, group])
            assert float(found[row, column]) == float(scales[row, group]) * (int(codes[row, column]) - zero)


@pytest.mark.parametrize(("kind", "steps"), [("int8", 255), ("int4", 16)])
def test_a_rounded_weight_is_the_nearest_of_few_values(kind: str, steps: int) -> None:
    weight = random(3, 50)
    assert TABLE.quantize_linear is not None
    found = TABLE.quantize_linear(weight, kind)
    assert found.shape == weight.shape
    for row in range(3):
        group, near = weight[row, :32], found[row, :32]
        span = float(group.max() - group.min()) if kind == "int4" else 2 * float(group.abs().max())
        assert len(near.unique()) <= steps and (group - near).abs().max() <= 0.5001 * span / (steps - 1)


@DTYPES
def test_logits_are_wide_and_a_head_is_packed_as_it_is(dtype) -> None:
    hidden, weight = random(3, 24, dtype=dtype), random(11, 24, dtype=dtype, seed=1)
    assert TABLE.head is not None and TABLE.pack_head is not None
    assert TABLE.pack_head(weight) is weight
    assert torch.equal(TABLE.head(hidden, weight), F.linear(hidden, weight).float())


def test_a_greedy_row_gives_its_first_largest_logit_and_bad_rows_are_told() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 0.0, 1.0], [float("-inf")] * 3, [0.0, -1.0, -2.0]])
    assert TABLE.greedy is not None
    tokens, bad = TABLE.greedy(logits)
    assert tokens.tolist() == [1, 0, 0, 0]
    assert bad.tolist() == [False, True, True, False]


def test_every_entry_is_tested_here_or_beside() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_reference_*.py"))
    assert [name for name in KernelTable.declared() if f"TABLE.{name}(" not in source] == []
