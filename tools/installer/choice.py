"""Chooses which torch is installed, from where, and why. It asks indexes through `Asker` and
installs nothing."""

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
    """A torch that the interpreter finds. `is_own`: it is installed in this environment, not in the
    base interpreter."""

    version: str
    is_own: bool
    brings_triton: bool

    @property
    def number(self) -> str:
        """The version without its suffix: 2.12.0 for 2.12.0a0+git5."""
        found = re.match(r"[\d.]*\d", self.version)
        return found.group() if found else self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decision about torch."""

    number: str
    """The version for the constraints of other packages; for a vendor's torch with its suffix."""
    requirements: tuple[str, ...]
    """pip's requirements; empty: the installed torch stays."""
    why: str
    """One line for the user: version, size, source and reason."""
    index_words: tuple[str, ...] = ()
    """pip's options for an additional index."""
    megabytes: tuple[int, int] = (0, 0)
    """Approximate size of the download, and its size on disk."""
    brings_triton: bool = True
    notes: tuple[str, ...] = ()
    """Further lines for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The inputs of a choice."""

    host: TorchNeeds
    """The CPU package; its builds are used if no accelerator needs another."""
    devices: tuple[TorchNeeds, ...]
    """The packages of the chosen accelerators."""
    reason: str
    """Why these devices: they were seen, or named."""
    machine: Machine
    version: str = ""
    """The requested version; "": the preferred one."""
    index: str = ""
    """The requested index; "": none."""
    only_processor: bool = False
    """Use only the CPU, even if there is an accelerator."""


def installed() -> Installed | None:
    """Return this interpreter's torch by its metadata, without an import; None if not installed."""
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
    """Choose torch. Raises InstallError if none is available; with `may_fail` false (a dry run) the
    preferred build is chosen anyway, and `why` says what was wrong. Waits for indexes."""
    needs = _needs(wanted)
    if present is not None and not present.is_own and _is_supported(present, needs, wanted.version):
        return _kept(present, needs)
    number = version_for(needs, wanted.version)
    beside = tuple(text.format(torch=number) for each in needs for text in each.beside)
    if wanted.index:
        why = f"torch {number} from {wanted.index}, the named index"
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
    """Return the requested version, or the last package's most preferred one that all support.
    Raises InstallError if there is no common version, or `asked` is not one."""
    common = [version for version in needs[-1].versions if all(version in each.versions for each in needs)]
    names = " and ".join(each.package for each in needs)
    if asked and asked not in common:
        known = ", ".join(common)
        raise InstallError(f"torch {asked} is not among those that {names} support: {known}; name one by --torch")
    if not common:
        raise InstallError(f"{names} support no common version of torch; install one of them alone, by --device")
    return asked or common[0]


def has_any(names: Sequence[str]) -> bool:
    """Return whether one of these distributions is installed."""
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def _needs(wanted: Wanted) -> tuple[TorchNeeds, ...]:
    """Return the CPU package's needs, then those of the devices. Raises InstallError if two devices
    need different builds."""
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
    """Return whether all support the installed torch, by major and minor version: a vendor's can be
    between two releases, such as 2.12.0a0."""
    minor = present.number.split(".")[:2]
    is_known = all(any(minor == version.split(".")[:2] for version in each.versions) for each in needs)
    return is_known and asked in ("", present.number, present.version)


def _kept(present: Installed, needs: Sequence[TorchNeeds]) -> Choice:
    """Return the choice to keep the vendor's torch of the base interpreter."""
    why = f"torch {present.version} of the interpreter below this environment is kept"
    notes = tuple(each.note for each in needs if each.note and not has_any(each.vendor))
    return Choice(
        number=present.version, requirements=(), why=why, brings_triton=present.brings_triton or _triton(), notes=notes
    )


def _triton() -> bool:
    return has_any(("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-xpu", "triton-ascend"))


def _will_do(present: Installed, builds: Sequence[Build], wanted: Wanted) -> bool:
    """Return whether the installed build works: any build does on the CPU; an accelerator needs its
    own."""
    label = present.version.partition("+")[2]
    is_host = wanted.only_processor or not wanted.devices
    return is_host or label in {build.label for build in builds}


def _build(
    number: str, builds: Sequence[Build], wanted: Wanted, sources: Sources, ask: Asker, may_fail: bool
) -> tuple[Build, tuple[str, ...], str]:
    """Return the first available build, pip's options for its index, and the line that says
    why."""
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
        what = f"torch {first.version(number)}, {first.name}, is not available: {'; '.join(refused)}"
        remedy = "try again, name another index by --torch-index URL, or take the processor by --processor"
        raise InstallError(f"{what}; {remedy}")
    return first, _words(first), _line(number, first, wanted.reason, refused)


def _words(build: Build) -> tuple[str, ...]:
    """Return pip's options for the build's index; an extra index is enough, because no other index
    has a version with this label."""
    return ("--extra-index-url", build.index) if build.index else ()


def _line(number: str, build: Build, reason: str, refused: Sequence[str]) -> str:
    place = f" from {build.index}" if build.index else ""
    why = f"{reason}, and {'; '.join(refused)}" if refused else reason
    return f"torch {build.version(number)}: {build.name}, about {size(build.megabytes[0])} to download{place}: {why}"


def size(megabytes: float) -> str:
    """Format a size in megabytes."""
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"
