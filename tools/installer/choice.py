"""Which torch is installed, from where, and why. It asks indexes by what it is given, and installs
nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tools.installer.needs import Build, InstallError, TorchNeeds
from tools.installer.sources import Asker, Machine, Sources

TRITON = re.compile(r"(pytorch-)?triton\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A torch that the interpreter finds. `is_own`: it lies in this environment, not in the
    interpreter below it."""

    version: str
    is_own: bool
    brings_triton: bool

    @property
    def number(self) -> str:
        """Without what stands after the numbers: 2.12.0 of 2.12.0a0+git5."""
        found = re.match(r"[\d.]*\d", self.version)
        return found.group() if found else self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done about torch."""

    number: str
    """The version that all else must fit; of a vendor's torch all of it."""
    requirements: tuple[str, ...]
    """What pip is told; none: the torch that is there stays."""
    why: str
    """One line for people: what, how large, from where, for what reason."""
    index_words: tuple[str, ...] = ()
    """Options of pip's for an index other than its own."""
    megabytes: tuple[int, int] = (0, 0)
    """About what is downloaded, and what that is on disk."""
    brings_triton: bool = True
    notes: tuple[str, ...] = ()
    """Further lines for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a choice is made from."""

    host: TorchNeeds
    """The processor's package, whose builds serve where no accelerator asks for another."""
    devices: tuple[TorchNeeds, ...]
    """The accelerators' packages that are to be usable."""
    reason: str
    """Why these, in words: what was seen, or named."""
    machine: Machine
    version: str = ""
    """The version that was asked for; "": the preferred one."""
    index: str = ""
    """The index that was asked for."""
    only_processor: bool = False
    """No accelerator is to compute, whatever is there."""


def installed() -> Installed | None:
    """The torch of this interpreter, by its metadata; nothing is imported."""
    try:
        found = distribution("torch")
    except PackageNotFoundError:
        return None
    brings = any(TRITON.match(text) for text in found.requires or ())
    place = Path(str(found.locate_file(""))).resolve()
    return Installed(
        version=found.version, is_own=place.is_relative_to(Path(sys.prefix).resolve()), brings_triton=brings
    )


def choose(wanted: Wanted, present: Installed | None, sources: Sources, ask: Asker, may_fail: bool = True) -> Choice:
    """The torch for what is wanted. Raises InstallError where none can be had; with `may_fail`
    false, as in a dry run, the preferred build is taken all the same, and its line says what was
    wrong."""
    needs = _needs(wanted)
    if present is not None and not present.is_own and _is_supported(present, needs, wanted.version):
        return _kept(present, needs)
    number = version_for(needs, wanted.version)
    beside = tuple(text.format(torch=number) for each in needs for text in each.beside)
    if wanted.index:
        why = f"torch {number} from {wanted.index}, which was named"
        words = ("--index-url", wanted.index)
        return Choice(number=number, requirements=(f"torch=={number}", *beside), why=why, index_words=words)
    leading = needs[-1]
    builds = [build for build in leading.builds if build.serves(number, wanted.machine.system)]
    if not builds:
        systems = sorted({system for build in leading.builds for system in build.systems})
        found = f"there is no torch for {leading.package} on {wanted.machine.system}, only on {', '.join(systems)}"
        raise InstallError(f"{found}; take the processor by --processor")
    notes = tuple(each.note for each in needs if each.note and not has_any(each.vendor))
    if present is not None and present.number == number and _will_do(present, builds, wanted):
        why = f"torch {present.version} is installed already: {wanted.reason}"
        return Choice(
            number=number,
            requirements=(f"torch=={number}", *beside),
            why=why,
            brings_triton=present.brings_triton,
            notes=notes,
        )
    build, words, why = _build(number, builds, wanted, sources, ask, may_fail)
    return Choice(
        number=number,
        requirements=(f"torch=={build.version(number)}", *beside),
        why=why,
        index_words=words,
        megabytes=build.megabytes,
        brings_triton=build.brings_triton,
        notes=notes,
    )


