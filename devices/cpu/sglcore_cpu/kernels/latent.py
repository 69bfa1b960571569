"""Kernel table entries around latent attention (MLA) by the native kernels: norm, rotary embedding
and store of cache rows, grouped linear layers, and hyper-connections. Tensors with a memory layout
that the kernels do not read go to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.kernels.operands import INDEX_BYTES
from sglcore_cpu.kernels.sparse import address, are_indices, form_of, is_known, last_is_plain, refusal
from sglcore_cpu.native import TYPES, Engine


def takes_store(x: Tensor, weight: Tensor, *others: object) -> str:
    """Return why the kernels refuse a store of cache rows, empty if they take it: x must be float32
    or bfloat16, the norm's weight float32, the pool's rows (the last 2-dimensional tensor of the
    call) float32, bfloat16 or the bytes of a codec."""
    floats = [each.dtype for each in others if isinstance(each, Tensor) and each.ndim == 2]
    rows = floats[-1]
    wide = weight.dtype is torch.float32
    stores = wide and rows in {*TYPES, torch.uint8}
    return refusal(x) or ("" if stores else f"it stores rows of float32 and bfloat16, not of {rows}")


def takes_one(*call: object) -> str:
    """Return why a call is refused, empty if it is taken: the first floating-point argument must be
    float32 or bfloat16, and every other one float32 or of the dtype of the first."""
    tensors = [each for each in call if isinstance(each, Tensor) and each.is_floating_point()]
    others = {each.dtype for each in tensors} - {torch.float32, tensors[0].dtype}
    return refusal(tensors[0]) or ("" if not others else f"it takes no {others.pop()} together with {tensors[0].dtype}")


class Latent:
    """Implements the kernel table's entries for latent attention by methods of the same names, on
    one engine. Each call waits for its result."""

    def __init__(self, engine: Engine) -> None:
        self._empty = engine.empty
        self._rope_tail, self._norm_store, self._grouped_linear, self._hc_pre, self._hc_post = (
            engine.kernel(name).bind() for name in ("rope_tail", "norm_store", "grouped_linear", "hc_pre", "hc_post")
        )

    @implements(takes_one)
    def rope_tail(
        self, x: Tensor, positions: Tensor, cos_sin_cache: Tensor, norm_eps: float | None, is_inverse: bool
    ) -> Tensor:
        """Implement `KernelTable.rope_tail`: x [T, H, D] -> [T, H, D], a new tensor. Each head is
        normalised first unless `norm_eps` is None, and its last R elements are rotated (R: width of
        the cache), in one pass; `is_inverse` rotates backwards."""
        if not (last_is_plain(x, cos_sin_cache) and are_indices(positions)):
            return reference_sparse.rope_tail(x, positions, cos_sin_cache, norm_eps, is_inverse)
        tokens, heads, size = x.shape
        x_stride, head_stride, _ = x.stride()
        out = self._empty(tokens, heads, size, dtype=x.dtype)
        self._rope_tail(
            x=x.data_ptr(),
            x_stride=x_stride,
            x_head_stride=head_stride,
            out=out.data_ptr(),
            **_angles(positions, cos_sin_cache),
            tokens=tokens,
            heads=heads,
            size=size,
            norms=int(norm_eps is not None),
            eps=norm_eps or 0.0,
            inverse=int(is_inverse),
            type=TYPES[x.dtype],
        )
        return out

    @implements(takes_store)
    def norm_rope_store(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin_cache: Tensor,
        rows: Tensor,
        out_rows: Tensor,
        codec: RowCodec | None,
    ) -> None:
        """Implement `KernelTable.norm_rope_store` in one pass: scale the first S elements of row t
        of x [T, D] to root mean square 1, times weight [S], rotate the last ones (the width of the
        cache), and write the row to rows[out_rows[t]], in the form of `codec` (None: plain
        numbers). x itself does not change."""
        dense = last_is_plain(x, cos_sin_cache, rows, out_rows)
        if not (is_known(codec) and dense and are_indices(positions)):
            reference_sparse.norm_rope_store(x, weight, eps, positions, cos_sin_cache, rows, out_rows, codec)
        else:
            self._store(x, weight, None, eps, positions, cos_sin_cache, rows, out_rows, codec)

    @implements(takes_store)
    def index_key_store(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin_cache: Tensor,
        rows: Tensor,
        out_rows: Tensor,
        codec: RowCodec | None,
    ) -> None:
        """Implement `KernelTable.index_key_store` in one pass: layer norm of row t of x [T, D],
        rotation of its first elements (the width of the cache), written to rows[out_rows[t]] in the
        form of `codec` (None: plain numbers). x itself does not change."""
        dense = last_is_plain(x, cos_sin_cache, rows, out_rows)
        if not (is_known(codec) and dense and are_indices(positions)):
            reference_sparse.index_key_store(x, weight, bias, eps, positions, cos_sin_cache, rows, out_rows, codec)
        else:
            self._store(x, weight, bias, eps, positions, cos_sin_cache, rows, out_rows, codec)

    def _store(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin_cache: Tensor,
        rows: Tensor,
        out_rows: Tensor,
        codec: RowCodec | None,
    ) -> None:
        self._norm_store(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=address(bias),
            normed=weight.shape[0],
            eps=eps,
            **_angles(positions, cos_sin_cache),
            rows=rows.data_ptr(),
            row_stride=rows.stride(0),
            out_rows=out_rows.data_ptr(),
            index_bytes=INDEX_BYTES[out_rows.dtype],
            tokens=x.shape[0],
            size=x.shape[1],
            type=TYPES[x.dtype],
            **form_of(rows, codec),
        )

    @implements(takes_one)
    def grouped_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Implement `KernelTable.grouped_linear`: x [T, G, K], weight [G, R, K] with any strides ->
        [T, G, R]. Threads divide the outputs of a group."""
        group_stride, output_stride, input_stride = weight.stride()
        if not last_is_plain(x) or 1 not in (output_stride, input_stride):
            return reference_sparse.grouped_linear(x, weight)
        (tokens, groups, inputs), outputs = x.shape, weight.shape[1]
        out = self._empty(tokens, groups, outputs, dtype=x.dtype)
        self._grouped_linear(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_group_stride=x.stride(1),
            weight=weight.data_ptr(),
            group_stride=group_stride,
            output_stride=output_stride,
            input_stride=input_stride,
            out=out.data_ptr(),
            tokens=tokens,
            groups=groups,
            outputs=outputs,
            inputs=inputs,
            type=TYPES[x.dtype],
        )
        return out

    @implements(takes_one)
    def hc_pre(
        self, h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `KernelTable.hc_pre`: h [T, n, d], n residual streams of each token
        (hyper-connections) -> (x [T, d] of h's dtype, a layer's input, which is a weighted sum of
        the streams; and for `hc_post` the weights post float32 [T, n] and comb float32 [T, n, n]).
        `fn` [2 n + n * n, n * d], `base` and `scale` make the weights; `iters`: normalisations of
        comb's rows and columns."""
        tokens, streams, _ = h.shape
        if not (_are_streams(h) and fn.is_contiguous()):
            return reference_sparse.hc_pre(h, fn, base, scale, norm_eps, hc_eps, iters)
        post = self._empty(tokens, streams, dtype=torch.float32)
        comb = self._empty(tokens, streams, streams, dtype=torch.float32)
        return self._mixed(h, fn, base, scale, norm_eps, hc_eps, iters, (post, comb)), post, comb

    @implements(takes_one)
    def hc_head(self, h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
        """Implement `KernelTable.hc_head`: h [T, n, d], n residual streams of each token -> [T, d],
        their weighted sum, the first result of the kernel of `hc_pre`."""
        if not (_are_streams(h) and fn.is_contiguous()):
            return reference_sparse.hc_head(h, fn, base, scale, norm_eps, hc_eps)
        return self._mixed(h, fn, base, scale, norm_eps, hc_eps, 0, (None, None))

    def _mixed(
        self,
        h: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm_eps: float,
        hc_eps: float,
        iters: int,
        others: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        (tokens, streams, size), (post, comb) = h.shape, others
        x = self._empty(tokens, size, dtype=h.dtype)
        self._hc_pre(
            h=h.data_ptr(),
            h_stride=h.stride(0),
            fn=fn.data_ptr(),
            base=base.data_ptr(),
            scale=scale.data_ptr(),
            x=x.data_ptr(),
            post=address(post),
            comb=address(comb),
            tokens=tokens,
            streams=streams,
            size=size,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            iters=iters,
            type=TYPES[h.dtype],
        )
        return x

    @implements(takes_one)
    def hc_post(self, x: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Implement `KernelTable.hc_post` in one pass: x [T, d], a layer's result, h [T, n, d],
        post [T, n], comb [T, n, n] -> the new streams [T, n, d], a new tensor. Stream k is post[k]
        * x plus the sum over j of comb[j, k] * h[j]."""
        if not (last_is_plain(x) and _are_streams(h) and post.is_contiguous() and comb.is_contiguous()):
            return reference_sparse.hc_post(x, h, post, comb)
        tokens, streams, size = h.shape
        out = self._empty(tokens, streams, size, dtype=h.dtype)
        self._hc_post(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            h=h.data_ptr(),
            h_stride=h.stride(0),
            post=post.data_ptr(),
            comb=comb.data_ptr(),
            out=out.data_ptr(),
            tokens=tokens,
            streams=streams,
            size=size,
            type=TYPES[h.dtype],
        )
        return out


def _are_streams(h: Tensor) -> bool:
    """Return whether the streams of each token of h [T, streams, size] are contiguous; tokens may
    have gaps between them."""
    return h.stride()[1:] == (h.shape[2], 1)


def _angles(positions: Tensor, cos_sin_cache: Tensor) -> dict[str, int]:
    return {
        "positions": positions.data_ptr(),
        "cos_sin": cos_sin_cache.data_ptr(),
        "cos_sin_stride": cos_sin_cache.stride(0),
        "rotary": cos_sin_cache.shape[1],
    }
