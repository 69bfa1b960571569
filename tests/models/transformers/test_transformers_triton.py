"""Transformers' classes on the Triton kernels, as on most accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.runtime.kernels.triton import triton_kernels
from tests.models.transformers_cases import compare, sizes_of, tiny_model

KINDS = ("falcon_mamba", "gemma2", "gpt_oss", "jamba", "llama", "mamba", "mixtral")


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_gives_on_triton_kernels_what_its_own_forward_gives(kind: str, tmp_path: Path) -> None:
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path, kernels=triton_kernels()) < 2e-4
