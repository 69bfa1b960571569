"""The references of FlashAttention, FlashInfer and FlashMLA refuse what the libraries refuse, so
tests on the simulator detect such calls of this package."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.preconditions import FLASH_ATTENTION, Calls, Wrong, flash_attention, int32, strided, widened

pytestmark = pytest.mark.needs("simulator")

DEVICE = torch.device("cuda:0")
BAD_HEADS = Wrong("heads", lambda _: (4, 2, 60), "heads of whole 8ths")


def flash() -> Calls:
    """Return the calls of FlashAttention."""
    module = importlib.import_module("flash_attn_interface")
    paged = importlib.import_module("sglcore_sim.vendors.paged")

    def call(heads: tuple[int, int, int], **given: Any) -> Tensor:
        dim = heads[2]
        cut = {name: given[name][..., :dim] for name in ("q", "k_cache", "v_cache")}
        return module.flash_attn_with_kvcache(**{**given, **cut})

    made = flash_attention(call, DEVICE, [paged])
    return Calls(call, {**made.given, "heads": (4, 2, 64)}, (*FLASH_ATTENTION, BAD_HEADS), made.modules)


def decode(
    workspace: Tensor,
    plan: Tensor,
    starts: Tensor,
    indices: Tensor,
    last: Tensor,
    heads: tuple[int, int, int],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    buffers: tuple[int, int],
    override: Tensor,
    softcap: float,
) -> Tensor:
    """Plan and run a decode wrapper; then make another with graph buffers and plan it twice."""
    library = importlib.import_module("flashinfer")
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.reset_workspace_buffer(workspace, plan)
    sizes = (*heads, 16)
    wrapper.plan(starts, indices, last, *sizes, q_data_type=torch.float16)
    found = wrapper.run(q, (keys, values), out=out)
    graph = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=int32(DEVICE, *[0] * buffers[0]),
        paged_kv_indices_buffer=int32(DEVICE, *[0] * 8),
        paged_kv_last_page_len_buffer=int32(DEVICE, *[1] * buffers[1]),
    )
    graph.plan(starts, indices, last, *sizes, q_data_type=torch.float16)
    library.fast_decode_plan(
        graph, starts, indices, last, *sizes, global_override_indptr_cpu=override, logits_soft_cap=softcap
    )
    return found


def host(*values: int) -> Tensor:
    """Make an int32 tensor on the host."""
    return torch.tensor(values, dtype=torch.int32)


def flashinfer() -> Calls:
    """Return the calls for two requests over pages of 16."""
    pages = torch.zeros(4, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    q = torch.zeros(2, 4, 64, dtype=torch.float16, device=DEVICE)
    given = {
        "workspace": torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE),
        "plan": torch.zeros(1 << 12, dtype=torch.uint8, device=DEVICE),
        "starts": host(0, 1, 3),
        "indices": int32(DEVICE, 1, 2, 3),
        "last": host(5, 4),
        "heads": (4, 2, 64),
        "q": q,
        "keys": pages,
        "values": pages.clone(),
        "out": torch.zeros_like(q),
        "buffers": (3, 2),
        "override": host(0, 1, 3),
        "softcap": 0.0,
    }
    return Calls(decode, given, FLASHINFER, [importlib.import_module("sglcore_sim.vendors.flashinfer")])


FLASHINFER = (
    Wrong("workspace", lambda w: w[1:], "workspaces aligned"),
    Wrong("plan", lambda w: w.view(-1, 2)[:, 0], "contiguous workspaces of bytes"),
    Wrong("plan", Tensor.cpu, "workspaces on one device"),
    Wrong("heads", lambda _: (10, 2, 64), "groups of"),
    Wrong("indices", Tensor.long, "lists of int32"),
    Wrong("starts", lambda starts: starts[:-1], "offsets of batch_size + 1"),
    Wrong("last", lambda _: host(5, 17), "last pages of 1 to 16"),
    Wrong("indices", lambda indices: indices[:2], "as many pages as indptr says"),
    Wrong("plan", lambda w: w[:16], "an int workspace"),
    Wrong("keys", Tensor.cpu, "everything on the device of the plan"),
    Wrong("values", lambda v: v.repeat(1, 2, 1, 1)[:, ::2], "keys and values of one shape, stride"),
    Wrong("q", strided, "tensors whose last dimension"),
    Wrong("out", Tensor.float, "an output of the queries'"),
    Wrong("workspace", lambda w: w[:1024], "a float workspace"),
    Wrong("buffers", lambda _: (4, 2), "indptr buffers"),
    Wrong("override", lambda starts: starts.to(DEVICE), "an override of indptr on the host"),
    Wrong("softcap", lambda _: 30.0, "a softcap where the first plan had one"),
)


def flash_mla() -> Calls:
    """Return the calls for two tokens with 64 heads and the newer kernels, on a GPU that only the
    simulator has."""
    module = importlib.import_module("sglcore_sim.vendors.flash_mla")

    def call(major: int, heads: int, size: int, **given: Any) -> Any:
        given["kv"], given["indices"] = (x if x.dim() == 3 else x.unsqueeze(1) for x in (given["kv"], given["indices"]))
        cut = {
            "q": given["q"][:, :heads, :size],
            "kv": given["kv"][..., :size],
            "attn_sink": given["attn_sink"][:heads],
        }
        return module.flash_mla_sparse_fwd(Chip(major=major), **{**given, **cut})

    given = {
        "major": 10,
        "heads": 64,
        "size": 512,
        "q": torch.zeros(2, 96, 576, dtype=torch.bfloat16, device=DEVICE),
        "kv": torch.zeros(4, 576, dtype=torch.bfloat16, device=DEVICE),
        "indices": torch.zeros(2, 128, dtype=torch.int32, device=DEVICE),
        "sm_scale": 0.1,
        "d_v": 512,
        "attn_sink": torch.zeros(96, device=DEVICE),
        "topk_length": int32(DEVICE, 3, 128),
        "use_legacy": False,
        "return_log2_lse": None,
    }
    return Calls(call, given, FLASH_MLA, [module])


class Chip:
    """The simulator with changed chip properties."""

    def __init__(self, **properties: int) -> None:
        sim = importlib.import_module("sglcore_sim").current()
        self.kind = replace(sim.kind, properties={**sim.kind.properties, **properties})
        self.host_view, self.launch = sim.host_view, sim.launch


FLASH_MLA = (
    Wrong("attn_sink", Tensor.cpu, "everything on one device"),
    Wrong("kv", Tensor.half, "queries and rows in bfloat16"),
    Wrong("topk_length", Tensor.long, "indices and lengths of int32"),
    Wrong("d_v", lambda _: 448, "heads of 512 or 576 elements"),
    Wrong("heads", lambda _: 96, "64 or 128 heads"),
    Wrong("kv", lambda kv: kv.view(2, 2, 576), "rows [N, 1, size]"),
    Wrong("topk_length", lambda lens: lens[:1], "sinks [heads] and lengths"),
    Wrong("indices", lambda lists: lists[:, :96], "lists of whole 128s"),
    Wrong("kv", strided, "tensors whose last dimension"),
    Wrong("kv", widened, "strides and addresses"),
    Wrong("major", lambda _: 8, "a GPU of compute"),
    Wrong("size", lambda _: 576, "use_legacy for heads of 576"),
    Wrong("major", lambda _: 9, "use_legacy on GPUs of compute capability 9.0"),
    Wrong("return_log2_lse", lambda _: True, "use_legacy for sums to the base 2"),
)


def top_k() -> Calls:
    """Return the calls for two rows of scores over pages of four."""
    module = importlib.import_module("sglcore_sim.vendors.flashinfer_topk")

    def call(shared: int, raw: Any, k: int, **given: Any) -> Tensor:
        chip, places = (
            Chip(shared_memory_per_multiprocessor=shared),
            torch.zeros(2, k, dtype=torch.int32, device=DEVICE),
        )
        return module.top_k_page_table_transform(chip, **given, k=k, out_raw_indices=raw(places))

    given = {
        "shared": 128 << 10,
        "raw": lambda places: places,
        "input": torch.zeros(2, 16, device=DEVICE),
        "src_page_table": torch.ones(3, 4, dtype=torch.int32, device=DEVICE),
        "lengths": int32(DEVICE, 5, 16),
        "k": 4,
        "row_to_batch": int32(DEVICE, 2, 1),
        "dsa_graph_safe": True,
        "page_size": 4,
    }
    return Calls(call, given, TOP_K, [module])


TOP_K = (
    Wrong("lengths", Tensor.cpu, "everything on one device"),
    Wrong("input", Tensor.int, "scores in float32 or half"),
    Wrong("lengths", Tensor.long, "tables, lengths and rows of int32"),
    Wrong("lengths", lambda lens: lens[:1], "lengths and batches [rows]"),
    Wrong("row_to_batch", lambda _: None, "a table for each row"),
    Wrong("raw", lambda _: strided, "contiguous int32 outputs"),
    Wrong("input", strided, "scores side by side"),
    Wrong("page_size", lambda _: 3, "pages of a power of two"),
    Wrong("k", lambda _: 2049, "a k of 1 to 2048"),
    Wrong("shared", lambda _: 100 << 10, "128 KiB of shared memory"),
)


@pytest.mark.parametrize("wrong", (*FLASH_ATTENTION, BAD_HEADS), ids=lambda wrong: wrong.says)
def test_flash_attention_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    flash().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", FLASHINFER, ids=lambda wrong: wrong.says)
def test_flashinfer_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", FLASH_MLA, ids=lambda wrong: wrong.says)
def test_flash_mla_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    flash_mla().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", TOP_K, ids=lambda wrong: wrong.says)
def test_the_choice_of_the_largest_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    top_k().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("made", [flash, flashinfer, flash_mla, top_k])
def test_every_precondition_is_violated_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made().check_covered(monkeypatch)
