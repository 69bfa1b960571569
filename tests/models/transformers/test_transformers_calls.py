"""Kernels under transformers' classes are chosen for the calls that the layers make, and nothing of
a call stays."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.kernels.test_takes import recording
from tests.models.steps import Steps
from tests.models.transformers_cases import load, sizes_of, tiny_model

PARTS = ("linear", "embedding", "rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "gelu_tanh_and_mul", "head")
EXPERTS = ("top_k_routing", "sigmoid_routing", "moe", "clamped_moe", "softcap", "store_kv")
FUSED = ("rotary_and_store", "norm_rotary_and_store", "gated_linear")
CASES = [
    *((kind, 2) for kind in ("llama", "glm4", "stablelm", "mixtral", "gpt_oss")),
    ("qwen3", 1),  # normed before the heads are transposed,
    ("qwen3", 2),
    ("qwen3_next", 2),  # as a part of wider rows,
    ("gemma3_text", 1),  # after it,
    ("gemma3_text", 2),
    ("hunyuan_v1_dense", 2),  # and after the rotary embedding
    ("phimoe", 2),  # with routers of the class's own, which give 64-bit ids
    ("ernie4_5_moe", 2),
]


@pytest.mark.parametrize("entries", [(*PARTS, *EXPERTS), (*PARTS, *EXPERTS, *FUSED)], ids=["parts", "fused"])
@pytest.mark.parametrize(("kind", "kv_heads"), CASES)
def test_kernels_are_chosen_for_the_calls_that_layers_make(
    kind: str, kv_heads: int, entries: tuple[str, ...], tmp_path: Path
) -> None:
    """For any number of tokens: a kernel may be compiled for the other sizes."""
    table, asked, called = recording(entries)
    model = tiny_model(kind, {**sizes_of(kind), "num_key_value_heads": kv_heads})
    steps = Steps(load(model, tmp_path, kernels=table))
    steps.runner.attn_backend.takes_stored = True
    steps.logprobs({1: [3, 4, 5], 2: [7]})
    steps.logprobs({1: [9]})
    for name in entries:
        assert called[name] <= asked[name], f"{name} was not asked for {called[name] - asked[name]}"
    assert called["linear"] and called["embedding"] and sum(map(len, called.values())) > 4


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_neo", "bloom", "jamba", "mixtral", "diffllama", "stablelm"])
def test_no_tensor_of_a_step_stays(kind: str, tmp_path: Path) -> None:
    """One that stays would take a step's memory between steps."""
    model, seen = load(tiny_model(kind, sizes_of(kind)), tmp_path), []

    def note(module: Any, args: Any, named: Any) -> None:
        given = (each for each in (*args, *named.values()) if isinstance(each, Tensor) and each.is_floating_point())
        seen.extend(StorageWeakRef(each.untyped_storage()) for each in given)

    for module in model._decoder.modules():
        module.register_forward_pre_hook(note, with_kwargs=True)
    Steps(model).hidden({1: [5, 9, 7], 2: [3]})
    gc.collect()
    assert len(seen) > 10 and all(each.expired() for each in seen)
