"""Every operator that the package calls exists in the real extension: checked against its stored
schemas, and against its wheel."""

from __future__ import annotations

import ast
import importlib.util
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sglcore_npu
from sglcore_npu import kernels
from sglcore_npu.attention_fused import OPERATOR
from sglcore_sim import signatures
from sglcore_sim.vendors import torch_npu as references

SOURCES = sorted(Path(sglcore_npu.__file__).parent.glob("*.py"))
HERE = Path(__file__).parent


def beside(name: str) -> ModuleType:
    """Import a module of this folder."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def called() -> set[str]:
    """Return the operators that the sources call as `torch.ops.npu.NAME` or
    `torch.ops.npu.NAME.overload`."""
    calls = (node for file in SOURCES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    names = (ast.unparse(call.func) for call in calls)
    operators = (name.removeprefix("torch.ops.npu.") for name in names if name.startswith("torch.ops.npu."))
    return {name for name in operators if all(part.isidentifier() for part in name.split("."))}


def test_every_called_operator_is_one_of_the_vendor_and_has_a_reference() -> None:
    assert called() == set(references.REFERENCES)
    assert called() <= set(references.stored_schemas())


def test_the_newest_release_takes_the_same_calls() -> None:
    newest = files("sglcore_sim").joinpath("data", "npu_called_2.14.0.txt").read_text().splitlines()
    found = {line.removeprefix("npu::").partition("(")[0]: str(torch._C.parse_schema(line)) for line in newest}
    kept = references.stored_schemas()
    assert found == {name: str(torch._C.parse_schema(f"npu::{kept[name]}")) for name in called()}
    assert "2.14.0" in signatures.stored("torch_npu")["versions"]


def test_what_the_table_asks_for_is_what_it_calls() -> None:
    named = set(kernels.OPERATORS)
    attention = {OPERATOR, f"{OPERATOR}.out", f"_{OPERATOR}_get_max_workspace"}
    assert called() == named | attention


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments of an operator's stored schema, by name."""
    schema = torch._C.parse_schema(f"npu::{references.stored_schemas()[name]}")
    return {argument.name: argument for argument in schema.arguments}


def test_a_captured_call_names_arguments_of_the_out_variant_and_all_that_it_wants() -> None:
    tree = ast.parse((HERE.parent / "sglcore_npu" / "attention_fused.py").read_text())
    (method,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_call")
    (made,) = (node for node in ast.walk(method) if isinstance(node, ast.Dict))
    names = {key.value for key in made.keys if isinstance(key, ast.Constant)}
    layouts = {"input_layout", "atten_mask", "sparse_mode", "actual_seq_lengths", "actual_seq_lengths_kv"}
    for variant, extra in ((OPERATOR, set()), (f"{OPERATOR}.out", {"workspace", "out"})):
        known = arguments(variant)
        assert names | layouts | extra <= known.keys()
        assert {name for name, argument in known.items() if not argument.has_default_value()} <= names | extra


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The answers of `asked_schemas` and `asked_meta` with the vendor's wheel."""
    module = beside("wheel")
    found = module.find()
    if found is None:
        pytest.skip("needs the wheel of torch_npu: pip download --no-deps -d build/wheels torch_npu==2.13.0")
    schemas, meta = module.ask(module.unpack(found, tmp_path_factory.mktemp("wheel")), "asked_schemas", "asked_meta")
    return schemas, meta


def test_the_stored_schemas_are_those_of_the_wheel(answers: tuple[Any, Any]) -> None:
    real, _ = answers
    assert {schema.removeprefix("npu::") for schema in real} >= set(references.stored_schemas().values())
    assert len(real) == len(references.stored_schemas())


def test_the_package_runs_over_the_wheels_meta_kernels(answers: tuple[Any, Any]) -> None:
    _, given = answers
    without = {name for name, result in given.items() if isinstance(result, str)}
    assert without == {"pack_linear"} and "no fake impl or Meta kernel" in given["pack_linear"]
    heads = {"decode": [3, 1024], "extend": [33, 1024], "rotary": [[5, 1024], [5, 256]], "store_kv": None}
    norms = {"rms_norm": [5, 64], "add_rms_norm": [[5, 64], [5, 64]], "silu_and_mul": [5, 32]}
    rows = {"sparse_mqa": [7, 8, 512]}
    assert {name: result for name, result in given.items() if name not in without} == {**heads, **norms, **rows}


def test_a_wrong_argument_does_not_bind() -> None:
    with pytest.raises((TypeError, RuntimeError), match="block_tables"):
        torch.ops.npu.npu_fused_infer_attention_score(*[torch.zeros(1)] * 3, block_tables=torch.zeros(1))
