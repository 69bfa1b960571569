"""A configuration key that is missing or null means the same as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglcore.checkpoint import model_config as module
from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import ConfigError, SglcoreError
from tests.checkpoints import CAUSAL, gemma2, gpt_oss, oracle_logprobs, save
from tests.latent import LATENT, deepseek_v3
from tests.models.steps import Steps, load
from tests.models.test_causal_models import prompt

TOLERANCE = 1e-4
MOST = 300_000
"""The most parameters of a compared model; larger ones (a class's default sizes) are skipped."""
NAMED = ("architectures", "model_type", "transformers_version")
"""Keys that identify the model; these are not changed."""


def rewritten(folder: Path, raw: dict[str, Any], key: str, is_null: bool) -> None:
    """Write the configuration with `key` set to null, or without it."""
    changed = {**raw, key: None} if is_null else {name: value for name, value in raw.items() if name != key}
    (folder / "config.json").write_text(json.dumps(changed))


def theirs(oracle: Any, folder: Path) -> Any:
    """Transformers' model of the configuration, with the oracle's weights where they fit and random
    ones elsewhere. None if transformers refuses the configuration, or if the model is too large."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
        with torch.device("meta"):
            if type(oracle)(config).num_parameters() > MOST:
                return None
        model = type(oracle)(config).eval()
        model(torch.tensor([[1, 2, 3]]))
    except Exception:
        return None
    with torch.no_grad():
        torch.manual_seed(3)
        own = dict(oracle.state_dict())
        for name, value in model.state_dict().items():
            known = own.get(name)
            value.copy_(known if known is not None and known.shape == value.shape else torch.randn_like(value) * 0.3)
    limits = [mixer.time_step_limit for mixer in oracle.modules() if mixer.__class__.__name__ == "NemotronHMamba2Mixer"]
    for mixer in model.modules():
        if limits and mixer.__class__.__name__ == "NemotronHMamba2Mixer":
            mixer.time_step_limit = limits[0]  # as the function that makes the oracle does
    return model


def ours(folder: Path, ids: list[int]) -> torch.Tensor | str:
    """Our log-probabilities, or the reason why the model is refused."""
    try:
        return Steps(load(folder, max_positions=64)).logprobs({1: ids})
    except SglcoreError as error:
        return str(error)


def differences(oracle: Any, folder: Path, is_null: bool) -> list[str]:
    """The keys that we read differently, each with what was found."""
    save(oracle, folder)
    raw, ids = json.loads((folder / "config.json").read_text()), prompt(23)
    found, compared = [], 0
    for key in (key for key, value in raw.items() if value is not None and key not in NAMED):
        rewritten(folder, raw, key, is_null)
        model = theirs(oracle, folder)
        if model is not None:
            save(model, folder)
            rewritten(folder, raw, key, is_null)
        got = ours(folder, ids)
        if model is None:
            continue
        compared += 1
        if isinstance(got, str):
            found += [] if key in got else [f"{key}: refused without its name: {got}"]
        elif not (difference := (got - oracle_logprobs(model, ids)).abs().max()) < TOLERANCE:
            found.append(f"{key}: {difference:.5f} off")
    assert compared >= 5, "few are compared"
    return found


@pytest.mark.parametrize("is_null", [True, False], ids=["null", "left-out"])
@pytest.mark.parametrize("name", [*CAUSAL, *LATENT])
def test_every_key_that_is_null_or_left_out_means_what_it_means_to_the_library(
    tmp_path: Path, name: str, is_null: bool
) -> None:
    assert differences({**CAUSAL, **LATENT}[name](), tmp_path, is_null) == []


def test_null_that_is_read_as_the_default_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._said
    monkeypatch.setattr(
        module, "_said", lambda name, raw: real(name, {key: value for key, value in raw.items() if value is not None})
    )
    found = {each.partition(":")[0] for each in differences(gemma2(), tmp_path, is_null=True)}
    assert {"attn_logit_softcapping", "final_logit_softcapping"} <= found


@pytest.mark.parametrize(
    ("make", "key"), [(deepseek_v3, "kv_lora_rank"), (deepseek_v3, "v_head_dim"), (gpt_oss, "swiglu_limit")]
)
def test_null_where_a_model_needs_a_number_is_refused_by_its_name(tmp_path: Path, make: Any, key: str) -> None:
    raw = json.loads((save(make(), tmp_path) / "config.json").read_text())
    rewritten(tmp_path, raw, key, is_null=True)
    with pytest.raises(ConfigError, match=f"has no '{key}', or null"):
        load(tmp_path, max_positions=64)


def test_softcaps_that_are_null_are_none(tmp_path: Path) -> None:
    raw = json.loads((save(gemma2(), tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "final_logit_softcapping": None}))
    options = read_config(tmp_path).options
    assert "final_logit_softcapping" not in options and "attn_logit_softcapping" in options


@pytest.mark.parametrize("said", [{"rope_theta": 20000.0}, {"rope_theta": 20000.0, "rope_scaling": None}, {}])
def test_rotary_words_of_old_files_meet_a_default_that_is_not_plain(tmp_path: Path, said: dict[str, Any]) -> None:
    raw = json.loads((save(gpt_oss(), tmp_path) / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, **said}))
    wanted = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    rope = read_config(tmp_path).rope
    assert (rope.theta, rope.kind, rope.original_max) == (
        wanted["rope_theta"],
        wanted["rope_type"],
        wanted["original_max_position_embeddings"],
    )
    assert all(rope.scaling[name] == wanted[name] for name in ("factor", "beta_fast", "beta_slow", "truncate"))


def test_older_rotary_scaling_replaces_a_default_whole(tmp_path: Path) -> None:
    raw = json.loads((save(gpt_oss(), tmp_path) / "config.json").read_text())
    del raw["rope_parameters"]
    scaling = {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_scaling": scaling}))
    rope = read_config(tmp_path).rope
    assert (rope.kind, dict(rope.scaling), rope.theta) == ("linear", {"factor": 2.0}, 150000.0)
