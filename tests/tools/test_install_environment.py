"""The environment is made by the given Python, kept while it works, and remade if it is
incomplete."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.tools.planted_checkout import ROOT
from tools import make_environment
from tools.installer.pythons import refusal, served

PROGRAM = ROOT / "tools" / "make_environment.py"
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


STUB = f"""#!/bin/sh
# Makes an environment as `python -m venv` does, with a pip that nobody runs, which is a hundred times as quick.
for folder; do :; done
{sys.executable} "$@" --without-pip || exit 1
info=$(echo "$folder"/lib/python*/site-packages)/pip-99.dist-info
mkdir "$info" && echo "Name: pip" > "$info/METADATA" && echo pip > "$info/INSTALLER"
"""
RUN = "import sys; sys.path.insert(0, sys.argv[1]); from tools import make_environment as m; sys.executable = sys.argv[2]; m.make(m.Path(sys.argv[3]))"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A stub interpreter that makes environments quickly."""
    path = tmp_path / "bin" / "python3"
    path.parent.mkdir()
    path.write_text(STUB)
    path.chmod(0o755)
    return str(path)


def made(folder: Path, python: str, packages: str) -> str:
    """The output of making an environment with an interpreter that has these packages."""
    command = (sys.executable, "-c", RUN, str(ROOT), python, str(folder))
    environ = {**os.environ, "PYTHONPATH": packages}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def plant_pip(folder: Path, is_whole: bool = True) -> Path:
    """Make an environment with a fake pip, in the order of the real one: INSTALLER is written
    last."""
    venv.create(folder, symlinks=True)
    info = next(folder.glob("lib/python*/site-packages")) / "pip-99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: pip\nVersion: 99\n")
    if is_whole:
        (info / "INSTALLER").write_text("pip\n")
    return folder


def plant_torch(folder: Path, version: str, *others: str) -> str:
    """Write the metadata, without the files, of packages of an interpreter."""
    for name, number in (("torch", version), *((other, "1") for other in others)):
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {number}\n")
    return str(folder)


def test_one_that_works_stays_and_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant_pip(tmp_path / "venv")
    (folder / "mine").touch()
    assert make_environment.main([str(folder)]) == 0
    assert capsys.readouterr().out == "" and (folder / "mine").exists()


