"""The reference operators refuse what the vendor's operators refuse by their documentation, so
tests on the simulator detect such calls of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore_sim.vendors import torch_npu as references
from tests.attention.preconditions import Calls, Wrong, strided

PAGE, PAGES = 128, 3
MASK = torch.ones(references.MASK, dtype=torch.bool).triu_(1)


def half(*shape: int) -> Tensor:
    """Make zeros in float16."""
    return torch.zeros(shape, dtype=torch.float16)


def attend(packed: bool, sizes: tuple[int, int, int, int], cut: Any, **given: Any) -> Any:
    """Call the operator for two requests, with one query each or packed. `sizes`: head size, query
    heads, KV heads, page size."""
    dim, heads, kv_heads, page = sizes
    queries, pages = half(*((3,) if packed else (2, 1)), heads, dim), half(PAGES, page, kv_heads * dim)
    parts = {"query": queries, "key": pages, "value": pages.clone()}
    parts |= {"block_table": torch.zeros(2, 2, dtype=torch.int32), "out": [queries.clone(), torch.zeros(1)]}
    names, change = cut
    parts |= {name: change(parts[name]) for name in names}
    layout = {"input_layout": "TND", "sparse_mode": 3, "atten_mask": MASK} if packed else {"input_layout": "BSND"}
    ends = {"actual_seq_lengths": [1, 3]} if packed else {}
    shape = {"num_heads": heads, "num_key_value_heads": kv_heads, "block_size": page}
    return references.attention_out(**{**parts, **layout, **ends, **shape, **given})


def attention(packed: bool) -> Calls:
    """Return valid arguments of either layout."""
    given = {"packed": packed, "sizes": (64, 4, 2, PAGE), "cut": ((), None), "actual_seq_lengths_kv": [5, 130]}
    return Calls(attend, given, ROWS[packed], [references])


def sized(dim: int, heads: int, kv_heads: int, page: int, says: str) -> Wrong:
    """Return a violation by other sizes."""
    return Wrong("sizes", lambda _: (dim, heads, kv_heads, page), says)


def cut(names: str, change: Any, says: str) -> Wrong:
    """Return a violation by changing some of the tensors."""
    return Wrong("cut", lambda _: (names.split(), change), says)


BOTH = (
    cut("query", Tensor.bfloat16, "half precision of one kind"),
    cut("block_table", Tensor.long, "a block table of int32"),
    cut("key value", lambda x: x[..., :64].contiguous(), "pages of shape"),
    sized(64, 1024, 1024, PAGE, "at most 65535 elements"),
    cut("value", Tensor.bfloat16, "values of the shape and type"),
    cut("query", lambda query: query[..., :2, :].contiguous(), "queries of num_heads heads"),
    Wrong("actual_seq_lengths_kv", lambda _: [5, 2 * PAGE + 1], "2 lengths that the table holds"),
    sized(64, 4, 3, PAGE, "at most 64 queries' heads"),
    cut("key", strided, "contiguous tensors"),
    cut("out", lambda out: [out[0].float(), out[1]], "an output of the queries'"),
)
ROWS = {
    False: (
        *BOTH,
        sized(72, 4, 2, PAGE, "another head size"),
        sized(64, 4, 2, 72, "pages of another size"),
        cut("query", lambda query: query[:1], "one query a row"),
    ),
    True: (
        *BOTH,
        sized(72, 4, 2, PAGE, "another head size"),
        sized(64, 4, 2, 256, "pages of another size"),
        Wrong("actual_seq_lengths_kv", lambda _: [5, 1], "no more queries than keys"),
    ),
}


def ints(*values: int) -> Tensor:
    """Make an int32 tensor of one dimension."""
    return torch.tensor(values, dtype=torch.int32)


def sparse(heads: int, lengths: Tensor, key: Tensor, value: Tensor | None, **given: Any) -> Any:
    """Call attention over selected entries; by default the values are the keys."""
    each = {"actual_seq_lengths_query": ints(1, 1), "actual_seq_lengths_kv": lengths, "sparse_mode": 0}
    each |= {"query": half(2, 1, heads, 512), "query_rope": half(2, 1, heads, 64), "scale_value": 0.1}
    return references.sparse_attention(**{**each, **given}, key=key, value=key if value is None else value)


SMALL: dict[str, tuple[Any, dict[str, Any], tuple[Wrong, ...]]] = {
    "rms_norm": (
        references.rms_norm,
        {"input": half(3, 8), "gamma": half(8)},
        (
            Wrong("gamma", Tensor.float, "one dtype of floats"),
            Wrong("gamma", lambda gamma: gamma[:1], "a gamma of the last dimensions"),
        ),
    ),
    "add_rms_norm": (
        lambda x1, x2: references.add_rms_norm(x1, x2, half(8)),
        {"x1": half(3, 8), "x2": half(3, 8)},
        (Wrong("x2", lambda x2: x2[:1], "two tensors of one shape"),),
    ),
    "swiglu": (
        references.swiglu,
        {"input": half(3, 8)},
        (Wrong("input", Tensor.int, "floats"), Wrong("input", lambda x: x[:, :7], "two halves of one size")),
    ),
    "rotary_mul": (
        references.rotary_mul,
        {"input": half(1, 3, 4, 16), "r1": half(1, 3, 1, 16), "r2": half(1, 3, 1, 16), "rotary_mode": "half"},
        (
            Wrong("rotary_mode", lambda _: "interleave", "four dimensions in the mode 'half'"),
            Wrong("r2", Tensor.float, "one dtype of floats"),
            Wrong("r1", lambda r1: r1[:, :1], "r1 and r2 of every token"),
        ),
    ),
    "scatter": (
        lambda **given: references.scatter_pa_kv_cache(**given, cache_mode="Norm"),
        {
            "key": half(3, 2, 16),
            "value": half(3, 2, 16),
            "key_cache": half(9, 1, 2, 16),
            "value_cache": half(9, 1, 2, 16),
            "slot_mapping": torch.arange(3),
        },
        (
            Wrong("key", Tensor.float, "one dtype, of half precision"),
            Wrong("slot_mapping", lambda slots: slots[:2], "integer slots, one for each row"),
            Wrong("value", lambda value: value[:2], "values of the rows and heads"),
            Wrong("value_cache", lambda cache: cache[..., :8].contiguous(), "pages of 4 dimensions"),
            Wrong("key", strided, "contiguous tensors"),
        ),
    ),
    "sparse": (
        sparse,
        {
            "heads": 4,
            "key": half(2, 8, 1, 512),
            "value": None,
            "key_rope": half(2, 8, 1, 64),
            "sparse_indices": ints(0, 1, -1, 2, -1, -1).view(2, 1, 1, 3),
            "lengths": ints(2, 3),
            "attention_mode": 2,
        },
        (
            Wrong("attention_mode", lambda _: 0, "the attention mode 2"),
            Wrong("sparse_indices", lambda lists: lists[..., :0], "something in every tensor"),
            Wrong("key_rope", Tensor.bfloat16, "one type of half precision"),
            Wrong("heads", lambda _: 3, "1, 2, 4, ... or 128 heads"),
            Wrong("key", lambda key: key[..., :256].contiguous(), "one head of keys"),
            Wrong("key_rope", lambda turned: turned[..., :32].contiguous(), "64 elements that hold a place"),
            Wrong("value", lambda _: half(2, 8, 1, 512), "values that are the keys"),
            Wrong("sparse_indices", Tensor.long, "int32 places"),
            Wrong("sparse_indices", lambda lists: lists.flip(3), "lists that are filled up behind the rest"),
            Wrong("lengths", Tensor.long, "int32 lengths"),
            Wrong("lengths", lambda _: ints(2, 9), "lengths that queries and keys have"),
            Wrong("lengths", lambda _: ints(1, 3), "places that the text has"),
            Wrong("key_rope", strided, "contiguous tensors"),
        ),
    ),
}
"""The smaller operators by name: the call, valid arguments, and violations."""


def small(name: str) -> Calls:
    """Return the calls of one of them."""
    return Calls(*SMALL[name], [references])


CASES = [(packed, wrong) for packed, wrongs in ROWS.items() for wrong in wrongs]


@pytest.mark.parametrize(("packed", "wrong"), CASES, ids=lambda each: getattr(each, "says", str(each)))
def test_attention_refuses(packed: bool, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    attention(packed).check_refused(wrong, monkeypatch)


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, (_, _, wrongs) in SMALL.items() for wrong in wrongs]
)
def test_a_smaller_operator_refuses(name: str, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    small(name).check_refused(wrong, monkeypatch)


@pytest.mark.parametrize("name", ["one query a row", "packed", *sorted(SMALL.keys() - {"rotary_mul", "add_rms_norm"})])
def test_every_precondition_is_violated_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small(name) if name in SMALL else attention(name == "packed")
    made.check_covered(monkeypatch)


@pytest.mark.parametrize("wide", [(900, 3), (15, 3), (16, 1000)])
def test_rotation_refuses_heads_that_are_odd_too_wide_or_too_many(wide: tuple[int, int]) -> None:
    dim, heads = wide
    table = half(1, 3, 1, dim)
    with pytest.raises(RuntimeError, match="npu_rotary_mul wants"):
        references.rotary_mul(half(1, 3, heads, dim), table, table)
