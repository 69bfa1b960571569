"""Tables in a package's README: which functions of vendors' libraries exist for entries of the
kernel table and for attention, and which are used.

A row begins with a call, `name(first, second, ...)`, with the parameters in their order; then the
entries or backends that it could serve; then "used", or why not. A package's test holds its rows
against the published parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglcore.device.package import DevicePackage
from sglcore.runtime.kernels.table import KernelTable

_ROW = re.compile(r"^\| `(?P<name>[\w.]+)\((?P<parameters>[^)]*)\)` \| (?P<served>[^|]*) \| (?P<verdict>.*) \|$")


@dataclass(frozen=True, slots=True)
class Offer:
    """One row: the parameters that it names, whether these are `whole`, what the function could
    serve, and the verdict."""

    parameters: tuple[str, ...]
    whole: bool
    served: frozenset[str]
    verdict: str

    @property
    def is_used(self) -> bool:
        return self.verdict.startswith("used")


def offers_of(readme: Path) -> dict[str, Offer]:
    """Return the rows of a README by the function's name."""
    found = filter(None, map(_ROW.match, readme.read_text(encoding="utf-8").splitlines()))
    return {row["name"]: _offer(row) for row in found}


def _offer(row: re.Match[str]) -> Offer:
    parameters = tuple(filter(None, row["parameters"].split(", ")))
    whole = "..." not in parameters
    named = parameters if whole else parameters[:-1]
    return Offer(named, whole, frozenset(re.findall(r"`(\w+)`", row["served"])), row["verdict"])


def check_parameters(offers: Mapping[str, Offer], published: Mapping[str, Sequence[str]]) -> None:
    """Raise AssertionError unless every row is a published function with its parameters."""
    assert offers
    for name, offer in offers.items():
        wanted = tuple(published[name])
        assert offer.parameters == (wanted if offer.whole else wanted[: len(offer.parameters)]), name


def check_served(offers: Mapping[str, Offer], package: DevicePackage) -> None:
    """Raise AssertionError unless every row names entries of the kernel table, or backends of the
    package."""
    known = KernelTable.declared().keys() | package.attention.keys()
    for name, offer in offers.items():
        assert offer.served and offer.served <= known, name


def check_used(offers: Mapping[str, Offer], called: Collection[str]) -> None:
    """Raise AssertionError unless the rows of used functions are those of called ones."""
    assert {name for name, offer in offers.items() if offer.is_used} == set(called)
