"""The calls of AITER bind to the real signatures, which are stored here with their version."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

import sglcore_hip
from sglcore_hip.sparse_aiter import NEEDED

STORED = json.loads((Path(__file__).parent / "aiter_signatures.json").read_text())["functions"]
SOURCES = [Path(sglcore_hip.__file__).with_name(name) for name in ("attention_aiter.py", "sparse_aiter.py")]
KINDS = {"positional": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
MODULES = {"pa_decode_sparse": "aiter.ops.triton.attention.pa_decode_sparse"}
"""Where a function is, if not in `aiter`."""


def signature(function: str) -> inspect.Signature:
    """Return a stored signature."""
    empty = inspect.Parameter.empty
    rows = [(name, kind, empty if default is None else default) for name, kind, default in STORED[function]]
    return inspect.Signature([inspect.Parameter(name, KINDS[kind], default=default) for name, kind, default in rows])


def call_of(function: str) -> ast.Call:
    """Return the only call of a library function."""
    name = f"{MODULES.get(function, 'aiter')}.{function}"
    nodes = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))]
    (found,) = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == name)
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
    given = signature("pa_decode_sparse").bind(*call_of("pa_decode_sparse").args).arguments
    texts = {name: ast.unparse(value) for name, value in given.items()}
    assert (texts["unified_kv"], texts["kv_indices"], texts["kv_indptr"]) == ("rows", "chosen.reshape(-1)", "starts")
    assert (texts["attn_sink"], texts["softmax_scale"]) == ("sinks", "scale")


def test_the_parameters_by_which_old_versions_are_refused_are_those_of_the_library() -> None:
    assert signature("pa_decode_sparse").parameters.keys() >= NEEDED


@pytest.mark.needs("simulator")
def test_the_references_have_the_signatures_of_the_library() -> None:
    for function, parameters in STORED.items():
        library = importlib.import_module(MODULES.get(function, "aiter"))
        found = inspect.signature(vars(library)[function]).parameters.values()
        assert [(p.name, p.kind, p.default is not p.empty) for p in found] == [
            (name, KINDS[kind], default is not None) for name, kind, default in parameters
        ]
