"""Reading `quantization_config` in every dialect, and errors for what is not supported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint import gguf_header
from sglcore.checkpoint.quantization_config import Quantization, Scheme, read_quantization
from sglcore.core.errors import CheckpointError

PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """Make a configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {**PACKED, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def target(text: Any) -> dict[str, Any]:
    """The same for another target."""
    return {**compressed(), "config_groups": {"group_0": {"targets": [text], "weights": PACKED}}}


def scheme(given: dict[str, Any], module: str = "model.layers.3.mlp.down_proj") -> Scheme | None:
    """Return the scheme of a module."""
    found = read_quantization({"quantization_config": given})
    assert found is not None
    return found.scheme(module)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Scheme("gptq", 4, (1, 128), True, 1)),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
            Scheme("gptq", 8, (1, None)),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, Scheme("awq", 4, (1, 64), False)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, Scheme("awq", 4, (1, 128), False)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("float8", 8, (None, None))),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Scheme("float8", 8, (128, 128))),
        (compressed(), Scheme("packed", 4, (1, 64))),
        (compressed(strategy="channel", symmetric=False), Scheme("packed", 4, (1, None), False)),
        (compressed("int-quantized", num_bits=8, strategy="tensor"), Scheme("integers", 8, (None, None))),
        (compressed("naive-quantized", num_bits=8, strategy="channel"), Scheme("integers", 8, (1, None))),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), Scheme("float8", 8, (1, None))),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 64]),
            Scheme("float8", 8, (128, 64)),
        ),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure="128x64"),
            Scheme("float8", 8, (128, 64)),
        ),
    ],
)
def test_every_dialect_is_read(given: dict[str, Any], wanted: Scheme) -> None:
    assert scheme(given) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"quant_method": "gptq", "bits": 2, "group_size": None}, Scheme("gptq", 2, (1, None), True, 1)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1}, Scheme("gptq", 4, (1, 1), True, 1)),
        (
            {"quant_method": "awq", "bits": 4, "w_bit": 8, "group_size": 64, "q_group_size": 32},
            Scheme("awq", 4, (1, 64), False),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": None}, Scheme("awq", 4, (1, None), False)),
        ({"quant_method": "fp8", "fmt": "float8_e4m3fn"}, Scheme("float8", 8, (None, None))),
        ({"quant_method": "fp8", "weight_block_size": None}, Scheme("float8", 8, (None, None))),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, Scheme("float8", 8, (64, 128))),
        (compressed("naive-quantized", num_bits=8, symmetric=False), Scheme("integers", 8, (1, 64), False)),
        (
            compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
            Scheme("float8", 8, (None, None)),
        ),
        (compressed(strategy=None), Scheme("packed", 4, (1, 64))),
        (compressed(strategy=None, group_size=None), Scheme("packed", 4, (None, None))),
        (compressed(strategy="group", group_size=-1), Scheme("packed", 4, (1, None))),
        (compressed(num_bits=2), Scheme("packed", 2, (1, 64))),
    ],
)
def test_words_that_are_left_out_or_there_twice(given: dict[str, Any], wanted: Scheme) -> None:
    assert scheme(given) == wanted


@pytest.mark.parametrize(
    ("word", "wanted"), [("type", Scheme("packed", 4, (1, 64))), ("symmetric", Scheme("packed", 4, (1, 64)))]
)
def test_packed_weights_are_symmetric_integers_unless_the_file_says_other(word: str, wanted: Scheme) -> None:
    given = compressed()
    weights = {name: value for name, value in PACKED.items() if name != word}
    given["config_groups"]["group_0"]["weights"] = weights
    assert scheme(given) == wanted


def test_floats_with_zero_points_are_refused() -> None:
    given = compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=False)
    with pytest.raises(CheckpointError, match="8 bits of float in the format 'float-quantized'"):
        scheme(given)


@pytest.mark.parametrize("bits", [2, 3, 8, None])
def test_awq_has_four_bits(bits: int | None) -> None:
    with pytest.raises(CheckpointError, match=f"{bits} bits of awq in the version 'gemm'; wanted 4 bits, gemm"):
        scheme({"quant_method": "awq", "bits": bits, "group_size": 64})


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "x", [64], 0, 0.5])
def test_a_group_size_that_is_no_count_is_damage(size: Any) -> None:
    for given in ({"quant_method": "gptq", "bits": 4, "group_size": size}, compressed(group_size=size)):
        if not size and given["quant_method"] != "gptq":
            given["config_groups"]["group_0"]["weights"]["strategy"] = "group"
        with pytest.raises(CheckpointError, match=r"quantization_config of '.*' is damaged: \w+Error") as error:
            scheme(given)
        assert "\n" not in str(error.value)


