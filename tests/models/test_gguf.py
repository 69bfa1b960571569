"""GGUF files against the gguf package's dequantisation, and against transformers with the same
weights."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from sglcore.checkpoint.gguf_architectures import ARCHITECTURES as GGUF
from sglcore.checkpoint.gguf_header import read_header
from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import CheckpointError, ConfigError, SglcoreError
from sglcore.core.ledger import DecisionLedger
from sglcore.models.architecture_registry import ARCHITECTURES
from sglcore.models.implementation import choose_implementation
from sglcore.models.weights import quantized_weight
from sglcore.models.weights.gguf_blocks import KINDS, BlockWeight
from sglcore.models.weights.quantized_weight import packable, rounded
from tests.checkpoints import (
    LLAMA3,
    gemma,
    gemma2,
    gemma3,
    glm4,
    granite,
    llama,
    mixtral,
    olmo2,
    olmo3,
    oracle_logprobs,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    rope,
)
from tests.models.gguf_checkpoints import SIMPLE, SUPER, random_blocks, write
from tests.models.steps import Steps, load
from tests.models.test_quantized_checkpoints import TOLERANCE, Packs, difference

SIZES = {"hidden_size": 64, "intermediate_size": 96}
GEMMA3 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
OLMO3 = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 3e5} for kind in ("full_attention", "sliding_attention")
    }
}
LARGE = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}


def blocks(kind: str) -> np.ndarray:
    """uint8 rows of 512 columns; row 2 has a block with scales of 0."""
    rng = np.random.default_rng(1)
    if kind in SUPER:
        data = random_blocks(kind, (6, 512), rng)
        for place in SUPER[kind]:
            data[2, place : place + 2] = 0
        return data
    values = rng.normal(size=(6, 512)).astype(np.float32)
    values[2, :32], values[3, 32:64] = 0, 0.25
    return gguf.quants.quantize(values, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_has_the_packages_values_to_the_bit(kind: str) -> None:
    data = blocks(kind)
    weight, wanted = (
        BlockWeight(torch.from_numpy(data), kind, 512),
        gguf.quants.dequantize(data, GGMLQuantizationType[kind]),
    )
    assert torch.equal(weight.values(slice(0, 6)), torch.from_numpy(wanted))
    assert torch.equal(weight.values(slice(2, 5)), torch.from_numpy(wanted[2:5]))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_mean_the_same_values(kind: str) -> None:
    weight = BlockWeight(torch.from_numpy(blocks(kind)), kind, 512)
    wanted, codes = weight.values(slice(None)), weight.as_codes()
    assert codes.codes.dtype == torch.uint8 and int(codes.codes.max()) < 1 << codes.bits
    assert torch.isfinite(codes.scales).all() and (codes.zeros is None or codes.zeros.abs().max() <= 60000)
    assert (codes.values(slice(None)) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    if codes.group == 16:
        assert packable(codes) is None
        near = rounded(weight)
        step = near.scales.repeat_interleave(32, 1)
        assert ((near.values(slice(None)) - wanted).abs() <= 0.501 * step).all()
    else:
        found = packable(codes)
        assert found is not None and torch.equal(found.values(slice(None)), codes.values(slice(None)))


ORACLES = {
    "llama": (lambda: llama(**SIZES), "llama", None),
    "llama-wide-heads-tied": (lambda: llama(**SIZES, head_dim=24, tie_word_embeddings=True), "llama", "Q8_0"),
    "llama-biases": (lambda: llama(**SIZES, attention_bias=True), "llama", "Q4_0"),
    "qwen2": (lambda: qwen2(**SIZES), "qwen2", "Q5_1"),
    "qwen3": (lambda: qwen3(**SIZES, head_dim=24), "qwen3", "Q4_1"),
    "qwen3-halves": (lambda: qwen3(**SIZES, head_dim=24), "qwen3", "F16"),
    "llama-brain-halves": (lambda: llama(**SIZES), "llama", "BF16"),
    "qwen3-super-blocks": (lambda: qwen3(**LARGE, head_dim=64, tie_word_embeddings=True), "qwen3", "Q4_K"),
    "llama-super-blocks": (lambda: llama(**LARGE), "llama", "Q6_K"),
    "llama-super-blocks-5": (lambda: llama(**LARGE), "llama", "Q5_K"),
    "qwen3-moe": (
        lambda: qwen3_moe(**SIZES, head_dim=16, moe_intermediate_size=32, norm_topk_prob=True),
        "qwen3moe",
        "Q8_0",
    ),
    "qwen2-moe": (
        lambda: qwen2_moe(**SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=32, mlp_only_layers=[]),
        "qwen2moe",
        "Q4_0",
    ),
    "mixtral": (lambda: mixtral(**SIZES), "llama", "Q8_0"),
    "gemma": (lambda: gemma(hidden_size=64, intermediate_size=96, head_dim=16), "gemma", "Q8_0"),
    "gemma2": (lambda: gemma2(**SIZES, head_dim=16, query_pre_attn_scalar=16), "gemma2", "Q4_1"),
    "gemma3": (lambda: gemma3(**SIZES, head_dim=16, query_pre_attn_scalar=16, **GEMMA3), "gemma3", "Q8_0"),
    "gemma3-halves": (lambda: gemma3(**SIZES, head_dim=16, query_pre_attn_scalar=16, **GEMMA3), "gemma3", "BF16"),
    "phi3": (lambda: phi3(**SIZES, sliding_window=7), "phi3", "Q4_0"),
    "glm4": (lambda: glm4(**SIZES, head_dim=16), "glm4", "Q8_0"),
    "granite": (lambda: granite(**SIZES), "granite", "Q4_0"),
    "olmo2": (lambda: olmo2(**SIZES), "olmo2", "Q8_0"),
    "olmo3": (
        lambda: olmo3(
            **SIZES, num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"], **OLMO3
        ),
        "olmo2",
        "Q8_0",
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_file_has_the_log_probabilities_of_the_weights_it_means(name: str, tmp_path: Path) -> None:
    make, arch, kind = ORACLES[name]
    oracle = make()
    file = write(oracle, tmp_path / "model.gguf", arch, lambda name: None if "mlp.gate.weight" in name else kind)
    assert difference(load(file), oracle) < TOLERANCE
    device, ledger = Packs(pack_head=lambda weight: weight), DecisionLedger()
    if kind in SIMPLE or kind in ("Q4_K", "Q5_K"):
        assert difference(load(file, kernels=device.table, ledger=ledger), oracle) < 2 * TOLERANCE
        assert device.packed and ledger.rows[0].topic == "weights"


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_matrices_are_read_in_pieces_and_heads_stay_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of two rows, fewer than a head has."""
    monkeypatch.setattr(quantized_weight, "PIECE", 2 * SIZES["hidden_size"])
    oracle = llama(**SIZES)
    file = write(oracle, tmp_path / "m.gguf", "llama", lambda name: kind)
    assert difference(load(file), oracle) < TOLERANCE


