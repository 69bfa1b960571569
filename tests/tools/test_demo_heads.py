"""The shipped draft heads have the published names, fit in a wheel, and have the recorded
acceptance."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglcore import LLM
from tests.drafts import DFlashLayer
from tools.demo.acceptance import (
    BLOCK_DRAFTS,
    DRAFTS,
    RECORD,
    TEMPERATURES,
    WRITTEN,
    Text,
    asked,
    held_out,
    tau,
    walk,
    walks,
    written,
)
from tools.demo.dflash import FOLDER as DFLASH
from tools.demo.dflash import READ_LAYERS, SIZE, DFlash, load_dflash
from tools.demo.heads import (
    AUX_LAYERS,
    DRAFT,
    Eagle3,
    Head,
    NextToken,
    delayed,
    load_eagle3,
    load_next_token,
    load_target,
    read,
    unroll,
    unrolled_attention,
)
from tools.demo.layers import FOLDER as LAYERS
from tools.demo.layers import NextTokenLayers, load_layers

FOLDER = Path(__file__).resolve().parents[2] / "sglcore" / "assets" / "demo"
PROMPTS = 4
LEAST = 0.95
UNROLLED: dict[str, Callable[[Path], Head]] = {"eagle3": load_eagle3, "mtp": load_next_token}
LOADERS = UNROLLED | {"dflash": load_dflash, LAYERS: load_layers}
SETTINGS: dict[str, dict[str, str]] = {LAYERS: {"speculative": "mtp", "draft_model": LAYERS}}
"""The settings for heads that do not have their kind's name."""
MEASURED = [*((kind, DRAFTS) for kind in LOADERS), ("dflash", BLOCK_DRAFTS)]
"""(kind, number of draft tokens) of each recorded measurement."""
LAYER = {
    "input_layernorm.weight": (256,),
    "self_attn.o_proj.weight": (256, 256),
    "post_attention_layernorm.weight": (256,),
}


@pytest.fixture(scope="module")
def texts() -> dict[float, list[Text]]:
    """The model's texts after the first prompts of the record, by temperature."""
    prompts = held_out(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), PROMPTS)
    assert list(prompts) == recorded()["prompts"]["documents"][:PROMPTS]
    with LLM(device="cpu", threads=1, max_requests=PROMPTS) as llm:
        return {each: written(llm, list(prompts.values()), asked(PROMPTS, each)) for each in TEMPERATURES}


def recorded() -> dict:
    return json.loads((FOLDER / RECORD).read_text())


def recorded_steps(kind: str, temperature: float, count: int, drafts: int = DRAFTS) -> int:
    """The recorded number of steps for the first `count` prompts."""
    found = recorded()["heads"][kind][str(temperature)]
    return sum((found if drafts == DRAFTS else found["longer"][str(drafts)])["steps"][:count])


def recorded_tau(kind: str, temperature: float, count: int, drafts: int = DRAFTS) -> float:
    """The recorded tokens per step over the first `count` prompts."""
    return count * (recorded()["written"] - 1) / recorded_steps(kind, temperature, count, drafts)


