"""The tokenizer and the chat templates of a GGUF file, as the objects and settings of a checkpoint
folder.

Two kinds of vocabulary are read: "gpt2", byte-level BPE with a list of merges, and "llama", pieces
that are merged by their scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sglcore.checkpoint.gguf_config import CONTROL, TOKENS, token_id
from sglcore.checkpoint.gguf_header import REMEDY, GgufHeader, read_header
from sglcore.core.errors import CheckpointError

USER_DEFINED = 4
"""The GGUF type of tokens that are matched as a whole in any text but are not control tokens."""

SPACE = "\u2581"

_CONTRACTIONS, _SYMBOLS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UP_TO_THREE = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_SPLITS: Mapping[str, str] = MappingProxyType(
    {
        "llama-bpe": _UP_TO_THREE,
        "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}",
        "dbrx": _UP_TO_THREE,
    }
)
_SAME: Mapping[str, str] = MappingProxyType(
    {
        "llama3": "llama-bpe",
        "llama-v3": "llama-bpe",
        "smaug-bpe": "llama-bpe",
        "deepseek-r1-qwen": "qwen2",
        "chatglm-bpe": "dbrx",
        "glm4": "dbrx",
        "gpt2": "gpt-2",
        "olmo": "gpt-2",
        "refact": "smollm",
    }
)
PLAIN_BYTES, DIGITS = "gpt-2", "smollm"
_KNOWN = (*_SPLITS, PLAIN_BYTES, DIGITS, *_SAME)
_NAMES: Mapping[str, str] = MappingProxyType({"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"})


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a GGUF file, and settings as in a tokenizer_config.json: special
    tokens by name, and the chat templates. Raises CheckpointError for an unsupported kind of
    vocabulary and for damaged data."""
    header = read_header(path, texts=True)
    try:
        return _read(header)
    except CheckpointError:
        raise
    except Exception as error:
        # The library raises nothing narrower for merges of tokens that are not in the vocabulary.
        found = f"{path} has a damaged tokenizer: {type(error).__name__} {' '.join(str(error).split()):.200}"
        raise CheckpointError(found, remedy=REMEDY) from None


def _read(header: GgufHeader) -> tuple[Tokenizer, dict[str, Any]]:
    kind = header.need("tokenizer.ggml.model", str)
    tokens = header.need(TOKENS, list)
    _check_single(header, tokens)
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{header.path} has a vocabulary of the kind {kind!r}", wanted="gpt2 or llama")
    tokenizer = _by_bytes(header, tokens) if kind == "gpt2" else _by_scores(header, tokens)
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    for token, number in zip(tokens, kinds, strict=False):
        if number == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif number == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    _add_ends(tokenizer, header, tokens)
    return tokenizer, {**_special_tokens(header, tokens), **_templates(header.metadata)}


def _check_single(header: GgufHeader, tokens: list[str]) -> None:
    if len(set(tokens)) < len(tokens):
        again, _ = Counter(tokens).most_common(1)[0]
        raise CheckpointError(
            f"{header.path} has the token {again!r:.60} twice", wanted="each token once", remedy=REMEDY
        )


def _by_bytes(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer. The file's `tokenizer.ggml.pre` says how text is split
    first. Raises CheckpointError for an unknown rule."""
    name = header.metadata.get("tokenizer.ggml.pre", "none")
    name = _SAME.get(name, name)
    merges = [tuple(merge.split(" ", 1)) for merge in header.need("tokenizer.ggml.merges", list)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = _split(header.path, name)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _split(path: Path, name: str) -> Any:
    if name == PLAIN_BYTES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == DIGITS:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if name not in _SPLITS:
        raise CheckpointError(
            f"{path} cuts text by the rule {name!r} (tokenizer.ggml.pre)",
            wanted=f"one of {', '.join(_KNOWN)}",
            remedy="use the safetensors version of this model",
        )
    first = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _by_scores(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    """Return a BPE tokenizer that merges every two pieces that together form a piece, those with
    the best score first.

    Unknown characters become byte tokens.
    """
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    scores = header.need("tokenizer.ggml.scores", list)
    pairs = [
        (scores[token_id], token[:cut], token[cut:])
        for token, token_id in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: (-pair[0], vocab[pair[1]], vocab[pair[2]]))
    unknown = tokens[token_id(header, "unknown", len(tokens)) or 0]
    model = BPE(
        vocab=vocab,
        merges=[(left, right) for _, left, right in pairs],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer


def _add_ends(tokenizer: Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    """Make the tokenizer put BOS before and EOS after a prompt, as the file says. If it does not
    say, a vocabulary of kind "llama", and Llama 3's, gets BOS. Changes the tokenizer."""
    get = header.metadata.get
    usual = get("tokenizer.ggml.model") == "llama" or _SAME.get(str(get("tokenizer.ggml.pre")), "") == "llama-bpe"
    usual = usual or get("tokenizer.ggml.pre") == "llama-bpe"
    parts = []
    for key, default, place in (("bos", usual, 0), ("eos", False, 1)):
        found = token_id(header, key, len(tokens))
        if found is not None and get(f"tokenizer.ggml.add_{key}_token", default):
            parts.append((place, tokens[found], found))
    if parts:
        single = [f"{text}:0" for place, text, _ in parts if place == 0] + ["$A:0"]
        single += [f"{text}:0" for place, text, _ in parts if place == 1]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(text, place) for _, text, place in parts]
        )


def _special_tokens(header: GgufHeader, tokens: list[str]) -> dict[str, str]:
    """Return the text of special tokens, by the names of a tokenizer_config.json, such as
    `bos_token`."""
    found = {name: token_id(header, name, len(tokens)) for name in _NAMES}
    return {f"{_NAMES[name]}_token": tokens[place] for name, place in found.items() if place is not None}


def _templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    default = metadata.get("tokenizer.chat_template")
    named = [
        {"name": name, "template": metadata[f"tokenizer.chat_template.{name}"]}
        for name in metadata.get("tokenizer.chat_templates", [])
        if f"tokenizer.chat_template.{name}" in metadata
    ]
    if not all(isinstance(text, str) for text in (default or "", *(each["template"] for each in named))):
        raise TypeError("a chat template that is not text")
    if named:
        first = [{"name": "default", "template": default}] if default else []
        return {"chat_template": [*first, *named]}
    return {"chat_template": default} if default else {}
