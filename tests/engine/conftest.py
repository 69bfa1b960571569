"""The embedded model, loaded once in float32, and transformers' view of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglcore import LLM
from sglcore.engine.start import embedded_model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_requests=8, threads=1, kv_cache_memory=64 << 20, overlap=True) as loaded:
        yield loaded
        loaded.engine.scheduler.audit()


@pytest.fixture(scope="session")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32).eval()
