"""`--quantize`, and which layers are packed by which entry of the kernel table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, StrictError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.models.checkpoint import load_checkpoint
from sglcore.models.weights.quantized_weight import QuantizedWeight, ScaledFloats, fill, joined, packable, rounded
from sglcore.runtime.kernels.reference_kernels import linear
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import llama, qwen3_moe, save
from tests.models.quantized_checkpoints import CASES, make
from tests.models.steps import Steps, load
from tests.models.test_quantized_checkpoints import Packs, difference

LAYERS = 8


class Recorder:
    """Packing entries that record their calls and return plain copies (quantize_linear: rounded
    values)."""

    def __init__(self, *without: str) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        entries: dict[str, Any] = {
            "pack_linear": self._entry("pack_linear"),
            "pack_head": self._entry("pack_head"),
            "quantize_linear": self._rounding,
        }
        self.table = KernelTable().replace(**{n: e for n, e in entries.items() if n not in without})

    def _entry(self, name: str) -> Any:
        def pack(weight: Tensor) -> Tensor:
            self.calls.append((name, tuple(weight.shape)))
            return weight.clone()

        return pack

    def _rounding(self, weight: Tensor, kind: str) -> Tensor:
        self.calls.append((kind, tuple(weight.shape)))
        whole = rounded(ScaledFloats(weight.float(), torch.ones(1, 1), (weight.shape[0], weight.shape[1])))
        return whole.values(slice(None)).to(weight.dtype)

    def count(self, name: str) -> int:
        """The number of calls of an entry."""
        return [call for call, _ in self.calls].count(name)


@pytest.fixture
def oracle_and_folder(tmp_path: Path) -> tuple[Any, Path]:
    """A dense Llama and its folder."""
    oracle = llama(hidden_size=64, intermediate_size=128)
    return oracle, save(oracle, tmp_path)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_linear_layers_are_rounded_as_asked_and_the_output_layer_to_8_bits(kind: str, oracle_and_folder) -> None:
    oracle, folder = oracle_and_folder
    device, ledger = Recorder(), DecisionLedger()
    model = load(folder, kernels=device.table, quantize=kind, ledger=ledger)
    assert difference(model, oracle) < 0.3
    assert device.count(kind) == LAYERS + (kind == "int8") and device.calls[-1] == ("int8", (97, 64))
    (row,) = ledger.rows
    assert (row.topic, row.requested, row.effective) == ("weights", kind, kind)
    assert row.reason == f"{LAYERS} of {LAYERS} linear layers {kind}; output layer int8"


def test_left_to_itself_a_plain_checkpoint_is_packed_plain_and_nothing_is_said(oracle_and_folder) -> None:
    _, folder = oracle_and_folder
    device, ledger = Recorder(), DecisionLedger()
    load(folder, kernels=device.table, ledger=ledger)
    assert (device.count("pack_linear"), device.count("pack_head"), ledger.rows) == (LAYERS, 1, ())


def test_a_tied_output_layer_is_packed_once_for_both(tmp_path: Path) -> None:
    oracle = llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    device = Recorder()
    model = load(save(oracle, tmp_path), kernels=device.table)
    assert device.calls[-1] == ("pack_head", (97, 64)) and model.weights.head.weight is model.embed_tokens.weight
    assert sum(weight is model.weights.head.weight for weight in model.weights.parameters) == 1
    assert difference(model, oracle) < 1e-4


@pytest.mark.parametrize("quantize", ["auto", "int8"])
def test_without_an_entry_for_it_a_tied_output_layer_stays_plain(quantize: str, tmp_path: Path) -> None:
    folder = save(llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=True), tmp_path)
    device = Recorder("pack_head")
    model = load(folder, kernels=device.table, quantize=quantize)
    assert len(device.calls) == LAYERS and (97, 64) not in [shape for _, shape in device.calls]
    assert model.weights.head.weight is model.embed_tokens.weight


def test_without_an_entry_for_it_another_output_layer_is_a_linear_layer(oracle_and_folder) -> None:
    _, folder = oracle_and_folder
    device = Recorder("pack_head")
    load(folder, kernels=device.table)
    assert device.calls[-1] == ("pack_linear", (97, 64))


def test_logits_come_from_the_entry_for_them(oracle_and_folder) -> None:
    oracle, folder = oracle_and_folder
    asked: list[tuple[int, ...]] = []

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        asked.append(tuple(weight.shape))
        return linear(hidden, weight, None).float()

    assert difference(load(folder, kernels=KernelTable().replace(head=head)), oracle) < 1e-4
    assert asked == [(97, 64)]


def test_the_gate_of_experts_is_never_rounded(tmp_path: Path) -> None:
    device = Recorder()
    load(save(qwen3_moe(hidden_size=64, head_dim=16), tmp_path), kernels=device.table, quantize="int4")
    assert device.count("pack_linear") == 2 and device.count("int4") == 4
    assert all(shape == (5, 64) for name, shape in device.calls if name == "pack_linear")


def test_codes_of_a_checkpoint_are_kept_and_its_plain_layers_rounded(tmp_path: Path) -> None:
    device = Recorder()
    packs = Packs(quantize_linear=device.table.quantize_linear)
    make(CASES["packed-groups"], tmp_path, keep=("lm_head", "down_proj"))
    ledger = DecisionLedger()
    load(tmp_path, kernels=packs.table, quantize="int4", ledger=ledger)
    assert (len(packs.packed), device.count("int4"), device.count("int8")) == (LAYERS - 2, 2, 1)
    assert ledger.rows[0].effective == "4-bit groups of 32, int4"
    assert ledger.rows[0].reason.endswith("; the checkpoint's own codes are kept")


def test_experts_stay_plain_which_is_less_than_was_asked_for(tmp_path: Path) -> None:
    device, ledger = Recorder(), DecisionLedger()
    folder = save(qwen3_moe(hidden_size=64, head_dim=16), tmp_path)
    load(folder, kernels=device.table, quantize="int4", ledger=ledger)
    (row,) = ledger.rows
    experts = sum(".experts." in name for name in load_file(folder / "model.safetensors"))
    assert row.downgrade and row.reason.endswith(f"; {experts} expert weights stay plain")
    assert row.remedy == "leave --quantize out, or use a model without experts"
    with pytest.raises(StrictError, match="expert weights stay plain"):
        load(folder, kernels=device.table, quantize="int4", ledger=DecisionLedger(strict=True))
    plain = DecisionLedger()
    load(folder, kernels=device.table, ledger=plain)
    assert plain.rows == ()


@pytest.mark.parametrize("quantize", ["auto", "int8", "none"])
def test_the_chosen_value_says_that_activations_are_rounded_and_none_makes_plain_weights(
    quantize: str, tmp_path: Path
) -> None:
    make(CASES["gptq"], tmp_path)
    packs, rounds, ledger = Packs(), Recorder(), DecisionLedger()
    table = packs.table.replace(quantize_linear=rounds.table.quantize_linear).rounding(8)
    load(tmp_path, kernels=table, quantize=quantize, ledger=ledger)
    (row,) = [row for row in ledger.rows if row.topic == "weights"]
    is_told = "activations in 8 bits" in row.effective and "--quantize none does not" in row.reason
    assert is_told == (quantize != "none") and bool(packs.packed) == (quantize != "none")
    assert quantize != "none" or (
        row.effective == "dequantised to float32" and "dequantised, as requested" in row.reason
    )


def test_kernels_that_round_no_activations_are_not_said_to(tmp_path: Path) -> None:
    make(CASES["gptq"], tmp_path)
    ledger = DecisionLedger()
    load(tmp_path, kernels=Packs().table, ledger=ledger)
    assert not any("activations" in row.effective + row.reason for row in ledger.rows)


def test_codes_that_are_wider_than_asked_for_are_a_downgrade(tmp_path: Path) -> None:
    packs = Packs(quantize_linear=Recorder().table.quantize_linear)
    make(CASES["integers-rows"], tmp_path)
    rows = []
    for asked in ("int4", "int8", "auto"):
        ledger = DecisionLedger()
        load(tmp_path, kernels=packs.table, quantize=asked, ledger=ledger)
        rows += ledger.rows
    assert [row.downgrade for row in rows] == [True, False, False]
    assert rows[0].reason.endswith(f"; {LAYERS} linear layers stay in 8 bits")
    assert rows[0].remedy == "use the plain version of this model, or leave --quantize out"
    assert ["the checkpoint's own codes are kept" in row.reason for row in rows] == [True, True, False]


def test_weights_that_are_rounded_are_not_called_dequantised(tmp_path: Path) -> None:
    packs, ledger = Packs(quantize_linear=Recorder().table.quantize_linear), DecisionLedger()
    make(CASES["float8-rows"], tmp_path)
    load(tmp_path, kernels=packs.table, quantize="int4", ledger=ledger)
    assert re.search(r"; \d+ weights rounded to int4, being 8-bit floats$", ledger.rows[0].reason)
    ledger = DecisionLedger()
    load(tmp_path, kernels=packs.table, ledger=ledger)
    assert ledger.rows[0].reason.endswith(" weights dequantised, being 8-bit floats; --quantize int8 rounds them")


def test_the_size_counts_what_is_kept(oracle_and_folder) -> None:
    class Small(torch.Tensor):
        @property
        def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            return 7

    _, folder = oracle_and_folder
    plain = load(folder)
    table = KernelTable().replace(pack_linear=lambda weight: weight.as_subclass(Small))
    packed = load(folder, kernels=table)
    dense = sum(layer.weight.numel() for layer in plain.weights.linears) + plain.weights.head.weight.numel()
    sizes = [sum(weight.nbytes for weight in model.weights.parameters) for model in (packed, plain)]
    assert sizes[0] == sizes[1] - 4 * dense + 7 * (LAYERS + 1)


def test_a_device_that_does_not_quantise_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"do not quantise \(sglcore.runtime.kernels.reference_kernels has no quantize_linear\)"
    ):
        load(folder, quantize="int8")


def test_the_configuration_reaches_the_loader(oracle_and_folder) -> None:
    _, folder = oracle_and_folder
    device, ledger = Recorder(), DecisionLedger()
    load_checkpoint(
        EngineConfig(model=str(folder), quantize="int4"),
        folder,
        facts=Facts(tensor_device="cpu"),
        kernels=device.table,
        ledger=ledger,
        progress=lambda phase, done, total: None,
    )
    assert device.count("int4") == LAYERS and [row.topic for row in ledger.rows] == ["model impl", "dtype", "weights"]


def test_the_same_text_comes_of_whole_prompts_and_of_pieces(oracle_and_folder) -> None:
    _, folder = oracle_and_folder
    model = load(folder, kernels=Recorder().table, quantize="int8")
    ids = [5, 9, 33, 60, 71, 2, 18]
    whole, steps = Steps(model).logprobs({1: ids}), Steps(model)
    pieces = torch.cat([steps.logprobs({1: ids[:4]}), steps.logprobs({1: ids[4:]})])
    assert (whole - pieces).abs().max() < 1e-4


def codes(rows: int, columns: int, bits: int, group: int, zeros: bool = False, seed: int = 0) -> QuantizedWeight:
    """Random codes."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    return QuantizedWeight(
        torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=draw),
        torch.rand(rows, groups, generator=draw),
        torch.rand(rows, groups, generator=draw) * 9 if zeros else None,
        bits,
        group,
    )


