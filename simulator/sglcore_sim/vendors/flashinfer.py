"""FlashInfer 0.7.2: plan and run of the paged wrappers as CPU references with the real signatures.

As in the library, a plan is written to pinned memory of the wrapper and copied to the device
without waiting. The kernel reads lengths from that copy, and pages from the wrapper's buffers. In
graph mode the caller provides the buffers.

Sources of the preconditions: flashinfer/decode.py, prefill.py and utils.py, and the checks and
dispatches of csrc/batch_decode.cu and batch_prefill.cu (flashinfer-ai/flashinfer). A workspace must
have at least the size that a plan with split rows needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglcore_sim.faces.module import bound
from sglcore_sim.vendors.flashinfer_topk import top_k_page_table_transform
from sglcore_sim.vendors.paged import adjacent, attend, cells_of, flat, plant_module, require, together

VERSION = "0.7.2.post1"
INT_WORKSPACE = 8 << 20
HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 3, 4, 8)
"""Query heads per key head for which decode is compiled without tensor cores."""
ALIGNMENT = 16
HALF = (torch.float16, torch.bfloat16)


def refuse(wanted: Mapping[str, object]) -> None:
    """Raise ValueError, the library's usual error, with the first text in `wanted` (text: whether
    it holds) that does not hold; if all hold, do nothing."""
    require("flashinfer", wanted, ValueError)


def plant(sim: Any) -> None:
    """Make `import flashinfer` in this process return a new module with `__version__`, both wrapper
    classes, `fast_decode_plan` and `top_k_page_table_transform`, bound to the simulator `sim`."""
    wrappers = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
    made = {wrapper.__name__: bound(wrapper, _sim=sim) for wrapper in wrappers}
    made["top_k_page_table_transform"] = partial(top_k_page_table_transform, sim)
    plant_module("flashinfer", __version__=VERSION, fast_decode_plan=fast_decode_plan, **made)


class PagedWrapper:
    """The base of the decode and the prefill wrapper: workspaces, page buffers, and a plan (the
    rows' query offsets, then their lengths, int32) in the int workspace. `run` before `plan` and an
    int workspace too small for the plan raise RuntimeError, another layout than NHD
    NotImplementedError, other wrong arguments ValueError.
    """

    _sim: Any
    _window_left: int
    _softcap: float
    _sm_scale: float | None

    def _make(
        self, workspace: Tensor, kv_layout: str, graph: bool, buffers: tuple[Tensor | None, ...], any_group: bool
    ) -> None:
        if kv_layout != "NHD":
            raise NotImplementedError("this reference takes the layout NHD only")
        if graph:
            starts, indices, last = buffers
            if starts is None or indices is None or last is None:
                raise ValueError("the page buffers should be torch.Tensors in cudagraph mode")
            refuse({"indptr buffers of batch_size + 1": len(starts) == len(last) + 1})
        self._graph = graph
        self._any_group = any_group
        self._planned = False
        self._buffers: list[Any] = list(buffers)
        self.reset_workspace_buffer(workspace, torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=workspace.device))
        self.device = workspace.device

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        buffers = (float_workspace_buffer, int_workspace_buffer)
        wanted = {
            f"workspaces aligned to {ALIGNMENT} bytes": all(x.data_ptr() % ALIGNMENT == 0 for x in buffers),
            "contiguous workspaces of bytes": all(x.is_contiguous() and x.dtype == torch.uint8 for x in buffers),
            "workspaces on one device": together(*buffers),
        }
        refuse(wanted)
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pinned = torch.empty(int_workspace_buffer.shape, dtype=torch.uint8, pin_memory=True)

    def _plan(
        self,
        query_starts: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        dtypes: tuple[Any, Any],
        non_blocking: bool,
    ) -> None:
        self._check(heads, dtypes)
        batch = len(last_page_len)
        _check_lists(query_starts, indptr, indices, last_page_len, page_size)
        self._check_batch(batch)
        if self._graph and len(indices) > len(self._buffers[1]):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        for place, given in enumerate((indptr, indices, last_page_len)):
            if self._graph:
                self._buffers[place][: len(given)].copy_(given, non_blocking=non_blocking)
            else:
                self._buffers[place] = given.to(self.device, non_blocking=non_blocking)
        self._write_plan(query_starts, indptr.to("cpu"), last_page_len.to("cpu"), page_size)
        self._batch, self._heads, self._page_size, self._dtypes = batch, heads, page_size, dtypes
        self._planned = True

    def _check_batch(self, batch: int) -> None:
        if self._graph and batch != len(self._buffers[2]):
            raise ValueError(f"The batch size should be fixed in cudagraph mode, {len(self._buffers[2])}, not {batch}")

    def _write_plan(self, query_starts: Tensor, starts: Tensor, last: Tensor, page_size: int) -> None:
        """Write the plan, `query_starts` [batch + 1] and the lengths in tokens that follow from
        page offsets `starts` [batch + 1] and tokens of the last pages `last` [batch], to pinned
        memory, and copy it to the device without waiting. Raises RuntimeError if the int workspace
        is too small. `starts` and `last` are on the host."""
        lengths = torch.clamp(starts[1:] - starts[:-1] - 1, min=0) * page_size + last
        work = torch.cat((query_starts.to("cpu"), lengths)).to(torch.int32)
        size = work.numel() * 4
        require("flashinfer", {"an int workspace that holds the plan": size <= self._int_workspace_buffer.numel()})
        self._pinned[:size].view(torch.int32).copy_(work)
        self._int_workspace_buffer[:size].copy_(self._pinned[:size], non_blocking=True)

    def _check(self, heads: tuple[int, int, int], dtypes: tuple[Any, Any]) -> None:
        if heads[2] not in HEAD_DIMS:
            raise ValueError(f"unsupported head_dim {heads[2]}")
        if heads[0] % heads[1]:
            raise ValueError(f"num_qo_heads {heads[0]} is no multiple of num_kv_heads {heads[1]}")
        if any(dtype not in HALF for dtype in dtypes):
            raise ValueError(f"unsupported data types {dtypes}")
        is_compiled = self._any_group or heads[0] // heads[1] in GROUPS
        refuse({f"groups of {GROUPS} heads, or tensor cores": is_compiled})

    def _run(self, q: Tensor, kv: Any, causal: bool, factor: float, out: Tensor | None) -> Tensor:
        if not self._planned:
            raise RuntimeError("plan() must come before run()")
        keys, values = kv
        shape, wanted = tuple(q.shape[1:]), (self._heads[0], self._heads[2])
        if shape != wanted or keys.shape[1:] != (self._page_size, self._heads[1], self._heads[2]):
            raise ValueError(f"planned for heads {self._heads}, run with q {shape} and pages {tuple(keys.shape)}")
        if (q.dtype, keys.dtype) != self._dtypes:
            raise ValueError(f"planned for {self._dtypes}, run with {q.dtype} and {keys.dtype}")
        out = torch.empty_like(q) if out is None else out
        given = (q, keys, values, out)
        wanted = {
            "everything on the device of the plan": all(x.device == self.device for x in given),
            "keys and values of one shape, stride and type": keys.stride() == values.stride()
            and (keys.shape, keys.dtype) == (values.shape, values.dtype),
            "tensors whose last dimension is contiguous": adjacent(*given),
            "an output of the queries' shape and type": (out.shape, out.dtype) == (q.shape, q.dtype),
            "a float workspace for a partial result of each head": self._float_workspace_buffer.numel()
            >= 4 * q.shape[0] * q.shape[1] * (q.shape[2] + 1),
        }
        refuse(wanted)
        scale, left = (self._sm_scale or 1 / math.sqrt(q.shape[-1])) * factor, self._window_left
        softcap = self._softcap
        sim, batch, page_size = self._sim, self._batch, self._page_size
        plan = self._int_workspace_buffer[: (2 * batch + 1) * 4]
        starts, pages = self._buffers[0][: batch + 1], self._buffers[1]

        def kernel() -> None:
            work = sim.host_view(plan).view(torch.int32).tolist()
            begin, lists = sim.host_view(starts).tolist(), sim.host_view(pages)
            rows = [
                (work[i], work[i + 1], cells_of(lists[begin[i] : begin[i + 1]], work[batch + 1 + i], page_size))
                for i in range(batch)
            ]
            k_cells, v_cells = flat(sim.host_view(keys)), flat(sim.host_view(values))
            attend(sim.host_view(out), sim.host_view(q), rows, k_cells, v_cells, scale, causal, left, softcap)

        reads = [q, keys, values, plan, starts, pages, self._buffers[2]]
        writes = [out, self._float_workspace_buffer[:16]]
        sim.launch(f"flashinfer.{type(self).__name__}.run", kernel, reads=reads, writes=writes)
        return out


def _check_lists(query_starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> None:
    """Raise ValueError for lists that no plan takes: all int32 with one dimension, offsets of batch
    + 1. The values of `last` and `indptr` are checked only if they are on the host."""
    wanted = {
        "lists of int32": all(x.dtype == torch.int32 and x.dim() == 1 for x in (query_starts, indptr, indices, last)),
        "offsets of batch_size + 1": len(query_starts) == len(indptr) == len(last) + 1,
        f"last pages of 1 to {page_size} tokens": not last.is_cpu or ((last >= 1) & (last <= page_size)).all(),
        "as many pages as indptr says": not indptr.is_cpu or len(indices) >= int(indptr[-1]),
    }
    refuse(wanted)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """The wrapper for decode: one query token per row, q [batch, heads, dim]. Its methods have the
    library's signatures; options of `plan` must be given by name (else TypeError). `run` returns
    the attention as one tensor of q's shape, also with `return_lse`. Options that the reference
    does not use are ignored."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._make(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, use_tensor_cores)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        if deprecated_positional_args:
            raise TypeError("options of plan() are given by name; by position they are deprecated")
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type or q_data_type)
        self._plan(starts, indptr, indices, last_page_len, heads, page_size, dtypes, non_blocking)
        self._window_left, self._softcap, self._sm_scale = window_left, logits_soft_cap or 0.0, sm_scale

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor:
        if q.shape[0] != self._batch:
            raise ValueError(f"q has {q.shape[0]} rows, the plan {self._batch}")
        return self._run(q, paged_kv_cache, True, (q_scale or 1.0) * (k_scale or 1.0), out)