def version_for(needs: Sequence[TorchNeeds], asked: str) -> str:
    """The version that all support, preferred by the last; raises InstallError where there is none,
    or not the one asked."""
    common = [version for version in needs[-1].versions if all(version in each.versions for each in needs)]
    names = " and ".join(each.package for each in needs)
    if asked and asked not in common:
        known = ", ".join(common)
        raise InstallError(f"torch {asked} is not among those that {names} support: {known}; name one by --torch")
    if not common:
        raise InstallError(f"{names} support no common version of torch; install one of them alone, by --device")
    return asked or common[0]


def has_any(names: Sequence[str]) -> bool:
    """Whether one of these distributions is installed."""
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def _needs(wanted: Wanted) -> tuple[TorchNeeds, ...]:
    """The host's, then those of the devices; raises InstallError where two devices need different
    builds."""
    if wanted.only_processor or not wanted.devices:
        return (wanted.host,)
    builds = {each.builds for each in wanted.devices}
    if len(builds) > 1:
        names = ", ".join(each.package for each in wanted.devices)
        raise InstallError(
            f"found accelerators that need different builds of torch: {names}; one can be served: choose it by --device"
            f' NAME (make demo INSTALL="--device {wanted.devices[0].package}"), or take none by --processor'
        )
    return (wanted.host, *wanted.devices)


def _is_supported(present: Installed, needs: Sequence[TorchNeeds], asked: str) -> bool:
    """A vendor's torch may be between two that the index has: 2.12.0a0."""
    minor = present.number.split(".")[:2]
    is_known = all(any(minor == version.split(".")[:2] for version in each.versions) for each in needs)
    return is_known and asked in ("", present.number, present.version)


def _kept(present: Installed, needs: Sequence[TorchNeeds]) -> Choice:
    """The vendor's torch, in the interpreter that this environment stands on."""
    why = f"torch {present.version} of the interpreter below this environment is kept"
    notes = tuple(each.note for each in needs if each.note and not has_any(each.vendor))
    return Choice(
        number=present.version, requirements=(), why=why, brings_triton=present.brings_triton or _triton(), notes=notes
    )


def _triton() -> bool:
    return has_any(("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-xpu", "triton-ascend"))


def _will_do(present: Installed, builds: Sequence[Build], wanted: Wanted) -> bool:
    """Any build computes on processors; an accelerator needs its own."""
    label = present.version.partition("+")[2]
    is_host = wanted.only_processor or not wanted.devices
    return is_host or label in {build.label for build in builds}


def _build(
    number: str, builds: Sequence[Build], wanted: Wanted, sources: Sources, ask: Asker, may_fail: bool
) -> tuple[Build, tuple[str, ...], str]:
    """The build, the options for its index, and the line that says why."""
    refused: list[str] = []
    for build in builds:
        folder = sources.local(f"torch-{build.version(number)}", wanted.machine)
        if folder is not None:
            build = replace(build, megabytes=(0, build.megabytes[1]))
            return build, (), f"torch {build.version(number)}: {build.name}, from {folder}: {wanted.reason}"
        wrong = ask(build.index, build.version(number), wanted.machine) if build.index else ""
        if not wrong:
            return build, _words(build), _line(number, build, wanted.reason, refused)
        refused.append(f"{build.index} {wrong}")
    first = builds[0]
    if may_fail:
        what = f"torch {first.version(number)}, {first.name}, can not be had: {'; '.join(refused)}"
        remedy = "try again, name another index by --torch-index URL, or take the processor by --processor"
        raise InstallError(f"{what}; {remedy}")
    return first, _words(first), _line(number, first, wanted.reason, refused)


def _words(build: Build) -> tuple[str, ...]:
    """A label makes the version one that no other index has."""
    return ("--extra-index-url", build.index) if build.index else ()


def _line(number: str, build: Build, reason: str, refused: Sequence[str]) -> str:
    place = f" from {build.index}" if build.index else ""
    why = f"{reason}, and {'; '.join(refused)}" if refused else reason
    return f"torch {build.version(number)}: {build.name}, about {size(build.megabytes[0])} to download{place}: {why}"


def size(megabytes: float) -> str:
    """For people."""
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"
