"""Flags of speculative decoding: other engines' names for them, and refusals in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.cli.__main__ import main
from sglcore.cli.aliases import drafter_name
from sglcore.cli.setting_flags import engine_settings
from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"speculative": "EAGLE3", "draft_model": "/d"}, {"speculative": "eagle3", "draft_model": "/d"}),
        ({"speculative": "NEXTN", "draft_tokens": 3}, {"speculative": "mtp", "draft_tokens": 3}),
        ({"speculative": "NGRAM", "speculative_num_draft_tokens": 8}, {"speculative": "ngram", "draft_tokens": 7}),
        (
            {"speculative_config": '{"method": "draft_model", "model": "/d", "num_speculative_tokens": 5}'},
            {"speculative": "standalone", "draft_model": "/d", "draft_tokens": 5},
        ),
        (
            {"speculative": "EAGLE3", "draft_width": 4, "draft_tokens": 3, "speculative_num_draft_tokens": 8},
            {"speculative": "eagle3", "draft_width": 4, "draft_depth": 3, "draft_tokens": 7},
        ),
        ({"draft_width": 4, "draft_tokens": 9}, {"draft_width": 4, "draft_tokens": 9}),
        ({"speculative_config": '{"model": "/d"}', "draft_tokens": 2}, {"draft_model": "/d", "draft_tokens": 2}),
    ],
)
def test_what_other_engines_call_it_is_ours(given: dict[str, object], wanted: dict[str, object]) -> None:
    assert engine_settings(given) == wanted


def test_names_of_drafters_are_ours() -> None:
    words = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "deepseek_mtp", "FROZEN_KV_MTP", "Medusa")
    ours = ["eagle", "eagle3", "mtp", "standalone", "ngram", "mtp", "frozen-mtp", "medusa"]
    assert [drafter_name(word) for word in words] == ours


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"speculative_config": "{"}, "--speculative-config is not JSON"),
        ({"speculative_config": "[4]"}, "wanted an object of method, model, num_speculative_tokens"),
        ({"speculative_config": '{"method": "ngram", "prompt_lookup_max": 4}'}, "leave prompt_lookup_max out"),
        ({"speculative_config": '{"method": 3}'}, "wanted a name"),
        ({"speculative_config": '{"method": "ngram"}', "speculative": "off"}, "give --speculative alone"),
        ({"speculative_num_draft_tokens": 4, "draft_tokens": 3}, "give --draft-tokens alone"),
        ({"speculative_config": '{"num_speculative_tokens": "4"}'}, "draft_tokens is '4'"),
        ({"speculative_num_draft_tokens": 1}, "draft_tokens is 0"),
        ({"speculative_num_draft_tokens": 34}, "draft_tokens is 33; it must be at most 32"),
    ],
)
def test_what_is_none_of_them_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_config(engine_settings(given), {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--speculative-algorithm", "MEDUSA"),
            "speculative is 'medusa'; wanted one of auto, off, ngram, suffix, eagle",
        ),
        (("--speculative", "eagle"), "this checkpoint has no such draft; --draft-model FOLDER"),
        (("--speculative", "ngram", "--draft-model", "."), "leave one of --draft-model and --speculative out"),
        (("--speculative-draft-model-path", "nowhere"), "there is no folder 'nowhere'"),
        (("--speculative", "standalone", "--speculative-model", "."), "this is not a checkpoint folder"),
        (("--draft-tokens", "0"), "draft_tokens is 0; it must be at least 1. Give a positive number or leave it out."),
        (
            ("--draft-tokens", "-3"),
            "draft_tokens is -3; it must be at least 1. Give a positive number or leave it out.",
        ),
        (("--draft-tokens", "1000"), "draft_tokens is 1000; it must be at most 32. Give no more or leave it out."),
    ],
)
def test_what_does_not_fit_is_one_line(
    words: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(("explain", *words)) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and len(error.splitlines()) == 1


def test_explain_shows_what_proposes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("explain", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "speculative ngram ngram, 5" in shown


def test_explain_shows_what_proposals_are_drawn_from(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--speculative", "eagle3", "--speculative-verify", "block", "--max-requests", "7", "--draft-tokens", "3")
    assert main(("explain", *words)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"draft probabilities block {8 * 3 * 2147 * 4 / 2**20:.1f} MiB" in shown
