"""Bring-up orders are checked before any work, edited into new orders, and undone when a step
fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglcore.core.errors import BringUpError
from sglcore.device.bring_up import BringUp

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


STANDARD = BringUp((pools, hisparse, attention))


def test_steps_run_in_order_with_what_they_need() -> None:
    seen: list[str] = []
    built = STANDARD.run(GIVEN, report=lambda name, seconds: seen.append(name))
    assert seen == ["pools", "hisparse", "attention"] == list(built)
    assert built["attention"] == "attention(pools(the config), hisparse(pools(the config)))"


def test_an_order_that_builds_attention_before_hisparse_fails_naming_the_need_before_any_work() -> None:
    worked: list[str] = []

    def pools(config: str) -> None:
        worked.append("pools")

    with pytest.raises(BringUpError) as caught:
        BringUp((pools, attention, hisparse)).run(GIVEN)
    assert str(caught.value) == (
        "step 'attention' needs 'hisparse', which a later step provides; wanted it earlier; "
        "move step 'hisparse' before 'attention'"
    )
    assert worked == []


def test_a_need_that_nothing_provides_lists_what_there_is() -> None:
    with pytest.raises(
        BringUpError, match="'attention' needs 'hisparse', which nothing provides; wanted one of config, p"
    ):
        STANDARD.remove(hisparse).check(GIVEN)


def test_a_step_that_needs_itself_is_told_so() -> None:
    def loop(loop: object) -> None: ...

    with pytest.raises(BringUpError, match="which it provides itself"):
        BringUp((loop,)).check(())


def test_a_step_may_not_provide_what_is_given() -> None:
    with pytest.raises(BringUpError, match="step 'pools' provides a value that is already given"):
        STANDARD.check({"config", "pools"})


def test_two_steps_may_not_provide_the_same() -> None:
    with pytest.raises(BringUpError, match="two steps provide pools"):
        BringUp((pools, pools))


@pytest.mark.parametrize("step", [lambda *parts: None, lambda **parts: None, lambda config, /: None])
def test_a_step_whose_needs_have_no_names_is_refused(step: Callable[..., object]) -> None:
    with pytest.raises(BringUpError, match="wanted parameters with names"):
        BringUp((step,))


def test_inserting_gives_a_new_order_and_leaves_the_old_one() -> None:
    def open_blas(config: str) -> str:
        return "blas"

    before = STANDARD.insert(open_blas, before=attention)
    after = STANDARD.insert(open_blas, after="pools")
    assert [step.provides for step in before.steps] == ["pools", "hisparse", "open_blas", "attention"]
    assert [step.provides for step in after.steps] == ["pools", "open_blas", "hisparse", "attention"]
    assert len(STANDARD.steps) == 3


def test_inserting_needs_one_place() -> None:
    with pytest.raises(BringUpError, match="insert needs a place in the order; wanted either before= or after="):
        STANDARD.insert(pools)
    with pytest.raises(BringUpError, match="insert needs a place in the order"):
        STANDARD.insert(pools, before=attention, after=attention)


def test_a_replacement_provides_what_the_old_step_did() -> None:
    def flat_pools(config: str) -> str:
        return "flat"

    order = STANDARD.replace(pools, flat_pools)
    assert order.run(GIVEN)["hisparse"] == "hisparse(flat)"
    assert "pools (flat_pools)" in order.text()
    assert order.replace(flat_pools, pools).text() == STANDARD.text()


def test_editing_a_step_that_is_not_there_lists_the_steps() -> None:
    with pytest.raises(BringUpError, match="no step 'graphs' in this order; wanted one of pools, hisparse, attention"):
        STANDARD.remove("graphs")


def test_a_need_with_a_default_may_be_absent_but_never_comes_later() -> None:
    def worker(attention: str = "none") -> str:
        return f"worker of {attention}"

    assert BringUp((worker,)).run({})["worker"] == "worker of none"
    assert BringUp((*STANDARD.steps, worker)).run(GIVEN)["worker"].startswith("worker of attention(")
    with pytest.raises(BringUpError, match="step 'worker' needs 'attention', which a later step provides"):
        BringUp((worker, pools, hisparse, attention)).check(GIVEN)


def test_a_failing_step_keeps_its_traceback_and_closes_what_was_built_in_reverse() -> None:
    closed: list[str] = []

    def first() -> Part:
        return Part("first", closed)

    def plain(first: Part) -> str:
        return "nothing to close"

    def second() -> Part:
        return Part("second", closed, fails=True)

    def third(second: Part) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        BringUp((first, plain, second, third)).run({})
    assert closed == ["second", "first"]
    assert caught.traceback[-1].name == "third"
    assert "in the bring-up step third  <- second" in caught.value.__notes__
    assert any("second is stuck" in note for note in caught.value.__notes__)


def test_a_thing_that_two_steps_returned_is_closed_once() -> None:
    closed: list[str] = []
    part = Part("part", closed)

    def one() -> Part:
        return part

    def two() -> Part:
        return part

    def three() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        BringUp((one, two, three)).run({})
    assert closed == ["part"]


def test_what_is_given_is_not_closed_by_a_failure() -> None:
    closed: list[str] = []

    def step(config: Part) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        BringUp((step,)).run({"config": Part("config", closed)})
    assert closed == []


def test_the_text_has_one_line_a_step_with_its_needs() -> None:
    assert STANDARD.text() == ("pools      <- config\nhisparse   <- pools\nattention  <- config, pools, hisparse\n")