def test_factors_of_the_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    oracle = llama(**SIZES, **rope("llama3", **LLAMA3))
    plain = 1.0 / (10000.0 ** (torch.arange(0, 16, 2) / 16))
    factors = (plain / oracle.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 1
    file = write(oracle, tmp_path / "m.gguf", "llama", lambda name: None, extra={"rope_freqs.weight": factors})
    assert difference(load(file), oracle) < TOLERANCE


def test_a_mix_of_types_is_joined_and_groups_of_16_are_rounded_and_said(tmp_path: Path) -> None:
    oracle = llama(**LARGE)
    is_six = re.compile(r".*(v_proj|down_proj).*").match
    file = write(oracle, tmp_path / "m.gguf", "llama", lambda name: "Q6_K" if is_six(name) else "Q4_K")
    device, ledger = Packs(), DecisionLedger()
    assert difference(load(file, kernels=device.table, ledger=ledger), oracle) < 0.05
    assert sorted(weight.bits for weight in device.packed) == [4] * 5 + [8] * 4
    assert "4 weights rounded from groups of 16 to 8 bits in groups of 32" in ledger.rows[0].reason
    assert "1 weights dequantised, being outside linear layers" in ledger.rows[0].reason


def test_an_output_layer_of_more_bits_than_asked_for_is_no_downgrade(tmp_path: Path) -> None:
    file = write(llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: "Q8_0" if "lm_head" in name else "Q4_0")
    device, ledger = Packs(quantize_linear=lambda weight, kind: weight), DecisionLedger()
    load(file, kernels=device.table, quantize="int4", ledger=ledger)
    assert [weight.bits for weight in device.packed] == [4] * 8 + [8]
    (row,) = ledger.rows
    assert not row.downgrade and "stay in" not in row.reason


def test_the_metadata_is_the_configuration_of_the_same_checkpoint(tmp_path: Path) -> None:
    oracle = qwen3_moe(norm_topk_prob=True)
    add: dict[str, Any] = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    file = write(oracle, tmp_path / "m.gguf", "qwen3moe", lambda name: None, tokenizer=add)
    oracle.save_pretrained(tmp_path / "folder")
    found, wanted = read_config(file, ARCHITECTURES), read_config(tmp_path / "folder")
    for name in ("architecture", "hidden_size", "head_dim", "vocab_size", "num_key_value_heads", "moe", "dtype"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("context_length", "tie_word_embeddings", "sliding_windows", "rope"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("linear", {"factor": 3.0}), ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16})],
)
def test_scaled_positions_are_the_oracles(kind: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])

    oracle = qwen3(**SIZES, **rope(kind, **scaling))
    file = write(oracle, tmp_path / "m.gguf", "qwen3", lambda name: None, change=change)
    assert difference(load(file, max_positions=64), oracle) < TOLERANCE