@pytest.mark.parametrize(
    ("bits", "columns", "group", "form"),
    [
        (4, 256, 32, (4, 32)),
        (2, 256, 64, (4, 64)),
        (5, 96, 32, (8, 32)),
        (8, 512, 256, (8, 128)),
        (8, 192, 96, (8, 32)),
        (4, 192, 192, (4, 64)),
        (8, 50, 50, (8, 32)),
    ],
)
def test_packable_weights_have_the_same_values(bits: int, columns: int, group: int, form: tuple[int, int]) -> None:
    weight = codes(6, columns, bits, group)
    found = packable(weight)
    assert found is not None and (found.bits, found.group) == form
    assert found.scales.shape == (6, -(-columns // found.group)) and found.scales.is_contiguous()
    assert torch.equal(found.values(slice(None)), weight.values(slice(None)))


@pytest.mark.parametrize(("columns", "group"), [(96, 48), (64, 16), (80, 20)])
def test_groups_that_no_kernel_has_are_not_packable(columns: int, group: int) -> None:
    assert packable(codes(6, columns, 4, group)) is None


def test_joined_weights_have_the_values_of_their_parts() -> None:
    parts = [codes(3, 128, 4, 64), codes(5, 128, 8, 32, seed=1), codes(2, 128, 4, 128, zeros=True, seed=2)]
    whole = joined(parts)
    assert (whole.bits, whole.group, whole.codes.shape) == (8, 32, (10, 128))
    assert torch.equal(whole.values(slice(None)), torch.cat([part.values(slice(None)) for part in parts]))
    same = joined(parts[:1] + [codes(4, 128, 4, 64, seed=3)])
    assert (same.bits, same.group, same.zeros) == (4, 64, None)


def test_rounding_is_to_the_nearest_of_255_steps() -> None:
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    values[2] = 0
    found = rounded(ScaledFloats(values, torch.ones(1, 1), (5, 64)))
    step = values.unflatten(1, (2, 32)).abs().amax(-1) / 127
    assert torch.equal(found.scales, step) and found.zeros is None and found.group == 32
    assert ((found.values(slice(None)) - values).abs() <= 0.5001 * step.repeat_interleave(32, 1)).all()


def test_filling_works_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.models.weights.quantized_weight.PIECE", 200)
    weight, target = codes(7, 64, 4, 32), torch.empty(7, 64, dtype=torch.bfloat16)
    fill(weight, target)
    assert torch.equal(target, weight.values(slice(None)).bfloat16())
