"""Kernels that declare which arguments they support: a model with such sizes uses them, others use
the next candidate, and the ledger reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.conformance.kit_run import Kit
from sglcore.conformance.law import LawBroken
from sglcore.conformance.laws.laws_kernels import RELATIVE, compare
from sglcore.conformance.mutant import Mutant
from sglcore.conformance.mutants import mutants_kernels as broken
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.core.errors import StrictError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.kernel_choice import Refusals, choose, fitted, fitted_to
from sglcore.runtime.kernels.table import KernelTable, Limited, Trial
from sglcore.runtime.tp_worker import TpModelWorker
from tests.checkpoints import bert, llama, qwen3, qwen3_moe, save
from tests.models.steps import Steps, load

HEADS = torch.empty(1, 4 * 16, device="meta")
CACHE = torch.empty(8, 8, device="meta")
PARTLY = (HEADS, HEADS, torch.empty(1, dtype=torch.int32, device="meta"), CACHE, 16)


def whole(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> str:
    """Refuse heads that are rotated in part."""
    rotated = cos_sin_cache.shape[1]
    return "" if rotated == head_dim else f"{rotated} of {head_dim} elements of a head are rotated"


def quick_rotary(*call: Any) -> Any:
    """A device's implementation of `rotary`."""
    return reference_kernels.rotary(*call)


def vendor_rotary(*call: Any) -> Any:
    """A second implementation of `rotary` for the device."""
    return reference_kernels.rotary(*call)


def test_the_first_candidate_that_takes_a_call_is_chosen_and_the_table_keeps_all() -> None:
    table = KernelTable().replace(rotary=quick_rotary).replace(rotary=Limited(vendor_rotary, whole))
    assert table.rotary is vendor_rotary and table.origin["rotary"] == f"{__name__}:vendor_rotary"
    assert choose(table, KernelTable.rotary, PARTLY) is quick_rotary
    assert choose(table, KernelTable.rotary, (*PARTLY[:3], CACHE, 8)) is vendor_rotary
    assert (
        choose(KernelTable(rotary=Limited(vendor_rotary, whole)), KernelTable.rotary, PARTLY)
        is reference_kernels.rotary
    )


def test_a_library_is_tried_once_for_each_dtype_and_size() -> None:
    tried: list[str] = []

    def run(x: Tensor) -> Tensor:
        tried.append(f"{x.dtype} {len(x)}")
        if x.dtype is torch.float16:
            raise RuntimeError("no kernel for half precision")
        return torch.zeros(1)

    limited = Limited(vendor_rotary, trial=Trial(run))
    failed = "its first call failed: RuntimeError: no kernel for half precision"
    for _ in range(2):
        for dtype, reason in ((torch.float32, ""), (torch.float16, failed)):
            assert [limited.refusal(torch.empty(size, dtype=dtype, device="meta")) for size in (1, 2)] == [reason] * 2
    assert tried == ["torch.float32 1", "torch.float32 2", "torch.float16 1", "torch.float16 2"]


def test_a_refusal_is_a_row_that_names_what_was_wanted_the_reason_and_the_remedy_once() -> None:
    table, refusals = KernelTable().replace(rotary=Limited(vendor_rotary, whole)), Refusals()
    for _ in range(3):
        choose(table, KernelTable.rotary, PARTLY, refusals=refusals)
    (row,) = refusals.rows()
    assert (row.topic, row.requested) == ("kernel rotary", f"{__name__}:vendor_rotary")
    assert row.effective == "sglcore.runtime.kernels.reference_kernels:rotary" and row.downgrade
    assert row.reason.startswith("8 of 16 elements of a head are rotated; found q float32[1, 64], k float32[1, 64], ")
    assert "head_dim 16" in row.reason and "--kernels reference" in row.remedy


WHOLE = (*PARTLY[:3], CACHE, 8)
"""A call that `whole` takes."""


def of_library() -> KernelTable:
    """Return a table with `rotary` of a vendor's library before the device's own."""
    table = KernelTable().replace(rotary=quick_rotary)
    return table.offering("acme-kernels", "rotary", lambda: Limited(vendor_rotary, whole))


