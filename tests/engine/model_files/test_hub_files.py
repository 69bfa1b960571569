"""The files of a repository that are fetched, of which commit, and what is reported on the way,
with a hub that is a mapping of paths to bytes."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from sglcore.checkpoint.checkpoint_files import INDEX
from sglcore.core.errors import ConfigError
from sglcore.engine import model_download
from sglcore.engine.model_download import Hub, commit_of, is_hub_name
from sglcore.engine.start import no_progress

Served = Callable[[Mapping[str, bytes]], "PushedHub"]
PLAIN = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w"}


class PushedHub:
    """A hub whose default branch is another commit at each request. `asked`: the revision of each
    request; `cannot_list`: the error of a request for the list of files."""

    def __init__(self, files: Mapping[str, bytes], cache: Path) -> None:
        self.files, self.cache = files, cache
        self.asked: list[str | None] = []
        self.cannot_list: Exception | None = None
        self._commits = (f"{number:040x}" for number in count(1))

    def snapshot_download(
        self, repository: str, *, revision: str | None, token: str | None, allow_patterns: list[str], tqdm_class: Any
    ) -> str:
        self.asked.append(revision)
        folder = self.cache / (next(self._commits) if revision in (None, "main") else str(revision))
        folder.mkdir(exist_ok=True)
        for name in filter_repo_objects(self.files, allow_patterns=allow_patterns):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.files[name])
        return str(folder)

    def list_repo_files(self, repository: str, revision: str | None) -> list[str]:
        if self.cannot_list is not None:
            raise self.cannot_list
        self.asked.append(revision)
        return list(self.files)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Makes a hub of these files, which stands in for the library's."""

    def make(files: Mapping[str, bytes]) -> PushedHub:
        hub = PushedHub(files, tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(
            huggingface_hub, "HfApi", lambda token: SimpleNamespace(list_repo_files=hub.list_repo_files)
        )
        return hub

    return make


def fetched(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


READ = (
    *("generation_config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("additional_chat_templates/tools.jinja", "modules.json", "config_sentence_transformers.json"),
    *("sentence_bert_config.json", "1_Pooling/config.json", "draft/config.json", "draft/model.safetensors"),
)
UNREAD = (
    *("README.md", "pytorch_model.bin", "original/params.json", "onnx/model.onnx", "1_Pooling/README.md"),
    *("additional_chat_templates/README.md", "tokenizer.model", "tf_model.h5", "model.safetensors.bak"),
)


@pytest.mark.parametrize("runs_code", [False, True])
def test_the_files_that_the_engine_reads_are_fetched_and_no_other(served: Served, runs_code: bool) -> None:
    served({**PLAIN, **dict.fromkeys((*READ, *UNREAD, "modeling_x.py"), b"{}")})
    folder = Hub(no_progress, runs_code=runs_code).fetch("o/n")
    assert fetched(folder) == {*PLAIN, *READ, *(["modeling_x.py"] if runs_code else [])}


@pytest.mark.parametrize("revision", [None, "main"])
@pytest.mark.parametrize("name", ["o/n", "o/n:Q8_0"])
def test_a_gguf_file_is_of_the_commit_whose_files_were_listed(served: Served, name: str, revision: str | None) -> None:
    hub = served({"m-Q4_K_M.gguf": b"4", "m-Q8_0.gguf": b"8"})
    file = Hub(no_progress, revision).fetch(name)
    assert file.read_bytes() == (b"8" if name.endswith("Q8_0") else b"4")
    assert hub.asked == [revision, *[commit_of(file)] * 2] and fetched(file.parent) == {file.name}


def test_a_quantisation_that_is_named_is_a_gguf_file_even_beside_a_checkpoint(served: Served) -> None:
    served({**PLAIN, "Q8_0/m-Q8_0.gguf": b"8", "mmproj-Q8_0.gguf": b"p"})
    assert Hub(no_progress).fetch("o/n:Q8_0").read_bytes() == b"8"
    assert Hub(no_progress).fetch("o/n").is_dir()


def test_a_projector_is_no_language_model(served: Served) -> None:
    served({"mmproj-model-F16.gguf": b"p", "m-IQ2.gguf": b"2"})
    assert Hub(no_progress).fetch("o/n").read_bytes() == b"2", "the only one"
    with pytest.raises(ConfigError, match="no .gguf file of 'F16'; wanted one of m-IQ2.gguf; name"):
        Hub(no_progress).fetch("o/n:F16")
    served({"mmproj-model-F16.gguf": b"p"})
    with pytest.raises(ConfigError, match="wanted a checkpoint folder, or a .gguf file; use another model"):
        Hub(no_progress).fetch("o/n:F16")


@pytest.mark.parametrize("error", [httpx.ConnectError("no route"), huggingface_hub.errors.OfflineModeIsEnabled()])
def test_a_gguf_file_in_any_folder_of_the_cache_needs_no_list(served: Served, error: Exception) -> None:
    hub = served({"README.md": b""})
    folder = hub.cache / f"{1:040x}" / "Q8_0"
    folder.mkdir(parents=True)
    for name in ("m-Q8_0-00001-of-00002.gguf", "mmproj-F16.gguf"):
        (folder / name).touch()
    hub.cannot_list = error
    assert Hub(no_progress).fetch("o/n:Q8_0") == folder / "m-Q8_0-00001-of-00002.gguf"
    with pytest.raises(ConfigError, match="no route" if "route" in str(error) else "o/n:F16 is not complete"):
        Hub(no_progress, f"{1:040x}").fetch("o/n:F16")


@pytest.mark.parametrize("missing", ["one.safetensors", "two.safetensors"])
def test_each_file_of_weights_must_be_there(served: Served, missing: str) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    weights = {INDEX: json.dumps(index).encode(), "one.safetensors": b"1", "two.safetensors": b"2"}
    del weights[missing]
    served({"config.json": b"{}", "tokenizer.json": b"{}", **weights})
    with pytest.raises(ConfigError, match=f"o/n has no {missing}, or the cache lacks it"):
        Hub(no_progress).fetch("o/n")


def test_a_commit_is_the_last_part_of_a_path_that_looks_like_one() -> None:
    one, two = "a" * 40, "b" * 40
    assert commit_of(Path("/") / one / "snapshots" / two / "Q8_0" / "m.gguf") == two
    assert commit_of(Path("/") / one / ("c" * 41) / ("B" * 40)) == one


@pytest.mark.parametrize(
    "name",
    [
        "a/.b",
        ".a/b",
        "../b",
        "a/",
        "/b",
        "a/b:",
        ":Q8_0",
        "a/b:Q8:0",
        "a/b/c:Q8_0",
        "a b/c",
        "a/b\n",
        "https://a/b",
        "",
    ],
)
def test_what_is_written_otherwise_is_no_name_of_the_hub(name: str) -> None:
    assert not is_hub_name(name)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"unit": "B", "desc": "Fetching"}, [(1, 3), (3, 3)]),
        ({"unit": "B", "desc": "Downloading bytes"}, []),
        ({"unit": "it", "desc": "Fetching 3 files"}, []),
        ({"unit": "B", "total": 1 << 20}, [(1, 1), (3, 1)]),
        ({"unit": "B", "total": (1 << 20) - 1}, []),
        ({"unit": "B", "total": None}, []),
    ],
)
def test_the_bytes_of_files_are_progress_from_a_mebibyte_on(
    options: dict[str, Any], told: list[tuple[int, int]]
) -> None:
    found: list[tuple[Any, ...]] = []
    bar = model_download._bar(lambda *state: found.append(state))(**{"total": 3 << 20, "name": "x", **options})
    for step in (1 << 20, 2 << 20):
        bar.update(step)
    assert found == [("download (MiB)", *each) for each in told]
    bar.update(None)
    assert bar.n == 3 << 20


