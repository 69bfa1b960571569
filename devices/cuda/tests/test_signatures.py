"""The calls of FlashInfer, FlashAttention and FlashMLA bind to the real signatures, which are
stored here with their versions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import sglcore_cuda
from sglcore_cuda import sparse_flashinfer

HERE = Path(__file__).parent
SOURCES = Path(sglcore_cuda.__file__).parent
KINDS = {
    "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "varargs": inspect.Parameter.VAR_POSITIONAL,
    "varkw": inspect.Parameter.VAR_KEYWORD,
}
LIBRARIES = {"flashinfer": "flashinfer", "flash_attn": "flash_attn_interface", "flash_mla": "flash_mla"}
"""The simulator's modules, and the library modules that they plant."""
STORED = {name: json.loads((HERE / f"{name}_signatures.json").read_text()) for name in LIBRARIES}


def signature(library: str, function: str) -> inspect.Signature:
    """Return a stored signature, without self."""
    parameters = STORED[library]["functions"][function]
    return inspect.Signature(
        [
            inspect.Parameter(name, KINDS[kind], default=inspect.Parameter.empty if default is None else default)
            for name, kind, default in parameters
        ]
    )


def calls(source: str, ending: str) -> list[ast.Call]:
    """Return every call in a source file with a callee that ends with `ending`."""
    tree = ast.parse((SOURCES / source).read_text())
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(ending)]


def bind(call: ast.Call, wanted: inspect.Signature) -> None:
    """Raise TypeError if the call does not fit the signature; arguments from `**` are ignored."""
    wanted.bind_partial(*call.args, **{k.arg: k.value for k in call.keywords if k.arg is not None})
    if all(k.arg is not None for k in call.keywords):
        wanted.bind(*call.args, **{k.arg: k.value for k in call.keywords if k.arg is not None})


FLASHINFER = (
    ("flashinfer.BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper.__init__"),
    ("flashinfer.BatchDecodeWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper.__init__"),
    ("wrapper.run", "BatchDecodeWithPagedKVCacheWrapper.run"),
    ("wrapper.run", "BatchPrefillWithPagedKVCacheWrapper.run"),
    ("wrapper.reset_workspace_buffer", "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer"),
)


@pytest.mark.parametrize(("callee", "function"), FLASHINFER)
def test_calls_of_flashinfer_bind(callee: str, function: str) -> None:
    found = calls("attention_flashinfer.py", callee)
    assert found
    for call in found:
        bind(call, signature("flashinfer", function))


def test_both_plans_bind_by_position_and_by_name() -> None:
    decode, prefill = calls("attention_flashinfer.py", "wrapper.plan")
    bind(decode, signature("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.plan"))
    bind(decode, signature("flashinfer", "BatchDecodeWithPagedKVCacheWrapper._plan_impl"))
    bind(prefill, signature("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.plan"))


def test_the_plan_of_a_replay_binds() -> None:
    (call,) = calls("attention_flashinfer.py", "flashinfer.fast_decode_plan")
    call.args.pop(0)  # The wrapper, which is the function's `self`.
    bind(call, signature("flashinfer", "fast_decode_plan"))


def test_graph_buffers_are_named_as_the_wrapper_names_them() -> None:
    (call,) = calls("attention_flashinfer.py", "self._decode_wrapper")
    given = {k.arg for k in call.keywords}
    assert given <= set(signature("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.__init__").parameters)
    assert {"use_cuda_graph", "paged_kv_indptr_buffer"} < given


def test_the_call_of_flash_attention_binds() -> None:
    (call,) = calls("attention_flash.py", "flash_attn_with_kvcache")
    bind(call, signature("flash_attn", "flash_attn_with_kvcache"))


@pytest.mark.parametrize(
    ("source", "library", "function"),
    [
        ("sparse_flashmla.py", "flash_mla", "flash_mla_sparse_fwd"),
        ("sparse_flashmla.py", "flash_mla", "has_legacy"),
        ("sparse_flashinfer.py", "flashinfer", "top_k_page_table_transform"),
    ],
)
def test_calls_of_sparse_attention_bind(source: str, library: str, function: str) -> None:
    (call,) = calls(source, f"{library}.{function}")
    bind(call, signature(library, function))


def test_the_options_that_an_old_library_lacks_are_those_of_the_call() -> None:
    (call,) = calls("sparse_flashinfer.py", "flashinfer.top_k_page_table_transform")
    assert {k.arg for k in call.keywords} == sparse_flashinfer.NEEDED


def test_a_call_with_a_name_that_the_library_lacks_is_caught() -> None:
    (call,) = calls("attention_flash.py", "flash_attn_with_kvcache")
    call.keywords[0].arg = "cache_lengths"
    with pytest.raises(TypeError, match="cache_lengths"):
        bind(call, signature("flash_attn", "flash_attn_with_kvcache"))


@pytest.mark.needs("simulator")
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_references_have_the_signatures_of_the_libraries(library: str) -> None:
    module = importlib.import_module(f"sglcore_sim.vendors.{library}")
    for function, parameters in STORED[library]["functions"].items():
        found = list(inspect.signature(_reference(module, function)).parameters.values())
        mine = [[p.name, p.kind, p.default is not p.empty] for p in found if p.name != "self"]
        assert mine == [[name, KINDS[kind], default is not None] for name, kind, default in parameters], function


def _reference(module: Any, function: str) -> Any:
    if "." not in function:
        return getattr(importlib.import_module(LIBRARIES[module.__name__.rpartition(".")[2]]), function)
    name, method = function.split(".")
    return getattr(getattr(module, name), method)
