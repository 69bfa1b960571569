"""The calls of AITER bind to the real signatures, which are stored here with their version."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

import sglcore_hip

STORED = json.loads((Path(__file__).parent / "aiter_signatures.json").read_text())["functions"]
SOURCE = Path(sglcore_hip.__file__).with_name("attention_aiter.py")
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def signature(function: str) -> inspect.Signature:
    """Return a stored signature."""
    empty = inspect.Parameter.empty
    rows = [(name, empty if default is None else default) for name, _, default in STORED[function]]
    return inspect.Signature([inspect.Parameter(name, POSITIONAL, default=default) for name, default in rows])


def call_of(function: str) -> ast.Call:
    """Return the only call of a library function."""
    tree = ast.parse(SOURCE.read_text())
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == f"aiter.{function}")
    return found


@pytest.mark.parametrize("function", sorted(STORED))
def test_calls_bind(function: str) -> None:
    call = call_of(function)
    signature(function).bind(*call.args, **{k.arg: k.value for k in call.keywords if k.arg is not None})


def test_arguments_by_position_are_the_ones_that_are_meant() -> None:
    call = call_of("paged_attention_v1")
    given = signature("paged_attention_v1").bind(*call.args).arguments
    texts = {name: ast.unparse(value) for name, value in given.items()}
    assert texts["block_tables"] == "rows.pages" and texts["context_lens"] == "rows.seq_lens"
    assert texts["cu_query_lens"] == "rows.query_starts" and texts["max_context_len"] == "rows.longest"
    assert texts["kv_cache_layout"] == "'NHD'" and texts["partition_size"] == "PARTITION"


@pytest.mark.needs("simulator")
def test_the_references_have_the_signatures_of_the_library() -> None:
    aiter = importlib.import_module("aiter")
    for function, parameters in STORED.items():
        found = inspect.signature(getattr(aiter, function)).parameters.values()
        assert [(p.name, p.default is not p.empty) for p in found] == [(n, d is not None) for n, _, d in parameters]
