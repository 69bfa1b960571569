"""Models by their names on the hub: the requests made, the use of the cache, and the errors if
neither has the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.checkpoint_files import INDEX
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.engine.model_download import Hub, choose_gguf, commit_of, is_hub_name
from sglcore.engine.start import embedded_model
from sglcore.serving.replicas.configs import with_whole_path
from tests import warm
from tests.cli.test_generate import refused
from tests.engine.hub_server import COMMIT, HubServer, hub_server

FETCH = """
import json, sys
from pathlib import Path
from sglcore.engine.model_download import Hub
from sglcore.core.errors import ConfigError
told = []
for name, options in json.loads(sys.argv[1]):
    try:
        path = Hub(lambda *state: told.append(state), **options).fetch(name)
        print(json.dumps([str(path), sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()), told]))
    except ConfigError as error:
        print(json.dumps([str(error)]))
"""
PLAIN = {"config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"hello", "remote.py": b"", "original/a.pth": b"x"}
SHARDS = {INDEX: json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()}
REPOSITORIES = {
    "owner/one": {
        **PLAIN,
        "model.safetensors": b"w" * (3 << 20),
        "model.fp16.safetensors": b"v",
        "1_Pooling/config.json": b"{}",
    },
    "owner/two": {**PLAIN, **SHARDS, "one.safetensors": b"1", "two.safetensors": b"2", "model.safetensors": b"whole"},
    "owner/pieces": {
        **{name: data for name, data in PLAIN.items() if name != "tokenizer.json"},
        "tokenizer.model": b"p",
        "merges.txt": b"m",
        "model.safetensors": b"w",
    },
    "owner/torch": {**PLAIN, "pytorch_model.bin": b"x"},
    "owner/gguf": {"m-Q4_K_M.gguf": b"4", "m-Q8_0.gguf": b"8", "m-BF16.gguf": b"b", "mmproj-F16.gguf": b"p"},
    "owner/folders": {"Q4_0/m-Q4_0.gguf": b"4", "Q8_0/m-Q8_0.gguf": b"8"},
    "owner/gated": {**PLAIN, "model.safetensors": b"w"},
    "owner/gated-gguf": {"m-Q4_K_M.gguf": b"4"},
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server(HubServer(REPOSITORIES, frozenset({"owner/gated", "owner/gated-gguf"}))) as server:
        yield server


def environment(cache: Path, url: str, **more: str) -> dict[str, str]:
    """Return the environment of a process with this hub and cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SGLCORE_"))}
    return {**kept, "HF_HOME": str(cache), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def fetch(names: list[tuple[str, dict[str, Any]]], cache: Path, url: str, **more: str) -> list[Any]:
    """Fetch each name in a new process; returns path, files and progress, or the error."""
    found = warm.run(("-c", FETCH, json.dumps(names)), Path.cwd(), environment(cache, url, **more))
    assert found.returncode == 0, found.stderr
    assert "%|" not in found.stderr, "a bar of the library's own was drawn"
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_only_what_the_engine_reads_is_fetched_and_then_the_cache_answers_without_a_network(
    hub: HubServer, tmp_path: Path
) -> None:
    names: list[tuple[str, dict[str, Any]]] = [
        ("owner/one", {"runs_code": False}),
        ("owner/two", {"runs_code": True, "revision": "main"}),
        ("owner/gguf", {}),
        ("owner/gguf:q8_0", {}),
        ("owner/folders:Q8_0", {}),
        ("owner/pieces", {}),
    ]
    one, two, usual, named, inner, pieces = fetch(names, tmp_path, hub.url)
    assert one[1] == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert two[1] == ["config.json", INDEX, "one.safetensors", "remote.py", "tokenizer.json", "two.safetensors"]
    assert pieces[1] == ["config.json", "merges.txt", "model.safetensors", "tokenizer.model"]
    assert (Path(usual[0]).name, Path(named[0]).name) == ("m-Q4_K_M.gguf", "m-Q8_0.gguf")
    assert Path(inner[0]).parts[-2:] == ("Q8_0", "m-Q8_0.gguf")
    assert commit_of(Path(one[0])) == commit_of(Path(named[0])) == COMMIT
    assert one[2][-1] == ["download (MiB)", 3, 3]
    hub.asked.clear()
    pinned = [(name, {**options, "revision": COMMIT}) for name, options in names]
    assert [each[:2] for each in fetch(pinned, tmp_path, hub.url)] == [
        each[:2] for each in (one, two, usual, named, inner, pieces)
    ]
    assert not hub.asked
    for offline in ({"HF_HUB_OFFLINE": "1"}, {}):
        url = hub.url if offline else "http://127.0.0.1:9"
        assert [each[:2] for each in fetch(names, tmp_path, url, **offline)] == [
            each[:2] for each in (one, two, usual, named, inner, pieces)
        ]


@pytest.mark.parametrize("revision", [None, "main"])
def test_all_files_are_of_the_commit_of_the_first_ones_while_others_are_pushed(
    revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = (f"{number:040x}" for number in range(9))

    def download(repository: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        commit = next(pushed) if revision in (None, "main") else revision
        assert repository == "owner/pieces" and commit is not None
        (tmp_path / commit).mkdir(exist_ok=True)
        for name, data in REPOSITORIES["owner/pieces"].items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / commit / name).write_bytes(data)
        return str(tmp_path / commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = Hub(lambda *_: None, revision).fetch("owner/pieces")
    assert [each.name for each in tmp_path.iterdir()] == [folder.name]
    assert {each.name for each in folder.iterdir()} == {
        "config.json", "merges.txt", "model.safetensors", "tokenizer.model"
    }  # fmt: skip


def test_what_can_not_be_fetched_is_one_line_with_the_remedy(hub: HubServer, tmp_path: Path) -> None:
    cases = {
        ("owner/none", None): ("no folder 'owner/none', and no public model", "HF_TOKEN"),
        ("owner/one", "v9"): ("has no revision 'v9'", "--revision"),
        ("owner/gated", None): ("is gated", "hf auth login"),
        ("owner/torch", None): ("has no model.safetensors", "wanted model.safetensors"),
        ("owner/gguf:Q2_K", None): ("no .gguf file of 'Q2_K'", "m-BF16.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf", ":QUANT"),
    }
    asked = [(name, {"revision": revision}) for (name, revision) in cases]
    for (said,), parts in zip(fetch(asked, tmp_path, hub.url), cases.values(), strict=True):
        assert all(part in said for part in parts) and "\n" not in said, said
    gated: list[tuple[str, dict[str, Any]]] = [(name, {"token": "t0"}) for name in ("owner/gated", "owner/gated-gguf")]
    for path, *_ in fetch(gated, tmp_path, hub.url):
        assert COMMIT in path and "Bearer t0" in hub.tokens
    empty = tmp_path / "empty"
    for offline, parts in (
        ({"HF_HUB_OFFLINE": "1"}, ("HF_HUB_OFFLINE forbids the network", "unset HF_HUB_OFFLINE")),
        ({}, ("http://127.0.0.1:9 cannot be reached", "check the network")),
    ):
        ((said,),) = fetch([("owner/one", {})], empty, "http://127.0.0.1:9", **offline)
        assert all(part in said for part in (*parts, str(empty), "hf download owner/one")) and "\n" not in said, said


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (429, ("429 Too Many Requests", "try again in 7 s", "HF_TOKEN")),
        (500, ("500 Internal Server Error", "try again later")),
        (503, ("503 Service Unavailable", "try again later")),
        (403, ("403 Forbidden", "hf auth login")),
    ],
)
def test_what_the_hub_answers_is_told_and_not_that_it_can_not_be_reached(
    hub: HubServer, tmp_path: Path, status: int, parts: tuple[str, ...]
) -> None:
    hub.refusals = {"revision": status}
    names: list[tuple[str, dict[str, Any]]] = [("owner/one", {}), ("owner/gguf", {})]
    for (said,) in fetch(names, tmp_path, hub.url):
        assert all(part in said for part in parts) and "reached" not in said and "\n" not in said, said
        assert f"{hub.url}/owner/" in said and "hf download owner/" in said


def test_a_cache_that_is_not_whole_does_not_hide_what_the_hub_answers(hub: HubServer, tmp_path: Path) -> None:
    one: list[tuple[str, dict[str, Any]]] = [("owner/one", {})]
    gguf: list[tuple[str, dict[str, Any]]] = [("owner/gguf:Q8_0", {})]
    ((whole, *_),) = fetch(one, tmp_path, hub.url)
    ((named, *_),) = fetch(gguf, tmp_path, hub.url)
    hub.refusals = dict.fromkeys(("revision", "tree", "resolve"), 403)  # the library tries a 503 again for seconds
    (first, *_), (second, *_) = fetch([*one, *gguf], tmp_path, hub.url)
    assert (first, second) == (whole, named), "what is whole needs no hub"
    (Path(whole) / "model.safetensors").unlink()
    (lacks,), (other,) = fetch([*one, ("owner/gguf:Q4_K_M", {})], tmp_path, hub.url)
    for said in (lacks, other):
        assert "403 Forbidden" in said and "hf auth login" in said, said


def test_a_model_of_the_hub_generates_and_a_missing_library_is_one_line(tmp_path: Path) -> None:
    model, draft = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for folder in (embedded_model(), embedded_model() / "draft")
    )
    words = ("-m", "sglcore.cli", "generate", "owner/demo", "-q", "-p", "Once upon", "--max-tokens", "4")
    with hub_server(HubServer({"owner/demo": model, "owner/draft": draft})) as hub:
        known = environment(tmp_path, hub.url, OMP_NUM_THREADS="1")
        found = warm.run((*words, "--draft-model", "owner/draft", "--draft-tokens", "2"), Path.cwd(), known)
    assert found.returncode == 0 and found.stdout.strip() and "%|" not in found.stderr, found.stderr
    assert {"owner/demo/model.safetensors", "owner/draft/model.safetensors"} <= hub.asked
    assert "owner/demo/README.md" not in hub.asked
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError")
    broken = {**known, "PYTHONPATH": os.pathsep.join((str(tmp_path), known.get("PYTHONPATH", "")))}
    refused(warm.run(words, Path.cwd(), broken), "needs huggingface_hub", "sglcore[hub]")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen/Qwen3-0.6B", True), ("o/n:Q8_0", True), ("/data/x", False), ("x", False), ("./a", False), ("a/b/c", False)],
)
def test_a_name_of_the_hub_has_two_parts_and_is_no_path(name: str, expected: bool) -> None:
    assert is_hub_name(name) == expected


