"""Tests of the Metal kernels' launches, and that their source, names and MLX's signature agree.
Needs no GPU."""

from __future__ import annotations

import itertools
import math
import re

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.metal_cases import Case, Inputs, made
from devices.mlx.tests.metal_on_host import Generated, generated_text, parse
from sglcore.core.errors import ConfigError
from sglcore_mlx.attention import metal
from sglcore_mlx.attention.metal import PART, Launch, Program, Shape, combine_launch, paged_decode, walk_launch

PLAIN = Shape(2, 8, 2, 64, 4, 16, None, mx.float32, mx.float32)
PROGRAMS = (metal.DECODE, metal.PARTS, metal.COMBINE)


def shape(**sizes: object) -> Shape:
    """Return PLAIN with other sizes."""
    values = {name: getattr(PLAIN, name) for name in Shape.__dataclass_fields__}
    return Shape(**{**values, **sizes})  # type: ignore[arg-type]


def swept() -> list[Shape]:
    """Return shapes that cover all sizes that the kernels take."""
    sizes = itertools.product((1, 7), (1, 2, 5, 8, 16, 48), (1, 4), (32, 64, 96, 128, 256, 512, 992), (1, 600))
    return [
        Shape(rows, shared * kv_heads, kv_heads, head_dim, pages, 16, None, mx.float16, mx.bfloat16)
        for rows, shared, kv_heads, head_dim, pages in sizes
    ]


def arrays(of: Shape) -> tuple[mx.array, ...]:
    """Return the arrays of a call, filled with constants."""
    return (
        mx.zeros((of.rows, of.heads, of.head_dim), of.dtype),
        mx.zeros(((of.pages + 1) * of.page_size, 2, of.kv_heads, of.head_dim), of.kv_dtype),
        mx.zeros((of.rows, of.pages), mx.int32),
        mx.ones((of.rows,), mx.int32),
    )


def generated(launch: Launch, inputs: tuple[object, ...]) -> Generated:
    """Return the source that MLX generates for a launch."""
    return parse(generated_text(launch, inputs), launch.program.inputs, launch.program.outputs)


def both(of: Shape) -> list[Generated]:
    """Return the source that MLX generates for all launches of a call."""
    walk, combine = walk_launch(of), combine_launch(of)
    partial = [mx.zeros(size, dtype) for size, dtype in zip(walk.output_shapes, walk.output_dtypes, strict=True)]
    made = [generated(walk, (*arrays(of), 1.0, 50.0, mx.zeros((of.heads,)), mx.ones((of.rows,), mx.int32)))]
    return made if of.parts == 1 else [*made, generated(combine, (*partial, arrays(of)[3]))]


def test_launches_stay_within_what_metal_allows() -> None:
    for of, make in itertools.product(swept(), (walk_launch, combine_launch)):
        launch = make(of)
        assert math.prod(launch.threadgroup) <= 1024 and launch.threadgroup[0] % 32 == 0
        assert all(whole % size == 0 for whole, size in zip(launch.grid, launch.threadgroup, strict=True))
        assert _declared_bytes(launch) <= of.threadgroup_bytes <= 32 * 1024


