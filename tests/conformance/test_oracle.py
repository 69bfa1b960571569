"""The reference agrees with independent code, and a difference is reported with position, size and
margin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sglcore.conformance.inputs.kit_models import MODELS, write_checkpoint
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Kit
from sglcore.conformance.law import LawBroken
from sglcore.conformance.oracle import check_results
from sglcore.conformance.reference_parts import REFERENCE


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    made = Kit(REFERENCE, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize("model", ["dense", "window", "moe"])
def test_the_reference_gives_the_log_probabilities_of_transformers(model: str, kit: Kit) -> None:
    folder = kit.checkpoint(model, 16)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (ids,) = random_prompts(3, (40,))
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    np.testing.assert_allclose(kit.oracle(model, 16).logprobs(ids), wanted, atol=2e-5, rtol=0)


def test_a_checkpoint_is_the_same_each_time_and_exact_in_bfloat16(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for model in MODELS:
        one, other = (write_checkpoint(tmp_path / name / model, model, 16) for name in "ab")
        first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
        assert first.keys() == second.keys()
        for name, weight in first.items():
            assert torch.equal(weight.nan_to_num(9), second[name].nan_to_num(9)), name
            assert torch.equal(weight.bfloat16().float().nan_to_num(9), weight.nan_to_num(9)), name


def test_the_first_divergent_token_is_told_with_the_margin_of_the_two_best(kit: Kit) -> None:
    harness = kit.harness("dense")
    (result,) = harness.run(random_prompts(1, (7,)), 4)
    oracle = kit.oracle("dense", 16)
    assert check_results([result], oracle, 1e-4) < 1e-5
    wrong = [*result.scores[:2], replace(result.scores[2], chosen=result.scores[2].chosen - 0.5), *result.scores[3:]]
    with pytest.raises(LawBroken, match=r"the first divergent token is number 9 .*output.* two best are .* apart"):
        check_results([replace(result, scores=wrong)], oracle, 1e-4)


def test_a_greedy_token_must_be_one_of_the_best(kit: Kit) -> None:
    harness = kit.harness("dense")
    (result,) = harness.run(random_prompts(1, (7,)), 1)
    oracle = kit.oracle("dense", 16)
    worst = int(oracle.logprobs(result.prompt)[-1].argmin())
    with pytest.raises(LawBroken, match="below the oracle's best"):
        check_results([replace(result, tokens=[worst], scores=[])], oracle, 1e-4)


def test_what_is_not_a_number_is_never_within_the_tolerance(kit: Kit) -> None:
    harness = kit.harness("dense")
    (result,) = harness.run(random_prompts(1, (7,)), 1)
    wrong = [replace(result.scores[0], chosen=result.scores[0].chosen * np.float32("nan"))]
    with pytest.raises(LawBroken, match="largest difference inf"):
        check_results([replace(result, scores=wrong)], kit.oracle("dense", 16), 1e9)
