"""Engine settings on several ranks: each works as on one rank, or is refused by name before any
process starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.start import start
from tests import deepseek_v4, latent
from tests.checkpoints import bert, gemma2, llama, save
from tests.laws import test_pooling_laws as pooling
from tests.laws import test_prompt_embeds as images
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.models.gguf_checkpoints import write
from tests.models.test_gguf import ORACLES
from tests.parallel import defects
from tests.parallel.engine import RankedEngine, configured

PLAIN: dict[str, Any] = {"kernels": "reference"}


def texts(engine: TokenEngine) -> list[list[int]]:
    """The tokens for prompts in chunks that arrive while others run."""
    return [each.tokens for each in engine.run(random_prompts(5, (21, 6, 30)), 16, stagger=2)]


ASKED: MappingProxyType[str, tuple[Callable[[], Any], dict[str, Any]]] = MappingProxyType(
    {
        "cells of 8 bits": (llama, {"kv_cache_dtype": "int8"}),
        "latent rows of 8 bits": (latent.deepseek_v3, {"kv_cache_dtype": "fp8", "page_size": 16}),
        "windows and blocks of 8 bits": (deepseek_v4.deepseek_v4, {"kv_cache_dtype": "fp8", "page_size": 16}),
        "windows in the memory of other pages": (gemma2, {"kv_memory": "shared"}),
        "prompts by slices of layers": (llama, {"prompt_slices": "20"}),
        "rows in host memory": (
            latent.deepseek_v32,
            {"hisparse": json.dumps({"device_buffer_size": 24, "host_to_device_ratio": 100}), "graph": "off"},
        ),
    }
)


@pytest.mark.needs("host")
@pytest.mark.parametrize("name", ASKED)
def test_texts_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    make, settings = ASKED[name]
    folder = save(make(), tmp_path)
    alone = TokenEngine(folder, max_batch_tokens=16, **settings)
    wanted = texts(alone)
    with RankedEngine(folder, max_batch_tokens=16, **settings) as engine:
        assert texts(engine) == wanted
        assert engine.recorder.swaps == alone.recorder.swaps
        assert bool(engine.recorder.swaps.rows) == ("hisparse" in settings)
        assert any(path.startswith("layers") for path in engine.paths) == ("prompt_slices" in settings)
    alone.worker.close()


@pytest.mark.parametrize("name", [name for name in pooling.CASES if name != "transformers"])
def test_vectors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case, prompts = pooling.CASES[name], random_prompts(5, pooling.LENGTHS)
    oracle = case.oracle()
    save(case.saved(oracle), tmp_path)
    if case.mode is not None:
        pooling.write_modules(tmp_path, case.mode, normalize=case.normalize)
    with RankedEngine(tmp_path, **case.settings) as engine:
        found = pooling.embed(engine, prompts)
    np.testing.assert_allclose(found, pooling.expected(case, oracle, prompts), atol=pooling.TOLERANCE)


def test_a_bias_that_every_rank_adds_shows_in_vectors(tmp_path: Path) -> None:
    oracle, prompts = bert(), random_prompts(5, pooling.LENGTHS)
    with RankedEngine(save(oracle, tmp_path), defects.bias_on_every_rank) as engine:
        found = pooling.embed(engine, prompts)
    wanted = pooling.expected(pooling.CASES["bert"], oracle, prompts)
    assert np.abs(found - wanted).max() > 10 * pooling.TOLERANCE


@pytest.mark.parametrize("name", pooling.SCORED)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle, prompts = pooling.SCORED[name](), random_prompts(6, (9, 21, 4))
    types = [(np.arange(len(prompt)) >= len(prompt) // 2).astype(np.int32) for prompt in prompts]
    with RankedEngine(save(oracle, tmp_path)) as engine:
        found = pooling.embed(engine, prompts, types)
    np.testing.assert_allclose(found, pooling.scores_of(oracle, prompts, types), atol=pooling.TOLERANCE)


@pytest.mark.parametrize("name", images.MODELS)
def test_images_among_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts as embeddings, with positions on three axes."""
    oracle, prompts = images.MODELS[name](), images.mixed()
    with RankedEngine(save(oracle, tmp_path), max_batch_tokens=7) as engine:
        images.check(oracle, prompts, images.serve(engine, prompts))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", ["llama-wide-heads-tied", "llama-biases", "qwen3-halves", "qwen3-moe", "phi3", "glm4"])
def test_a_gguf_file_is_divided_too(name: str, reads: bool, tmp_path: Path) -> None:
    make, arch, kind = ORACLES[name]
    oracle = make()
    file = write(oracle, tmp_path / "model.gguf", arch, lambda name: None if "mlp.gate.weight" in name else kind)
    with RankedEngine(file, defects.reads_codes if reads else None, **PLAIN) as engine:
        check_logprobs(engine.run(random_prompts(5, (5, 17)), 6, score_prompts=True), oracle, 2e-4)


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (llama, {"tp": 3}, "tp is 3, and this model has 4 attention heads; wanted one of 1, 2, 4"),
        (llama, {"model_impl": "transformers"}, "tp is 2 and model_impl is 'transformers', which do not go together"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_before_any_process(
    make: Callable[..., Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = configured(save(make(), tmp_path), **settings)

    def never(spec: RankSpec) -> Any:
        raise AssertionError("a process was started")

    with pytest.raises(ConfigError, match=re.escape(said)):
        start(config, ranks=RankOptions(never))
