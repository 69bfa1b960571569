"""Which device runs. The rules: a name is strict; else the only usable accelerator; else the host, when none is present."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from sglcore.device.discovery import Installed
from sglcore.device.errors import DeviceError, StrictError
from sglcore.device.ledger import DecisionLedger
from sglcore.device.pci import PciDevice
from sglcore.device.selection import Choice, Requested, requested_device, select
from tests.device.site import Site

AUTOMATIC = Requested()
UNCLAIMED = PciDevice("0000:01:00.0", 0x1EAF, 0x0001, 0x0302)


def choose(site: Site, name: str | None = None, *unclaimed: PciDevice) -> Choice:
    """Select among the planted packages, with `--device` when a name is given."""
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
        "mend the runtime (it was asked for by --device)"
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


def test_a_package_that_raises_ends_the_start_with_its_own_error(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", body="raise RuntimeError('the driver is too old')")
    with pytest.raises(RuntimeError, match="the driver is too old"):
        choose(site)
    with pytest.raises(RuntimeError, match="the driver is too old"):
        choose(site, "one")
    assert choose(site, "host").chosen.name == "host"


def test_a_probe_that_raises_is_never_taken_for_absent(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", probe_body="raise OSError('the node is locked')")
    with pytest.raises(OSError, match="the node is locked") as caught:
        choose(site)
    assert caught.value.__notes__ == ["in the probe 'planted_one.probe:probe' of device 'one'"]
    assert caught.traceback[-1].name == "probe"


def test_a_probe_that_answers_something_else_is_refused(site: Site) -> None:
    site.add("one", probe_body="return True")
    with pytest.raises(DeviceError, match="the probe of 'one' gave a bool; wanted a ProbeReport"):
        choose(site)


def test_a_package_for_another_api_ends_an_automatic_start(site: Site) -> None:
    site.add("host", is_host=True)
    site.add("one", tag="[api-9]")
    with pytest.raises(DeviceError, match="API 9"):
        choose(site)


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
    """The law: whatever keeps a present accelerator from running, the answer is an error and not the host."""
    try:
        return choose_one(site.discover()) != "host"
    except Exception:
        return True


@pytest.mark.parametrize(
    "trouble", [{"runtime": False}, {"probe_body": "raise OSError()"}, {"body": "raise OSError()"}, {"tag": "[api-9]"}]
)
def test_the_law_of_the_quiet_host_holds_and_catches_a_choice_that_breaks_it(
    site: Site, trouble: dict[str, object]
) -> None:
    def ours(installed: Sequence[Installed]) -> str:
        return select(installed, AUTOMATIC, ()).chosen.name

    def mutant(installed: Sequence[Installed]) -> str:
        try:
            return ours(installed)
        except Exception:
            return "host"

    site.add("host", is_host=True)
    site.add("one", **trouble)
    assert never_a_quiet_host(ours, site)
    assert not never_a_quiet_host(mutant, site)
