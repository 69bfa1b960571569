"""Every Triton kernel is launched with the settings of its entry's field: warps, stages, and
options of the vendor's compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the library triton")

from triton.runtime.interpreter import InterpretedFunction

from sglcore.runtime.kernels.triton import LaunchConfig, Tuning, experts
from sglcore.runtime.kernels.triton.tuning import MOE_TILES, read_launches
from tools import kernel_cases
from tools.kernel_cases import cases

OTHERS = MappingProxyType(
    {
        **{"sort_kernel": "moe_sort", "gate_up_kernel": "moe", "down_kernel": "moe", "sum_kernel": "moe_sum"},
        **{"gated_kernel": "silu_and_mul", "merge_chunks_kernel": "merge"},
        **dict.fromkeys(("tail_kernel", "index_key_kernel"), "rope_tail"),
        **dict.fromkeys(("events_kernel", "writes_kernel"), "compress_plan"),
        **dict.fromkeys(("sqrtsoftplus_routing_kernel", "hash_routing_kernel"), "top_k_routing"),
        "hc_mix_kernel": "hc_pre",
        **{"keep_kernel": "compress", "grouped_linear_kernel": "moe"},
        **dict.fromkeys(("delta_step_kernel", "delta_chunks_kernel"), "gated_delta_rule"),
        **dict.fromkeys(("scan_step_kernel", "scan_chunks_kernel"), "selective_scan"),
        **dict.fromkeys(
            ("best_kernel", "histogram_kernel", "search_kernel", "ties_kernel", "race_kernel", "pick_kernel"), "draw"
        ),
    }
)
"""Kernels that are not named after the field that launches them."""


def marked() -> Tuning:
    """Return a tuning in which each launch has an option with the name of its field."""
    tuning = Tuning(lanes=32)
    names = [field.name for field in fields(tuning) if isinstance(getattr(tuning, field.name), LaunchConfig)]
    own = {name: LaunchConfig(64, 5, lanes=16, options={"vendor": name}) for name in names}
    tile = LaunchConfig(64, 5, lanes=16, options={"vendor": "moe"})
    return replace(tuning, **own, moe=tuple(replace(each, config=tile) for each in MOE_TILES))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Record the options of every launch by kernel, and run nothing."""
    found: dict[str, list[dict[str, Any]]] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.setdefault(kernel.fn.__name__, []).append(options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    # These have launches of their own.
    monkeypatch.setattr(kernel_cases, "_small_tiles", lambda tuning: {})
    return found


def test_every_kernel_is_launched_as_its_own_field_says(launches: dict[str, list[dict[str, Any]]]) -> None:
    for case in cases(marked()).values():
        case()
    for kernel, told in launches.items():
        owner = OTHERS.get(kernel, kernel.removesuffix("_kernel"))
        assert {(each["num_warps"], each["num_stages"], each["vendor"]) for each in told} == {(4, 5, owner)}, kernel
    wanted = {field.name for field in fields(Tuning) if isinstance(getattr(marked(), field.name), LaunchConfig)}
    assert {OTHERS.get(kernel, kernel.removesuffix("_kernel")) for kernel in launches} == wanted | {"moe"}


def test_experts_that_a_compiler_sees_as_one_operation_are_launched_alike(
    launches: dict[str, list[dict[str, Any]]],
) -> None:
    hidden, ids, tuning = torch.empty(4, 32), torch.empty(4, 2, dtype=torch.int64), marked()
    w13, w2 = torch.empty(8, 64, 32), torch.empty(8, 32, 32)

    def run() -> None:
        experts.moe(hidden, hidden[:, :2].contiguous(), ids, w13, w2, tuning)

    run()
    plain = {kernel: told.copy() for kernel, told in launches.items()}
    launches.clear()
    texts: list[str] = []

    def compiled(graph: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        texts.extend(value for node in graph.graph.nodes for value in node.args if isinstance(value, str))
        return graph.forward

    torch.compile(run, backend=compiled, fullgraph=True)()
    assert texts and not any("\n" in text for text in texts), "inductor quotes arguments in comments of one line"
    assert launches.keys() == plain.keys() == {"sort_kernel", "gate_up_kernel", "down_kernel", "sum_kernel"}
    for kernel, told in launches.items():
        assert told == plain[kernel], kernel


def test_a_launch_is_read_back_from_its_text() -> None:
    launch = LaunchConfig(64, 3, lanes=16, options={"grf_mode": "large", "waves_per_eu": 2, "fast": True})
    (read,) = read_launches(f"[{launch.text}]")
    assert read == launch and hash(read) == hash(launch) and "\n" not in launch.text


def test_what_the_fields_decide_is_no_option() -> None:
    with pytest.raises(ValueError, match="num_warps of a launch"):
        LaunchConfig(options={"num_warps": 4})


def test_options_are_frozen_as_a_copy() -> None:
    given = {"maxnreg": 64}
    launch = LaunchConfig(options=given)
    given["maxnreg"] = 32
    assert launch.options == {"maxnreg": 64}
    with pytest.raises(TypeError):
        launch.options["maxnreg"] = 1  # pyright: ignore[reportIndexIssue]


def programs_fit(tuning: type[Tuning]) -> bool:
    """The law: a program has no more elements than allowed, unless one row has more, and as many
    rows for every number of them but one, so that no number of requests needs a compiler. No tile
    exceeds its memory, unless it has the smallest number of tokens that a dot product takes
    (16)."""
    made = tuning(elements=2048, tile_bytes=16 << 10)
    return all(
        made.rows(width, count) * width <= max(2048, width)
        and made.rows(width, count) == (1 if count == 1 else made.rows(width, 2))
        and made.fitting(64, width) * width <= max(16 << 10, 16 * width)
        and 16 <= made.fitting(64, width) <= 64
        for width in (1, 33, 1000, 2048, 3000)
        for count in (1, 3, 5000)
    )


class Wider(Tuning):
    """Mutant: rounds rows up."""

    def rows(self, width: int, count: int) -> int:
        """Return twice the number of rows."""
        return 2 * super().rows(width, count)


class Closer(Tuning):
    """Mutant: has a form for each number of rows."""

    def rows(self, width: int, count: int) -> int:
        """Return no more rows than there are."""
        return min(super().rows(width, count), count)


class Thinner(Tuning):
    """Mutant: has tiles that are too small for a dot product."""

    def fitting(self, tokens: int, token_bytes: int) -> int:
        """Return the number of tokens that fit."""
        return min(tokens, max(1, self.tile_bytes // token_bytes))


def test_programs_fit_and_those_that_do_not_are_caught() -> None:
    assert programs_fit(Tuning)
    assert not any(programs_fit(each) for each in (Wider, Closer, Thinner))