def refused(error: Exception) -> str:
    """The message for an error of the library."""
    with pytest.raises(ConfigError) as told, model_download._in_one_line("o/n", None):
        raise error
    return str(told.value)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), f"free space for the cache {constants.HF_HUB_CACHE}"),
        (OSError(errno.EACCES, "Permission denied"), "try again, or name a folder"),
        (ValueError("it is\n  not whole"), "it is not whole; try again, or name a folder"),
        (httpx.ReadTimeout("too slow"), "too slow; try again, or name a folder"),
    ],
)
def test_what_ends_a_fetch_is_told_with_its_remedy(error: Exception, remedy: str) -> None:
    found = refused(error)
    assert f"{constants.ENDPOINT}/o/n could not be fetched: " in found and remedy in found
    assert ("free space" in found) is ("free space" in remedy)


@pytest.mark.parametrize(
    ("status", "headers", "remedy"),
    [
        (429, {"retry-after": "9"}, "try again in 9 s; HF_TOKEN raises"),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, "try again later; HF_TOKEN raises"),
        (429, {}, "try again later; HF_TOKEN raises"),
        (428, {}, "check the name, and set HF_TOKEN"),
        (499, {"retry-after": "9"}, "check the name, and set HF_TOKEN"),
        (500, {"retry-after": "9"}, "try again later, or copy"),
    ],
)
def test_a_status_has_its_remedy(status: int, headers: dict[str, str], remedy: str) -> None:
    response = httpx.Response(status, headers=headers, request=httpx.Request("GET", "https://hub/o/n"))
    assert remedy in refused(HfHubHTTPError("refused", response=response))
