"""Nested orders of a bring-up: checked, run, edited and closed together with the outer
order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from sglcore.core.errors import BringUpError
from sglcore.device import bring_up, bring_up_steps
from sglcore.device.bring_up import Again, BringUp, NestedOrder
from tests.planted import planted

GIVEN = {"config": "the config"}


class Part:
    """Something that records when it is closed."""

    def __init__(self, name: str, closed: list[str], fails: bool = False) -> None:
        self.name, self.closed, self.fails = name, closed, fails

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails:
            raise OSError(f"{self.name} is stuck")


def pools(config: str) -> str:
    return f"pools({config})"


def hisparse(pools: str) -> str:
    return f"hisparse({pools})"


def attention(config: str, pools: str, hisparse: str) -> str:
    return f"attention({pools}, {hisparse})"


def draft(config: str) -> str:
    return f"draft({config})"


def draft_pools(draft: str, pools: str) -> str:
    return f"draft_pools({draft}, {pools})"


def rows(pools: str) -> str:
    return f"rows({pools})"


def worker(attention: str, draft_attention: str, rows: str = "none") -> str:
    return f"{attention} and {draft_attention}, rows: {rows}"


DRAFT_ATTENTION = Again("draft_attention", ("attention",), {"pools": "draft_pools"})
SPECULATION = NestedOrder(
    "speculation", {"pools": (draft, draft_pools), "attention": (DRAFT_ATTENTION,)}, exports=("draft_attention",)
)
ROWS = NestedOrder("host rows", {"pools": (rows, hisparse)}, exports=("rows", "hisparse"))
OUTER = (pools, attention, worker)


def names(order: BringUp) -> list[str]:
    return [step.path for step in order.steps]


def refused(order: BringUp, match: str) -> None:
    """Check that an order is refused before any of its steps runs."""
    with pytest.raises(BringUpError, match=match):
        order.check(GIVEN)
    seen: list[str] = []
    with pytest.raises(BringUpError, match=match):
        order.run(GIVEN, report=lambda name, seconds: seen.append(name))
    assert seen == []


def nested_steps_run_at_their_places() -> None:
    order = BringUp(OUTER, nested=(SPECULATION, ROWS))
    assert names(order) == [
        *("pools", "speculation/draft", "speculation/draft_pools", "host rows/rows", "host rows/hisparse"),
        *("attention", "speculation/draft_attention", "worker"),
    ]
    built = order.run(GIVEN)
    assert list(built) == [name.split("/")[-1] for name in names(order)]
    assert (
        built["draft_attention"] == f"attention(draft_pools(draft(the config), {built['pools']}), {built['hisparse']})"
    )
    assert built == BringUp([*order.steps]).run(GIVEN) and built["worker"].endswith(f"rows: {built['rows']}")
    other = BringUp(OUTER, nested=(ROWS, SPECULATION))
    assert other.run(GIVEN) == built and names(other)[1] == "host rows/rows"


def needs_of_all_levels_are_checked_first() -> None:
    def graphs(memory: int) -> None: ...

    late = NestedOrder("graphs", {"worker": (graphs,)})
    refused(BringUp(OUTER, nested=(SPECULATION, ROWS, late)), "step 'graphs/graphs' needs 'memory', which nothing prov")
    early = NestedOrder("speculation", {"pools": (draft_pools, draft)})
    refused(
        BringUp((pools,), nested=(early,)),
        "'speculation/draft_pools' needs 'draft', which a later step provides; wanted it earlier; move step "
        "'speculation/draft' before 'speculation/draft_pools'",
    )
    again = NestedOrder("speculation", {"pools": (draft, draft_pools, DRAFT_ATTENTION)}, SPECULATION.exports)
    refused(
        BringUp(OUTER, nested=(again, ROWS)),
        "step 'speculation/draft_attention' runs 'attention' again, which is no function of an earlier step",
    )


def what_is_not_exported_is_for_its_own_steps() -> None:
    own = NestedOrder(SPECULATION.name, SPECULATION.places)
    found = "step 'worker' needs 'draft_attention', which 'speculation' keeps for its own steps; wanted an export"
    refused(BringUp(OUTER, nested=(own, ROWS)), found)
    fewer = NestedOrder(ROWS.name, ROWS.places, ("hisparse",))
    refused(BringUp(OUTER, nested=(SPECULATION, fewer)), "'worker' needs 'rows', which 'host rows' keeps for its own")


def a_failure_closes_what_both_levels_built_in_reverse() -> None:
    closed: list[str] = []

    def part(name: str, *needs: str, fails: bool = False) -> bring_up.Step:
        def make(**given: object) -> Part:
            if fails:
                raise RuntimeError("out of memory")
            return Part(name, closed, fails=name == "draft")

        return bring_up.Step(name, make, needs, ())

    for nested_fails in (True, False):
        closed.clear()
        feature = NestedOrder("speculation", {"pools": (part("draft"),), "runner": (part("head", fails=nested_fails),)})
        outer = part("pools"), part("runner"), part("worker", fails=not nested_fails)
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            BringUp(outer, nested=(feature,)).run({})
        assert closed == ["head", "runner", "draft", "pools"][nested_fails:]
        notes = "\n".join(caught.value.__notes__)
        assert f"in the bring-up step {'speculation/head' if nested_fails else 'worker'} (make)  <- nothing" in notes
        assert "closing 'speculation/draft' failed too" in notes


def edits_of_both_levels_stay_in_their_order() -> None:
    def other(config: str) -> str:
        return "other"

    order = BringUp(OUTER, nested=(SPECULATION, ROWS))
    for place in ("draft", "speculation/draft", draft):
        assert names(order.insert(other, before=place))[1:3] == ["speculation/other", "speculation/draft"]
        assert names(order.insert(other, after=place))[1:3] == ["speculation/draft", "speculation/other"]
        assert names(order.replace(place, other)) == names(order)
        assert order.replace(place, other).run(GIVEN)["draft_pools"].startswith("draft_pools(other, ")
        refused(order.remove(place), "'speculation/draft_pools' needs 'draft', which nothing provides")
    assert names(order.insert(other, after="pools"))[:3] == ["pools", "other", "speculation/draft"]
    assert names(order.insert(other, before="attention"))[-4:] == ["other", *names(order)[-3:]]
    assert (
        order.replace("draft_attention", other)
        .run(GIVEN)["worker"]
        .endswith("and other, rows: rows(pools(the config))")
    )
    assert order.remove("rows").run(GIVEN)["worker"].endswith("rows: none")
    with pytest.raises(
        BringUpError, match="no step 'host rows/draft' in this order; wanted one of pools, speculation/d"
    ):
        order.remove("host rows/draft")


def an_edit_exports_what_its_step_needs() -> None:
    def states(draft_pools: str, rows: str = "none") -> str:
        return f"states of {draft_pools}"

    def kind() -> str:
        return "kind"

    def pools_of_kind(config: str, kind: str = "standard") -> str:
        return f"pools of {kind}"

    order = BringUp(OUTER, nested=(SPECULATION, ROWS))
    inserted = order.insert(states, before="worker")
    assert inserted.run(GIVEN)["states"].startswith("states of draft_pools")
    assert "speculation exports draft_pools, draft_attention\n" in inserted.text()
    assert "draft_pools, draft_attention" in order.replace("attention", states).replace(states, attention).text()
    late = BringUp((*OUTER[:2], pools_of_kind), nested=(SPECULATION, ROWS)).insert(kind, after="draft_attention")
    assert late.run(GIVEN)["pools_of_kind"] == "pools of kind" and "exports draft_attention, kind" in late.text()


LAWS = (
    nested_steps_run_at_their_places,
    needs_of_all_levels_are_checked_first,
    what_is_not_exported_is_for_its_own_steps,
    a_failure_closes_what_both_levels_built_in_reverse,
    edits_of_both_levels_stay_in_their_order,
    an_edit_exports_what_its_step_needs,
)
DEFECTS: dict[str, tuple[ModuleType, str, str, Callable[[], None]]] = {
    "the first nested order comes last": (
        bring_up_steps,
        "end = [*outers, len(made)][here.index(place) + 1]",
        "end = outers[here.index(place)] + 1",
        nested_steps_run_at_their_places,
    ),
    "needs of nested steps are not checked": (
        bring_up,
        "                if need not in known:\n",
        "                if need not in known and not step.nested_in:\n",
        needs_of_all_levels_are_checked_first,
    ),
    "functions that run again are not checked": (
        bring_up,
        "if isinstance(step, Again):",
        "if isinstance(step, Again) and not step.nested_in:",
        needs_of_all_levels_are_checked_first,
    ),
    "every result is exported": (
        bring_up,
        "is_hidden(made[need], step)",
        "False",
        what_is_not_exported_is_for_its_own_steps,
    ),
    "a default hides that a result is not exported": (
        bring_up,
        "if name in later or name in known",
        "if name in later",
        what_is_not_exported_is_for_its_own_steps,
    ),
    "nested results are closed last": (
        bring_up,
        "reversed(tuple(built.items()))",
        "sorted(reversed(built.items()), key=lambda item: '/' in item[0])",
        a_failure_closes_what_both_levels_built_in_reverse,
    ),
    "errors lack the nested order": (
        bring_up,
        'f"{step.nested_in}/" if step.nested_in else ""',
        '""',
        a_failure_closes_what_both_levels_built_in_reverse,
    ),
    "an inserted step is always an outer one": (
        bring_up,
        "nested_in=self.steps[other].nested_in",
        'nested_in=""',
        edits_of_both_levels_stay_in_their_order,
    ),
    "a replacement leaves its nested order": (
        bring_up,
        "nested_in=was.nested_in, is_exported=was.is_exported",
        'nested_in="", is_exported=False',
        edits_of_both_levels_stay_in_their_order,
    ),
    "paths are unknown": (
        bring_up,
        "step in (other.provides, other.path)",
        "step == other.provides",
        edits_of_both_levels_stay_in_their_order,
    ),
    "an edit exports only its own result": (
        bring_up_steps,
        "(steps if step is new else (new,))",
        "(steps if step is new else ())",
        an_edit_exports_what_its_step_needs,
    ),
    "an edit exports only what it needs": (
        bring_up_steps,
        "(steps if step is new else (new,))",
        "(new,)",
        an_edit_exports_what_its_step_needs,
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_nested_orders_hold(law: Callable[[], None]) -> None:
    law()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, sound, defect, law = DEFECTS[name]
    broken = planted(module, sound, defect)
    if module is bring_up_steps:
        for function in ("nest", "exported"):
            monkeypatch.setattr(bring_up, function, getattr(broken, function))
    else:
        monkeypatch.setattr(sys.modules[__name__], "BringUp", broken.BringUp)
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception, BringUpError)):
        law()


@pytest.mark.parametrize(
    ("places", "exports", "match"),
    [
        (
            {"pools": (draft,)},
            ("drafts",),
            "'more' exports drafts, which none of its steps provides; wanted some of dra",
        ),
        (
            {"graphs": (draft,)},
            (),
            "'more' has steps after 'graphs', which is no step of the outer order; wanted one of",
        ),
        ({"rows": (draft,)}, (), "'more' has steps after 'rows', which is no step of the outer order"),
        ({"pools": (pools,)}, (), "two steps provide pools"),
        ({"pools": (rows,)}, (), "two steps provide rows"),
    ],
)
def test_a_nested_order_that_does_not_fit_is_refused(
    places: dict[str, tuple[Callable[..., object]]], exports: tuple[str, ...], match: str
) -> None:
    with pytest.raises(BringUpError, match=match):
        BringUp(OUTER, nested=(ROWS, NestedOrder("more", places, exports)))


def test_two_nested_orders_may_not_have_one_name() -> None:
    with pytest.raises(BringUpError, match="two nested orders have the name 'host rows'; wanted another name"):
        BringUp(OUTER, nested=(ROWS, NestedOrder("host rows", {"pools": (draft,)})))


def test_the_text_has_the_outer_order_and_then_each_nested_one() -> None:
    assert BringUp(OUTER, nested=(SPECULATION, ROWS)).text() == (
        "pools      <- config; then speculation, host rows\n"
        "attention  <- config, pools, hisparse; then speculation\n"
        "worker     <- attention, draft_attention, rows?\n"
        "\n"
        "speculation exports draft_attention\n"
        "  after pools\n"
        "    draft                              <- config\n"
        "    draft_pools                        <- draft, pools\n"
        "  after attention\n"
        "    draft_attention (attention again)  <- pools=draft_pools\n"
        "\n"
        "host rows exports rows, hisparse\n"
        "  after pools\n"
        "    rows      <- pools\n"
        "    hisparse  <- pools\n"
    )
    started = BringUp(OUTER, nested=(ROWS,)).remove(pools).text()
    assert started.startswith("the start; then host rows\n") and "  after the start\n" in started
