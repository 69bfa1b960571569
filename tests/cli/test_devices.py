"""`sglcore devices` shows every package with its evidence, broken ones too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from sglcore.cli.device_report import Survey, survey_values
from sglcore.cli.render import show_survey
from sglcore.device.pci import PciDevice
from tests.device.site import Site


def as_json(site: Site, *words: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON of `sglcore devices`."""
    ran = site.run("-m", "sglcore.cli", "devices", "--json", *words, environ=environ)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_package_is_listed_with_facts_versions_and_the_choice(site: Site) -> None:
    site.add("one", version="2.5", vendors=range(0x10000))
    seen = as_json(site)
    assert seen["chosen"]["name"] == "one" and seen["refusal"] is None
    devices = {device["name"]: device for device in seen["devices"]}
    assert set(devices) >= {"cpu", "one"}
    assert devices["one"]["is_chosen"] and not devices["cpu"]["is_chosen"]
    assert devices["one"]["version"] == "2.5"
    assert list(devices["one"]["facts"]) == ["hardware", "driver", "package", "runtime"]
    assert devices["one"]["facts"]["hardware"] == {
        "holds": True,
        "evidence": "planted hardware",
        "remedy": "plug it in",
        "is_wanted": False,
    }


def test_the_devices_of_a_package_are_listed_with_what_is_known_and_what_is_hidden(site: Site) -> None:
    site.add("one", devices=2, hidden="ONES='0,2' shows 2 of 3")
    (seen,) = as_json(site, "one")["devices"]
    assert [device["index"] for device in seen["devices"]] == [0, 1]
    assert seen["devices"][1] == {
        "index": 1,
        "name": "planted 1",
        "memory": None,
        "is_busy": None,
        "pci_address": None,
        "uuid": None,
    }
    assert seen["hidden"] == "ONES='0,2' shows 2 of 3"
    ran = site.run("-m", "sglcore.cli", "devices", "one")
    assert "one:1" in ran.stdout and "planted 1, memory unknown, use unknown" in ran.stdout
    assert "ONES='0,2' shows 2 of 3" in ran.stdout


def test_one_of_several_devices_is_shown_by_its_package(site: Site) -> None:
    site.add("one", devices=2)
    assert [device["name"] for device in as_json(site, "one:1")["devices"]] == ["one"]


def test_the_number_that_was_asked_for_is_chosen_or_refused_with_what_is_there(site: Site) -> None:
    site.add("one", devices=2)
    chosen = as_json(site, environ={"SGLCORE_DEVICE": "one:1"})["chosen"]
    assert (chosen["name"], chosen["index"]) == ("one", 1)
    refusal = as_json(site, environ={"SGLCORE_DEVICE": "one:2"})["refusal"]
    assert refusal.startswith("there is no device one:2, from SGLCORE_DEVICE; wanted one of one:0 (planted 0")


def test_a_broken_package_is_shown_with_the_way_to_start_without_it_and_the_rest_is_chosen(site: Site) -> None:
    site.add("one", tag="[api-9]")
    ran = site.run("-m", "sglcore.cli", "devices")
    assert "written for API 9" in ran.stdout and "--device cpu starts without it" in ran.stdout
    assert ran.stdout.startswith("chosen: cpu")
    rows = as_json(site)["rows"]
    assert [row["topic"] for row in rows][:2] == ["device", "device one"] and rows[1]["downgrade"]


def test_one_device_can_be_shown_alone(site: Site) -> None:
    site.add("one")
    assert [device["name"] for device in as_json(site, "cpu")["devices"]] == ["cpu"]


def test_asking_to_see_a_device_does_not_change_the_choice(site: Site) -> None:
    site.add("one", hardware=False, offered=True)
    seen = as_json(site, "one")
    assert seen["devices"][0]["facts"]["hardware"]["holds"]
    assert seen["chosen"]["name"] == "cpu"


def test_a_package_that_raises_is_shown_with_its_traceback_beside_the_others(site: Site) -> None:
    site.add("one", body="raise RuntimeError('the driver is too old')")
    devices = {device["name"]: device for device in as_json(site)["devices"]}
    assert "RuntimeError: the driver is too old" in devices["one"]["traceback"]
    assert devices["cpu"]["facts"]["hardware"]["holds"]


def test_a_refused_choice_is_said(site: Site) -> None:
    seen = as_json(site, environ={"SGLCORE_DEVICE": "nothing"})
    assert seen["chosen"] is None
    assert seen["refusal"].startswith("device 'nothing', from SGLCORE_DEVICE, is not installed")


def test_the_table_names_the_choice_the_failing_fact_and_its_remedy(site: Site) -> None:
    site.add("one", runtime=False)
    ran = site.run("-m", "sglcore.cli", "devices")
    assert ran.returncode == 0
    assert "planted runtime; mend the runtime" in ran.stdout
    assert ran.stdout.startswith("no device is chosen: device 'one' is present but not usable")


def test_the_table_prints_the_traceback_of_a_package_on_standard_error(site: Site) -> None:
    site.add("one", probe_body="raise RuntimeError('[locked]')")
    ran = site.run("-m", "sglcore.cli", "devices")
    assert "[locked]" in ran.stdout
    assert "sglcore-one raised:" in ran.stderr and "planted_one" in ran.stderr


def test_the_bring_up_order_is_printed(site: Site) -> None:
    site.add("one")
    ran = site.run("-m", "sglcore.cli", "devices", "one", "--bring-up")
    assert ran.stdout == "pools      <- config\nattention  <- config, pools\n"


def test_a_bring_up_order_needs_a_name(site: Site) -> None:
    ran = site.run("-m", "sglcore.cli", "devices", "--bring-up")
    assert ran.returncode == 2
    assert re.fullmatch(
        r"error: --bring-up without a device; wanted one of cpu\b.*; sglcore devices NAME --bring-up\n", ran.stderr
    )


def test_an_unclaimed_accelerator_is_said_in_the_table_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    device = PciDevice("0000:01:00.0", 0x1EAF, 0x0001, 0x0302)
    seen = Survey((), None, None, (device,))
    show_survey(seen)
    assert "unclaimed accelerator: 0000:01:00.0 [1eaf:0001] of PCI class 0302" in capsys.readouterr().out
    assert survey_values(seen)["unclaimed"] == [
        {"address": "0000:01:00.0", "vendor_id": 0x1EAF, "device_id": 1, "pci_class": 0x0302}
    ]
