"""Intel's extension for PyTorch: its kernels are right if it fits this torch; otherwise it is
reported and never imported."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.ipex import record, stand_in
from devices.cpu.tests.ipex.stand_in import MODULE, RECORDED, SCHEMAS, install
from sglcore.cli.doctor import check_devices
from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.kit_run import Kit, run_case
from sglcore.conformance.law import LawBroken
from sglcore.conformance.laws.laws_kernels import RELATIVE, compare, entries
from sglcore.conformance.target import find_target
from sglcore.core.errors import ConfigError, DeviceError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.system import host_system
from sglcore.runtime.kernels.table import KernelTable, Limited, takes_all
from sglcore_cpu import package
from sglcore_cpu.bring_up import processor_kernels
from sglcore_cpu.facts import facts
from sglcore_cpu.kernels import ipex
from sglcore_cpu.kernels.extension import DISTRIBUTION
from sglcore_cpu.kernels.torch_kernels import takes_whole_heads
from sglcore_cpu.placement import Placement
from sglcore_cpu.probe import probe

FITS = f"{torch.__version__.rpartition('.')[0]}.7+cpu"
"""A patch release that fits the installed torch."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in of an extension that fits."""
    install(tmp_path / "site", FITS, monkeypatch)


# -- the kernels
# --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_the_stand_in_gives_what_the_extension_gave() -> None:
    found = record.answers()
    assert found.keys() == RECORDED["answers"].keys()
    for name, (shape, numbers) in RECORDED["answers"].items():
        torch.testing.assert_close(found[name], torch.tensor(numbers).view(shape), atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.usefixtures("installed")
def test_the_kit_holds_the_table_against_the_reference_and_the_engine_runs_on_it(tmp_path: Path) -> None:
    target = find_target("cpu")
    cases = [case for case in entries(target) if case.startswith("ipex/")]
    assert {f"ipex/{name}" for name in ("linear", "pack_linear", "rms_norm", "add_rms_norm", "rotary")} < set(cases)
    kit = Kit(target, tmp_path)
    by_name = {law.name: law for law in LAWS}
    found = [run_case(kit, by_name["kernel_is_reference"], case) for case in cases]
    kit.close()
    on_it = Kit(target, tmp_path, {"kernels": "ipex"})
    found.append(run_case(on_it, by_name["tiny"], "dense"))
    on_it.close()
    assert [outcome.text for outcome in found if outcome.verdict != "passed"] == []


def calls() -> Iterator[tuple[str, ast.Call, dict[str, ast.expr]]]:
    """Yield every operator call in `ipex`: the operator's name, the call, and the values assigned
    to names in the calling function."""
    tree = ast.parse(inspect.getsource(ipex))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        given = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            callee = ast.unparse(given.get(ast.unparse(call.func), call.func))
            if callee.startswith(("torch.ops.torch_ipex.", "torch.ops.ipex_prepack.")):
                yield callee.removeprefix("torch.ops.").replace(".", "::"), call, given


def parameters(operator: str) -> list[str]:
    """Return the names of an operator's arguments; none has a default."""
    return [part.split()[-1] for part in SCHEMAS[operator].partition("(")[2].partition(")")[0].split(", ")]


def test_every_operator_that_is_called_is_recorded_and_takes_what_it_is_given() -> None:
    found = {operator: call for operator, call, _ in calls()}
    assert found.keys() == set(record.CALLED)
    for operator, call in found.items():
        assert len(call.args) == len(parameters(operator)) and not call.keywords, operator


def test_the_stand_in_has_the_arguments_of_the_recorded_operators() -> None:
    for operator in SCHEMAS:
        mine = inspect.signature(getattr(stand_in, operator.partition("::")[2])).parameters
        assert len(mine) == len(parameters(operator)), operator


# -- mutants
# -----------------------------------------------------------------------------------------------


def strided_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mutant: a residual with any strides goes to the operator."""
    return torch.ops.torch_ipex.add_rmsnorm(x, residual, weight, eps, True), residual


def bias_to_the_operator(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Mutant: the bias goes to the operator, which ignores it."""
    if not isinstance(weight, ipex.BlockedWeight):
        return torch.nn.functional.linear(x, weight, bias)
    blocks: Any = weight.form
    return torch.ops.torch_ipex.ipex_linear(x, blocks._blocks, bias, blocks._handle, weight.shape[0])


def forgotten_context(weight: Tensor) -> Tensor:
    """Mutant: the context that the handle points to is not kept alive."""
    packed: Any = ipex.pack_linear(weight)
    packed.form._context = None
    return packed


def cosines_first(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Mutant: rows [cos, sin], the order of our own tables."""
    return ipex.rotary(q, k, positions, cache.roll(cache.shape[1] // 2, dims=1), head_dim)


def no_row(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Mutant: the operator is called with zero tokens too."""
    rows = cache.index_select(0, positions).roll(cache.shape[1] // 2, dims=1)
    first = torch.zeros((), dtype=torch.int64)
    return ipex._rotated(q, rows, first, head_dim), ipex._rotated(k, rows, first, head_dim)


TAKES = MappingProxyType({"rotary": takes_whole_heads})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("entry", "defect", "told"),
    [
        ("add_rms_norm", strided_residual, "as if its rows lay together"),
        ("pack_linear", bias_to_the_operator, "differs by"),
        ("pack_linear", forgotten_context, "that nobody kept"),
        ("rotary", cosines_first, "differs by"),
        ("rotary", no_row, "takes a row at least"),
    ],
)
def test_the_law_of_kernels_catches(entry: str, defect: Callable[..., Any], told: str) -> None:
    trial: Any = SimpleNamespace(case=entry, note=lambda *seen: None, tolerance=RELATIVE.__getitem__)
    replaced = "linear" if defect is bias_to_the_operator else entry
    with pytest.raises((LawBroken, RuntimeError), match=told):
        compare(
            trial, ipex.ipex_kernels().replace(**{replaced: Limited(defect, TAKES.get(entry, takes_all))}), facts(0)
        )


# -- choice and reports
# -------------------------------------------------------------------------------------------------


def start(kernels: str, graph: str = "off") -> tuple[KernelTable, tuple[Row, ...]]:
    """Choose the kernel table for `--kernels` and `--graph`; also return the ledger's rows about
    the extension."""
    ledger = DecisionLedger()
    threads = Placement(1, (), "asked for")
    table = processor_kernels(
        EngineConfig(kernels=kernels, graph=graph), package, facts(0), threads, ledger, torch.device("cpu")
    )
    return table, tuple(row for row in ledger.rows if row.topic == "extension")


def test_where_it_is_not_installed_nothing_is_said_and_asking_for_it_is_refused() -> None:
    assert start("auto")[1] == ()
    assert DISTRIBUTION not in probe(True, host_system()).details
    with pytest.raises(
        ConfigError,
        match=r"'ipex', but intel-\S+ is not installed; wanted .* torch 2\.\d+; --kernels auto, .* ended in March",
    ):
        start("ipex")


def test_one_for_another_torch_is_told_everywhere_refused_by_name_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "2.8.0+cpu", monkeypatch, source="raise RuntimeError('imported')")
    why = f"is built for torch 2.8, but torch here is {torch.__version__}"
    table, (row,) = start("auto")
    assert (row.effective, row.downgrade) == ("not used", False) and why in row.reason and "2.8.0+cpu" in row.reason
    assert (
        probe(False, host_system())
        .details[DISTRIBUTION]
        .startswith(f"2.8.0+cpu; not used: it {why}; it ended in March")
    )
    (note,) = (check for check in check_devices() if check.topic.endswith(DISTRIBUTION))
    assert note.verdict == "note" and why in note.found
    with pytest.raises(
        ConfigError, match=f"'ipex', but {DISTRIBUTION} 2.8.0.* {re.escape(why)}; wanted .*--kernels auto"
    ):
        start("ipex")
    assert MODULE not in sys.modules and table.origin["linear"] != "sglcore_cpu.kernels.ipex:linear"


@pytest.mark.usefixtures("installed")
def test_one_that_fits_serves_when_it_is_asked_for() -> None:
    table, (row,) = start("ipex")
    assert table.origin["linear"] == "sglcore_cpu.kernels.ipex:linear"
    assert (row.requested, row.effective) == ("ipex", f"{DISTRIBUTION} {FITS}")
    other, (row,) = start("auto")
    assert other.origin["linear"] != "sglcore_cpu.kernels.ipex:linear"
    assert (row.effective, row.remedy) == ("not used", "--kernels ipex")


def test_one_that_fits_and_is_broken_is_an_error_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, FITS, monkeypatch, source="raise OSError('libiomp5.so: no such file')")
    with pytest.raises(DeviceError, match="cannot be imported: libiomp5.so: no such file; --kernels auto"):
        start("ipex")


@pytest.mark.usefixtures("installed")
def test_where_a_compiler_traces_torchs_kernels_it_is_not_said_to_serve() -> None:
    table, (row,) = start("ipex", graph="compiled")
    assert table.origin["linear"] != "sglcore_cpu.kernels.ipex:linear"
    assert (row.requested, row.effective, row.remedy) == ("ipex", "not used", "--graph off")
    assert "a compiler traces" in row.reason


@pytest.mark.usefixtures("installed")
def test_weights_of_sixteen_bits_without_instructions_stay_plain() -> None:
    weight = torch.ones(4, 8, dtype=torch.float16)
    assert ipex.pack_linear(weight) is weight
