"""Classes of transformers with few defined positions: no trace of a class uses more positions than
it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.models.transformers_backend import shape_walk
from sglcore.models.transformers_backend.shape_walk import DoesNotRun
from tests.models.transformers_cases import compare, sizes_of, tiny_model

KINDS = {
    "gpt_neo": "max_position_embeddings",
    "mpt": "max_seq_len",
    "opt": "max_position_embeddings",
    "gptj": "n_positions",
    "xglm": "max_position_embeddings",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_context_is_served_as_a_long_one_is(kind: str, tmp_path: Path) -> None:
    assert compare(tiny_model(kind, {**sizes_of(kind), KINDS[kind]: 100}), tmp_path) < 1e-4


def test_a_walk_beyond_the_positions_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shape_walk, "_POSITIONS", ())
    with pytest.raises(DoesNotRun, match="does not run on shapes alone"):
        compare(tiny_model("mpt", {**sizes_of("mpt"), "max_seq_len": 100}), tmp_path)
