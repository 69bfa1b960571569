"""Numbers of a GGUF file that decide about others, and files that can not be opened."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.gguf_architectures import ARCHITECTURES, SPARSE_LLAMA
from sglcore.checkpoint.gguf_config import LARGEST, checkpoint_name, end_tokens, gguf_config, token_id
from sglcore.checkpoint.gguf_header import GgufHeader, GgufTensor, is_gguf, read_header
from sglcore.core.errors import CheckpointError
from tests.checkpoint.test_gguf_headers import listed, raw, tensor, text
from tests.checkpoint.test_gguf_metadata import COLUMNS, METADATA, SHAPES, header, renamed


def positions(**given: Any) -> dict[str, Any]:
    """Return how a llama with these numbers below `rope` rotates positions."""
    own = {f"llama.rope.{name.replace('__', '.')}": value for name, value in given.items()}
    return gguf_config(header({**METADATA, **own}))["rope_parameters"]


@pytest.mark.parametrize("count", [0, -8, LARGEST + 1, "8"])
@pytest.mark.parametrize("key", ["dimension_count", "scaling__original_context_length"])
def test_counts_of_positions_are_from_one_to_the_largest(key: str, count: Any) -> None:
    name = f"llama.rope.{key.replace('__', '.')}"
    if count == 0 and "context" in key:
        assert "original_max_position_embeddings" not in positions(**{key: 0})
        return
    with pytest.raises(CheckpointError, match=f"says {name} = {count!r}; wanted "):
        positions(**{key: count})
    assert positions(**{key: 1}) != positions()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("factor", [None, 4, "4", True])
def test_a_scaling_has_a_factor_with_a_fraction(kind: str, factor: Any) -> None:
    given = {} if factor is None else {"scaling__factor": factor}
    with pytest.raises(
        CheckpointError, match=f"says llama.rope.scaling.factor = {factor!r}; wanted a value of kind fl"
    ):
        positions(scaling__type=kind, **given)


@pytest.mark.parametrize("base", [0.5, 1.0, 1e6])
def test_a_rotary_base_is_taken_as_it_is(base: float) -> None:
    assert positions(freq_base=base)["rope_theta"] == base
    for wrong in (10000, "x", True):
        with pytest.raises(
            CheckpointError, match=f"says llama.rope.freq_base = {wrong!r}; wanted a value of kind float"
        ):
            positions(freq_base=wrong)


def test_an_original_context_is_kept_with_and_without_a_scaling() -> None:
    for more in ({}, {"scaling__type": "yarn", "scaling__factor": 2.0}, {"scaling__type": "none"}):
        assert positions(scaling__original_context_length=64, **more)["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("rotated", "head_dim", "share"), [(8, None, 0.5), (16, None, 1.0), (8, 32, 0.25), (32, 32, 1.0)]
)
def test_the_share_of_a_head_that_is_rotated_is_of_its_own_size(
    rotated: int, head_dim: int | None, share: float
) -> None:
    own = {} if head_dim is None else {"llama.attention.key_length": head_dim}
    found = gguf_config(header({**METADATA, **own, "llama.rope.dimension_count": rotated}))
    assert found["rope_parameters"]["partial_rotary_factor"] == share
    assert found["head_dim"] == (head_dim or COLUMNS // 4)


@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES if name != SPARSE_LLAMA])
def test_numbers_are_those_below_the_architectures_own_name(arch: str) -> None:
    """Numbers of other architectures in the same file change nothing."""
    others = {f"{other}.context_length": 7 for other in ("bert", "clip", "llama", "qwen2") if other != arch}
    counts = {"feed_forward_length": 33, "attention.head_count_kv": 2, "attention.key_length": 24}
    own = {f"{arch}.{key}": value for key, value in counts.items()}
    found = gguf_config(header({**others, **renamed(arch), **own}))
    assert (found["max_position_embeddings"], found["intermediate_size"]) == (512, 33)
    assert (found["num_key_value_heads"], found["head_dim"]) == (2, 24)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
@pytest.mark.parametrize("more", [-1, 0, 1, 16, -16])
def test_only_the_largest_gemma_scales_queries_by_the_mean_size_of_its_heads(arch: str, layers: int, more: int) -> None:
    config = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40}
    given = {**config, "num_hidden_layers": layers + more, "sliding_window": 9}
    found = ARCHITECTURES[arch].more(header(), given)
    assert found == {"query_pre_attn_scalar": 24 if more == 0 else 40, "sliding_window": 9}


@pytest.mark.parametrize(
    ("arch", "part", "wanted"),
    [
        ("glm4", "post_attention_norm", "post_self_attn_layernorm"),
        ("glm4", "ffn_norm", "post_attention_layernorm"),
        ("glm4", "post_ffw_norm", "post_mlp_layernorm"),
        ("glm4", "ffn_up", "mlp.gate_up_proj"),
        ("gemma2", "post_attention_norm", "post_attention_layernorm"),
        ("gemma2", "ffn_norm", "pre_feedforward_layernorm"),
        ("gemma3", "post_ffw_norm", "post_feedforward_layernorm"),
        ("gemma", "ffn_norm", "post_attention_layernorm"),
        ("gemma", "post_attention_norm", None),
        ("phi3", "attn_qkv", "self_attn.qkv_proj"),
        ("qwen2", "attn_qkv", None),
        ("llama", "ffn_gate_inp", None),
        ("qwen3moe", "ffn_gate_inp", "mlp.gate"),
        ("qwen3moe", "ffn_gate_shexp", None),
        ("qwen2moe", "ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
        ("qwen2moe", "ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ("qwen3", "attn_k_norm", "self_attn.k_norm"),
    ],
)
@pytest.mark.parametrize("layer", [0, 9, 10, 123])
def test_a_tensor_of_a_layer_has_the_name_of_its_architecture(
    arch: str, part: str, wanted: str | None, layer: int
) -> None:
    found = checkpoint_name(header(renamed(arch)), f"blk.{layer}.{part}.weight")
    assert found == (None if wanted is None else f"model.layers.{layer}.{wanted}.weight")


def test_experts_of_a_llama_have_the_names_of_a_mixtral() -> None:
    sparse = header({**METADATA, "llama.expert_count": 4})
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    for part, name in names.items():
        found = checkpoint_name(sparse, f"blk.1.ffn_{part}_exps.weight")
        assert found == f"model.layers.1.block_sparse_moe.experts.{{}}.{name}.weight"
        assert checkpoint_name(header(), f"blk.1.ffn_{part}_exps.weight") is None
    assert checkpoint_name(sparse, "blk.0.ffn_gate_inp.weight") == "model.layers.0.block_sparse_moe.gate.weight"


@pytest.mark.parametrize("name", ["bos", "eos", "unknown", "padding", "eot"])
def test_a_special_token_is_one_of_the_vocabulary(name: str) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    assert token_id(header(), name, 5) is None
    assert [token_id(header({key: token}), name, 5) for token in (0, 4)] == [0, 4]
    for wrong in (-1, 5, False, 2.0, [1]):
        with pytest.raises(CheckpointError, match=rf"says {key} = .*; wanted 0 to 4; download it again"):
            token_id(header({key: wrong}), name, 5)


def test_a_file_that_can_not_be_opened_is_named_with_the_systems_reason(tmp_path: Path) -> None:
    for path, number in ((tmp_path / "none.gguf", 2), (tmp_path, 21)):
        with pytest.raises(CheckpointError) as refused:
            read_header(path)
        assert refused.value.found == f"{path} cannot be read: {os.strerror(number)}"


@pytest.mark.parametrize("data", [b"", b"GG", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + bytes(15)])
def test_a_file_that_ends_within_its_first_numbers_is_damage(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="m.gguf is damaged: it ends inside its header; download it again"):
        read_header(tmp_path / "m.gguf")


def test_texts_that_a_file_lost_after_it_was_read_are_damage(tmp_path: Path) -> None:
    file = raw(tmp_path, listed("words", 8, 2, text("a") + text("bcd")))
    found = read_header(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is damaged: it ends inside its header"):
        found.some_texts("words", [0, 1])
    assert found.some_texts("words", [0]) == {0: "a"}


def test_a_list_that_was_kept_and_has_no_texts_is_read_at_its_places(tmp_path: Path) -> None:
    found = read_header(raw(tmp_path, listed("numbers", 5, 3, struct.pack("<3i", 4, 5, 6))))
    assert found.some_texts("numbers", [2, 0, 3]) == {2: 6, 0: 4}


def test_a_tensor_without_elements_or_rows_ends_where_it_begins(tmp_path: Path) -> None:
    found = read_header(raw(tmp_path, tensors=[tensor("t", 4, 0), tensor("u", 0, kind=8)], data=bytes(64))).tensors
    assert [(each.start == each.end, each.shape) for each in found.values()] == [(True, (0, 4)), (True, (0,))]


def test_plain_vectors_alone_do_not_decide_the_type() -> None:
    vectors = {**SHAPES, "output_norm.weight": (COLUMNS,)}
    assert gguf_config(header(shapes=vectors, kind="F16"))["dtype"] == "float16"
    assert gguf_config(header(shapes=vectors, kind="Q4_K"))["dtype"] == "bfloat16"


def test_truths_are_read_as_truths_alone_and_in_lists(tmp_path: Path) -> None:
    entry = text("truth") + struct.pack("<IB", 7, 1), text("number") + struct.pack("<IB", 0, 1)
    found = read_header(raw(tmp_path, *entry, listed("truths", 7, 2, b"\1\0"))).metadata
    assert found["truth"] is True and found["number"] == 1 and found["number"] is not True
    assert found["truths"] == [True, False] and all(isinstance(each, bool) for each in found["truths"])


def test_an_empty_list_of_any_kind_takes_no_bytes(tmp_path: Path) -> None:
    entries = [listed(f"list {kind}", kind, 0, b"") for kind in range(13)]
    found = read_header(raw(tmp_path, *entries, text("after") + struct.pack("<IB", 0, 9)), texts=True).metadata
    assert found == {**{f"list {kind}": [] for kind in range(13)}, "after": 9}


@pytest.mark.parametrize("shape", [(31,), (33,), (1,), (33, 2)])
def test_vectors_too_are_of_whole_blocks(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'t' has rows of {shape[0]} elements, and Q8_0 has blocks of 32"):
        read_header(raw(tmp_path, tensors=[tensor("t", *shape, kind=8)], data=bytes(512)))


def test_a_name_in_capital_letters_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.GGUF").touch()
    assert not is_gguf(tmp_path / "m.GGUF")


def test_an_unknown_architecture_is_told_the_names_that_files_may_have() -> None:
    with pytest.raises(CheckpointError) as refused:
        gguf_config(header(renamed("falcon")))
    names = [name for name in ARCHITECTURES if name != SPARSE_LLAMA]
    assert refused.value.found == "m.gguf has the architecture 'falcon'"
    assert refused.value.wanted == f"one of {', '.join(names)}"


def test_a_vocabulary_is_as_large_as_its_embeddings() -> None:
    given = {**METADATA, "llama.vocab_size": 5, "tokenizer.ggml.tokens": ["a"] * 7}
    assert gguf_config(header(given))["vocab_size"] == SHAPES["token_embd.weight"][0]


@pytest.mark.parametrize("name", [*SHAPES, "output.weight"])
def test_any_matrix_of_another_type_decides_in_which_type_is_computed(name: str) -> None:
    shapes = {**SHAPES, "output.weight": SHAPES["token_embd.weight"]}
    tensors = {each: GgufTensor(each, "F16", shape, 0, 0) for each, shape in shapes.items()}
    found = {**tensors, name: GgufTensor(name, "F32", shapes[name], 0, 0)}
    assert gguf_config(GgufHeader(Path("m.gguf"), METADATA, tensors, {}))["dtype"] == "float16"
    assert gguf_config(GgufHeader(Path("m.gguf"), METADATA, found, {}))["dtype"] == "bfloat16"


@pytest.mark.parametrize("shapes", [{}, {"token_embd.weight": ()}])
def test_tokens_that_end_a_text_are_known_without_embeddings(shapes: dict[str, tuple[int, ...]]) -> None:
    given = {"tokenizer.ggml.eos_token_id": 500_000}
    assert end_tokens(header(given, shapes)) == (500_000,)


@pytest.mark.parametrize("kind", ["", 0, False])
def test_a_scaling_without_a_name_is_not_taken_for_none(kind: Any) -> None:
    with pytest.raises(CheckpointError, match=f"scales positions by {kind!r}; wanted none, linear or yarn"):
        positions(scaling__type=kind)
