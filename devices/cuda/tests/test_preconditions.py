"""What FlashAttention and FlashInfer refuse, their references refuse too, so that no call of this package may come to it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.preconditions import FLASH_ATTENTION, Calls, Wrong, flash_attention, int32, strided

pytestmark = pytest.mark.needs("simulator")

DEVICE = torch.device("cuda:0")
BAD_HEADS = Wrong("heads", lambda _: (4, 2, 60), "heads of whole 8ths")


def flash() -> Calls:
    """The one call of FlashAttention."""
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
    """Plan and run a decode wrapper, then another by graph buffers that is planned again."""
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
    """A list on the host."""
    return torch.tensor(values, dtype=torch.int32)


def flashinfer() -> Calls:
    """Two rows over pages of 16."""
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


@pytest.mark.parametrize("wrong", (*FLASH_ATTENTION, BAD_HEADS), ids=lambda wrong: wrong.says)
def test_flash_attention_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    flash().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", FLASHINFER, ids=lambda wrong: wrong.says)
def test_flashinfer_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer().check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("made", [flash, flashinfer])
def test_every_precondition_is_violated_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made().check_covered(monkeypatch)
