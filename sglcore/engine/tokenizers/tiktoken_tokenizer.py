"""Tokenizers from files that rank byte sequences, as tiktoken reads them: tekken.json,
tiktoken.model and similar files.

transformers makes the tokenizer, and the result is compared with tiktoken before it is used; both
are imported only here and only when needed. A tekken.json has the pattern that splits texts; of the
other files, which have only ranks, the checkpoint has it in Python code (`tokenizer_code.py`).
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, normalizers, processors

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.tokenizer_code import Form, stated_by
from sglcore.engine.tokenizers.tokenizer_conversion import PROBES, cut_otherwise, library, unreadable

TEKKEN = "tekken.json"
"""Mistral's format: ranks, pattern and special tokens in one file."""
RANKS = ("tiktoken.model", "qwen.tiktoken", "hy.tiktoken")
"""Names of files that have only ranks: each line has the base64 of a token's bytes, and its
rank."""
MISTRAL = "pip install mistral-common, or save a tokenizer.json next to the weights"
MIXED = (
    *PROBES,
    "\u4e2d\u6587English\u6df7\u5408 Caf\u00e9'S  1234567890\r\n\r\n \t x",
    " A\u0301B \u0928\u092e\u0938\u094d\u0924\u0947 \u3042\u30a2!!\n",
)
"""Texts that different patterns split differently."""


NORMALIZERS: Mapping[Form, Callable[[], normalizers.Normalizer]] = MappingProxyType(
    {"NFC": normalizers.NFC, "NFD": normalizers.NFD, "NFKC": normalizers.NFKC, "NFKD": normalizers.NFKD}
)


class Ranked(NamedTuple):
    """The content of a tekken.json or of a file of ranks, in the form that tiktoken needs to
    encode: the rank of each sequence of bytes, the pattern that splits texts, the token id of rank
    0, and the Unicode form to which texts are normalized (None: none)."""

    ranks: dict[bytes, int]
    """The rank of each sequence of bytes, from 0."""
    pattern: str
    """The regular expression that splits text. Each match is encoded separately."""
    first_id: int
    """The token id of rank 0."""
    form: Form | None = None
    """The Unicode normalization of a text before it is split; None: no normalization."""


def has_ranks(file: Path) -> bool:
    """Return whether the first line of a file has the form of a file of ranks; some are named
    tokenizer.model, as sentencepiece's are. False if it cannot be read."""
    try:
        with open(file, "rb") as lines:
            return _rank(lines.readline(4096)) is not None
    except OSError:
        return False


def read_tekken(file: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a tekken.json, which puts BOS before a prompt, and settings: its
    special tokens by name, and the chat template of mistral-common if that is installed. Old files
    need mistral-common for their special tokens. Raises ConfigError."""
    library("transformers", file)
    try:
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

        content = json.loads(file.read_bytes())
        if content.get("special_tokens") is None:
            library("mistral_common", file, MISTRAL)
        made: Any = convert_tekken_tokenizer(str(file))
        tokenizer: Tokenizer = made.backend_tokenizer
        ranked = _tekken(content)
    except ConfigError:
        raise
    except Exception as error:
        raise unreadable(file, error) from None
    _hold(tokenizer, file, ranked)
    settings = {name: str(text) for name, text in made.special_tokens_map.items() if isinstance(text, str)}
    bos = settings["bos_token"]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer, settings | ({"chat_template": made.chat_template} if made.chat_template else {})


def read_ranks(file: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a file of ranks, and empty settings. Special tokens get ids after the
    ranks; the checkpoint's code and its tokenizer_config.json list them. Raises ConfigError."""
    library("transformers", file)
    code = stated_by(file)
    ranked = Ranked(_ranks(file), code.pattern, 0, code.form)
    specials = code.special_ids(file, len(ranked.ranks))
    try:
        tokenizer = _converted(file, ranked)
    except Exception as error:
        raise unreadable(file, error) from None
    if ranked.form is not None:
        tokenizer.normalizer = NORMALIZERS[ranked.form]()
    _hold(tokenizer, file, ranked)
    settings = file.parent / "tokenizer_config.json"
    listed = read_json(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    added = {**specials, **{int(token_id): token for token_id, token in listed.items()}}
    tokenizer.add_tokens(list(_added(added, len(ranked.ranks))))
    return tokenizer, {}


def _tekken(content: Mapping[str, Any]) -> Ranked:
    """Return the ranks and the pattern in the content of a tekken.json, as mistral-common reads it:
    tokens beyond the configured size are left out. Raises ValueError if there are fewer."""
    config = content["config"]
    first = config.get("default_num_special_tokens") or len(content.get("special_tokens") or ())
    size = config.get("default_vocab_size")
    entries = content["vocab"] if size is None else content["vocab"][: size - first]
    if size is not None and len(entries) < size - first:
        raise ValueError(f"{size} tokens, {first} of them special, and {len(entries)} entries")
    ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
    return Ranked(ranks, config["pattern"], first)


def _ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks in a file. tiktoken's own reader caches by the file's path, and could return
    the ranks of an older file. Raises ConfigError for a wrong line."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        entry = _rank(line)
        if entry is None or entry[1] != len(found) or entry[0] in found:
            raise ConfigError(
                f"line {number} of {file} is {line!r:.60}",
                wanted=f"the base64 of bytes not listed before, and the rank {len(found)}",
                remedy="download it again, or save a tokenizer.json next to the weights",
            )
        found[entry[0]] = entry[1]
    return found


def _rank(line: bytes) -> tuple[bytes, int] | None:
    """Return the bytes and the rank in a line; None if the line has another form."""
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdigit():
        return None
    try:
        return base64.b64decode(parts[0], validate=True), int(parts[1])
    except ValueError:
        return None


def _converted(file: Path, ranked: Ranked) -> Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """transformers' converter, with the ranks of `ranked` in place of those that it would read
        from the file."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranked.ranks

    return Converter(vocab_file=str(file), pattern=ranked.pattern).converted()


def _added(listed: Mapping[int, Mapping[str, Any]], first: int) -> Iterator[AddedToken]:
    """Yield a token for each id from `first` to the largest id in `listed` (token by id). Ids that
    are not listed get reserved names, because added tokens get their ids by counting."""
    for token_id in range(first, max(listed, default=-1) + 1):
        token = listed.get(token_id, {"content": f"<|reserved_token_{token_id}|>"})
        yield AddedToken(token["content"], special=bool(token.get("special", True)), normalized=False)


def _hold(tokenizer: Tokenizer, file: Path, ranked: Ranked) -> None:
    """Raise ConfigError if the tokenizer encodes one of MIXED differently from tiktoken, if a byte
    has no rank, or if tiktoken does not accept the ranks and the pattern."""
    tiktoken = library("tiktoken", file)
    if missing := [value for value in range(256) if bytes([value]) not in ranked.ranks]:
        raise unreadable(file, ValueError(f"there is no token for {len(missing)} bytes, such as {missing[0]}"))
    try:
        own = tiktoken.Encoding(name=file.name, pat_str=ranked.pattern, mergeable_ranks=ranked.ranks, special_tokens={})
    except Exception as error:
        raise unreadable(file, error) from None
    for text in MIXED:
        given = tokenizer.encode(text, add_special_tokens=False).ids
        formed = text if ranked.form is None else unicodedata.normalize(ranked.form, text)
        wanted = [ranked.first_id + rank for rank in own.encode_ordinary(formed)]
        if given != wanted:
            raise cut_otherwise(file, text, given, wanted, "tiktoken")
