"""Tokenizers whose files are ranks of byte sequences, as tiktoken reads them: tekken.json, and tiktoken.model.

transformers makes them, and what it makes is held to tiktoken itself before it is used; both are imported here alone and
only then. A file of ranks does not have the pattern that texts are split by: the checkpoint states it in Python code,
which is read and not run.
"""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, processors

from sglcore.checkpoint.files import read_json
from sglcore.device.errors import ConfigError
from sglcore.engine.conversion import PROBES, cut_otherwise, library, unreadable

TEKKEN = "tekken.json"
"""Mistral's: ranks, pattern and special tokens in one file."""
RANKS = "tiktoken.model"
"""Ranks alone: a line has the base64 of a token's bytes and its rank."""
CODE = "tokenization_*.py"
"""The checkpoint's code of its tokenizer, of which the pattern is taken."""
MISTRAL = "pip install mistral-common, or save a tokenizer.json beside the weights"
MIXED = (
    *PROBES,
    "\u4e2d\u6587English\u6df7\u5408 Caf\u00e9'S  1234567890\r\n\r\n \t x",
    " A\u0301B \u0928\u092e\u0938\u094d\u0924\u0947 \u3042\u30a2!!\n",
)
"""Texts with what patterns tell apart."""


class Ranked(NamedTuple):
    """What a file's own library would be given."""

    ranks: dict[bytes, int]
    """The rank of each sequence of bytes, from 0."""
    pattern: str
    """The regular expression whose matches are encoded one by one."""
    first_id: int
    """The token id of rank 0."""


def has_ranks(file: Path) -> bool:
    """Whether a file begins as those of tiktoken do; some of them are named tokenizer.model, as sentencepiece's."""
    try:
        with open(file, "rb") as lines:
            return _rank(lines.readline(4096)) is not None
    except OSError:
        return False


def read_tekken(file: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a tekken.json, which puts BOS before a prompt; its special tokens by name, and the chat template that
    mistral-common makes of it where it is installed. An old file leaves its special tokens to mistral-common. Raises
    ConfigError."""
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
    """The tokenizer of a file of ranks, with the tokens that tokenizer_config.json lists behind them. Raises ConfigError."""
    library("transformers", file)
    ranked = Ranked(_ranks(file), _pattern(file), 0)
    try:
        tokenizer = _converted(file, ranked)
    except Exception as error:
        raise unreadable(file, error) from None
    _hold(tokenizer, file, ranked)
    settings = file.parent / "tokenizer_config.json"
    listed = read_json(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    tokenizer.add_tokens(list(_added({int(token_id): token for token_id, token in listed.items()}, len(ranked.ranks))))
    return tokenizer, {}


def _tekken(content: Mapping[str, Any]) -> Ranked:
    """As mistral-common reads it: what is beyond the configured size is left out."""
    config = content["config"]
    first = config.get("default_num_special_tokens") or len(content.get("special_tokens") or ())
    size = config.get("default_vocab_size")
    entries = content["vocab"] if size is None else content["vocab"][: size - first]
    if size is not None and len(entries) < size - first:
        raise ValueError(f"{size} tokens, of which {first} are special, and {len(entries)} entries")
    ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
    return Ranked(ranks, config["pattern"], first)


def _ranks(file: Path) -> dict[bytes, int]:
    """Read here: tiktoken's own reader keeps a copy by the file's path, and would give an older file's ranks."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        entry = _rank(line)
        if entry is None or entry[1] != len(found) or entry[0] in found:
            raise ConfigError(
                f"line {number} of {file} is {line!r:.60}",
                wanted=f"the base64 of bytes that are new, and the rank {len(found)}",
                remedy="download it again, or save a tokenizer.json beside the weights",
            )
        found[entry[0]] = entry[1]
    return found


def _rank(line: bytes) -> tuple[bytes, int] | None:
    """The bytes and the rank of a line; None if it is no such line."""
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdigit():
        return None
    try:
        return base64.b64decode(parts[0], validate=True), int(parts[1])
    except ValueError:
        return None


def _pattern(file: Path) -> str:
    """The pattern that the checkpoint's code states."""
    codes = sorted(file.parent.glob(CODE))
    found = {pattern for code in codes for pattern in _stated(code)}
    if len(found) != 1:
        named = ", ".join(code.name for code in codes) or "none"
        raise ConfigError(
            f"{file} has ranks alone, and {len(found)} patterns to split texts by are stated beside it (in {named})",
            wanted=f"one pat_str in a file {CODE}, which is read and not run",
            remedy="fetch that file of the checkpoint, or save a tokenizer.json beside the weights",
        )
    return found.pop()


def _stated(code: Path) -> Iterator[str]:
    """What is assigned to a name like pat_str in a file of Python, where that is plain text or texts joined."""
    try:
        tree = ast.parse(code.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(ast.unparse(target).rpartition(".")[2].lower() == "pat_str" for target in targets):
            text = _text(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if text is not None:
                yield text


def _text(value: ast.expr | None) -> str | None:
    """Of a constant, or of "|".join([...]) of constants; None of anything else."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
        ):
            texts = [_text(part) for part in parts]
            return None if None in texts else between.join(text for text in texts if text is not None)
    return None


def _converted(file: Path, ranked: Ranked) -> Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """With the ranks that have been read."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranked.ranks

    return Converter(vocab_file=str(file), pattern=ranked.pattern).converted()


def _added(listed: Mapping[int, Mapping[str, Any]], first: int) -> Iterator[AddedToken]:
    """Those from id `first` to the last that is listed; the ids between have names of their own, as tokens take ids in order."""
    for token_id in range(first, max(listed, default=-1) + 1):
        token = listed.get(token_id, {"content": f"<|reserved_token_{token_id}|>"})
        yield AddedToken(token["content"], special=bool(token.get("special", True)), normalized=False)


def _hold(tokenizer: Tokenizer, file: Path, ranked: Ranked) -> None:
    """Raise ConfigError if texts are cut otherwise than by tiktoken."""
    tiktoken = library("tiktoken", file)
    if missing := [value for value in range(256) if bytes([value]) not in ranked.ranks]:
        raise unreadable(file, ValueError(f"there is no token for {len(missing)} bytes, such as {missing[0]}"))
    try:
        own = tiktoken.Encoding(name=file.name, pat_str=ranked.pattern, mergeable_ranks=ranked.ranks, special_tokens={})
    except Exception as error:
        raise unreadable(file, error) from None
    for text in MIXED:
        given = tokenizer.encode(text, add_special_tokens=False).ids
        wanted = [ranked.first_id + rank for rank in own.encode_ordinary(text)]
        if given != wanted:
            raise cut_otherwise(file, text, given, wanted, "tiktoken")