def test_one_without_pip_gets_it_and_keeps_what_it_has(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (tmp_path / "venv" / "mine").touch()
    assert make_environment.make(tmp_path / "venv") == 0
    assert make_environment.has_pip(tmp_path / "venv") and (tmp_path / "venv" / "mine").exists()


@pytest.mark.parametrize("left", ["nothing but a file", "no interpreter", "no configuration"])
def test_one_that_was_left_half_made_is_made_again(
    tmp_path: Path, left: str, python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "venv"
    plant_pip(folder, is_whole=False)
    if left == "no interpreter":
        (folder / "bin" / "python").unlink()
    elif left == "no configuration":
        (folder / "pyvenv.cfg").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    (folder / "left").touch()
    monkeypatch.setattr(sys, "executable", python)
    assert make_environment.make(folder) == 0
    assert capsys.readouterr().out == f"{folder} is incomplete, or of another Python: it is made again\n"
    assert not (folder / "left").exists() and make_environment.has_pip(folder)


def test_one_of_another_python_is_made_again_only_where_that_was_asked_for(tmp_path: Path) -> None:
    folder = plant_pip(tmp_path / "venv")
    lib = next(folder.glob("lib/python*"))
    (folder / "bin" / "python").unlink()
    program = f'#!/bin/sh\nPYTHONPATH={lib}/site-packages exec {sys.executable} -S -c "import sys; sys.version_info = (3, 12); exec(sys.argv[1])" "$2"\n'
    (folder / "bin" / "python").write_text(program)
    (folder / "bin" / "python").chmod(0o755)
    assert make_environment.has_pip(folder) and not make_environment.has_pip(folder, same=OWN != "3.12")
    assert make_environment.make(folder) == 0
    assert (folder / "bin" / "python").read_text() == program


def test_an_environment_works_where_its_pip_is_whole(tmp_path: Path) -> None:
    for is_whole, said in ((True, "yes\n"), (False, "no\n")):
        folder = plant_pip(tmp_path / str(is_whole), is_whole)
        ran = subprocess.run(
            (str(folder / "bin" / "python"), str(PROGRAM), "--works"), capture_output=True, text=True, check=False
        )
        assert ran.stdout == said
    assert not make_environment.works("") or make_environment.works(sys.executable)


def test_a_python_that_cannot_make_one_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python3"
    python.write_text(
        "#!/bin/sh\nmkdir -p \"$3\"\necho 'The virtual environment was not created successfully because ensurepip is not\navailable.'\nexit 1\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert make_environment.make(tmp_path / "venv") == 1
    assert capsys.readouterr().err == (
        f"{python} cannot make an environment with pip: apt-get install python{OWN}-venv, or your system's equivalent"
        " package; then make demo again\n"
    )
    assert not (tmp_path / "venv").exists()
    assert make_environment.explain("OSError: [Errno 28] No space left on device").startswith(
        "no space is left on the disk"
    )


@pytest.mark.parametrize(
    ("version", "others", "kept"),
    [
        ("2.13.0", (), False),
        ("2.13.0+cpu", (), False),
        ("2.13.0+rocm7.2", (), True),
        ("2.12.0a0+5ab9cf2.nv26", (), True),
        ("2.11.0", ("torch_musa",), True),
        ("2.13.0+cpu", ("torch_npu",), True),
    ],
)
def test_a_vendors_torch_is_kept(tmp_path: Path, version: str, others: tuple[str, ...], kept: bool) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tools import make_environment as m; print(m.vendors_torch())"
    )
    environ = {**os.environ, "PYTHONPATH": plant_torch(tmp_path, version, *others)}
    command = (sys.executable, "-c", program, str(ROOT))
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{version if kept else ''}\n"


def test_an_environment_over_a_vendors_torch_sees_it_and_says_so(tmp_path: Path, python: str) -> None:
    said = made(tmp_path / "venv", python, plant_torch(tmp_path / "packages", "2.13.0+rocm7.2"))
    assert (
        said
        == f"torch 2.13.0+rocm7.2 of {python} is a vendor's: it is kept, and {tmp_path / 'venv'} sees its packages\n"
    )
    assert "include-system-site-packages = true" in (tmp_path / "venv" / "pyvenv.cfg").read_text()


def test_a_vendors_torch_that_is_too_old_is_left_alone(tmp_path: Path, python: str) -> None:
    said = made(tmp_path / "venv", python, plant_torch(tmp_path / "packages", "2.9.1+rocm6.4"))
    assert said == f"torch 2.9.1+rocm6.4 of {python} is not one that sglcore works with: it is left alone\n"
    assert "include-system-site-packages = false" in (tmp_path / "venv" / "pyvenv.cfg").read_text()


def test_a_python_that_is_not_served_is_refused_with_one_that_is() -> None:
    first, last = served()[0], served()[-1]
    assert refusal((3, 11, 7), "python3") == "" and first == "3.11"
    old = refusal((3, 9, 2), "/usr/bin/python3", which=lambda name: name == "python3.12" or None)
    assert old == (
        f"/usr/bin/python3 is Python 3.9, which is too old: sglcore needs 3.11 to {last};"
        " use it by make demo PYTHON=python3.12"
    )
    new = refusal((4, 0, 1), "py", which=lambda name: None)
    assert new == (
        f"py is Python 4.0, which is newer than the wheels of torch and others: sglcore needs 3.11 to {last};"
        f" install one of them and use it by make demo PYTHON=python{last}"
    )


@pytest.mark.parametrize("name", ["make_environment.py", "install_devices.py"])
def test_an_old_python_reads_what_refuses_it(name: str, tmp_path: Path) -> None:
    for path in (
        ROOT / "tools" / name,
        *(ROOT / "tools" / "installer" / part for part in ("__init__.py", "pythons.py")),
    ):
        ast.parse(path.read_text(), feature_version=(3, 8))
    program = "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = (sys.executable, "-I", "-S", "-c", program, str(ROOT / "tools" / name), str(tmp_path / "venv"))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and ran.stdout == ""
    assert ran.stderr.startswith(f"{sys.executable} is Python 3.9, which is too old: sglcore needs 3.11 to ")
    assert ran.stderr.count("\n") == 1


# The Makefile, in a checkout with an installer that only records its calls.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", root)
    shutil.copytree(
        ROOT / "tools" / "installer", root / "tools" / "installer", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("__init__.py", "make_environment.py"):
        shutil.copy(ROOT / "tools" / name, root / "tools")
    shutil.copy(ROOT / "pyproject.toml", root)
    note = "import sys, pathlib; p = pathlib.Path('ran.txt'); p.write_text((p.read_text() if p.exists() else '') + ' '.join(['ran', *sys.argv[1:]]) + chr(10))"
    (root / "tools" / "install_devices.py").write_text(note)
    plant_pip(root / ".venv")
    return root


MENDING = f"""#!/bin/sh
# A Python that was asked for: it says its version, and makes an environment whole instead of making one.
[ "$1" = -c ] && exec {sys.executable} "$@"
for folder in .venv/lib/python*/site-packages/pip-99.dist-info; do echo pip > "$folder/INSTALLER"; done
touch .venv/pyvenv.cfg
echo "$@" >> mended.txt
"""


def make(root: Path, *words: str) -> list[str]:
    """The arguments of each call of the installer."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MFLAGS")}
    command = ("make", "-s", ".venv/installed", *words)
    ran = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return (root / "ran.txt").read_text().splitlines() if (root / "ran.txt").exists() else []


def test_make_installs_once_and_again_where_the_environment_broke(checkout: Path) -> None:
    python = checkout / "python3"
    python.write_text(MENDING)
    python.chmod(0o755)
    asked = f"PYTHON={python}"
    assert make(checkout, "INSTALL=--device one", asked) == ["ran --device one"]
    assert make(checkout, asked) == ["ran --device one"]
    assert not (checkout / "mended.txt").exists()
    next(checkout.glob(".venv/lib/python*/site-packages/pip-*/INSTALLER")).unlink()
    assert make(checkout, asked) == ["ran --device one", "ran"]
    assert (checkout / "mended.txt").read_text() == "tools/make_environment.py --same .venv\n"
    assert make(checkout, asked) == ["ran --device one", "ran"]
