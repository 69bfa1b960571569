"""KV entries in 8 bits have equal values in the float format that the GPU converts and in the
reference's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ
from sglcore.runtime.kernels.triton.sparse import latent_rows
from sglcore.runtime.memory.kv_rows import FP8
from sglcore_hip.capability import read_capability
from tests.checkpoints import Oracle, save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import deepseek_v32
from tests.laws.engine import TokenEngine, random_prompts

CLOSE = 2e-3
"""Tolerance of log-probabilities in float32: entries that differ in the last bits may round
differently."""


@pytest.mark.needs("simulator")
@pytest.mark.parametrize(
    ("make", "changes", "backend"),
    [(deepseek_v4, {}, "compressed"), (deepseek_v4, {}, "hip_radix"), (deepseek_v32, {"n_group": 1}, "latent")],
)
def test_a_model_s_rows_are_kept_in_the_gpu_s_floats_and_say_the_same(
    make: Callable[..., Oracle], changes: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    check(save(make(num_experts_per_tok=8, index_topk=64, **changes), tmp_path / "model"), backend)


@pytest.mark.needs("simulator")
def test_the_scale_of_the_other_format_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same byte means half as much in e4m3fnuz as in e4m3fn."""
    if read_capability().float8 != E4M3FNUZ:
        pytest.skip("needs a GPU that converts e4m3fnuz")
    known = latent_rows.form_of
    monkeypatch.setattr(latent_rows, "form_of", lambda codec: known(codec) | ({"BIAS": 7} if codec else {}))
    folder = save(deepseek_v4(num_experts_per_tok=8, index_topk=64), tmp_path / "model")
    with pytest.raises(AssertionError):
        check(folder, "hip_radix")


def check(folder: Path, backend: str) -> None:
    """Raise AssertionError if the reference's floats and the GPU's give other results."""
    found, forms = [], []
    for kernels in ("reference", "triton"):
        given = {"attention_backend": backend, "page_size": 16, "max_model_len": 64, "graph": "off"}
        engine = TokenEngine(folder, kernels=kernels, kv_cache_dtype=FP8, poison=True, **given)
        pool: Any = engine.worker.runner.attn_backend.token_to_kv_pool
        forms.append({kept.codec.float8 for layer in pool.layers for kept in layer.values() if kept.codec})
        found.append(engine.run(random_prompts(3, (21, 6)), 3, score_prompts=True))
    assert forms == [{E4M3FN}, {read_capability().float8 or E4M3FN}]
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(
            one.prompt_logprobs + one.logprobs, other.prompt_logprobs + other.logprobs, atol=CLOSE
        )
