"""Models by names of the Hugging Face hub: downloaded into the cache of huggingface_hub, or found
there.

The library is imported only when such a name is used. Only files that the engine reads are
requested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER, INDEX, SINGLE, weight_names
from sglcore.checkpoint.gguf_header import SUFFIX
from sglcore.core.errors import ConfigError, no_space
from sglcore.engine.tokenizers.converted_tokenizer import MORE_FILES as TOKENIZER_FILES

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    f"{DRAFT_FOLDER}/*",
    INDEX,
)
"""Patterns of the files, other than weights, that the engine reads from a repository."""
USUAL_QUANT = "Q4_K_M"
"""The quantisation that is chosen from several GGUF files if the name gives none."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_name(model: str) -> bool:
    """Return whether `model` is `owner/name` or, for a GGUF file, `owner/name:quant`, and not an
    existing path."""
    return NAME.fullmatch(model) is not None and not Path(model).exists()


def commit_of(path: Path) -> str:
    """Return the commit hash, 40 hexadecimal digits, in a path of the cache. The path must contain
    one."""
    return next(part for part in reversed(path.parts) if _COMMIT.fullmatch(part))


@dataclass(frozen=True, slots=True)
class Hub:
    """How files are fetched. `progress(phase, done, total)` gets MiB during downloads, perhaps on
    other threads; `revision`: branch, tag or commit (None: the default branch); `token` (None:
    HF_TOKEN or the token of `hf auth login`); `runs_code`: fetch Python files too."""

    progress: Callable[[str, int, int], None]
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    runs_code: bool = False

    def fetch(self, name: str) -> Path:
        """Return the checkpoint folder or GGUF file of a name `owner/name` or `owner/name:quant`,
        in the cache. Downloads missing files and waits for them. Raises ConfigError if the model
        cannot be fetched or lacks its weights, or if huggingface_hub is not installed."""
        repository, _, quant = name.partition(":")
        with _in_one_line(name, self.revision):
            folder = self._get(repository, self.revision, (*FILES, "*.py") if self.runs_code else FILES)
            if quant or not (folder / "config.json").is_file():
                return self._fetch_gguf(repository, quant, folder)
            if not (folder / "tokenizer.json").is_file():
                self._get(repository, folder.name, TOKENIZER_FILES)
            names = weight_names(folder)
            self._get(repository, folder.name, names)
        if missing := [each for each in names if not (folder / each).is_file()]:
            raise ConfigError(
                f"{name} has no {missing[0]}, or the cache lacks it and nothing can be fetched",
                wanted=f"{SINGLE}, the files of {INDEX}, or a {SUFFIX} file",
                remedy="use another model, or fetch this one where there is a network",
            )
        return folder

    def _get(self, repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        bar = _bar(self.progress)
        found = snapshot_download(
            repository, revision=revision, token=self.token, allow_patterns=list(patterns), tqdm_class=bar
        )
        return Path(found)

    def _fetch_gguf(self, repository: str, quant: str, folder: Path) -> Path:
        """Return the repository's GGUF file of a quantisation (empty: `choose_gguf` decides); if
        the hub cannot list its files, the file in the cache.

        Raises ConfigError if the repository has no such file, and the hub's error if it could not
        be listed and the cache does not have the file.
        """
        from httpx import HTTPError
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            names = HfApi(token=self.token).list_repo_files(repository, revision=folder.name)
        except (HTTPError, OfflineModeIsEnabled) as error:
            cached = [file.relative_to(folder).as_posix() for file in folder.rglob(f"*{SUFFIX}")]
            try:
                return folder / choose_gguf(repository, quant, _models(cached))
            except ConfigError:
                raise error from None
        file = choose_gguf(repository, quant, _models(names))
        return self._get(repository, folder.name, (file,)) / file


def _models(names: Iterable[str]) -> list[str]:
    """Return the GGUF files that contain a language model, sorted: not those of a vision projector
    (mmproj)."""
    return sorted(name for name in names if name.endswith(SUFFIX) and "mmproj" not in name)


def choose_gguf(repository: str, quant: str, names: Sequence[str]) -> str:
    """Return the one of the file names `names` that ends in the quantisation `quant`, in either
    case; the shortest of several, and of a file in parts the first part. With an empty `quant`, the
    file of USUAL_QUANT, or else the only file. Raises ConfigError if there is none; `repository` is
    for its text."""
    wanted = quant or USUAL_QUANT
    end = re.compile(rf"(.*[-._/])?{re.escape(wanted)}(-\d+-of-\d+)?{re.escape(SUFFIX)}", re.IGNORECASE)
    found = sorted((name for name in names if end.fullmatch(name)), key=len)
    if not found and len(names) == 1 and not quant:
        found = list(names)
    if not found:
        asked = f"no {SUFFIX} file of {quant!r}" if quant else f"no config.json and no {SUFFIX} file of {USUAL_QUANT!r}"
        raise ConfigError(
            f"{repository} has {asked}",
            wanted=f"one of {', '.join(names)}" if names else f"a checkpoint folder, or a {SUFFIX} file",
            remedy=f"name one as {repository}:QUANT" if names else "use another model",
        )
    return found[0]


def _bar(progress: Callable[[str, int, int], None]) -> type[Any]:
    """Return a class for the argument `tqdm_class` of huggingface_hub: it draws nothing, and calls
    `progress("download (MiB)", done, total)` for downloads of at least 1 MiB."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # Of the two bars in bytes, the one for bytes on the wire has no known total.
            self._counts = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():
                self.n += n or 0
                if self._counts and self.total and self.total >= 1 << 20:
                    progress("download (MiB)", int(self.n) >> 20, int(self.total) >> 20)

    return Bar


@contextmanager
def _in_one_line(name: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of huggingface_hub and of HTTP, OSError and ValueError inside the context
    into ConfigError with a remedy. Also raises it if the library is not installed. `name` and
    `revision` of the model are for its text."""
    try:
        from httpx import HTTPError
        from huggingface_hub import constants, errors
    except ImportError:
        found = f"there is no folder {name!r}, and a model of the hub needs huggingface_hub"
        raise ConfigError(found, remedy="pip install 'sglcore[hub]', or name a folder") from None
    repository = name.partition(":")[0]
    at, login = f"{constants.ENDPOINT}/{repository}", "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(f"{at} is gated", wanted="a token of an account that has access", remedy=login) from None
    except errors.RepositoryNotFoundError:
        found = f"there is no folder {name!r}, and no public model {at}"
        raise ConfigError(found, remedy=f"check the name; for a private one, {login}") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{at} has no revision {revision!r}", remedy="correct --revision") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _answered(at, repository, error.__cause__) from None
        raise _absent(name, repository, offline=constants.HF_HUB_OFFLINE) from None
    except errors.HfHubHTTPError as error:
        raise _answered(at, repository, error) from None
    except (HTTPError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        remedy = (
            f"free space for the cache {constants.HF_HUB_CACHE}, or set HF_HOME" if no_space(error) else "try again"
        )
        raise ConfigError(f"{at} could not be fetched: {text}", remedy=f"{remedy}, or name a folder") from None


def _answered(at: str, repository: str, error: HfHubHTTPError) -> ConfigError:
    """Return the ConfigError for a hub that answered with an HTTP error status, which decides the
    remedy. `at`: what was requested; `repository`: owner/name."""
    status, wait = error.response.status_code, error.response.headers.get("retry-after", "")
    if status == 429:
        remedy = f"try again {f'in {wait} s' if wait.isdigit() else 'later'}; HF_TOKEN raises the limit of requests"
    elif status < 500:
        remedy = "check the name, and set HF_TOKEN or run `hf auth login`"
    else:
        remedy = "try again later"
    return ConfigError(
        f"{at} was requested, and the answer is {status} {error.response.reason_phrase}".rstrip(),
        wanted="200, or its files in the cache",
        remedy=f"{remedy}, or copy the cache of a machine that ran `hf download {repository}`",
    )


def _absent(name: str, repository: str, *, offline: bool) -> ConfigError:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE forbids the network" if offline else f"{constants.ENDPOINT} cannot be reached"
    online = "unset HF_HUB_OFFLINE" if offline else "check the network"
    return ConfigError(
        f"{name} is not complete in the cache {constants.HF_HUB_CACHE}, and {why}",
        wanted="its files there, or a folder",
        remedy=f"{online}, or copy the cache of a machine that ran `hf download {repository}`",
    )