@pytest.mark.parametrize("max_positions", [16, 64])
def test_long_and_short_factors_are_phis(tmp_path: Path, max_positions: int) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 2.0, 3.0]}
    turned = rope("longrope", **factors, partial_rotary_factor=0.5)
    oracle = phi3(**SIZES, **turned, original_max_position_embeddings=16)
    kinds = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    file = write(
        oracle,
        tmp_path / "m.gguf",
        "phi3",
        lambda name: None,
        extra={name: np.array(factors[kind], np.float32) for name, kind in kinds.items()},
        change=lambda writer: writer.add_rope_scaling_orig_ctx_len(16),
    )
    ids = random_ids(9 if max_positions == 16 else 23)
    found = Steps(load(file, max_positions=max_positions)).logprobs({1: ids})
    assert (found - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_begin_at_multiples_of_the_files_own_alignment(alignment: int, tmp_path: Path) -> None:
    oracle = llama(**SIZES)
    file = write(
        oracle, tmp_path / "m.gguf", "llama", lambda name: None, change=lambda w: w.add_custom_alignment(alignment)
    )
    assert difference(load(file), oracle) < TOLERANCE


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ((None,), "float32"),
        (("F16",), "float16"),
        (("BF16",), "bfloat16"),
        (("Q8_0",), "bfloat16"),
        (("F16", "BF16"), "bfloat16"),
        (("F16", "Q8_0"), "bfloat16"),
    ],
)
def test_a_file_is_computed_in_the_type_of_its_matrices(
    kinds: tuple[str | None, ...], dtype: str, tmp_path: Path
) -> None:
    file = write(
        llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: kinds["down_proj" in name and len(kinds) > 1]
    )
    assert read_config(file).dtype == dtype


def test_two_tensors_of_one_name_are_damage(tmp_path: Path) -> None:
    file = write(llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: None)
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.1.attn_v.weight"))
    with pytest.raises(CheckpointError, match="is damaged: it has two tensors with the same name"):
        load(file)


def random_ids(count: int) -> list[int]:
    """Seeded token ids."""
    return np.random.default_rng(7).integers(0, 97, count).tolist()


@pytest.mark.parametrize(("arch", "layers", "scalar"), [("gemma2", 46, 20), ("gemma2", 42, 8), ("gemma3", 62, 20)])
def test_the_largest_gemmas_scale_queries_by_the_mean_size_of_heads(
    file: Path, arch: str, layers: int, scalar: int
) -> None:
    config = {"hidden_size": 40, "num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": layers}
    found = GGUF[arch].more(read_header(file), {**config, "sliding_window": None})
    assert found == {"query_pre_attn_scalar": scalar, "sliding_window": 4096}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small GGUF file."""
    return write(llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: "Q8_0")


def test_a_file_runs_by_a_file_of_ours_and_transformers_classes_are_refused_for_it(file: Path) -> None:
    assert not choose_implementation("auto", file, DecisionLedger())[1]
    with pytest.raises(ConfigError, match=r"m\.gguf is a GGUF file; leave --model-impl out"):
        choose_implementation("transformers", file, DecisionLedger())


@pytest.mark.parametrize("size", [3, 20, 200, 900, -100, -5000])
def test_a_cut_file_is_an_error_of_one_line(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SglcoreError, match=r"is damaged|ends inside") as error:
        load(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lost", [1, 100, 5000])
def test_tensors_that_end_behind_the_file_are_damage_of_its_header(file: Path, lost: int) -> None:
    """The damage is reported before a model is made, and no tensor is read beyond the end of the
    file."""
    end = max(tensor.end for tensor in read_header(file).tensors.values())
    file.write_bytes(file.read_bytes()[: end - lost])
    with pytest.raises(CheckpointError, match=rf"is damaged: it has {end - lost} bytes, and '.*' ends at \d+"):
        read_header(file)
    file.write_bytes(file.read_bytes() + bytes(lost))
    assert max(tensor.end for tensor in read_header(file).tensors.values()) == end


def test_changed_bytes_of_the_header_are_errors_or_change_nothing_that_matters(file: Path) -> None:
    whole = file.read_bytes()
    rng = np.random.default_rng(2)
    for place in rng.integers(0, 1500, 60):
        spoiled = bytearray(whole)
        spoiled[place] ^= int(rng.integers(1, 256))
        file.write_bytes(spoiled)
        try:
            load(file)
        except SglcoreError as error:
            assert "\n" not in str(error)


def frequency_base(writer: gguf.GGUFWriter) -> None:
    """Write a string in place of the number."""
    writer.kv_data[0].pop("llama.rope.freq_base")
    writer.add_string("llama.rope.freq_base", "x")


def original_context(writer: gguf.GGUFWriter) -> None:
    """Write a string in place of the number."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_string("llama.rope.scaling.original_context_length", "x")


