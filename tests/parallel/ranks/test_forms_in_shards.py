"""Every model form with data parallel shards: an idle shard keeps its states and KV, and values
that cross shards equal transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from tests import checkpoints
from tests.checkpoints import save
from tests.laws import test_pooling_laws as pooling
from tests.laws import test_prompt_embeds as images
from tests.laws.engine import check_logprobs, random_prompts
from tests.models.gguf_checkpoints import write
from tests.models.test_gguf import ORACLES
from tests.parallel.engine import RankedEngine
from tests.parallel.ranks.test_forms_on_ranks import FORMS, SEED
from tests.parallel.ranks.test_settings_on_ranks import PLAIN


@pytest.mark.parametrize("name", FORMS)
def test_shards_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    """Arrivals while others run, a single request, and prefix cache hits."""
    make, _, settings = FORMS[name]
    oracle = make()
    with RankedEngine(checkpoints.save(oracle, tmp_path), tp=2, dp=2, max_batch_tokens=9, **settings) as engine:
        prompts = random_prompts(SEED, (1, 5, 30))
        check_logprobs(engine.run(prompts, 6, score_prompts=True, stagger=2), oracle, 1e-4)
        check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 4), oracle, 1e-4)
        assert engine.scheduler.stats().hit_tokens > 15


@pytest.mark.parametrize("name", [name for name in pooling.CASES if name != "transformers"])
def test_vectors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case, prompts = pooling.CASES[name], random_prompts(5, pooling.LENGTHS)
    oracle = case.oracle()
    save(case.saved(oracle), tmp_path)
    if case.mode is not None:
        pooling.write_modules(tmp_path, case.mode, normalize=case.normalize)
    with RankedEngine(tmp_path, **case.settings, dp=2) as engine:
        found = pooling.embed(engine, prompts)
    np.testing.assert_allclose(found, pooling.expected(case, oracle, prompts), atol=pooling.TOLERANCE)


@pytest.mark.parametrize("name", images.MODELS)
def test_images_among_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle, prompts = images.MODELS[name](), images.mixed()
    with RankedEngine(save(oracle, tmp_path), max_batch_tokens=7, dp=2) as engine:
        images.check(oracle, prompts, images.serve(engine, prompts))


def test_a_gguf_file_is_shared_too(tmp_path: Path) -> None:
    make, arch, kind = ORACLES["qwen3-moe"]
    oracle = make()
    file = write(oracle, tmp_path / "model.gguf", arch, lambda name: None if "mlp.gate.weight" in name else kind)
    with RankedEngine(file, **PLAIN, dp=2) as engine:
        check_logprobs(engine.run(random_prompts(5, (5, 17)), 6, score_prompts=True), oracle, 2e-4)
    with pytest.raises(ConfigError, match="experts in a GGUF file cannot be read separately; --ep 1"):
        RankedEngine(file, ep=2)