def test_an_entry_that_a_library_serves_is_a_row_that_names_it() -> None:
    refusals = Refusals()
    assert choose(of_library(), KernelTable.rotary, WHOLE, refusals) is vendor_rotary
    (row,) = refusals.rows()
    assert (row.topic, row.effective, row.downgrade) == ("kernel rotary", "acme-kernels", False)
    assert row.reason.startswith(f"{__name__}: first candidate")


def test_an_own_function_is_no_librarys() -> None:
    refusals = Refusals()
    choose(KernelTable().replace(rotary=Limited(vendor_rotary, whole)), KernelTable.rotary, WHOLE, refusals)
    assert list(refusals.rows()) == []


def test_a_library_that_refuses_one_of_several_calls_serves_none_of_them() -> None:
    refusals = Refusals()
    calls = ((KernelTable.rotary, WHOLE), (KernelTable.rotary, PARTLY))
    assert fitted_to(of_library(), calls, refusals).rotary is quick_rotary
    (row,) = refusals.rows()
    assert row.downgrade and row.requested.endswith(":vendor_rotary")


def test_kernels_that_refuse_for_one_reason_are_one_row() -> None:
    def refuses(*call: Any) -> str:
        return "not of this size"

    other = Limited(fails, lambda *call: "another reason")
    table = KernelTable().replace(rotary=Limited(vendor_rotary, whole), gelu=other, silu_and_mul=other)
    table, refusals = (
        table.replace(greedy=Limited(fails, refuses), gelu=Limited(reference_kernels.rotary, refuses)),
        Refusals(),
    )
    for name in ("greedy", "silu_and_mul", "gelu"):
        choose(table, KernelTable.declared()[name], (HEADS,), refusals=refusals)
    choose(table, KernelTable.rotary, PARTLY, refusals=refusals)
    rows = {row.topic: row for row in refusals.rows()}
    assert list(rows) == ["kernels greedy, gelu", "kernels silu_and_mul, gelu", "kernel rotary"]
    row = rows["kernels greedy, gelu"]
    assert row.requested == f"{__name__}, sglcore.runtime.kernels.reference_kernels" and row.downgrade
    assert row.effective == f"the entries that it combines, {__name__}"
    assert row.reason == "not of this size; found logits float32[1, 64]"


def test_an_optional_entry_that_refuses_goes_and_its_parts_are_called() -> None:
    table, refusals = KernelTable().replace(greedy=Limited(reference_kernels.greedy, lambda logits: "no")), Refusals()
    assert table.greedy is reference_kernels.greedy
    assert choose(table, KernelTable.greedy, (HEADS,), refusals=refusals) is None
    assert choose(KernelTable(), KernelTable.greedy, (HEADS,), refusals=refusals) is None
    assert [row.effective for row in refusals.rows()] == ["the entries that it combines"]


def test_a_fitted_table_has_what_takes_the_calls_and_all_else_as_it_was() -> None:
    table = KernelTable().replace(
        rotary=Limited(vendor_rotary, whole), rotary_and_store=reference_kernels.rotary_and_store, gelu=quick_rotary
    )
    left = fitted(table, KernelTable.rotary, PARTLY, refusals=None)
    assert left.rotary is reference_kernels.rotary and left.origin["rotary"].startswith(
        "sglcore.runtime.kernels.reference_kernels:"
    )
    assert left.rotary_and_store is reference_kernels.rotary_and_store and left.gelu is quick_rotary
    assert fitted(table, KernelTable.gelu, (HEADS,), refusals=None) is table


def test_a_table_without_candidates_that_refuse_keeps_what_it_says_of_itself() -> None:
    table = (
        KernelTable()
        .replace(rotary=Limited(vendor_rotary, whole))
        .storing("e4m3fnuz")
        .refusing("a library was refused")
    )
    left = fitted(table, KernelTable.rotary, PARTLY, refusals=None)
    assert left is not table
    assert (left.refused, left.float8) == (table.refused, table.float8) != (KernelTable().refused, KernelTable().float8)


