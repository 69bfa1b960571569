"""Finding device packages, and the check of their contract number before any import."""

from __future__ import annotations

import pytest

from sglcore.core.errors import DeviceError
from sglcore.device.candidate import try_package
from sglcore.device.discovery import Installed
from tests.device.site import Site


def only(site: Site) -> Installed:
    """Return the only installed package."""
    (item,) = site.discover()
    return item


def test_a_package_is_found_with_its_distribution_and_version(site: Site) -> None:
    site.add("one", version="2.5")
    item = only(site)
    assert (item.name, item.distribution, item.version) == ("one", "sglcore-one", "2.5")
    assert item.loaded().summary == "planted"


@pytest.mark.parametrize(
    ("number", "behind"), [(4, "sglcore"), (99, "sglcore"), (2, "sglcore-one"), (0, "sglcore-one")]
)
def test_a_wrong_api_number_is_refused_before_the_module_is_imported(site: Site, number: int, behind: str) -> None:
    planted = site.add("one", api=number, tag=f"[api-{number}]")
    with pytest.raises(DeviceError) as caught:
        only(site).loaded()
    assert f"was written for API {number}; wanted API 3" in str(caught.value)
    assert str(caught.value).endswith(f"pip install --upgrade {behind}")
    assert not site.was_imported(planted)


def test_the_right_api_number_does_import_the_module(site: Site) -> None:
    planted = site.add("one")
    only(site)
    assert site.was_imported(planted)


def test_an_entry_point_without_a_number_is_refused_before_import(site: Site) -> None:
    planted = site.add("one", tag="")
    with pytest.raises(DeviceError, match=r"does not state its API number; wanted 'module:name \[api-3\]'"):
        only(site).loaded()
    assert not site.was_imported(planted)


def test_a_declaration_that_contradicts_its_entry_point_is_refused(site: Site) -> None:
    site.add("one", api=7)
    with pytest.raises(DeviceError, match="declares device 'one' with API 7; wanted 'one' with API 3"):
        only(site).loaded()


def test_a_declaration_with_another_name_than_its_entry_point_is_refused(site: Site) -> None:
    site.add("one", declared="two")
    with pytest.raises(DeviceError, match="declares device 'two' with API 3; wanted 'one' with API 3"):
        only(site).loaded()


def test_a_module_that_raises_is_listed_with_the_error_it_raised(site: Site) -> None:
    site.add("one", body="raise RuntimeError('the driver is too old')")
    item = only(site)
    with pytest.raises(RuntimeError, match="too old") as caught:
        item.loaded()
    assert "planted_one" in str(caught.traceback[-1].path)


def test_a_module_that_ends_the_process_ends_none(site: Site) -> None:
    site.add("one", body="raise SystemExit(3)")
    with pytest.raises(DeviceError, match="of sglcore-one ends the process that imports it"):
        only(site).loaded()


def test_what_is_left_of_a_distribution_does_not_stop_the_others(site: Site) -> None:
    site.add("two")
    left = site.path / "left-1.0.dist-info"
    left.mkdir()
    (left / "entry_points.txt").write_text("[sglcore.devices]\ntwo = nowhere:package [api-3]\n", encoding="utf-8")
    for item in site.discover():
        with pytest.raises(DeviceError, match="an unknown distribution and sglcore-two both offer a device 'two'"):
            item.loaded()


def test_pip_is_never_told_of_a_distribution_without_a_name(site: Site) -> None:
    left = site.path / "left-1.0.dist-info"
    left.mkdir()
    (left / "entry_points.txt").write_text("[sglcore.devices]\none = nowhere:package\nsix = os:path [api-3]\n", "utf-8")
    found = [try_package(item, False).trouble() for item in site.discover()]
    assert len(found) == 2 and all(remedy.startswith("delete the .dist-info folder") for _, remedy in found)


def test_something_else_than_a_package_is_refused(site: Site) -> None:
    site.add("one", body="DevicePackage = dict")
    with pytest.raises(DeviceError, match="is a dict; wanted a DevicePackage"):
        only(site).loaded()


def test_two_distributions_that_offer_one_name_are_both_named(site: Site) -> None:
    first = site.add("one")
    second = site.add("one", distribution="acme-one")
    items = site.discover()
    assert len(items) == 2
    for item in items:
        with pytest.raises(DeviceError, match="acme-one and sglcore-one both offer a device 'one'"):
            item.loaded()
    assert not site.was_imported(first) and not site.was_imported(second)


def test_one_broken_package_hides_no_other(site: Site) -> None:
    site.add("one", tag="[api-9]")
    site.add("two")
    assert [(item.name, item.package is None) for item in site.discover()] == [("one", True), ("two", False)]


def test_the_tag_survives_a_real_installation() -> None:
    """pip installs the cpu package; its entry point must keep the contract number."""
    from importlib.metadata import entry_points

    (point,) = entry_points(group="sglcore.devices", name="cpu")
    assert point.value == "sglcore_cpu:package [api-3]"
