"""DeepSeek-V3.2 and V4 give transformers' numbers with each of a vendor's libraries and without.

A package's test file says which libraries serve these models, and has `from
tests.laws.attention.sparse_models import *` for the fixture.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.engine.llm import LLM
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.kernels.triton import Tuning
from sglcore.sampling.params import SamplingParams
from tests.checkpoints import Oracle, oracle_logprobs, save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import deepseek_v32

__all__ = ["sparse_model"]

CONTEXT = 160
HEADS = {"num_attention_heads": 64, "index_head_dim": 128, "num_experts_per_tok": 8}
LATENT = {**HEADS, "num_key_value_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
MODELS = {
    "deepseek-v3.2": (deepseek_v32, {**LATENT, "index_topk": CONTEXT, "n_group": 1}),
    "deepseek-v4": (deepseek_v4, {**HEADS, "head_dim": 512, "index_topk": CONTEXT // 4}),
}
"""Published head and entry sizes, which libraries take. All entries and experts are selected, so
that rounding changes no selection."""
NEAR, MEAN = 0.2, 0.03
"""Largest and mean difference of a log-probability by bfloat16 over a few layers."""
LENGTHS = (30, 5, 70)


@pytest.fixture(scope="module", params=list(MODELS))
def sparse_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """A model of transformers in float32, its weights exact in bfloat16, and its checkpoint."""
    make, changes = MODELS[request.param]
    oracle = make(max_position_embeddings=4 * CONTEXT, **changes)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@dataclass(frozen=True)
class Library:
    """A vendor's library that serves entries of these models."""

    module: str
    """Its top module."""
    users: tuple[str, ...]
    """The modules of the package that import it."""
    origin: str
    """How a row of the ledger for an entry that it serves begins, after "kernel "."""

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it impossible to import, and its users be imported anew."""
        for name in [name for name in sys.modules if name.partition(".")[0] == self.module]:
            monkeypatch.setitem(sys.modules, name, None)
        for user in self.users:
            monkeypatch.delitem(sys.modules, user, raising=False)


def hold(model: tuple[Oracle, Path], device: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    """Compare log-probabilities with transformers', of prompts in chunks and of sampled tokens, and
    return the rows of the ledger. Kernels that no library serves are the reference."""

    def reference(tuning: Tuning) -> KernelTable:
        return KernelTable()

    monkeypatch.setattr("sglcore.runtime.kernels.triton.triton_kernels", reference)
    oracle, folder = model
    given = {"dtype": "bfloat16", "max_model_len": CONTEXT, "max_requests": 4, "max_batch_tokens": 24}
    given |= {"kv_cache_memory": 64 << 20, "graph_buckets": (1, 4), "skip_tokenizer": True, **settings}
    generator = np.random.default_rng(1)
    prompts = [generator.integers(1, oracle.config.vocab_size, length).tolist() for length in LENGTHS]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(folder), device=device, **given) as engine:
        outputs = engine.generate(prompts, params)
        told = "\n".join(f"{row.topic}: {row.effective}: {row.reason}" for row in engine.ledger.rows)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (sample,) = output.outputs
        ids = [*prompt, *sample.token_ids]
        records = [*(output.prompt_logprobs or ())[1:], *(sample.logprobs or ())]
        assert len(records) == len(ids) - 1
        scores = [record.logprob for record in records if record is not None]
        wanted = oracle_logprobs(oracle, ids)[torch.arange(len(ids) - 1), ids[1:]].numpy()
        found.append(np.abs(np.array(scores) - wanted))
    error = np.concatenate(found)
    assert error.max() < NEAR and error.mean() < MEAN, (error.max(), error.mean())
    return told


def hold_without(
    missing: Sequence[Library], model: tuple[Oracle, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare as `hold` without these libraries, and assert that none of them serves an entry."""
    for library in missing:
        library.take_away(monkeypatch)
    told = hold(model, device, monkeypatch)
    assert [library.module for library in missing if library.origin in told] == []
