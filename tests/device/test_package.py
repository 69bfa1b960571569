"""The package declaration and its references."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from sglcore.core.errors import ConfigError, DeviceError
from sglcore.device.package import DevicePackage, resolve
from sglcore.worker.topology import Communication
from tests.device.site import Site

PACKAGE = DevicePackage(
    name="one",
    api=3,
    summary="planted",
    probe="a:probe",
    facts="a:facts",
    worker="a:Worker",
    attention={"second": "a:Second", "first": "a:First"},
    graphs={},
    kernels={"fast": "a:fast", "plain": "a:plain"},
    bring_up="a:BRING_UP",
)


def test_a_declaration_is_frozen_and_keeps_copies_in_the_order_they_were_given() -> None:
    given = {"second": "a:Second", "first": "a:First"}
    package = replace(PACKAGE, attention=given)
    given.clear()
    assert tuple(package.attention) == ("second", "first")
    with pytest.raises(TypeError):
        package.attention["third"] = "a:Third"  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        package.name = "two"  # type: ignore[misc]


@pytest.mark.parametrize("ref", ["module", "module:", ":name", "a b:c", "a:b [api-1]", ""])
def test_a_reference_that_is_not_module_and_name_is_refused_when_it_is_declared(ref: str) -> None:
    with pytest.raises(DeviceError, match="device package 'one' refers to .*wanted a reference such as"):
        replace(PACKAGE, worker=ref)


def test_kernel_tables_are_named_and_the_first_is_the_preferred() -> None:
    assert PACKAGE.kernels_for("auto", "reference") == "fast"
    assert [PACKAGE.kernels_for(name, "reference") for name in ("plain", "reference")] == ["plain", "reference"]
    with pytest.raises(ConfigError, match="kernels is 'quick'; wanted one of auto, fast, plain, reference$"):
        PACKAGE.kernels_for("quick", "reference")
    with pytest.raises(DeviceError, match="device package 'one' names no kernel table"):
        replace(PACKAGE, kernels={})


def test_ranks_share_the_processor_and_a_device_that_says_so() -> None:
    own, shared = Communication("x"), Communication("x", shares_device=True)
    given = ((False, None), (False, own), (True, None), (True, own), (False, shared))
    found = [replace(PACKAGE, is_host=is_host, communication=each).ranks_share_device for is_host, each in given]
    assert found == [False, False, True, True, True]


def test_a_reference_resolves_to_what_it_names() -> None:
    assert resolve("json:JSONDecoder.decode").__name__ == "decode"


def test_a_missing_module_is_named_with_the_package_and_a_remedy() -> None:
    with pytest.raises(DeviceError) as caught:
        resolve("no_such_module.deeper:name", "one")
    assert str(caught.value) == (
        "device package 'one' refers to 'no_such_module.deeper:name', but there is no module 'no_such_module'; "
        "pip install --upgrade sglcore-one"
    )


def test_a_missing_attribute_is_named_with_its_module() -> None:
    with pytest.raises(DeviceError, match="device package 'one' .* module 'json' has no attribute 'nothing'"):
        resolve("json:nothing", "one")


def test_an_import_that_fails_inside_the_module_keeps_its_own_traceback_and_says_who_asked(site: Site) -> None:
    (site.path / "planted_broken.py").write_text("import not_there_at_all\n")
    with pytest.raises(ModuleNotFoundError) as caught:
        resolve("planted_broken:name", "one")
    assert caught.value.name == "not_there_at_all"
    assert caught.value.__notes__ == ["while importing 'planted_broken:name', to which device package 'one' refers"]
    assert str(caught.traceback[-1].path).endswith("planted_broken.py")
