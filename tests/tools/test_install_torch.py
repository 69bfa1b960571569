"""Which torch is chosen: by the index's versions, pip's settings, the installed version, and a
vendor's build."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tools.planted_checkout import BESIDE, BOTH, LABELLED, LINUX, ROOT, offer, plan, refuse, seen
from tools.installer.choice import Installed
from tools.installer.needs import InstallError, needs_of, takes
from tools.installer.sources import Machine, Sources, asker, from_listing, lacks, page


def test_the_public_build_follows_where_the_index_does_not_answer_and_the_line_says_so(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True, torch=BOTH)
    asked = plan(tmp_path, [host], ask=offer)
    assert asked.commands[0] == "--extra-index-url http://127.0.0.1:9/cpu torch==1.2.3+host9"
    made = plan(tmp_path, [host], ask=refuse)
    assert made.commands[0] == "torch==1.2.3"
    assert made.choice.why == (
        "torch 1.2.3: the plain build, about 3 MB to download: no accelerator was seen,"
        " and http://127.0.0.1:9/cpu does not answer (planted)"
    )


def test_an_accelerators_only_build_must_be_had_unless_nothing_is_installed_yet(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one", torch=LABELLED)]
    with pytest.raises(InstallError) as caught:
        plan(tmp_path, found, ask=refuse)
    assert str(caught.value) == (
        "torch 1.1.0+one9, the build for one, is not available: http://127.0.0.1:9/whl does not answer (planted);"
        " try again, name another index by --torch-index URL, or take the processor by --processor"
    )
    made = plan(tmp_path, found, ask=refuse, may_fail=False)
    assert made.commands[0] == "--extra-index-url http://127.0.0.1:9/whl torch==1.1.0+one9"
    assert made.choice.why.endswith("one was seen, and http://127.0.0.1:9/whl does not answer (planted)")


def test_a_wheel_that_pip_is_told_of_is_taken_and_nobody_is_asked(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True, torch=BOTH)
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "torch-1.2.3+host9-cp312-cp312-manylinux_2_28_x86_64.whl").touch()
    made = plan(tmp_path, [host], sources=Sources(folders=(folder,)))
    assert made.commands[0] == "torch==1.2.3+host9"
    assert made.choice.megabytes == (0, 2)
    assert made.choice.why == f"torch 1.2.3+host9: the build for host, from {folder}: no accelerator was seen"
    other = replace(LINUX, python="cp313")
    assert plan(tmp_path, [host], sources=Sources(folders=(folder,)), machine=other).commands[0] == "torch==1.2.3"


@pytest.mark.parametrize("version", ["1.2.3", "1.2.3+cpu", "1.2.3+host9"])
def test_a_processor_is_served_by_any_build_that_is_installed(tmp_path: Path, version: str) -> None:
    host = seen(tmp_path, "host", is_host=True, torch=BOTH)
    present = Installed(version=version, is_own=True, brings_triton=False)
    made = plan(tmp_path, [host], "--extra", "test", present=present)
    assert made.commands[:2] == ["torch==1.2.3", "triton==4.5.6"]
    assert made.choice.why == f"torch {version} is installed already: no accelerator was seen"
    assert made.choice.megabytes == (0, 0)


def test_an_accelerator_needs_its_own_build_whatever_is_installed(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one", torch=LABELLED)]
    for version, first in (("1.1.0+cpu", "torch==1.1.0+one9"), ("1.1.0+one9", "torch==1.1.0")):
        present = Installed(version=version, is_own=True, brings_triton=True)
        assert plan(tmp_path, found, ask=offer, present=present).commands[0].split()[-1] == first


@pytest.mark.parametrize("version", ["1.1.0+vendor5", "1.1.0a0+git7", "1.1.7"])
def test_a_vendors_torch_below_the_environment_is_kept(tmp_path: Path, version: str) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one", torch=LABELLED)]
    present = Installed(version=version, is_own=False, brings_triton=True)
    made = plan(tmp_path, found, "--extra", "test", present=present)
    assert made.commands == ["setuptools>=77", *made.commands[1:]] and "torch==" not in " ".join(made.commands)
    assert made.choice.why == f"torch {version} of the interpreter below this environment is kept"
    assert f"torch=={version}\n" in (tmp_path / f"build/constraints-torch-{version}.txt").read_text()


def test_a_torch_below_the_environment_that_no_package_supports_is_not_kept(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True)
    present = Installed(version="0.9.0+vendor", is_own=False, brings_triton=True)
    assert plan(tmp_path, [host], present=present).commands[0] == "torch==1.2.3"
    other = Installed(version="1.2.3+vendor", is_own=False, brings_triton=True)
    assert plan(tmp_path, [host], "--torch", "1.1.0", present=other).commands[0] == "torch==1.1.0"


def test_requirements_beside_torch_have_its_version_and_what_else_is_needed_is_said(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one", torch=BESIDE)]
    made = plan(tmp_path, found, ask=offer)
    assert made.commands[0].endswith("torch==1.1.0 extension==1.1.0")
    assert made.choice.notes == ("take the rest from the vendor",)


def test_a_build_that_serves_some_versions_is_no_way_out_for_the_others(tmp_path: Path) -> None:
    table = BOTH.replace("megabytes = [3, 4]", 'megabytes = [3, 4]\nversions = ["1.2.3"]')
    host = seen(tmp_path, "host", is_host=True, torch=table)
    assert plan(tmp_path, [host], ask=refuse).commands[0] == "torch==1.2.3"
    with pytest.raises(InstallError, match=r"torch 1\.1\.0\+host9, the build for host, is not available"):
        plan(tmp_path, [host], "--torch", "1.1.0", ask=refuse)


def test_a_system_for_which_there_is_no_build_is_refused(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True)
    with pytest.raises(InstallError, match="there is no torch for host on Windows, only on Darwin, Linux"):
        plan(tmp_path, [host], machine=Machine(system="Windows", machine="AMD64", python="cp312"))


def test_every_package_of_this_checkout_can_be_chosen_and_allows_what_it_says_it_supports() -> None:
    folders = [path.parent for path in sorted(ROOT.glob("devices/*/pyproject.toml"))]
    known = {folder.name: needs for folder in folders if (needs := needs_of(folder)) is not None}
    assert len(known) == 6
    for folder in folders:
        if folder.name in known:
            assert all(takes(folder, version) for version in known[folder.name].versions), folder
            assert set(known[folder.name].versions) <= set(known["cpu"].versions), folder
            assert not takes(folder, "2.10.0") and not takes(folder, "2.16.0"), folder
    for needs in known.values():
        assert all(build.index.startswith("https://") == bool(build.label) for build in needs.builds)


def test_a_wheel_fits_by_its_python_system_and_processor() -> None:
    names = {
        "torch-1-cp312-cp312-manylinux_2_28_x86_64.whl": True,
        "torch-1-cp312-cp312-linux_x86_64.whl": True,
        "torch-1-cp312-cp312t-manylinux_2_28_aarch64.whl": False,
        "torch-1-cp311-cp311-manylinux_2_28_x86_64.whl": False,
        "torch-1-cp312-cp312-win_amd64.whl": False,
        "torch-1-cp312-cp312-musllinux_1_2_x86_64.whl": False,
        "torch.whl": False,
    }
    assert {name: LINUX.fits(name) for name in names} == names
    assert Machine(system="Darwin", machine="arm64", python="cp312").fits("torch-1-cp312-none-macosx_14_0_arm64.whl")


def test_pips_configuration_is_read_and_a_variable_counts_first(tmp_path: Path) -> None:
    text = (
        f"global.find-links='{tmp_path}'\nglobal.index-url='https://a/simple'\n:env:.index-url='https://b/simple'\n"
        f":env:.find-links='https://c/page {tmp_path.as_uri()}'\nglobal.proxy='http://p'\nignored\n"
    )
    assert from_listing(text) == Sources(index="https://b/simple", folders=(tmp_path,), proxy="http://p")
    assert from_listing("") == Sources()


@contextmanager
def index(body: bytes, status: int = 200, wait: float = 0.0) -> Iterator[str]:
    """Serve this body for every page, in two parts; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body[:1])
            time.sleep(wait)
            self.wfile.write(body[1:])

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/whl"
    finally:
        server.shutdown()
        server.server_close()


