"""What tensor parallelism divides of each kind of model, and which widths fit a quantised one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from sglcore.checkpoint.model_config import ModelConfig, config_of, read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology, legal_tp
from sglcore.checkpoint.parallel.tensor_parallel import MOST_WIDTH, Shard, check_divisible, constraints, legal_widths
from sglcore.core.errors import ConfigError
from sglcore.worker.topology import Topology

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def read(architecture: str = "LlamaForCausalLM", folder: Path = Path("nowhere"), **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    return config_of(folder, {**SIZES, "architectures": [architecture], **changes})


def divided(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """Return the size of what is divided and the ranks that divide it, by its name."""
    return {rule.name: (rule.size, rule.axis) for rule in constraints(config)}


ATTENTION = {"attention heads": (16, "attn_tp"), "key-value heads": (4, "attn_tp")}
DENSE = {"intermediate features in a feed-forward block": (192, "tp")}
CASES: tuple[tuple[str, Mapping[str, Any], Mapping[str, tuple[int, str]]], ...] = (
    ("LlamaForCausalLM", {}, DENSE),
    (
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "moe_intermediate_size": 24},
        {"intermediate features in an expert": (24, "expert")},
    ),
    (
        "Qwen2MoeForCausalLM",
        {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        {
            **DENSE,
            "intermediate features in an expert": (24, "expert"),
            "intermediate features in the shared expert": (40, "tp"),
        },
    ),
    (
        "Qwen3NextForCausalLM",
        {"linear_num_key_heads": 6, "linear_num_value_heads": 12, "num_experts": 0},
        {
            **DENSE,
            "key heads of linear attention": (6, "attn_tp"),
            "value heads of linear attention": (12, "attn_tp"),
        },
    ),
    (
        "GraniteMoeHybridForCausalLM",
        {"mamba_n_heads": 24, "mamba_n_groups": 3, "shared_intermediate_size": 80, "num_local_experts": 0},
        {
            **DENSE,
            "Mamba heads": (24, "attn_tp"),
            "groups of Mamba heads": (3, "attn_tp"),
            "intermediate features in the shared block": (80, "tp"),
        },
    ),
    (
        "Lfm2ForCausalLM",
        {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        {**DENSE, "convolution channels": (96, "attn_tp")},
    ),
    (
        "DeepseekV4ForCausalLM",
        {"o_groups": 8, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_key_value_heads": 4},
        {
            "groups of attention heads": (8, "attn_tp"),
            "intermediate features in an expert": (24, "expert"),
            "intermediate features in the shared expert": (24, "tp"),
        },
    ),
)


@pytest.mark.parametrize(("architecture", "given", "wanted"), CASES, ids=lambda value: str(value)[:24])
def test_each_kind_of_model_has_its_own_parts(
    architecture: str, given: Mapping[str, Any], wanted: Mapping[str, tuple[int, str]]
) -> None:
    assert divided(read(architecture, **given)) == {**ATTENTION, **wanted}


@pytest.mark.parametrize(
    ("words", "fitting"),
    [
        ({}, (1, 2, 4, 8, 16)),
        ({"num_key_value_heads": 1}, (1, 2, 4, 8, 16)),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, (1, 2, 3, 6, 12)),
        ({"intermediate_size": 6}, (1, 2)),
        ({"num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 256}, (1, 2, 4, 8, 16, 32, 64)),
        ({"mamba_n_heads": 4, "mamba_n_groups": 2}, (1, 2, 4)),
        ({"mamba_n_heads": 16, "mamba_n_groups": 1}, (1, 2, 4, 8, 16)),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 8}, (1, 2)),
    ],
)
def test_heads_are_divided_and_few_key_heads_are_shared(words: Mapping[str, Any], fitting: tuple[int, ...]) -> None:
    assert legal_widths(read(**words)) == fitting
    assert legal_tp(read(**words), Topology(1)) == fitting and fitting[-1] <= MOST_WIDTH


def quantised(method: str) -> dict[str, Any]:
    """A quantisation of all linear layers."""
    group = {"targets": ["Linear"], "weights": PACKED}
    row = {"targets": ["Linear"], "weights": {**PACKED, "strategy": "channel"}}
    down = {"targets": ["re:.*down_proj"], "weights": PACKED}
    form: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 64},
        "rows": {"quant_method": "gptq", "bits": 4, "group_size": -1},
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "packed": {**form, "config_groups": {"group_0": group}},
        "packed rows": {**form, "config_groups": {"group_0": row}},
        "down_proj alone": {**form, "config_groups": {"group_0": down}},
    }[method]


OUT, DOWN = "inputs of self_attn.o_proj in groups of {}", "inputs of mlp.down_proj in groups of {}"


@pytest.mark.parametrize(
    ("method", "names", "fitting"),
    [
        ("gptq", {OUT.format(32): (512, "attn_tp"), DOWN.format(32): (192, "tp")}, (1, 2)),
        ("awq", {OUT.format(64): (512, "attn_tp"), DOWN.format(64): (192, "tp")}, (1,)),
        ("rows", {}, (1, 2, 4, 8, 16)),
        ("fp8", {}, (1, 2, 4, 8, 16)),
        ("packed", {OUT.format(32): (512, "attn_tp"), DOWN.format(32): (192, "tp")}, (1, 2)),
        ("packed rows", {}, (1, 2, 4, 8, 16)),
        ("down_proj alone", {DOWN.format(32): (192, "tp")}, (1, 2)),
    ],
)
def test_a_group_of_columns_with_one_scale_stays_on_one_rank(
    method: str, names: Mapping[str, tuple[int, str]], fitting: tuple[int, ...]
) -> None:
    config = read(quantization_config=quantised(method))
    assert divided(config) == {**ATTENTION, **DENSE, **names}
    assert legal_widths(config) == fitting
    if names and max(fitting) == 2:
        with pytest.raises(ConfigError, match=r"this model has 192 inputs of mlp.down_proj in groups of 32; wanted "):
            check_topology(config, Topology(4))


def test_groups_of_the_output_projection_are_those_of_the_values() -> None:
    given = {"quantization_config": quantised("gptq"), "v_head_dim": 20, "intermediate_size": 512}
    config = read(**given)
    assert divided(config)[OUT.format(32)] == (16 * 20, "attn_tp")
    assert legal_widths(config) == (1, 2)
    assert legal_widths(read(**{**given, "v_head_dim": 40})) == (1, 2, 4)


def test_a_model_of_experts_alone_has_no_groups_in_dense_blocks() -> None:
    sparse = {"num_experts": 8, "moe_intermediate_size": 96, "quantization_config": quantised("gptq")}
    assert DOWN.format(32) not in divided(read("Qwen3MoeForCausalLM", **sparse))
    assert DOWN.format(32) in divided(read("Qwen3MoeForCausalLM", **sparse, mlp_only_layers=[3]))
    assert legal_widths(read("Qwen3MoeForCausalLM", **sparse)) == (1, 2, 4, 8, 16)


EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


@pytest.mark.parametrize(("tp", "ep", "is_legal"), [(2, 2, True), (2, 1, True), (8, 2, True), (8, 1, False)])
def test_whole_experts_are_divided_by_none(tp: int, ep: int, is_legal: bool) -> None:
    config, topology = read("Qwen3MoeForCausalLM", **EXPERTS), Topology(tp, 1, ep)
    assert (tp in legal_tp(config, topology)) == is_legal
    if is_legal:
        check_topology(config, topology)
    else:
        wanted = r"^tp is 8, and this model has 20 intermediate features in an expert; wanted one of 1, 2, 4; set --tp"
        with pytest.raises(ConfigError, match=wanted):
            check_topology(config, topology)


@pytest.mark.parametrize(
    ("dp", "ep", "fitting"),
    [
        (1, 1, (1, 2, 4)),
        (1, 2, (2, 4, 8, 16)),
        (1, 4, (4, 8, 16)),
        (2, 1, (2, 4)),
        (2, 2, (2, 4, 8, 16, 32)),
        (4, 2, (4, 8, 16, 32, 64)),
        (2, 4, (4, 8, 16, 32)),
        (3, 1, ()),
    ],
)
def test_widths_that_fit_are_multiples_of_the_other_axes(dp: int, ep: int, fitting: tuple[int, ...]) -> None:
    assert legal_tp(read("Qwen3MoeForCausalLM", **EXPERTS), Topology(dp * ep, dp, ep)) == fitting


def test_experts_that_ranks_can_not_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ep is 2, and this model has no experts; --ep 1"):
        check_topology(read(), Topology(2, 1, 2))
    with pytest.raises(ConfigError, match="ep is 4, and this model has 6 experts; wanted one of 1, 2; set --ep to one"):
        check_topology(read("Qwen3MoeForCausalLM", **EXPERTS), Topology(4, 1, 4))
    file = tmp_path / "m.gguf"
    file.touch()
    with pytest.raises(ConfigError, match="experts in a GGUF file cannot be read separately; --ep 1"):
        check_topology(read("Qwen3MoeForCausalLM", file, **EXPERTS), Topology(2, 1, 2))


@pytest.mark.parametrize(
    ("tp", "dp", "said"),
    [
        (6, 1, "tp is 6, and this model has 16 attention heads; wanted one of 1, 2, 4, 8, 16; set --tp to one of them"),
        (6, 2, "tp is 6 in 2 shards of requests, and this model has 16 attention heads; wanted one of 2, 4, 8, 16, 32"),
        (7, 7, "tp is 7 in 7 shards of requests, and this model has 192 intermediate features in a feed-forward block"),
    ],
)
def test_an_error_names_the_shards_of_requests_if_there_are_several(tp: int, dp: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_topology(read(), Topology(tp, dp))
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith(
        "set --tp to one of them" if tp == 6 else "wanted another dp or ep: no tp fits these"
    )


def test_layers_of_a_librarys_own_class_are_not_divided() -> None:
    check_divisible(read(), 2)
    with pytest.raises(ConfigError, match="tp is 2, and this model has layers of transformers' own class.*; --tp 1"):
        check_divisible(read(), 2, is_ours=False)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (6, 3), (0, 2), (64, 64)])
def test_parts_are_of_one_size_and_follow_each_other(count: int, size: int) -> None:
    parts = [Shard(rank, size).part(count) for rank in range(size)]
    assert [item for first, last in parts for item in range(first, last)] == list(range(count))
    assert {last - first for first, last in parts} == {count // size}


def test_a_part_of_what_does_not_divide_is_refused() -> None:
    for count in (5, 7):
        with pytest.raises(ConfigError, match=f"tp is 3, and a layer divides {count} elements, .*; wanted a divisor"):
            Shard(0, 3).part(count)


@pytest.mark.parametrize(("rows", "size", "each"), [(97, 1, 97), (97, 2, 49), (98, 2, 49), (1, 4, 1), (8, 3, 3)])
def test_a_vocabulary_is_padded_to_equal_parts(rows: int, size: int, each: int) -> None:
    parts = [Shard(rank, size).vocabulary(rows) for rank in range(size)]
    assert parts == [(rank * each, (rank + 1) * each) for rank in range(size)]
    assert parts[-1][1] >= rows


@pytest.mark.parametrize(
    ("heads", "size", "wanted"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_key_heads_that_are_fewer_than_ranks_are_held_by_several(heads: int, size: int, wanted: list[Any]) -> None:
    assert [Shard(rank, size).kv_heads(heads) for rank in range(size)] == wanted


def gguf(folder: Path, kv_heads: int) -> Path:
    """A GGUF file of a Llama with four heads."""
    file = folder / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(kv_heads)
    writer.add_feed_forward_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, rows in (("token_embd", 8), ("blk.0.attn_q", 16)):
        writer.add_tensor(f"{name}.weight", np.zeros((rows, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_an_error_of_a_gguf_file_names_that_file(tmp_path: Path) -> None:
    file = gguf(tmp_path, 3)
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    assert str(refused.value).startswith(f"{file} gives 4 query heads for 3 key-value heads")


def test_a_gguf_file_is_read_for_its_task_and_for_architectures_that_run(tmp_path: Path) -> None:
    file = gguf(tmp_path, 2)
    for task, said in (("auto", "None"), ("generate", "None"), ("embed", "lasttoken, length 1")):
        assert str(read_config(file, ("LlamaForCausalLM",), task).pooling) == said
    with pytest.raises(ConfigError, match="the architecture 'LlamaForCausalLM' is not supported; wanted one that"):
        read_config(file, ("Qwen2ForCausalLM",))
