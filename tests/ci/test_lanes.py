"""Lanes come from the declarations of packages, and tests go to lanes by their needs. Unusable
values are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.lanes import HOST, LaneError, lane_named, lanes, needs_of, read

HOST_TOML = '[[lane]]\nname = "one"\ncapabilities = ["host"]\ntorch = ["2.13.0"]\n'
SIM_TOML = """[device]
capabilities = ["streams"]
[[lane]]
name = "two-sim"
simulator = "two"
capabilities = ["graphs.full"]
[[lane]]
name = "two-card"
runner = ["self-hosted", "two"]
"""


def plant(root: Path, **texts: str) -> Path:
    for device, text in texts.items():
        folder = root / "devices" / device
        folder.mkdir(parents=True)
        (folder / "ci.toml").write_text(text)
    return root


def test_lanes_come_from_the_packages_the_hosts_first_and_hardware_last(tmp_path: Path) -> None:
    found = lanes(plant(tmp_path, a=SIM_TOML, z=HOST_TOML))
    assert [lane.name for lane in found] == ["one", "two-sim", "two-card"]
    assert [lane.needs_hardware for lane in found] == [False, False, True]
    assert found[1].capabilities == {"streams", "graphs.full", "device", "package.a", "simulator", "torch"}
    assert found[2].capabilities == {"streams", "device", "package.a", "torch"}
    assert found[1].tests == ("tests", "devices/a/tests", "simulator/tests")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "declares no lane"),
        ("[[lane]]\ncapabilities = []\n", "a lane without a name"),
        ('[[lane]]\nname = "x"\nspeed = 3\n', "unknown speed"),
        ("[[lane", "ci.toml"),
        ('[[lane]]\nname = "x"\nsetup = [""]\n', "setup of lane x is .''.; wanted a list of texts, none empty"),
        ('[[lane]]\nname = "x"\nsetup = "true"\n', "setup of lane x is 'true'; wanted a list"),
        ('[[lane]]\nname = "x"\nimage = ["one"]\n', "image of lane x is .'one'.; wanted a str"),
        ('[[lane]]\nname = "x"\nvendor_torch = "yes"\n', "vendor_torch of lane x is 'yes'; wanted a bool"),
    ],
)
def test_a_declaration_that_can_not_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    root = plant(tmp_path, a=text)
    with pytest.raises(LaneError, match=said):
        read(root / "devices" / "a" / "ci.toml")


def test_a_lane_of_an_environment_of_its_own_has_no_torch_unless_it_says_so(tmp_path: Path) -> None:
    text = '[[lane]]\nname = "x"\nenvironment = ["numpy"]\ncapabilities = [{}]\n'
    one, two = lanes(plant(tmp_path, a=text.format(""), b=text.replace("x", "y").format('"torch"')))
    assert one.capabilities == {"device", "package.a"} and one.environment == ("numpy",)
    assert "torch" in two.capabilities


def test_a_lane_that_lists_its_tests_runs_those_and_takes_no_others(tmp_path: Path) -> None:
    text = '[[lane]]\nname = "x"\ntests = ["devices/a/tests"]\nignore = ["devices/a/tests/test_y.py"]\n'
    (lane,) = lanes(plant(tmp_path, a=text))
    assert lane.tests == ("devices/a/tests",)
    assert lane.takes("devices/a/tests/test_x.py::test_y") and lane.takes("devices/a/tests")
    assert not lane.takes("devices/a") and not lane.takes("tests/laws") and not lane.takes("devices/a/tests2")
    (everything,) = lanes(plant(tmp_path / "other", z=HOST_TOML))
    assert everything.takes("tests/laws")


def test_a_lane_may_leave_to_another_what_needs_none_of_its_capabilities(tmp_path: Path) -> None:
    text = '[[lane]]\nname = "x"\nonly = ["torch"]\n'
    (lane,) = lanes(plant(tmp_path, a=text))
    assert lane.missing(frozenset({"torch", "package.a"})) == []
    assert lane.missing(frozenset({"package.a"})) == ["a need of torch"]
    assert lane.missing(frozenset({"torch", "streams"})) == ["streams"]


def test_two_lanes_of_one_name_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaneError, match="two packages declare the lane one"):
        lanes(plant(tmp_path, a=HOST_TOML, b=HOST_TOML))
    with pytest.raises(LaneError, match="there is no lane 'gone'; there are: "):
        lane_named("gone", lanes())


def test_a_test_needs_what_it_says_and_what_its_folder_says() -> None:
    streams = frozenset({"streams"})
    assert needs_of(Path("tests/schedule/test_x.py"), frozenset()) == {HOST}
    assert needs_of(Path("tests/laws/test_x.py"), streams) == streams
    assert needs_of(Path("devices/one/tests/test_x.py"), streams) == {"streams", "package.one"}
    assert needs_of(Path("simulator/tests/test_x.py"), frozenset()) == {"simulator"}


def test_every_package_of_the_project_has_a_lane_that_needs_no_hardware() -> None:
    found = lanes()
    assert sum(HOST in lane.capabilities for lane in found) == 1
    packages = {path.parent.name for path in Path("devices").glob("*/pyproject.toml")}
    assert {lane.device for lane in found if not lane.needs_hardware} == packages


def test_what_the_lanes_of_the_project_list_is_there() -> None:
    for lane in lanes():
        missing = [name for name in (*lane.tests, *lane.ignore) if not Path(name).exists()]
        assert not missing, f"{lane.name} lists {', '.join(missing)}"


def test_no_folder_of_a_packages_tests_is_a_package_that_would_hide_the_projects_tests() -> None:
    assert not [str(path) for path in Path("devices").glob("*/tests/__init__.py")]
