"""What drafts take from a configuration and from the shapes of their tensors, and the last values
that fit a target."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.checkpoint.frozen_draft_config import FrozenCells
from sglcore.checkpoint.model_config import ModelConfig, config_of
from sglcore.core.errors import ConfigError
from sglcore.models.drafts.dflash import default_layers, dflash_words
from sglcore.models.drafts.eagle3 import aux_layers_of, eagle3_words
from sglcore.models.drafts.gemma4_assistant import frozen_words

LAYERS, VOCABULARY, WIDTH = 6, 96, 48
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
IDS = "eagle_aux_hidden_state_layer_ids"


def read(**words: Any) -> ModelConfig:
    """A draft's configuration; only its path is not there."""
    return config_of(Path("nowhere"), {**SIZES, **words})


def target(*layers: Any) -> Any:
    """A target with six layers, as far as a draft asks about it."""
    sizes = SimpleNamespace(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, hidden_size=WIDTH)
    return SimpleNamespace(config=sizes, feature_size=WIDTH, attention_layers=layers)


def columns(count: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a draft that reads this number of layers."""
    return {"fc.weight": (WIDTH, count * WIDTH)}


def block_words(count: int = 2, block: Any = 4, mask: Any = 3, ids: Any = None) -> dict[str, Any]:
    own = {"mask_token_id": mask, **({} if ids is None else {"target_layer_ids": ids})}
    return dflash_words(read(block_size=block, dflash_config=own), columns(count), target())


@pytest.mark.parametrize("block", [2, 16])
@pytest.mark.parametrize("mask", [0, VOCABULARY - 1])
def test_a_block_has_two_tokens_at_least_and_its_mask_is_any_token(block: int, mask: int) -> None:
    found = block_words(block=block, mask=mask)
    assert (found["block_size"], found["mask_token_id"], found["target_hidden_size"]) == (block, mask, WIDTH)


@pytest.mark.parametrize("ids", [[0, 5], [1, 2], [0, 1]])
def test_a_block_reads_the_output_of_the_layers_it_names(ids: list[int]) -> None:
    assert block_words(ids=ids)["aux_layers"] == tuple(each + 1 for each in ids)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"block": 1}, "block_size = 1; wanted 2 or more"),
        ({"block": 4.0}, "block_size = 4.0; wanted 2 or more"),
        ({"mask": -1}, "mask_token_id = -1; wanted a token id below 96"),
        ({"mask": VOCABULARY}, "mask_token_id = 96; wanted a token id below 96"),
        ({"mask": None}, "mask_token_id = None; wanted a token id below 96"),
        ({"ids": [0, 6]}, r"target_layer_ids = \[0, 6\]; wanted 2 ascending numbers of the model's 6 layers"),
        ({"ids": [-1, 2]}, r"target_layer_ids = \[-1, 2\]; wanted 2 ascending"),
        ({"ids": [3, 2]}, r"target_layer_ids = \[3, 2\]; wanted 2 ascending"),
        ({"ids": [1, 2, 3]}, r"target_layer_ids = \[1, 2, 3\]; wanted 2 ascending"),
        ({"ids": []}, r"target_layer_ids = \[\]; wanted 2 ascending"),
    ],
    ids=str,
)
def test_a_block_that_does_not_fit_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        block_words(**given)


def test_a_block_of_layers_with_a_window_is_refused() -> None:
    words = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
    given = read(**words, max_window_layers=0, block_size=4, dflash_config={"mask_token_id": 3})
    with pytest.raises(ConfigError, match="wanted 'full_attention' alone"):
        dflash_words(given, columns(2), target())


@pytest.mark.parametrize(
    ("count", "layers", "wanted"),
    [(5, 36, [1, 9, 17, 25, 33]), (1, 36, [18]), (1, 7, [3]), (2, 6, [1, 3]), (3, 8, [1, 3, 5])],
)
def test_a_block_that_names_no_layers_reads_some_at_equal_distances(count: int, layers: int, wanted: list[int]) -> None:
    assert default_layers(count, layers) == wanted


def test_a_block_reads_as_many_default_layers_as_its_projection_has_inputs() -> None:
    assert block_words(count=1)["aux_layers"] == (4,)
    assert block_words(count=2)["aux_layers"] == (2, 4)


@pytest.mark.parametrize("place", ["the top", "eagle_config"])
@pytest.mark.parametrize(
    ("library", "ids", "wanted"),
    [(False, [0, 5], (1, 6)), (False, [-1, 0], (0, 1)), (True, [0, 6], (0, 6)), (True, [3, 3], (3, 3))],
)
def test_features_are_of_the_embedding_up_to_the_last_layer(
    place: str, library: bool, ids: list[int], wanted: tuple[int, ...]
) -> None:
    """The library speculators counts outputs from the embedding, others from the first layer."""
    words: dict[str, Any] = {IDS: ids} if place == "the top" else {"eagle_config": {IDS: ids}}
    words |= {"speculators_model_type": "eagle3"} if library else {}
    assert aux_layers_of(read(**words), columns(2), LAYERS, WIDTH) == wanted


@pytest.mark.parametrize(
    ("library", "ids"), [(False, [0, 6]), (True, [0, 7]), (False, [-2, 0]), (True, [-1, 0]), (False, [2, 1])]
)
def test_features_of_layers_that_there_are_not_are_refused(library: bool, ids: list[int]) -> None:
    words: dict[str, Any] = {IDS: ids, **({"speculators_model_type": "eagle3"} if library else {})}
    with pytest.raises(ConfigError, match="wanted ascending numbers of the model's 6 layers"):
        aux_layers_of(read(**words), columns(2), LAYERS, WIDTH)


def test_a_draft_may_read_the_last_hidden_states_instead_of_layers() -> None:
    assert aux_layers_of(read(eagle_config={"use_aux_hidden_state": False}), {}, LAYERS, WIDTH) == ()
    assert aux_layers_of(read(eagle_config={}), columns(3), 12, WIDTH) == (2, 6, 9)


@pytest.mark.parametrize(("rows", "has_map"), [(VOCABULARY, True), (VOCABULARY, False), (40, True)])
def test_a_draft_has_a_map_of_tokens_only_where_its_file_has_one(rows: int, has_map: bool) -> None:
    shapes: dict[str, tuple[int, ...]] = {**columns(3), "lm_head.weight": (rows, WIDTH)}
    shapes |= {"d2t": (rows,)} if has_map else {}
    found = eagle3_words(read(draft_vocab_size=rows), shapes, target())
    assert (found["draft_vocab_size"], found["has_d2t"]) == (rows, has_map)
    del shapes["lm_head.weight"]
    if rows == VOCABULARY:
        assert not eagle3_words(read(), shapes, target())["has_d2t"]


def layer(place: int, window: int | None = None, **changes: Any) -> Any:
    """A target's attention with two heads of 12."""
    given = {"rows": None, "is_exact": False, "num_kv_heads": 2, "head_dim": 12, **changes}
    return SimpleNamespace(layer_id=place, sliding_window=window, **given)


def frozen(groups: int, most: int, stored: int, *layers: Any, ordered: bool = True) -> dict[str, Any]:
    words = {"use_ordered_embeddings": ordered, "num_centroids": groups, "centroid_intermediate_top_k": most}
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.{at}.self_attn.q_norm.weight": (12,) for at in range(2)}
    shapes["masked_embedding.centroids.weight"] = (stored, WIDTH)
    return frozen_words(read(backbone_hidden_size=WIDTH, **words), shapes, target(*layers))


@pytest.mark.parametrize(("groups", "most"), [(1, 1), (8, 8), (8, 1), (VOCABULARY, 5)])
def test_a_draft_chooses_one_to_all_groups_of_tokens(groups: int, most: int) -> None:
    assert frozen(groups, most, groups, layer(0))["token_groups"] == (groups, most)
    assert frozen(groups, most, groups, layer(0), ordered=False)["token_groups"] is None


@pytest.mark.parametrize(
    ("groups", "most", "stored", "told"),
    [
        (8, 9, 8, "centroid_intermediate_top_k = 9; wanted 1 to 8"),
        (8, 0, 8, "centroid_intermediate_top_k = 0; wanted 1 to 8"),
        (0, 1, 0, "num_centroids = 0; wanted 0, as masked_embedding.centroids has, and a divisor of 96"),
        (7, 1, 7, "num_centroids = 7; wanted 7, .* and a divisor of 96"),
        (8, 1, 4, "num_centroids = 8; wanted 4"),
    ],
)
def test_groups_of_tokens_that_do_not_fit_are_refused(groups: int, most: int, stored: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        frozen(groups, most, stored, layer(0))


def test_a_draft_reads_the_last_layer_without_a_window() -> None:
    found = frozen(1, 1, 1, layer(0), layer(1), layer(2, window=4))["frozen_cells"]
    assert found == (FrozenCells(1, 2, 12, None),) * 2


@pytest.mark.parametrize("changes", [{"rows": object()}, {"is_exact": True}], ids=["rows", "exact"])
def test_a_draft_reads_no_layer_whose_cache_has_another_form(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"layer_types\[0\] = 'full_attention'; wanted a kind of layer with keys"):
        frozen(1, 1, 1, layer(0), layer(1, **changes))
    assert frozen(1, 1, 1, layer(0, **changes), layer(1))["frozen_cells"][0].layer_id == 1