def test_the_newer_key_counts_if_a_file_has_both() -> None:
    found = read_quantization({"quantization_config": {"quant_method": "fp8"}, "compression_config": compressed()})
    assert found is not None and found.method == "fp8"


def test_a_plain_checkpoint_has_none() -> None:
    assert read_quantization({"hidden_size": 4, "quantization_config": None}) is None


def test_the_older_key_of_compressed_tensors_is_known() -> None:
    found = read_quantization({"compression_config": compressed()})
    assert isinstance(found, Quantization) and found.method == "compressed-tensors"


def test_names_and_patterns_come_before_the_class_of_all_layers() -> None:
    given = compressed()
    own = {"targets": ["re:.*down_proj$", "lm_head"], "weights": {**PACKED, "num_bits": 8}}
    given["config_groups"]["group_1"] = own
    assert (found := scheme(given)) is not None and found.bits == 8
    assert (found := scheme(given, "lm_head")) is not None and found.bits == 8
    assert (found := scheme(given, "model.layers.0.self_attn.q_proj")) is not None and found.bits == 4


def test_a_group_has_a_format_of_its_own() -> None:
    given, eight = compressed("mixed-precision"), {**PACKED, "num_bits": 8, "strategy": "channel"}
    given["config_groups"] = {
        "group_0": {"targets": ["re:.*q_proj"], "format": "pack-quantized", "weights": PACKED},
        "group_1": {"targets": ["Linear"], "format": "int-quantized", "weights": eight},
    }
    assert scheme(given, "model.layers.0.self_attn.q_proj") == Scheme("packed", 4, (1, 64))
    assert scheme(given) == Scheme("integers", 8, (1, None))