def test_every_query_head_of_every_row_has_one_threadgroup_a_part() -> None:
    for of in swept():
        launch = walk_launch(of)
        parts, groups, rows = (whole // size for whole, size in zip(launch.grid, launch.threadgroup, strict=True))
        assert (parts, groups * of.queries, rows) == (of.parts, of.heads, of.rows), of
        assert (of.heads // of.kv_heads) % of.queries == 0, "the query heads of a threadgroup share a KV head"
        assert of.queries == 1 or of.queries * of.head_dim <= metal.MAX_REGISTERS * metal.LANES, of


def test_parts_cover_a_full_table_or_a_window() -> None:
    for pages, size, window in itertools.product((1, 15, 16, 17, 200), (8, 16, 32), (None, 1, PART, PART + 1, 10_000)):
        of = shape(pages=pages, page_size=size, window=window)
        longest = min(pages * size, window or pages * size)
        assert (of.parts - 1) * PART < longest <= of.parts * PART
        assert of.page_size % of.block == 0 and PART % of.block == 0


def test_a_rows_order_of_sums_depends_on_nothing_but_the_model() -> None:
    orders = {
        tuple(dict(walk_launch(shape(rows=rows, pages=pages)).template).items()) for rows in (1, 9) for pages in (1, 99)
    }
    assert len(orders) == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_kernel_uses_every_array_that_it_declares(program: Program) -> None:
    words = set(re.findall(r"\w+", program.source))
    assert {*program.inputs, *program.outputs} <= words


@pytest.mark.parametrize("of", [PLAIN, shape(pages=99, window=700)], ids=["one part", "several parts"])
def test_constants_of_the_text_are_the_templates_or_its_own(of: Shape) -> None:
    for launch in (walk_launch(of), *([combine_launch(of)] if of.parts > 1 else [])):
        text = re.sub(r"//.*", "", launch.program.source)
        own = set(re.findall(r"constexpr \w+ ([A-Z_]+) =", text)) | {"UNROLLED"}
        used = set(re.findall(r"\b[A-Z][A-Z_]*\b", text)) - own
        given = {name for name, _ in launch.template}
        assert used <= given and given - used <= {"T"}, launch.program.name


@pytest.mark.parametrize("of", [PLAIN, shape(pages=99), shape(rows=1, pages=1)], ids=["plain", "parts", "smallest"])
def test_the_signature_that_mlx_makes_has_what_the_text_reads(of: Shape) -> None:
    for launch, one in zip((walk_launch(of), combine_launch(of)), both(of), strict=False):
        kinds = {kind: [p.name for p in one.parameters if p.kind == kind] for kind in ("input", "output", "shape")}
        assert (kinds["input"], kinds["output"]) == (list(launch.program.inputs), list(launch.program.outputs))
        assert kinds["shape"] == (["part_tops_shape"] if launch.program is metal.COMBINE else ["page_table_shape"])
        constants = [str(value) for name, value in launch.template if isinstance(value, int)]
        assert re.findall(r"\b-?\d+\b", one.instance.split("<")[1]) == constants


def test_small_arrays_come_in_another_address_space_and_only_cells_are_pointed_into() -> None:
    small = {p.name: p.type for p in both(shape(rows=1, pages=1))[0].parameters}
    large = {p.name: p.type for p in both(shape(rows=9, pages=9))[0].parameters}
    assert small["page_table"] == "const constant int32_t*" and large["page_table"] == "const device int32_t*"
    least = {p.name: p.type for p in both(shape(rows=1, heads=1, kv_heads=1, head_dim=32, pages=1))[0].parameters}
    assert least["kv"].startswith("const device ") and least["scale"] == "const constant float&"
    pointers = [line.strip() for one in PROGRAMS for line in one.source.splitlines() if re.search(r"\w\* \w+ =", line)]
    assert set(pointers) == {"const device KV* cell = kv + (int64_t(page) * PAGE_SIZE + block % PAGE_SIZE) * CELL"}


def test_without_metal_kernels_are_made_and_only_a_launch_fails() -> None:
    assert metal.metal_available() == mx.metal.is_available()
    if metal.metal_available():
        pytest.skip("this machine has Metal")
    with pytest.raises(RuntimeError, match="No Metal"):
        paged_decode(*arrays(PLAIN), page_size=16, scale=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"head_dim": 48}, "heads of 48 elements"),
        ({"head_dim": 1024}, "heads of 1024 elements"),
        ({"heads": 7}, "7 query heads over 2 KV heads"),
        ({"window": 0}, "a window of 0"),
        ({"page_size": 0}, "pages of 0 positions"),
        ({"dtype": mx.int8}, "elements of mlx.core.int8"),
    ],
)
def test_sizes_that_the_kernels_do_not_compute_are_refused_by_name(sizes: dict[str, object], found: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(found)}.*; wanted .*'gathered'"):
        shape(**sizes)


def test_arrays_that_do_not_belong_together_are_refused_by_name() -> None:
    right = made(Case(lengths=(3, 5)))
    wrong = {
        "kv": Inputs(right.q, right.kv[:, :1], right.page_table, right.seq_lens),
        "page_table": Inputs(right.q, right.kv, right.page_table[:1], right.seq_lens),
        "seq_lens": Inputs(right.q, right.kv, right.page_table, right.seq_lens.astype(mx.uint32)),
        "q": Inputs(right.q[0], right.kv, right.page_table, right.seq_lens),
    }
    for name, inputs in wrong.items():
        with pytest.raises(ConfigError, match=f"^{name} of "):
            paged_decode(*inputs.all, page_size=16, scale=1.0)
    with pytest.raises(ConfigError, match=r"^sinks of shape \(3,\)"):
        paged_decode(*right.all, page_size=16, scale=1.0, sinks=mx.zeros((3,)))


def test_the_text_takes_scores_in_base_two() -> None:
    given = []

    def launcher(launch: Launch, inputs: object) -> list[mx.array]:
        given.append(inputs)
        return [mx.zeros(size) for size in launch.output_shapes]

    paged_decode(*made(Case(lengths=(3,))).all, page_size=16, scale=0.5, softcap=30.0, launcher=launcher)
    assert np.allclose(given[0][4:6], (0.5 / math.log(2), 30.0 / math.log(2)))


def _declared_bytes(launch: Launch) -> int:
    constants = {name: value for name, value in launch.template if isinstance(value, int)}
    sizes = re.findall(r"threadgroup float \w+\[([A-Z_ *]+)\];", launch.program.source)
    return 4 * sum(math.prod(constants[name.strip()] for name in size.split("*")) for size in sizes)