def test_nothing_that_is_asked_can_read_a_value() -> None:
    def reads(x: Tensor) -> str:
        return "negative" if float(x.sum()) < 0 else ""

    with pytest.raises(RuntimeError, match="meta"):
        choose(
            KernelTable().replace(gelu=Limited(reference_kernels.gelu, reads)), KernelTable.gelu, (torch.ones(1, 4),)
        )


# -- models
# --------------------------------------------------------------------------------------------------


def as_described(*call: Any) -> tuple[Any, ...]:
    """Return the dtypes and sizes of a call without the first dimensions, so activations match for
    any number of rows."""
    return tuple((str(arg.dtype), tuple(arg.shape[1:])) if isinstance(arg, Tensor) else arg for arg in call)


def recording(entries: tuple[str, ...]) -> tuple[KernelTable, dict[str, set[Any]], dict[str, set[Any]]]:
    """Return a table that records the calls it was asked to support, and the calls made."""
    asked: dict[str, set[Any]] = {name: set() for name in entries}
    called: dict[str, set[Any]] = {name: set() for name in entries}

    def record(name: str, real: Callable[..., Any]) -> Limited:
        def takes(*call: Any) -> str:
            asked[name].add(as_described(*call))
            return ""

        def run(*call: Any) -> Any:
            called[name].add(as_described(*call))
            return real(*call)

        return Limited(run, takes)

    full = KernelTable.complete()
    return KernelTable().replace(**{name: record(name, getattr(full, name)) for name in entries}), asked, called


PLAIN = ("linear", "embedding", "rms_norm", "add_rms_norm", "layer_norm", "rotary", "silu_and_mul", "gelu")
ROUTED = ("top_k_routing", "moe", "store_kv", "head")
FUSED = ("rotary_and_store", "norm_rotary_and_store", "gated_linear")


@pytest.mark.parametrize("entries", [(*PLAIN, *ROUTED), (*PLAIN, *ROUTED, *FUSED)], ids=["parts", "fused"])
@pytest.mark.parametrize("model", [llama, qwen3, qwen3_moe, bert])
def test_layers_are_asked_for_what_they_call(
    model: Callable[..., Any], entries: tuple[str, ...], tmp_path: Path
) -> None:
    table, asked, called = recording(entries)
    steps = Steps(load(save(model(), tmp_path), kernels=table))
    steps.runner.attn_backend.takes_stored = True
    steps.hidden({1: [3, 4, 5], 2: [7]})
    if not steps.model.config.is_encoder:
        steps.logprobs({1: [9]})
        assert called["rotary_and_store" if "rotary_and_store" in entries else "store_kv"] or called[FUSED[1]]
    for name in entries:
        assert called[name] <= asked[name], f"{name} was not asked for {called[name] - asked[name]}"
    assert sum(map(len, called.values())) > 4


def test_a_model_runs_on_what_takes_it_and_the_ledger_has_the_rest(tmp_path: Path) -> None:
    def only_wide(x: Tensor, weight: Tensor, eps: float) -> str:
        return "" if x.dim() == 2 else f"{x.shape[1]} heads of {x.shape[2]}"

    def wide_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.dim() == 2
        return reference_kernels.rms_norm(x, weight, eps)

    folder, ids, ledger = save(qwen3(), tmp_path), [5, 6, 7, 8], DecisionLedger()
    table = KernelTable().replace(rms_norm=Limited(wide_norm, only_wide))
    found = Steps(load(folder, kernels=table, ledger=ledger)).logprobs({1: ids})
    assert torch.equal(found, Steps(load(folder)).logprobs({1: ids}))
    assert {row.topic for row in ledger.rows} == {"kernel rms_norm"}
    with pytest.raises(StrictError, match="heads of .* wanted .*wide_norm"):
        load(folder, kernels=table, ledger=DecisionLedger(strict=True))


