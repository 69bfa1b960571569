"""Each failure during an installation is one line that says what to do, and a second try succeeds.

Pip's messages come from the real pip where it can produce them without a network, and otherwise
from recorded ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.planted_checkout import LINUX, Environment, checkout, environment
from tests.tools.test_install_torch import index
from tools.installer.failures import check_space, explain
from tools.installer.needs import InstallError
from tools.installer.running import forget_half_installed
from tools.installer.sources import Sources

HERE = Sources(index="https://pypi.org/simple")
AGAIN = "; then make demo again"
RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...): [Errno -3] Temporary failure'"
NOTHING = "ERROR: No matching distribution found for torch==2.13.0"
LISTING = '<a href="torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl">'
PAGE = "<html>Please log in</html>"
HASHES = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE"
MIRROR = f"set HTTPS_PROXY, or a mirror by PIP_INDEX_URL{AGAIN}"
LINES = {
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": (
        "no space is left on a disk: free some, or set TMPDIR and PIP_CACHE_DIR to another disk" + AGAIN
    ),
    "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'))": (
        "the certificate of https://pypi.org/simple is not trusted: set PIP_CERT to its issuer's certificate file"
        + AGAIN
    ),
    "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 407 Proxy Authentication Required'))": (
        "the proxy lets no connection to https://pypi.org/simple through: correct HTTPS_PROXY" + AGAIN
    ),
    HASHES: f"https://pypi.org/simple did not return the package: a proxy stands between; {MIRROR}",
    RETRYING: f"https://pypi.org/simple cannot be reached: connect this machine, {MIRROR}",
    "ERROR: HTTP error 403 while getting https://files/x.whl": (
        f"https://files/x.whl answers with HTTP status 403: name a mirror by PIP_INDEX_URL{AGAIN}"
    ),
}


def refused(address: str, sources: Sources) -> str:
    """A page that cannot be fetched."""
    raise OSError("[Errno -2] Name or service not known")


@pytest.mark.parametrize("said", LINES)
def test_what_pip_says_becomes_one_line_with_the_remedy(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    assert explain(said, HERE, LINUX, Path("log"), refused) == LINES[said]


def test_a_package_that_is_not_found_is_looked_for_to_say_why() -> None:
    torch = "https://pypi.org/simple/torch/"
    assert explain(f"{RETRYING}\n{NOTHING}", HERE, LINUX, Path("log"), refused) == (
        f"{torch} does not answer (Name or service not known): connect this machine, {MIRROR}"
    )
    assert explain(NOTHING, HERE, LINUX, Path("log"), lambda *_: PAGE) == (
        f"{torch} answers with a page that is no package index: a proxy or a login page stands between; {MIRROR}"
    )
    assert explain(NOTHING, HERE, LINUX, Path("log"), lambda *_: LISTING) == (
        "https://pypi.org/simple has no torch==2.13.0 for cp312 on Linux x86_64: use another Python by make demo"
        " PYTHON=python3.12, or another index by PIP_INDEX_URL"
    )


def test_what_is_not_known_is_shown_in_pips_last_words() -> None:
    said = explain("\n".join(f"line {i}" for i in range(30)), HERE, LINUX, Path("build/install.log"))
    assert said.splitlines()[0] == "line 10"
    assert said.splitlines()[-1] == f"pip failed; its whole output is in build/install.log: fix the cause{AGAIN}"


def test_a_disk_is_asked_for_all_that_goes_there_before_anything_is_fetched(tmp_path: Path) -> None:
    needed = [(tmp_path / "not" / "yet", 7000), (tmp_path, 2800)]
    check_space(needed, "torch 2.13.0", lambda path: 9_800_000_000)
    with pytest.raises(InstallError) as caught:
        check_space(needed, "torch 2.13.0", lambda path: 9_799_000_000)
    assert str(caught.value) == (
        f"torch 2.13.0 needs about 9.8 GB on the disk of {tmp_path}, which has 9.8 GB free: free some, or set TMPDIR and"
        f" PIP_CACHE_DIR to another disk{AGAIN}"
    )


def test_packages_that_pip_was_interrupted_at_are_forgotten(tmp_path: Path) -> None:
    for name, has_installer in (("whole-1", True), ("half-2", False)):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text("Name: x")
        if has_installer:
            (tmp_path / f"{name}.dist-info" / "INSTALLER").write_text("pip\n")
    (tmp_path / "~alf").mkdir()
    assert forget_half_installed(tmp_path) == ["half-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole-1.dist-info"]


# The whole installer, in an environment with a scripted pip.


@pytest.fixture
def planted(tmp_path: Path) -> Environment:
    root = tmp_path / "checkout"
    root.mkdir()
    checkout(root, "host", is_host=True)
    return environment(tmp_path / "venv", root)


def lines(text: str) -> list[str]:
    """The lines that a user reads."""
    return [line for line in text.splitlines() if line]


def test_a_failed_download_ends_in_one_line_and_the_second_try_goes_through(planted: Environment) -> None:
    planted.answers = [("torch==", 1, "OSError: [Errno 28] No space left on device", "")]
    ran = planted.install()
    assert (ran.returncode, len(lines(ran.stderr)), len(planted.ran)) == (1, 1, 1)
    assert ran.stderr.startswith("no space is left on a disk: ")
    planted.answers = []
    again = planted.install()
    assert (again.returncode, again.stderr, len(planted.ran)) == (0, "", 5)
    assert not list((planted.root / "build").glob("pip-*"))


def test_a_full_disk_stops_it_before_pip_is_started(planted: Environment) -> None:
    table = planted.root / "devices" / "host" / "pyproject.toml"
    table.write_text(table.read_text().replace("[1, 2]", "[1, 9000000000]"))
    ran = planted.install()
    assert (ran.returncode, len(lines(ran.stderr)), planted.ran) == (1, 1, [])
    assert ran.stderr.startswith("torch 1.2.3 needs about 9000000.0 GB on the disk of ") and AGAIN in ran.stderr
    assert "torch 1.2.3: the plain build, about 1 MB to download" in ran.stdout


def test_a_file_that_a_proxy_has_spoiled_is_fetched_again_past_the_cache(planted: Environment) -> None:
    planted.answers = [("--no-cache-dir", 0, "", ""), ("torch==", 1, HASHES, "")]
    assert planted.install().returncode == 0
    assert ["--no-cache-dir" in words for words in planted.ran[:3]] == [False, True, False]
    planted.answers = [("torch==", 1, HASHES, "")]
    ran = planted.install()
    assert ran.returncode == 1 and "did not return the package: a proxy stands between" in ran.stderr


def test_a_compiler_that_is_missing_is_said_with_what_serves_and_what_to_do(planted: Environment) -> None:
    (planted.root / "devices/host/compile.py").write_text("import sys; sys.exit('there is no C++ compiler here')")
    table = planted.root / "devices/host/pyproject.toml"
    words = (
        '[tool.sglcore]\nearly-build = ["compile.py"]\nwithout-build = "slower; install one, then {python} -m again"\n'
    )
    table.write_text(words + table.read_text())
    ran = planted.install()
    python = planted.folder / "bin" / "python"
    assert ran.returncode == 0
    assert f"host: there is no C++ compiler here: slower; install one, then {python} -m again\n" in ran.stdout


HALF = """
folder = next(pathlib.Path(sys.prefix).glob("lib/python*/site-packages")) / "torch-1.2.3.dist-info"
folder.mkdir()
(folder / "METADATA").write_text("Name: torch\\nVersion: 1.2.3\\n")
time.sleep(60)
"""
"""The remains of an interrupted pip: a package with metadata, but without all of its files."""
COMPILE = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("running.txt").write_text(f"{os.getpid()} {child.pid}")
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running_and_the_second_try_installs_what_was_half_installed(
    planted: Environment, number: signal.Signals
) -> None:
    compile_ = planted.root / "devices" / "host" / "compile.py"
    compile_.write_text(COMPILE)
    table = planted.root / "devices" / "host" / "pyproject.toml"
    table.write_text('[tool.sglcore]\nearly-build = ["compile.py"]\n' + table.read_text())
    planted.answers = [("torch==", 0, "", HALF)]
    child = planted.start()
    running, half = compile_.with_name("running.txt"), planted.packages / "torch-1.2.3.dist-info" / "METADATA"
    wait_until(lambda: half.is_file() and len(running.read_text().split()) == 2 if running.is_file() else False)
    child.send_signal(number)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert lines(err) == ["interrupted: installed packages stay, and make demo continues from there"]
    wait_until(lambda: not any(is_alive(int(pid)) for pid in running.read_text().split()))
    assert not list((planted.root / "build").glob("pip-*"))
    planted.answers = []
    compile_.write_text("")
    again = planted.install()
    assert again.returncode == 0, again.stderr
    assert "torch-1.2.3 was half installed and is installed again\n" in again.stdout
    assert "torch==1.2.3" in planted.ran[1]


def test_what_a_killed_installation_left_is_removed(planted: Environment) -> None:
    left = planted.root / "build" / "pip-999999999"
    left.mkdir(parents=True)
    other = planted.root / "build" / f"pip-{os.getpid()}"
    other.mkdir()
    assert planted.install().returncode == 0
    assert not left.exists() and other.exists()


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until another process makes `holds()` true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process lives; a zombie counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# The real pip, against servers on this machine.


def real_pip(where: str, tmp_path: Path) -> str:
    """Pip's output with this index."""
    options = (
        "--retries",
        "0",
        "--timeout",
        "5",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    )
    command = (sys.executable, "-m", "pip", "download", *options, "--no-deps", "--index-url", where)
    words = (*command, "-d", str(tmp_path), "torch==2.13.0")
    environ = {name: value for name, value in os.environ.items() if not name.lower().startswith(("pip_", "http"))}
    environ["PIP_CONFIG_FILE"] = os.devnull
    ran = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode
    return ran.stdout + ran.stderr


def test_the_real_pip_behind_a_login_page_gives_the_line_about_it(tmp_path: Path) -> None:
    with index(PAGE.encode()) as address:
        said = explain(real_pip(address, tmp_path), Sources(index=address), LINUX, tmp_path)
    assert said.startswith(f"{address}/torch/ answers with a page that is no package index: ")


def test_the_real_pip_without_a_network_gives_the_line_about_it(tmp_path: Path) -> None:
    address = "http://127.0.0.1:9/simple"
    said = explain(real_pip(address, tmp_path), Sources(index=address), LINUX, tmp_path)
    assert said.startswith(f"{address}/torch/ does not answer (Connection refused): connect this machine, ")


def test_the_real_pip_that_gets_another_file_gives_the_line_about_it(tmp_path: Path) -> None:
    name = "torch-2.13.0-py3-none-any.whl"
    with index(f'<a href="{name}#sha256={"0" * 64}">{name}</a>'.encode()) as address:
        said = explain(real_pip(address, tmp_path), Sources(index=address), LINUX, tmp_path)
    assert said.startswith(f"{address} did not return the package: a proxy stands between; ")