def fast_decode_plan(
    self: Any,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """Plan a decode wrapper, `self`, again after its `plan()`, with the same heads, page size and
    dtypes; those arguments are ignored. In graph mode the caller writes the page buffers itself;
    otherwise the given tensors become the buffers. `global_override_indptr_cpu` is read in place of
    a copy of `indptr` to the host. Raises AttributeError before the first plan(), ValueError for
    wrong lists, for another batch size in graph mode, and for a softcap where the first plan had
    none or the reverse, and RuntimeError if the int workspace is too small.
    """
    if not self._planned:
        raise AttributeError("'_cached_module': plan() must come before fast_decode_plan()")
    batch = len(last_page_len)
    self._check_batch(batch)
    if not self._graph:
        self._buffers[:] = [indptr, indices, last_page_len]
    starts = indptr.cpu() if global_override_indptr_cpu is None else global_override_indptr_cpu
    wanted = {
        "an override of indptr on the host": starts.is_cpu,
        "a softcap where the first plan had one": bool(logits_soft_cap) == bool(self._softcap),
    }
    refuse(wanted)
    _check_lists(starts, starts, indices, last_page_len, page_size)
    self._write_plan(torch.arange(batch + 1, dtype=torch.int32), starts, last_page_len.cpu(), page_size)
    self._window_left, self._softcap, self._sm_scale = window_left, logits_soft_cap or 0.0, sm_scale


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """The wrapper for prefill: any number of query tokens per row, packed, q [tokens, heads, dim].
    Its methods have the library's signatures; `run` returns the attention as one tensor of q's
    shape, also with `return_lse`. Options that the reference does not use are ignored, custom masks
    included."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._make(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, True)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type or q_data_type)
        lists = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr, *lists, heads, page_size, dtypes, non_blocking)
        self._tokens = int(qo_indptr.to("cpu")[-1])
        self._causal, self._window_left, self._sm_scale = causal, window_left, sm_scale
        self._softcap = logits_soft_cap or 0.0

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        if q.shape[0] != self._tokens:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._tokens})")
        return self._run(q, paged_kv_cache, self._causal, (q_scale or 1.0) * (k_scale or 1.0), out)