def bad_experts(writer: gguf.GGUFWriter) -> None:
    """Write a string in place of the number."""
    writer.add_expert_count(4)
    writer.add_string("llama.expert_used_count", "x")


def test_lists_in_lists_without_end_are_an_error(tmp_path: Path) -> None:
    lists = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    (tmp_path / "m.gguf").write_bytes(head + lists + bytes(64))
    with pytest.raises(CheckpointError, match="is damaged: its lists are nested without end"):
        read_header(tmp_path / "m.gguf")


def test_experts_that_are_dequantised_are_said_where_all_else_is_plain(tmp_path: Path) -> None:
    oracle, ledger = qwen3_moe(**SIZES, head_dim=16, moe_intermediate_size=32), DecisionLedger()
    file = write(oracle, tmp_path / "m.gguf", "qwen3moe", lambda name: "Q8_0" if ".experts." in name else None)
    load(file, ledger=ledger)
    (row,) = ledger.rows
    assert row.effective == "plain" and re.search(r"\d+ weights dequantised, being outside linear layers", row.reason)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda w: w.add_uint32("split.count", 3), "is one of 3 parts; wanted one file; join them"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "scales positions by 'longrope'"),
        (lambda w: w.add_uint32("general.alignment", 0), "is damaged: it says general.alignment = 0"),
        (lambda w: w.add_string("general.alignment", "x"), "is damaged: it says general.alignment = 'x'"),
        (lambda w: w.add_array("general.alignment", [32]), r"is damaged: it says general.alignment = \[32\]"),
        (frequency_base, "rope.freq_base = 'x'; wanted a value of kind float"),
        (bad_experts, r"llama.expert_used_count = 'x'; wanted 0 to"),
        (original_context, "original_context_length = 'x'; wanted a value of kind int"),
    ],
)
def test_what_we_lack_is_named(spoil: Any, text: str, tmp_path: Path) -> None:
    file = write(llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: None, change=spoil)
    with pytest.raises(CheckpointError, match=text):
        load(file)


def test_an_architecture_that_we_lack_is_an_error(tmp_path: Path) -> None:
    file = write(llama(**SIZES), tmp_path / "m.gguf", "falcon", lambda name: None)
    with pytest.raises(
        CheckpointError, match="has the architecture 'falcon'; wanted one of llama, qwen2, qwen2moe, qwen3, "
    ):
        load(file)


def test_a_type_that_we_lack_is_an_error(tmp_path: Path) -> None:
    rows = np.zeros((4, 84), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"'blk.0.attn_q.weight' .* has the type Q2_K; wanted one of F32, F16, Q4_0"
    ):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)},
            "has 'blk.0.attn_sinks.weight', which this architecture",
        ),
        ({"blk.7.attn_norm.weight": np.zeros(64, np.float32)}, "has the tensors of 3 blocks .*; wanted 2 blocks"),
    ],
)
def test_tensors_of_another_model_are_errors(extra: Any, text: str, tmp_path: Path) -> None:
    file = write(llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: None, extra=extra)
    with pytest.raises(CheckpointError, match=text):
        load(file)


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.feed_forward_length")
        writer.add_feed_forward_length(80)

    file = write(llama(**SIZES), tmp_path / "m.gguf", "llama", lambda name: None, change=change)
    with pytest.raises(CheckpointError, match=r"has the shape \[96, 64\]; wanted \[80, 64\] as its metadata implies"):
        load(file)
