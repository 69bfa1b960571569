"""The MTP layer of DeepSeek-V4 in a whole engine: draft tokens are drawn from the distribution of
transformers' modules on the resulting text, with the target's streams as features."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.mlx.tests import test_draft_laws as laws

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_the_mtp_layer_drafts_from_all_streams(tmp_path: Path, graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.deepseek_v4 import HEAVY, RATES, DenseStreams, deepseek_v4, streams_of, with_published_names

    target = deepseek_v4(compress_rates={**RATES, HEAVY: 128})
    folder = with_published_names(target, tmp_path)
    monkeypatch.setattr(laws, "features_of", lambda model, text, kind: streams_of(model, text))
    given = {"page_size": 128, "max_model_len": 256, "kv_cache_memory": 64 << 20, "graph": graph}
    assert laws.run(folder, "mtp", DenseStreams(folder), target, **given) < laws.TOLERANCE