@pytest.mark.parametrize(
    ("text", "module", "is_meant"),
    [
        ("re:.*mlp", "model.layers.0.mlp.up_proj", True),
        ("re:mlp", "model.layers.0.mlp.up_proj", False),  # matched from the start
        ("re:model.layers.0", "model.layers.0.mlp.up_proj", True),
        ("up_proj", "model.layers.0.mlp.up_proj", True),
        ("mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("proj", "model.layers.0.mlp.up_proj", False),
        ("head", "lm_head", False),
        ("lm_head", "lm_head", True),
        ("linear", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_a_target_is_a_whole_name_or_a_pattern_from_the_beginning(text: str, module: str, is_meant: bool) -> None:
    assert (scheme(target(text), module) is not None) is is_meant


def test_a_module_that_no_target_matches_has_no_scheme() -> None:
    given = compressed()
    given["config_groups"]["group_0"]["targets"] = ["re:.*q_proj"]
    assert scheme(given) is None


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (Scheme("packed", 4, (1, 64)), "4 bits in groups of 64"),
        (Scheme("float8", 8, (128, 128)), "8-bit floats in blocks of 128 x 128"),
        (Scheme("integers", 8, (1, None)), "8 bits with a scale for each row"),
        (Scheme("float8", 8, (None, None)), "8-bit floats with a scale for each tensor"),
    ],
)
def test_a_scheme_has_words(scheme: Scheme, text: str) -> None:
    assert scheme.text == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is quantised by 'bitsandbytes'; wanted gptq, awq"),
        ("everything", "is quantised by 'everything'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "with 3 bits of gptq; wanted 2, 4 or 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "the gptq format 'marlin'; wanted gptq or gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}},
            "gptq settings that differ by layer",
        ),
        ({"quant_method": "gptq", "group_size": 128}, "quantization_config of 'gptq' is damaged: KeyError 'bits'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "awq in the version 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "the fp8 format 'e5m2'; wanted e4m3"),
        ({"quant_method": ["gptq"], "bits": 4}, r"is quantised by \['gptq'\]; wanted gptq, awq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "of 'gptq' is damaged: ValueError a block of 0"),
        ({"quant_method": "fp8", "weight_block_size": [40]}, "quantization_config of 'fp8' is damaged: ValueError"),
        ({"quant_method": "fp8", "weight_block_size": [0, 24]}, "is damaged: ValueError a block of 0"),
        (target("re:("), "is damaged: error missing \\), unterminated subpattern"),
        (target(3), "is damaged: TypeError the target 3"),
        ({**compressed(), "config_groups": {"a": {"targets": "Linear", "weights": PACKED}}}, "the targets 'Linear'"),
        (compressed("marlin-24"), "in the format 'marlin-24' of compressed-tensors"),
        (compressed(num_bits=3), "3 bits of int in the format 'pack-quantized'"),
        (compressed("nvfp4-pack-quantized", type="float"), "4 bits of float in the format 'nvfp4-pack-quantized'"),
        (compressed(strategy="token"), "the strategy 'token'; wanted tensor, channel, group or block"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity format 'sparse-24-bitmask'"),
        ({**compressed(), "config_groups": {"a": {"targets": ["Linear"], "weights": None}}}, "activations alone"),
        ({**compressed(), "config_groups": ["a"]}, "quantization_config of 'compressed-tensors' is damaged"),
    ],
)
def test_what_we_lack_is_an_error_of_one_line_with_a_remedy(given: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        read_quantization({"quantization_config": given})
    assert "\n" not in str(error.value) and error.value.remedy


def test_a_quantisation_of_another_library_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="config.json has 'quantization'"):
        read_quantization({"quantization": {"group_size": 64, "bits": 4}})


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
READ: dict[str, list[Any]] = {
    "gptq": [
        {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form, "desc_act": True}
        for bits in (2, 4, 8)
        for group in (-1, 32)
        for form in ("gptq", "gptq_v2")
    ],
    "awq": [{"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}],
    "fp8": [{"quant_method": "fp8", "fmt": "e4m3", **block} for block in ({}, {"weight_block_size": [128, 128]})],
    "mxfp4": [{"quant_method": "mxfp4"}],
    "compressed-tensors": [
        *(compressed(num_bits=bits) for bits in (2, 4, 8)),
        compressed("int-quantized", num_bits=8, strategy="tensor"),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 64]),
    ],
}
"""Configurations that the documentation lists as supported."""
NOT_YET: dict[str, dict[str, Any]] = {
    "gptq": {
        "3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 32},
        "dynamic": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*": {}}},
        "marlin": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
    },
    "awq": {form: {"quant_method": "awq", "bits": 4, "group_size": 64, "version": form} for form in ("gemv", "marlin")},
    "fp8": {"e5m2": {"quant_method": "fp8", "fmt": "e5m2"}},
    "mxfp4": {},
    "compressed-tensors": {
        "nvfp4-pack-quantized": compressed("nvfp4-pack-quantized", type="float", group_size=16),
        "mxfp4-pack-quantized": compressed("mxfp4-pack-quantized", type="float", group_size=32),
        "marlin-24": compressed("marlin-24"),
        "sparsity": {**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "transforms": {**compressed(), "transform_config": {"config_groups": {"R1": {}}}},
    },
}
"""Configurations that the documentation lists as unsupported, by the word it uses."""


def page() -> dict[str, list[str]]:
    """Return the rows of the documentation's table by checkpoint kind: what is supported, and what
    is not yet."""
    part = PAGE.read_text().partition("## Quantised checkpoints")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return {name.replace("`", ""): cells for name, *cells in rows[2:]}


@pytest.mark.parametrize("method", READ)
def test_what_the_page_says_of_a_method_is_so(method: str) -> None:
    _, lacks = page()[method]
    for given in READ[method]:
        assert read_quantization({"quantization_config": given}), given
    words = set(re.split("[;,] ", lacks.replace("`", ""))) - {"-"}
    assert words == NOT_YET[method].keys()
    for given in NOT_YET[method].values():
        with pytest.raises(CheckpointError, match="quantised with"):
            read_quantization({"quantization_config": given})


def test_methods_that_the_page_calls_unread_are_refused_by_their_names() -> None:
    (row,) = (name for name in page() if "bitsandbytes" in name)
    for name in row.split(", "):
        with pytest.raises(CheckpointError, match=f"quantised by '{name}'; wanted gptq, awq"):
            read_quantization({"quantization_config": {"quant_method": name}})


def test_the_page_lists_every_type_of_gguf_that_has_a_name() -> None:
    read, lacks = page()["GGUF"]
    assert read.split(", ") == sorted((name for name, _, _ in gguf_header.TYPES.values()), key=read.split(", ").index)
    assert set(lacks.split(", ")) == set(gguf_header.OTHERS.values())
    with pytest.raises(CheckpointError, match="'quantization'"):
        read_quantization({"quantization": {"bits": 4, "group_size": 64}})