LISTING = b'<a href="/x/torch-1.2.3%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl#sha256=0">torch</a>'


def test_an_index_is_asked_for_the_very_file(tmp_path: Path) -> None:
    with index(LISTING) as address:
        assert asker(Sources())(address, "1.2.3+cpu", LINUX) == ""
        said = asker(Sources())(address, "1.2.4+cpu", LINUX)
    assert said == "has no torch 1.2.4+cpu for cp312 on Linux x86_64"


def test_a_page_of_a_proxy_is_no_index() -> None:
    said = "answers with a page that is no package index: a proxy or a login page stands between"
    with index(b"<html>Please log in</html>") as address:
        assert asker(Sources())(address, "1.2.3+cpu", LINUX) == said
    assert lacks([], "1.2.3+cpu", LINUX) == said


def test_an_index_that_refuses_is_told_with_its_reason() -> None:
    with index(b"no", status=503) as address:
        assert asker(Sources())(address, "1", LINUX) == "does not answer (HTTP status 503)"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        said = asker(Sources())(f"http://127.0.0.1:{taken.getsockname()[1]}", "1", LINUX)
    assert said == "does not answer (Connection refused)"


def test_a_proxy_that_pip_is_told_of_is_asked() -> None:
    with index(LISTING) as address:
        proxied = asker(Sources(proxy=address.removesuffix("/whl")))
        assert proxied("http://no-such-host.invalid/whl", "1.2.3+cpu", LINUX) == ""


def test_an_index_that_never_ends_its_answer_is_waited_for_no_longer_than_said() -> None:
    with index(LISTING, wait=2.0) as address:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            page(address, Sources(), 0.1)
        assert time.monotonic() - begun < 1.5
