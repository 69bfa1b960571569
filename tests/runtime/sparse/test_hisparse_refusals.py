"""A setting that hisparse does not support is refused by name before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.runtime.hisparse.hisparse_bring_up import hisparse_config
from sglcore.runtime.kernels.hisparse_entries import REACHING
from sglcore.runtime.kernels.table import KernelTable
from sglcore.step.hisparse_config import HiSparseConfig

SHARING = Facts(tensor_device="cpu", shares_host_memory=True)
APART, REACHED = Facts(tensor_device="acme:0"), Facts(tensor_device="acme:0", reaches_pinned_memory=True)
OWN = KernelTable().replace(**{name: lambda *given: None for name in REACHING})
"""A kernel table with device entries that reach host memory."""


@pytest.mark.parametrize(("facts", "kernels"), [(SHARING, KernelTable()), (REACHED, OWN)])
@pytest.mark.parametrize("speculative", [None, "off", "auto"])
def test_what_is_asked_for_alone_is_had(facts: Facts, kernels: KernelTable, speculative: str | None) -> None:
    asked = EngineConfig(hisparse='{"device_buffer_size": 9}', speculative=speculative)
    assert hisparse_config(asked, facts, kernels) == HiSparseConfig(9)
    assert hisparse_config(EngineConfig(speculative=speculative), APART, KernelTable()) is None


@pytest.mark.parametrize(
    ("given", "facts", "missing", "reason"),
    [
        ({}, APART, (), "kernels on acme:0 do not reach host memory; wanted a device whose facts say reaches_pinned"),
        (
            {},
            REACHED,
            ("copy_rows",),
            "copy_rows of the kernel table are the reference's, which do not reach host memory",
        ),
        ({}, REACHED, REACHING, "norm_rope_store, copy_rows of the kernel table are the reference's"),
    ],
)
def test_what_does_not_go_with_it_is_named(
    given: dict[str, Any], facts: Facts, missing: tuple[str, ...], reason: str
) -> None:
    kernels = OWN.replace(**{name: KernelTable.declared()[name].reference for name in missing})
    with pytest.raises(ConfigError, match=reason):
        hisparse_config(EngineConfig(hisparse="on", **given), facts, kernels)
