"""The start of the command line: what works without optional packages, and the form of errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sglcore
from sglcore.cli.__main__ import main
from tests.device.site import Site


def test_the_version_is_printed_by_the_start_and_by_the_application(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = site.run("-m", "sglcore.cli", "--version")
    assert ran.stdout == f"sglcore {sglcore.__version__}\n"
    from sglcore.cli.app import make_app

    with pytest.raises(SystemExit) as end:
        make_app()(args=["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == ran.stdout


def test_help_lists_every_command(site: Site) -> None:
    ran = site.run("-m", "sglcore.cli", "--help")
    assert ran.returncode == 0
    assert re.search(r"^ +devices ", ran.stdout, re.MULTILINE)
    assert re.search(r"^ +doctor ", ran.stdout, re.MULTILINE)


@pytest.mark.parametrize("words", [("devices", "--nonsense"), ("nonsense",), ("devices", "a", "b")])
def test_a_wrong_word_exits_with_two_and_no_traceback(site: Site, words: tuple[str, ...]) -> None:
    ran = site.run("-m", "sglcore.cli", *words)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr and ran.stdout == ""


def test_an_error_a_person_can_act_on_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("devices", "no_such_device")) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: device 'no_such_device'")
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "--max-tokens", "abc"), "--max-tokens: found 'abc', wanted an integer; sglcore generate --help"),
        (("generate", "--temperature=x"), "--temperature: found 'x', wanted a number; sglcore generate --help"),
        (("generate", "--temprature", "1"), "no such option: --temprature (Possible options: --temperature)"),
        (("generte",), "no such command 'generte'. Did you mean 'generate'?; sglcore --help"),
        (("serve", "--port"), "option '--port' requires an argument; sglcore serve --help"),
        (("conform", "foo"), "device 'foo', from the argument, is not installed"),
        (("generate", "Once upon"), "there is no model 'Once upon'; give the text to complete with --prompt"),
        (("serve", "--host", "1.2.3.4"), "choose another --host"),
        (
            ("chat", "--url", "http://127.0.0.1:1"),
            "http://127.0.0.1:1 cannot be reached: Connection refused; start it",
        ),
    ],
)
def test_words_that_no_command_takes_are_one_line_that_says_what_to_do(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and said in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(("--version",)) == 2
    assert capsys.readouterr().err == "error: No space left on device; free some space, or write elsewhere\n"


@pytest.mark.parametrize("command", [("generate",), ("serve",), ("bench", "offline")])
def test_help_fits_eighty_columns_and_breaks_no_flag(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main((*command, "-h")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not [line for line in lines if line.endswith("-")]
    assert "Engine:" in lines and "Flags of other engines:" in lines
    assert main(command[:1] if len(command) > 1 else ()) == 2
    assert capsys.readouterr().err.startswith("Usage: sglcore")


def test_without_typer_the_error_says_what_to_install(tmp_path: Path, site: Site) -> None:
    root = Path(sglcore.__file__).parents[1]
    ran = site.run("-S", "-m", "sglcore.cli", "devices", environ={"PYTHONPATH": str(root)})
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: the command line needs 'typer', which is not installed; "
        "pip install typer; sglcore doctor works without it\n"
    )
