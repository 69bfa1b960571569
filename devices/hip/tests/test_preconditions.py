"""AITER's references refuse calls that AITER refuses, or that would access wrong memory, so tests
on the simulator detect such calls of this package."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from tests.attention.preconditions import Calls, Wrong, int32, strided, widened

pytestmark = pytest.mark.needs("simulator")

DEVICE = torch.device("cuda:0")


def vendor() -> list:
    """Return the module of the references."""
    return [importlib.import_module("sglcore_sim.vendors.aiter")]


def decode() -> Calls:
    """Return the calls for two requests with one query over pages of 16."""
    pages = torch.zeros(4, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    query = torch.zeros(2, 4, 64, dtype=torch.float16, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    given = {
        "out": torch.zeros_like(query),
        "workspace_buffer": torch.zeros(2 * 4 * (64 * 2 + 8), dtype=torch.uint8, device=DEVICE),
        "query": query,
        "key_cache": pages,
        "value_cache": pages.clone(),
        "scale": 0.125,
        "block_tables": int32(DEVICE, 1, 0, 2, 3).view(2, 2),
        "cu_query_lens": int32(DEVICE, 0, 1, 2),
        "context_lens": int32(DEVICE, 5, 20),
        "max_context_len": 20,
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "kv_cache_layout": "NHD",
        "logits_soft_cap": 0.0,
        "k_scale": one,
        "v_scale": one,
    }
    return Calls(importlib.import_module("aiter").paged_attention_v1, given, DECODE, vendor())


DECODE = (
    Wrong("kv_cache_layout", lambda _: "HND", "half precision, 'auto', 'NHD'"),
    Wrong("value_cache", Tensor.bfloat16, "one half precision"),
    Wrong("out", Tensor.float, "an output of the queries'"),
    Wrong("context_lens", Tensor.cpu, "everything on one device"),
    Wrong("query", widened, "queries whose heads lie side by side"),
    Wrong("value_cache", widened, "keys and values of one shape and stride"),
    Wrong("pages", lambda _: 64, "pages of"),
    Wrong("heads", lambda _: 3, "as many query heads"),
    Wrong("block_tables", strided, "block_tables int32"),
    Wrong("context_lens", Tensor.long, "context_lens int32"),
    Wrong("cu_query_lens", lambda starts: starts[:-1], "cu_query_lens int32"),
    Wrong("k_scale", Tensor.half, "scales of float32"),
    Wrong("workspace_buffer", Tensor.int, "a workspace of bytes"),
    Wrong("workspace_buffer", lambda workspace: workspace[:-1], "a workspace for every partition"),
)


def prefill() -> Calls:
    """Return the calls for two requests with several queries over lists of KV slots."""
    cells = torch.zeros(64, 2, 64, dtype=torch.float16, device=DEVICE)
    given = {
        "q": torch.zeros(3, 4, 64, dtype=torch.float16, device=DEVICE),
        "k": cells,
        "v": cells.clone(),
        "cu_seqlens_q": int32(DEVICE, 0, 1, 3),
        "kv_indptr": int32(DEVICE, 0, 4, 9),
        "kv_page_indices": torch.arange(9, dtype=torch.int32, device=DEVICE),
        "max_seqlen_q": 2,
        "max_seqlen_k": 5,
        "causal": True,
    }
    return Calls(importlib.import_module("aiter").mha_batch_prefill_func, given, PREFILL, vendor())


PREFILL = (
    Wrong("v", Tensor.bfloat16, "one half precision"),
    Wrong("kv_indptr", Tensor.cpu, "everything on one device"),
    Wrong("q", strided, "tensors whose last dimension"),
    Wrong("v", lambda v: v[:32], "cells [cells, heads, dim]"),
    Wrong("k", widened, "heads that begin every 16 bytes"),
    Wrong("dim", lambda _: 60, "heads of whole 8ths"),
    Wrong("q", lambda q: q[:, :3], "as many query heads"),
    Wrong("rows", lambda _: 0, "at least one row"),
    Wrong("cu_seqlens_q", Tensor.long, "cu_seqlens_q int32"),
    Wrong("kv_indptr", strided, "kv_indptr int32"),
    Wrong("kv_page_indices", Tensor.long, "kv_page_indices of int32"),
)


def changing(made: Calls, **sizes: int) -> Calls:
    """Return the calls with additional arguments for sizes that several arguments share."""

    def call(**given: object) -> Tensor:
        chosen = {name: given.pop(name) for name in sizes}
        return made.call(**resized(given, chosen))

    return Calls(call, {**made.given, **sizes}, made.wrongs, made.modules)


def resized(given: dict, chosen: dict) -> dict:
    """Return the arguments with another page size, number of heads, head size, or number of
    requests."""
    found = dict(given)
    for name in ("key_cache", "value_cache"):
        if name in found and chosen["pages"] != 16:
            found[name] = found[name].reshape(-1, chosen["pages"], *found[name].shape[2:])
    for name in ("query", "out"):
        if name in found and chosen["heads"] != 4:
            found[name] = found[name][:, : chosen["heads"]].contiguous()
    for name in ("q", "k", "v"):
        if name in found and chosen["dim"] != 64:
            found[name] = found[name][..., : chosen["dim"]]
    for name in ("cu_seqlens_q", "kv_indptr"):
        if name in found and chosen["rows"] != 2:
            found[name] = found[name][: chosen["rows"] + 1]
    return found


def listed() -> Calls:
    """Return the calls for two tokens with lists of three rows of one pool."""
    given = {
        "q": torch.zeros(2, 4, 512, dtype=torch.bfloat16, device=DEVICE),
        "unified_kv": torch.zeros(8, 512, dtype=torch.bfloat16, device=DEVICE),
        "kv_indices": int32(DEVICE, 0, 5, -1, 7, 1, 2),
        "kv_indptr": int32(DEVICE, 0, 3, 6),
        "attn_sink": torch.zeros(4, device=DEVICE),
        "softmax_scale": 0.125,
    }
    function = importlib.import_module("aiter.ops.triton.attention.pa_decode_sparse").pa_decode_sparse
    return Calls(function, given, LISTED, vendor())


LISTED = (
    Wrong("unified_kv", Tensor.half, "queries in half precision"),
    Wrong("attn_sink", Tensor.cpu, "everything on one device"),
    Wrong("unified_kv", lambda rows: rows[:, :256], "rows [rows, dim] of a power of two"),
    Wrong("kv_indices", Tensor.long, "kv_indices int32"),
    Wrong("kv_indptr", lambda starts: starts[:-1], "kv_indptr int32"),
    Wrong("attn_sink", Tensor.half, "attn_sink float32"),
)


MADE = {"decode": lambda: changing(decode(), pages=16, heads=4), "prefill": lambda: changing(prefill(), dim=64, rows=2)}


@pytest.mark.parametrize("wrong", DECODE, ids=lambda wrong: wrong.says)
def test_paged_decode_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    MADE["decode"]().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", PREFILL, ids=lambda wrong: wrong.says)
def test_batch_prefill_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    MADE["prefill"]().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", LISTED, ids=lambda wrong: wrong.says)
def test_attention_over_lists_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    listed().check_refused(wrong, monkeypatch)


def test_every_precondition_of_attention_over_lists_is_violated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listed().check_covered(monkeypatch)


@pytest.mark.parametrize("name", list(MADE))
def test_every_precondition_is_violated_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MADE[name]().check_covered(monkeypatch)