def test_what_is_a_path_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("owner/one") and is_hub_name("owner/two")
    folders = [with_whole_path(EngineConfig(model=name)).model for name in ("owner/one", "owner/two")]
    assert folders == [str(tmp_path / "owner" / "one"), "owner/two"]


@pytest.mark.parametrize(
    ("quant", "names", "expected"),
    [
        ("F16", ["a-BF16.gguf", "a-F16.gguf"], "a-F16.gguf"),
        ("Q4_K_M", ["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "a-Q4_K_M.gguf"),
        ("q4_k_m", ["Q4_K_M/a-Q4_K_M-00001-of-00002.gguf"], "Q4_K_M/a-Q4_K_M-00001-of-00002.gguf"),
        ("", ["only.gguf"], "only.gguf"),
    ],
)
def test_a_quant_is_the_end_of_a_files_name(quant: str, names: list[str], expected: str) -> None:
    assert choose_gguf("o/n", quant, names) == expected


QUANTS = ("Q4_K_M", "Q8_0", "F16", "BF16", "Q4_0")


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_quant_that_was_named_is_the_one_that_is_taken_or_none(count: int) -> None:
    """Holds for any number of files: a file that is the only one is still not taken for another
    quantization."""
    for there in combinations(QUANTS, count):
        names = [f"m-{quant}.gguf" for quant in there]
        for quant in QUANTS:
            if quant in there:
                assert choose_gguf("o/n", quant, names) == f"m-{quant}.gguf"
            else:
                with pytest.raises(ConfigError, match=f"no .gguf file of '{quant}'"):
                    choose_gguf("o/n", quant, names)


def test_of_several_files_one_must_be_named() -> None:
    with pytest.raises(ConfigError, match="wanted one of a-Q2_K.gguf, a-Q3_K.gguf; name one as o/n:QUANT"):
        choose_gguf("o/n", "", ["a-Q2_K.gguf", "a-Q3_K.gguf"])


@pytest.mark.parametrize(
    ("quant", "names", "wanted"),
    [
        ("F16", ("m-BF16.gguf", "m-F16.gguf"), "m-F16.gguf"),
        ("f16", ("m-BF16.gguf", "m.f16.gguf"), "m.f16.gguf"),
        ("BF16", ("m-BF16.gguf", "m-F16.gguf"), "m-BF16.gguf"),
        ("F16", ("F16/m-F16-00001-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf"), "F16/m-F16-00001-of-00002.gguf"),
        ("Q4_K", ("m-Q4_K.gguf", "m-IQ4_K.gguf", "m-Q4_K_M.gguf"), "m-Q4_K.gguf"),
        ("Q4_0", ("mQ4_0.gguf", "x_Q4_0.gguf"), "x_Q4_0.gguf"),
        ("F16", ("F16.gguf", "m-F16.gguf"), "F16.gguf"),
        ("F.6", ("m-F16.gguf", "m-F.6.gguf"), "m-F.6.gguf"),
    ],
)
def test_a_quant_is_a_whole_word_of_a_files_name(quant: str, names: tuple[str, ...], wanted: str) -> None:
    for order in (names, names[::-1]):
        assert choose_gguf("owner/m", quant, order) == wanted


@pytest.mark.parametrize("quant", ["F16", "4_K_M", "Q4_K"])
def test_a_quant_whose_name_only_ends_so_is_not_taken(quant: str) -> None:
    with pytest.raises(ConfigError, match=f"no .gguf file of '{quant}'.*wanted one of m-BF16.gguf, m-Q4_K_M.gguf"):
        choose_gguf("owner/m", quant, ["m-BF16.gguf", "m-Q4_K_M.gguf"])
