"""Files that the kit reads from a package are in its wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conformance.site import Site

ROOT = Path(__file__).resolve().parents[2]
NAME = "xpu"
GAP = '[[gap]]\nlaw = "order_checks"\nreason = "planted"\nlink = "https://example.org"\nexpiry = 2999-01-01\n'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A folder with only the contents of a package's wheel, built from a copy so that the checkout
    stays unchanged."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(
        ROOT / "devices" / NAME, folder / "source", ignore=shutil.ignore_patterns("*.egg-info", "build")
    )
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source))
    ran = subprocess.run(
        (sys.executable, "-m", "pip", *words), capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return Site(folder / "site")


def test_the_order_and_the_gaps_are_found_in_an_installed_wheel(site: Site) -> None:
    data = site.path / f"sglcore_{NAME}"
    assert (data / "gaps.toml").read_text() == (ROOT / "devices" / NAME / data.name / "gaps.toml").read_text()
    ran = site.sglcore("conform", NAME, "--level", "C0", "--law", "order_is_written_down", "--json")
    assert ran.returncode == 0, ran.stdout
    (data / "gaps.toml").write_text(GAP)
    ran = site.sglcore("conform", NAME, "--level", "C0", "--law", "order_checks", "--json")
    assert "order_checks holds, but has a gap" in " ".join(json.loads(ran.stdout)["problems"])


def test_without_its_order_a_wheel_breaks_the_law(site: Site) -> None:
    (site.path / f"sglcore_{NAME}" / "bring_up.txt").unlink()
    ran = site.sglcore("conform", NAME, "--level", "C0", "--law", "order_is_written_down", "--json")
    assert ran.returncode == 1 and "there is no" in ran.stdout
