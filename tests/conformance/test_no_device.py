"""Every call that needs a device is reported on a machine without one, for each way to call it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest
import torch

from sglcore.conformance.no_device import ASKS

MODULES = (torch.cuda, torch.xpu, torch.accelerator)
OF_ONE_VENDOR = {"cudart"}
"""Functions of one vendor, unknown to the core."""


def only_a_device_answers(module: ModuleType) -> Iterator[str]:
    """Yield the functions of a torch device module that raise if there is no device."""
    for name in {*module.__all__, "_lazy_init"} & vars(module).keys():
        function = vars(module)[name]
        if isinstance(function, FunctionType):
            parameters = inspect.signature(function).parameters.values()
            wanted = sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
            try:
                function(*[0] * wanted)
            except (AssertionError, RuntimeError):
                yield name
            except Exception:  # It wants a library, or another argument, before it gets to the device.
                continue


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a torch without a device")
@pytest.mark.filterwarnings("ignore")
def test_every_function_that_only_a_device_answers_is_watched() -> None:
    found = {name for module in MODULES for name in only_a_device_answers(module)} - OF_ONE_VENDOR
    assert len(found) > 30
    assert found <= set(ASKS), f"nobody would be told of {sorted(found - set(ASKS))}"
    assert not any(found <= set(ASKS) - {name} for name in found)
