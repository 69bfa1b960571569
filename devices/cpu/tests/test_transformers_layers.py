"""Model classes of transformers on the native kernels, as users run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_cpu.choice import kernels
from tests.models.transformers_cases import compare, sizes_of, tiny_model


@pytest.mark.parametrize("kind", ["falcon_mamba", "gemma2", "gpt_oss", "jamba", "mamba", "mixtral"])
def test_a_type_gives_on_native_kernels_what_its_own_forward_gives(kind: str, tmp_path: Path) -> None:
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path, kernels=kernels()) < 2e-4
