"""The device that runs: a requested name is strict; otherwise the only usable accelerator;
otherwise the host, if no accelerator is present."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from sglcore.core.errors import DeviceError, StrictError
from sglcore.core.ledger import DecisionLedger
from sglcore.device import selection
from sglcore.device.candidate import Candidate, try_package
from sglcore.device.choice import ChosenDevice, Requested, requested_device
from sglcore.device.discovery import Installed
from sglcore.device.pci import PciClaim, PciDevice
from sglcore.device.selection import Choice, select
from tests.device.site import Site

AUTOMATIC = Requested()
UNCLAIMED = PciDevice("0000:01:00.0", 0x1EAF, 0x0001, 0x0302)
NETWORK_CARD = PciDevice("0000:02:00.0", 0x1EAF, 0x0002, 0x0200)


def choose(site: Site, name: str | None = None, *unclaimed: PciDevice) -> Choice:
    """Select among the planted packages, with `--device` if a name is given."""
    return select(site.discover(), requested_device(name, {}), unclaimed)


def test_the_only_usable_accelerator_runs(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one")
    choice = choose(site)
    assert choice.chosen.name == "one"
    assert choice.rows[0].requested == "automatic"
    assert not any(row.downgrade for row in choice.rows)


def test_the_host_runs_when_no_accelerator_is_present(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", hardware=False)
    assert choose(site).chosen.name == "host"


def test_a_present_but_unusable_accelerator_is_never_a_quiet_host(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", runtime=False)
    with pytest.raises(DeviceError) as caught:
        choose(site)
    assert "device 'one' is present but not usable: runtime: planted runtime; mend the runtime" in str(caught.value)


def test_a_usable_accelerator_runs_beside_a_broken_one_which_the_ledger_names(site: Site) -> None:
    site.add("one")
    site.add("two", runtime=False)
    choice = choose(site)
    assert choice.chosen.name == "one"
    assert [row.topic for row in choice.rows] == ["device", "accelerator two"]


def test_two_usable_accelerators_are_an_error_that_names_both_and_the_setting(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one")
    site.add("two")
    with pytest.raises(
        DeviceError, match="found 2 usable accelerators: one, two; wanted one; set SGLCORE_DEVICE to one"
    ):
        choose(site)
    assert choose(site, "two").chosen.name == "two"


def test_a_name_is_strict_even_when_another_device_would_do(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", hardware=False)
    with pytest.raises(DeviceError, match="device 'one' is not present: hardware: planted hardware; plug it in"):
        choose(site, "one")


def test_a_named_device_that_is_not_usable_is_an_error_and_not_another_device(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", runtime=False)
    with pytest.raises(DeviceError) as caught:
        choose(site, "one")
    assert str(caught.value) == (
        "device 'one' is present but not usable: runtime: planted runtime; "
        "mend the runtime (it was requested by --device)"
    )


def test_the_host_can_be_named_beside_an_accelerator(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one")
    assert choose(site, "host").chosen.name == "host"


def test_a_name_that_is_not_installed_lists_what_is_and_the_pip_command(site: Site) -> None:
    site.add("one")
    site.add("two")
    with pytest.raises(DeviceError) as caught:
        choose(site, "three")
    assert str(caught.value) == (
        "device 'three', from --device, is not installed; wanted one of one, two; check the spelling, or pip install sglcore-three"
    )


def test_a_device_of_several_is_named_with_its_number(site: Site) -> None:
    site.add("one", devices=2)
    choice = choose(site, "one:1")
    assert (choice.chosen.name, choice.chosen.index, str(choice.chosen)) == ("one", 1, "one:1")
    assert (choice.rows[0].requested, choice.rows[0].effective) == ("one:1 (from --device)", "one:1")
    assert ChosenDevice.decode(choice.chosen.encode()).index == 1


@pytest.mark.parametrize("name", [None, "one"])
def test_without_a_number_the_first_of_several_runs_and_the_ledger_says_so(site: Site, name: str | None) -> None:
    site.add("one", devices=2)
    row = choose(site, name).rows[0]
    assert row.effective == "one:0" and row.reason.endswith("; the first of its 2 devices")
    site.add("host", is_host=True)
    assert "first" not in choose(site, "host").rows[0].reason


@pytest.mark.parametrize("number", [2, 10])
def test_a_number_that_does_not_exist_is_refused_with_the_list_of_what_is_there(site: Site, number: int) -> None:
    site.add("one", devices=2, hidden="ONES='1,3' shows 2 of 4")
    with pytest.raises(DeviceError) as caught:
        choose(site, f"one:{number}")
    assert str(caught.value) == (
        f"there is no device one:{number}, from --device (ONES='1,3' shows 2 of 4); wanted one of "
        "one:0 (planted 0, memory unknown, use unknown), one:1 (planted 1, memory unknown, use unknown)"
    )


def test_where_the_system_does_not_tell_how_many_there_are_every_number_goes_to_the_runtime(site: Site) -> None:
    site.add("one", devices=0)
    assert choose(site, "one:3").chosen.index == 3 and choose(site).rows[0].effective == "one"


@pytest.mark.parametrize("text", ["one:", "one:x", "one:-1", ":1", "one:1:2"])
def test_a_device_that_is_not_a_name_and_a_number_is_refused(site: Site, text: str) -> None:
    with pytest.raises(DeviceError, match="from --device; wanted NAME, or NAME:INDEX"):
        choose(site, text)


def test_what_a_variable_hides_is_a_row(site: Site) -> None:
    site.add("one", devices=1, hidden="ONES='3' shows 1 of 4")
    row = choose(site).rows[1]
    assert (row.topic, row.requested, row.effective, row.reason) == (
        "visible devices",
        "all",
        "1",
        "ONES='3' shows 1 of 4",
    )


HIDDEN = {"runtime": False, "wanted": True, "devices": 0, "hidden": "ONES='' shows 0 of 2"}
"""A device that an environment variable hides."""


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize("other", ["host", "two"])
def test_a_device_that_somebody_hides_is_passed_by_with_a_row(site: Site, other: str, driver: bool) -> None:
    site.add("host", is_host=True)
    site.add("one", driver=driver, **HIDDEN)
    if other == "two":
        site.add("two")
    choice = choose(site)
    (row,) = choice.rows[1:]
    assert choice.chosen.name == other and ("hidden" in choice.rows[0].reason) is (other == "host")
    assert (row.topic, row.effective, row.downgrade) == ("accelerator one", "not used", False)
    assert (row.reason, row.remedy) == ("it is hidden: planted runtime", "mend the runtime")


def test_a_device_that_somebody_hides_and_names_is_an_error_that_says_by_what(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", **HIDDEN)
    site.add("two", driver=False, **HIDDEN)
    with pytest.raises(DeviceError, match="'one' is present but not usable: runtime: planted runtime; mend"):
        choose(site, "one")
    with pytest.raises(DeviceError, match="driver: planted driver; it is also hidden: planted runtime; mend the dri"):
        choose(site, "two")


def test_where_all_are_hidden_and_no_host_is_installed_the_error_says_by_what(site: Site) -> None:
    site.add("one", **HIDDEN)
    with pytest.raises(DeviceError, match=r"among one \(accelerator one: it is hidden: planted runtime\), and no host"):
        choose(site)


def test_some_devices_are_offered_only_by_name(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", hardware=False, offered=True)
    assert choose(site).chosen.name == "host"
    assert choose(site, "one").chosen.name == "one"


def test_the_option_wins_over_the_variable_and_the_row_says_where_the_name_came_from(site: Site) -> None:
    site.add("one")
    site.add("two")
    by_variable = requested_device(None, {"SGLCORE_DEVICE": "two"})
    by_option = requested_device("one", {"SGLCORE_DEVICE": "two"})
    assert select(site.discover(), by_variable, ()).rows[0].requested == "two (from SGLCORE_DEVICE)"
    assert select(site.discover(), by_option, ()).rows[0].requested == "one (from --device)"
    assert requested_device(None, {"SGLCORE_DEVICE": ""}) == AUTOMATIC


TROUBLES = (
    {"body": "raise RuntimeError('the driver is too old')"},
    {"probe_body": "raise RuntimeError('the driver is too old')"},
    {"probe_body": "return True"},
    {"body": "raise SystemExit(3)"},
    {"probe_body": "raise SystemExit(3)"},
    {"tag": "[api-9]"},
    {"declared": "three"},
)
"""Defects that keep a package from loading or its probe from answering."""


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_package_that_raises_is_a_row_and_the_host_runs(site: Site, trouble: dict[str, object]) -> None:
    site.add("host", is_host=True)
    site.add("one", **trouble)
    choice = choose(site)
    assert choice.chosen.name == "host"
    (row,) = choice.rows[1:]
    assert (row.topic, row.effective, row.downgrade) == ("device one", "not used", True)
    assert row.reason.startswith("sglcore-one 1.0 cannot be ") and row.remedy.endswith(
        "; --device host starts without it"
    )
    with pytest.raises(StrictError, match="device one: found not used"):
        DecisionLedger(strict=True).record(*choice.rows)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_package_that_raises_is_a_row_beside_a_usable_accelerator(site: Site, trouble: dict[str, object]) -> None:
    site.add("two")
    site.add("one", vendors=(0x1EAF,), **trouble)
    choice = choose(site, None, UNCLAIMED)
    assert choice.chosen.name == "two"
    assert [(row.topic, row.downgrade) for row in choice.rows[1:]] == [("device one", False)]
    assert "--device two starts without it" in choice.rows[1].remedy


def test_two_packages_of_one_name_stop_nobody_else(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one")
    site.add("one", distribution="acme-one")
    assert [row.topic for row in choose(site).rows] == ["device", "device one", "device one"]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("claims", [(), (0x1EAF,)])
def test_where_its_hardware_is_on_the_bus_what_it_raised_ends_the_start(
    site: Site, trouble: dict[str, object], claims: tuple[int, ...]
) -> None:
    site.add("host", is_host=True)
    site.add("one", vendors=claims, **trouble)
    with pytest.raises((DeviceError, RuntimeError)) as caught:
        choose(site, None, NETWORK_CARD, UNCLAIMED)
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "0000:01:00.0 [1eaf:0001] of PCI class 0302 is probably a device of 'one'" in said
    assert said.endswith("--device host starts without it")
    assert choose(site, "host", UNCLAIMED).chosen.name == "host"


def test_graphics_of_a_processor_that_a_package_claims_end_no_start(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", vendors=(0x1EAF,), probe_body="raise RuntimeError")
    claim = PciClaim(0x1EAF, graphics=":01:00.0")
    found = [
        item if item.name == "host" else replace(item, package=replace(item.loaded(), pci={claim}))
        for item in site.discover()
    ]
    assert [row.topic for row in select(found, AUTOMATIC, (UNCLAIMED,)).rows] == ["device", "device one"]
    with pytest.raises(RuntimeError):
        select(found, AUTOMATIC, (UNCLAIMED, replace(UNCLAIMED, address="0000:02:00.0")))


def test_of_two_packages_that_raise_the_one_is_blamed_whose_hardware_is_there(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", probe_body="raise RuntimeError('first')", vendors=(0x1111,))
    site.add("two", probe_body="raise RuntimeError('second')", vendors=(0x1EAF,))
    with pytest.raises(RuntimeError, match="second"):
        choose(site, None, UNCLAIMED)


def test_a_device_on_the_bus_that_another_package_answers_for_is_not_taken_for_the_broken_ones(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", body="raise RuntimeError('the driver is too old')")
    site.add("two", hardware=False, vendors=(0x1EAF,))
    assert choose(site, None, UNCLAIMED).chosen.name == "host"


def test_a_probe_that_raises_answers_for_its_own_claims_alone(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", probe_body="raise RuntimeError", vendors=(0x1111,))
    assert [row.topic for row in choose(site, None, UNCLAIMED).rows] == [
        "device",
        "device one",
        "accelerator 0000:01:00.0",
    ]


@pytest.mark.parametrize("bus", [(), (UNCLAIMED,)])
def test_a_named_package_that_raises_ends_the_start_with_its_own_traceback(
    site: Site, bus: tuple[PciDevice, ...]
) -> None:
    site.add("host", is_host=True)
    site.add("one", body="raise RuntimeError('the driver is too old')")
    site.add("two", probe_body="raise OSError('the node is locked')", vendors=(0x1EAF,))
    with pytest.raises(RuntimeError, match="the driver is too old") as caught:
        choose(site, "one", *bus)
    assert "planted_one" in str(caught.traceback[-1].path)
    with pytest.raises(OSError, match="the node is locked") as probed:
        choose(site, "two", *bus)
    assert probed.value.__notes__[0] == "in the probe 'planted_two.probe:probe' of device 'two'"
    assert probed.traceback[-1].name == "probe"


def no_host_is_blamed(site: Site) -> bool:
    """The law: a host that raises ends the start with its own error, without a note that blames a
    device on the bus."""
    site.add("host", is_host=True, probe_body="raise RuntimeError('no memory')")
    with pytest.raises(RuntimeError, match="no memory") as caught:
        choose(site, None, UNCLAIMED)
    return not any("is probably a device of" in note for note in caught.value.__notes__)


def only_accelerators_are_blamed(site: Site) -> bool:
    """The law: an exception in a package does not end the start because of a network card on the
    bus."""
    site.add("host", is_host=True)
    site.add("one", body="raise RuntimeError('the driver is too old')")
    site.add("two", probe_body="raise RuntimeError('the driver is too old')", vendors=(NETWORK_CARD.vendor_id,))
    try:
        return choose(site, None, NETWORK_CARD).chosen.name == "host"
    except RuntimeError:
        return False


def whatever_is_there(
    candidate: Candidate, known: frozenset[PciClaim], bus: Sequence[PciDevice]
) -> Sequence[PciDevice]:
    return bus


@pytest.mark.parametrize("law", [no_host_is_blamed, only_accelerators_are_blamed])
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_raised_is_blamed_for_accelerators_alone_and_other_blame_is_caught(
    site: Site, monkeypatch: pytest.MonkeyPatch, law: Callable[[Site], bool], is_broken: bool
) -> None:
    if is_broken:
        monkeypatch.setattr(selection, "likely_devices", whatever_is_there)
    assert law(site) != is_broken


@pytest.mark.parametrize(
    ("trouble", "what", "remedy"),
    [
        (
            {"body": "raise RuntimeError"},
            "loaded",
            "pip install --upgrade sglcore-one (sglcore doctor shows the traceback)",
        ),
        ({"probe_body": "raise RuntimeError"}, "probed", "pip install --upgrade sglcore-one (sglcore doctor"),
        ({"tag": "[api-9]"}, "loaded", "pip install --upgrade sglcore"),
        ({"declared": "three"}, "loaded", "pip install --force-reinstall sglcore-one; "),
        ({"probe_body": "return True"}, "probed", "pip install --upgrade sglcore-one; "),
    ],
)
def test_who_is_told_of_a_package_that_raised_is_told_what_failed_and_its_own_remedy(
    site: Site, trouble: dict[str, object], what: str, remedy: str
) -> None:
    site.add("host", is_host=True)
    site.add("one", **trouble)
    row = choose(site).rows[1]
    assert row.reason.startswith(f"sglcore-one 1.0 cannot be {what}: ") and row.remedy.startswith(remedy)
    if "tag" in trouble:
        with pytest.raises(DeviceError, match=f"{remedy}, or --device host starts without it"):
            choose(site, None, UNCLAIMED)


def test_a_probe_that_answers_something_else_is_refused(site: Site) -> None:
    site.add("one", probe_body="return True")
    with pytest.raises(DeviceError, match="the probe of 'one' returned a bool; wanted a ProbeReport"):
        choose(site, "one")


def test_without_a_host_package_the_remedy_is_to_install_it(site: Site) -> None:
    site.add("one", hardware=False)
    with pytest.raises(
        DeviceError,
        match="found no accelerator among one, and no host device; pip install sglcore-cpu, or name a device",
    ):
        choose(site)


def test_a_host_that_is_not_usable_says_why(site: Site) -> None:
    site.add("host", is_host=True, runtime=False)
    with pytest.raises(DeviceError, match="runtime: planted runtime; mend the runtime"):
        choose(site)


def test_two_hosts_are_an_error_that_names_both(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("guest", is_host=True)
    with pytest.raises(
        DeviceError, match="found 2 host devices: guest, host; choose with --device NAME or SGLCORE_DEV"
    ):
        choose(site)


def test_an_unclaimed_accelerator_makes_the_host_a_downgrade_which_strict_refuses(site: Site) -> None:
    site.add("host", is_host=True)
    choice = choose(site, None, UNCLAIMED)
    assert choice.chosen.name == "host"
    (row,) = (row for row in choice.rows if row.downgrade)
    assert "0000:01:00.0 [1eaf:0001] of PCI class 0302" in row.reason
    DecisionLedger().record(*choice.rows)
    with pytest.raises(StrictError, match="0000:01:00.0"):
        DecisionLedger(strict=True).record(*choice.rows)


def test_an_unclaimed_accelerator_is_no_downgrade_when_the_host_was_asked_for(site: Site) -> None:
    site.add("host", is_host=True)
    assert not any(row.downgrade for row in choose(site, "host", UNCLAIMED).rows)


@pytest.mark.parametrize("states", tuple(itertools.product(["absent", "broken", "usable"], repeat=2)))
def test_every_pair_of_accelerators_gives_the_only_usable_one_or_an_error_or_the_host(
    site: Site, states: tuple[str, str]
) -> None:
    site.add("host", is_host=True)
    for name, state in zip(("one", "two"), states, strict=True):
        site.add(name, hardware=state != "absent", runtime=state == "usable")
    usable = [name for name, state in zip(("one", "two"), states, strict=True) if state == "usable"]
    if len(usable) == 2 or (not usable and "broken" in states):
        with pytest.raises(DeviceError):
            choose(site)
    else:
        assert choose(site).chosen.name == (usable[0] if usable else "host")


def never_a_quiet_host(choose_one: Callable[[Sequence[Installed]], str], site: Site) -> bool:
    """The law: if a present accelerator can not run, for any reason, the result is an error and not
    the host."""
    try:
        return choose_one(site.discover()) != "host"
    except Exception:
        return True


PRESENT = ({"runtime": False}, *TROUBLES)


@pytest.mark.parametrize("trouble", PRESENT)
def test_the_law_of_the_quiet_host_holds_and_catches_a_choice_that_breaks_it(
    site: Site, trouble: dict[str, object]
) -> None:
    def ours(installed: Sequence[Installed]) -> str:
        return select(installed, AUTOMATIC, (UNCLAIMED,)).chosen.name

    def mutant(installed: Sequence[Installed]) -> str:
        try:
            return ours(installed)
        except Exception:
            return "host"

    site.add("host", is_host=True)
    site.add("one", vendors=(0x1EAF,), **trouble)
    assert never_a_quiet_host(ours, site)
    assert not never_a_quiet_host(mutant, site)


def one_stops_nobody(choose_one: Callable[[Sequence[Installed]], Choice], site: Site) -> bool:
    """The law: a package that raises without evidence of its hardware does not change the choice,
    and gets a row in the ledger."""
    without = [item for item in site.discover() if item.name != "one"]
    try:
        found = choose_one(site.discover())
    except Exception:
        return False
    named = any(row.topic == "device one" for row in found.rows)
    return named and found.chosen.name == select(without, AUTOMATIC, ()).chosen.name


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("others", [("host",), ("host", "two")])
def test_the_law_of_one_broken_package_holds_and_catches_choices_that_break_it(
    site: Site, trouble: dict[str, object], others: tuple[str, ...]
) -> None:
    def ours(installed: Sequence[Installed]) -> Choice:
        return select(installed, AUTOMATIC, ())

    def strict(installed: Sequence[Installed]) -> Choice:
        for item in installed:
            try_package(item, False).probed()
        return ours(installed)

    def silent(installed: Sequence[Installed]) -> Choice:
        return ours([item for item in installed if try_package(item, False).error is None])

    for name in others:
        site.add(name, is_host=name == "host")
    site.add("one", **trouble)
    assert one_stops_nobody(ours, site)
    assert not one_stops_nobody(strict, site)
    assert not one_stops_nobody(silent, site)