def test_the_draw_and_the_cells_are_asked_for_as_an_engine_starts(tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def limited(table: KernelTable) -> KernelTable:
        def refuses(name: str) -> Limited:
            return Limited(fails, lambda *call: asked.setdefault(name, call) and "not of this size")

        return table.replace(**{name: refuses(name) for name in ("draw", "greedy", "cache_locations")})

    narrow = Mutant(
        name="limited",
        says="",
        facts=lambda facts: replace(facts, index_dtype="int32"),
        steps={"kernels": limited},
    )
    kit = Kit(REFERENCE.broken_by(narrow), tmp_path)
    harness = kit.harness("dense")
    harness.run([[3, 4, 5]], 2)
    worker = harness.started.worker
    assert isinstance(worker, TpModelWorker) and worker.runner.is_narrow
    kit.close()
    told = [row.topic for row in harness.started.ledger.rows if row.reason.startswith("not of this size")]
    assert told == ["kernels draw, greedy", "kernel cache_locations"]
    assert asked["cache_locations"][-1].dtype == torch.int32 and asked["draw"][0].dtype == torch.float32


# -- the kit
# --------------------------------------------------------------------------------------------------


def hold(table: KernelTable, case: str) -> None:
    """Run the kit's law that compares kernels, as for a device."""
    trial: Any = SimpleNamespace(case=case, note=lambda *seen: None, tolerance=RELATIVE.__getitem__)
    compare(trial, table, Facts(tensor_device="cpu"))


def fails(*call: Any) -> Any:
    """Raise: a kernel must not run on arguments that it refused."""
    raise AssertionError("it said that it does not take this")


def test_the_kit_runs_a_candidate_over_what_it_says_it_takes_and_the_next_over_the_rest() -> None:
    def vendor(*call: Any) -> Any:
        return fails() if whole(*call) else turned(*call)

    def turned(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> Any:
        cos, sin = cos_sin_cache[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
        return tuple(reference_kernels._rotate(x, cos, sin, head_dim) for x in (q, k))

    hold(KernelTable().replace(rotary=Limited(vendor, whole)), "rotary")
    with pytest.raises(LawBroken, match="rotary, "):
        hold(
            KernelTable().replace(rotary=lambda *call: (call[0], call[1])).replace(rotary=Limited(vendor, whole)),
            "rotary",
        )


@pytest.mark.parametrize(
    ("entry", "defect", "text"),
    [
        ("silu_and_mul", broken.whole_blocks, "silu_and_mul, .*: result 0 differs by"),
        (
            "rms_norm",
            broken.hands_on,
            "declares that it takes 3 rows of float32, but hands it to .*reference_kernels:rms_norm",
        ),
        (
            "rms_norm",
            broken.keeps_wide_products,
            "rms_norm, .*: result 0 is .* torch.float32, wanted .* torch.bfloat16",
        ),
        ("gelu", broken.takes_nothing, "takes no case: not in this size"),
        ("gelu", broken.takes_even_rows, "refuses .*an odd number of rows.*it must not depend on rows or strides"),
    ],
)
def test_a_kernel_that_does_not_keep_to_what_it_says_is_caught(entry: str, defect: Any, text: str) -> None:
    real = getattr(KernelTable(), entry)

    def own(*call: Any) -> Any:
        return real(*call) if entry != "rms_norm" else torch.rms_norm(call[0], call[1].shape, *call[1:])

    with pytest.raises(LawBroken, match=text):
        hold(KernelTable().replace(**{entry: defect(own)}), entry)


def refuses_small(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Refuse weights with a number of rows that is not a multiple of 16."""
    return "not of whole blocks" if weight.shape[0] % 16 else ""


def turned_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a weight that is packed with its rows reversed."""
    return reference_kernels.linear(x, weight.flip(0), bias)


def test_a_weight_stays_plain_where_the_product_that_would_read_it_packed_refuses_it() -> None:
    table = KernelTable().replace(linear=Limited(turned_product, refuses_small))
    hold(table.replace(pack_linear=lambda weight: weight if weight.shape[0] % 16 else weight.flip(0)), "pack_linear")
    with pytest.raises(LawBroken, match="pack_linear, .*: result 0 differs"):
        hold(broken.packs_what_linear_refuses(KernelTable()), "pack_linear")
    with pytest.raises(LawBroken, match="packs a weight that .*turned_product refuses, and .*:linear cannot read it"):
        hold(
            table.replace(pack_linear=lambda weight: weight.double() if weight.shape[0] % 16 else weight.flip(0)),
            "pack_linear",
        )