def layer(width: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer with attention inputs of size `width`."""
    projections = {"q": 256, "k": 128, "v": 128}
    attention = {f"self_attn.{name}_proj.weight": (rows, width) for name, rows in projections.items()}
    mlp = {f"mlp.{name}_proj.weight": (inner, 256) for name in ("gate", "up")} | {"mlp.down_proj.weight": (256, inner)}
    return LAYER | attention | mlp


def test_the_eagle3_head_has_the_published_names_and_shapes() -> None:
    config = json.loads((FOLDER / DRAFT / "config.json").read_text())
    rows = config["draft_vocab_size"]
    wanted = {f"midlayer.{name}": shape for name, shape in layer(512, config["intermediate_size"]).items()}
    wanted |= {"midlayer.hidden_norm.weight": (256,), "fc.weight": (256, 768), "norm.weight": (256,)}
    wanted |= {"lm_head.weight": (rows, 256), "d2t": (rows,), "t2d": (config["vocab_size"],)}
    found = load_file(FOLDER / DRAFT / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == wanted
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["target_hidden_size"] == 256
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert tuple(each + 1 for each in ids) == AUX_LAYERS


def test_the_dflash_head_has_the_published_names_and_shapes() -> None:
    config = json.loads((FOLDER / DFLASH / "config.json").read_text())
    own = layer(256, config["intermediate_size"]) | {f"self_attn.{name}_norm.weight": (32,) for name in ("q", "k")}
    layers = range(config["num_hidden_layers"])
    wanted = {f"layers.{index}.{name}": shape for index in layers for name, shape in own.items()}
    wanted |= {"fc.weight": (256, 256 * len(READ_LAYERS)), "hidden_norm.weight": (256,), "norm.weight": (256,)}
    found = load_file(FOLDER / DFLASH / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == wanted
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == SIZE
    ids, mask = config["dflash_config"]["target_layer_ids"], config["dflash_config"]["mask_token_id"]
    assert tuple(each + 1 for each in ids) == READ_LAYERS
    assert mask == json.loads((FOLDER / "config.json").read_text())["pad_token_id"]


def test_the_next_token_layers_are_a_checkpoint_of_their_own() -> None:
    config = json.loads((FOLDER / LAYERS / "config.json").read_text())
    own = layer(256, config["intermediate_size"]) | {"eh_proj.weight": (256, 512)}
    own |= {f"{name}.weight": (256,) for name in ("enorm", "hnorm", "shared_head.norm")}
    first = config["num_hidden_layers"]
    layers = range(first, first + config["num_nextn_predict_layers"])
    found = load_file(FOLDER / LAYERS / "model.safetensors")
    wanted = {f"model.layers.{index}.{name}": shape for index in layers for name, shape in own.items()}
    assert {name: tuple(value.shape) for name, value in found.items()} == wanted
    assert len(layers) == DRAFTS and first == json.loads((FOLDER / "config.json").read_text())["num_hidden_layers"]


def test_both_maps_of_the_draft_vocabulary_name_the_same_tokens() -> None:
    found = load_file(FOLDER / DRAFT / "model.safetensors")
    ids = found["d2t"] + torch.arange(len(found["d2t"]))
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    assert ids.tolist() == found["t2d"].nonzero()[:, 0].tolist()


def test_the_next_token_layer_is_in_the_models_own_file() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    wanted = layer(256, config["intermediate_size"])
    wanted |= {"enorm.weight": (256,), "hnorm.weight": (256,), "eh_proj.weight": (256, 512)}
    wanted |= {"shared_head.norm.weight": (256,)}
    prefix = f"model.layers.{config['num_hidden_layers']}."
    found = load_file(FOLDER / "model.safetensors")
    own = {name.removeprefix(prefix): tuple(value.shape) for name, value in found.items() if name.startswith(prefix)}
    assert own == wanted and config["num_nextn_predict_layers"] == 1


def test_transformers_reads_the_model_without_the_layer() -> None:
    found: Any = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    model, told = found
    assert not told["missing_keys"] and not told["mismatched_keys"]
    assert all(name.startswith("model.layers.6.") for name in told["unexpected_keys"])
    assert model.config.num_hidden_layers == 6


def test_attention_of_the_first_depth_is_causal_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(1))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(unrolled_attention(q, [(k, v)]), wanted)


@pytest.mark.parametrize("kind", UNROLLED)
def test_unrolled_depths_are_what_drafting_step_by_step_gives(kind: str) -> None:
    """The head's KV holds the target's features up to the root and the head's own after it, in one
    causal pass each."""
    head, target = UNROLLED[kind](FOLDER), load_target(FOLDER)
    ids = torch.randint(7, 2000, (1, 12), generator=torch.Generator().manual_seed(2))
    features, _ = read(head, target, ids)
    unrolled = unroll(head, target, ids, features, 4)
    root, embedded, turns = 6, target.embed_tokens(ids[:, 1:]), (target.cosine, target.sine)
    with torch.no_grad():
        cells = head.project(features[:, :root])
        for depth in range(4):
            length = root + depth
            made = head(embedded[:, :length], cells, (turns[0][:length], turns[1][:length]), [])
            wanted = head.logits(made, target)[0, -1]
            torch.testing.assert_close(unrolled[depth][0, length - 1], wanted, rtol=1e-4, atol=1e-4)
            cells = torch.cat((cells, made[:, -1:]), 1)


def test_a_layer_reads_the_tokens_up_to_the_last_proposal_and_no_feature_behind_the_root() -> None:
    """And it reads all of them: changing any one changes the draft."""
    head, target = load_layers(FOLDER), load_target(FOLDER)
    ids = torch.randint(7, 2000, (1, 14), generator=torch.Generator().manual_seed(2))
    features, _ = read(head, target, ids)
    root = 6
    with torch.no_grad():
        for depth in range(DRAFTS):
            wanted = head.drafts(target, ids, features, DRAFTS)[depth][0, root - 1 + depth]
            for at in range(14):
                other, told = ids.clone(), features.clone()
                other[0, at] = 3
                found = head.drafts(target, other, features, DRAFTS)[depth][0, root - 1 + depth]
                assert torch.equal(found, wanted) == (at > root + depth or at == 0), (depth, at)
                told[0, at] = 0
                found = head.drafts(target, ids, told, DRAFTS)[depth][0, root - 1 + depth]
                assert torch.equal(found, wanted) == (at >= root), (depth, at)


def test_blocks_of_all_roots_are_those_of_transformers_layers_over_each_roots_past() -> None:
    head, target, raw = load_dflash(FOLDER), load_target(FOLDER), load_file(FOLDER / DFLASH / "model.safetensors")
    config: Any = LlamaConfig.from_pretrained(FOLDER / DFLASH)
    config._attn_implementation = "eager"
    ids = torch.randint(7, 2000, (1, 20), generator=torch.Generator().manual_seed(2))
    features, _ = read(head, target, ids)
    root = 13
    turns = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(root + SIZE)[None])
    with torch.no_grad():
        drafted = head.drafts(target, ids, features, SIZE - 1)
        block = torch.tensor([int(ids[0, root]), *[head.mask] * (SIZE - 1)])
        hidden, context = target.embed_tokens(block), head.project(features[0, :root])
        for index in range(config.num_hidden_layers):
            layer, prefix = DFlashLayer(config), f"layers.{index}."
            own = {name.removeprefix(prefix): value for name, value in raw.items() if name.startswith(prefix)}
            layer.load_state_dict(own)
            hidden = layer(hidden, context, turns)
        wanted = head.logits(hidden, target)
    for depth in range(SIZE - 1):
        torch.testing.assert_close(drafted[depth][0, root - 1 + depth], wanted[depth + 1], rtol=1e-4, atol=1e-4)


def test_a_walk_counts_steps_as_the_engine_does() -> None:
    never, always = torch.zeros(4, 30, dtype=torch.bool).numpy(), torch.ones(4, 30, dtype=torch.bool).numpy()
    assert walk(never, 10).steps == walk(never, 10).tokens == 21
    assert walk(always, 10).steps == 5 and walk(always, 10).right == [5, 4, 4, 4]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("kind", "drafts"), MEASURED)
def test_the_head_reaches_its_recorded_acceptance(
    kind: str, drafts: int, temperature: float, texts: dict[float, list[Text]]
) -> None:
    found = tau(walks(LOADERS[kind](FOLDER), load_target(FOLDER), texts[temperature], drafts))
    assert found >= LEAST * recorded_tau(kind, temperature, PROMPTS, drafts)


def engine_share(kind: str, texts: dict[float, list[Text]], drafts: int = DRAFTS, **settings: Any) -> float:
    """The engine's tokens per step relative to the recorded ones, over both temperatures."""
    tokens = steps = known = 0
    prompts = [text.ids[: text.prompt] for text in texts[0.0]]
    given: dict[str, Any] = {"device": "cpu", "threads": 1, "draft_tokens": drafts, "max_requests": PROMPTS}
    with LLM(**given, **SETTINGS.get(kind, {"speculative": kind}), **settings) as llm:
        for temperature in TEMPERATURES:
            for output in llm.generate(prompts, asked(len(prompts), temperature)):
                tokens += len(output.outputs[0].token_ids) - 1
                steps += output.outputs[0].verified_steps
            known += recorded_steps(kind, temperature, PROMPTS, drafts)
    return known / steps * tokens / (len(TEMPERATURES) * PROMPTS * (WRITTEN - 1))


@pytest.mark.parametrize(("kind", "drafts"), MEASURED)
def test_the_engine_reaches_the_recorded_acceptance(kind: str, drafts: int, texts: dict[float, list[Text]]) -> None:
    assert engine_share(kind, texts, drafts) >= LEAST


def test_a_head_that_reads_the_layers_behind_its_own_is_below_its_record(
    texts: dict[float, list[Text]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(FOLDER / DRAFT, tmp_path / DRAFT))
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(AUX_LAYERS)
    (folder / "config.json").write_text(json.dumps(config))
    assert engine_share("eagle3", texts, draft_model=str(folder)) < LEAST


def shift_draft_ids(head: Eagle3) -> None:
    head.ids = delayed(head.ids, 1, -1)


def read_later_layers(head: Eagle3 | DFlash) -> None:
    head.fc.weight.data = head.fc.weight.data.roll(256, -1)


def swap_inputs(head: NextToken) -> None:
    head.eh_proj.weight.data = head.eh_proj.weight.data.roll(256, -1)


def take_turns(head: NextTokenLayers) -> None:
    head.layers = torch.nn.ModuleList([*head.layers[1:], head.layers[0]])


def fill_in_other_masks(head: DFlash) -> None:
    head.mask = 7


@pytest.mark.parametrize(
    ("kind", "defect"),
    (
        ("eagle3", shift_draft_ids),
        ("eagle3", read_later_layers),
        ("mtp", swap_inputs),
        (LAYERS, take_turns),
        ("dflash", read_later_layers),
        ("dflash", fill_in_other_masks),
    ),
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_broken_head_is_below_its_record(kind: str, defect: Callable, texts: dict[float, list[Text]]) -> None:
    head = LOADERS[kind](FOLDER)
    defect(head)
    assert tau(walks(head, load_target(FOLDER), texts[0.0][:2])) < LEAST * recorded_tau(kind, 0.0, 2)
