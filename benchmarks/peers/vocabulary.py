"""Makes a byte-level BPE vocabulary of a given size, so that loading the tokenizer takes as long as
a real one. Standard library only."""

from __future__ import annotations

import json
from itertools import chain, islice, product
from pathlib import Path

SPECIAL = ("<|begin|>", "<|end|>")


def byte_letters() -> list[str]:
    """Return the printable letter of each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return (tokens by id, merges): special tokens, single bytes, then pairs and triples of
    bytes."""
    letters = byte_letters()
    pairs = product(letters, letters)
    triples = ((left + middle, right) for left, middle, right in product(letters, letters, letters))
    merges = list(islice(chain(pairs, triples), size - len(SPECIAL) - len(letters)))
    return [*SPECIAL, *letters, *(left + right for left, right in merges)], merges


def write_tokenizer(folder: Path, size: int) -> None:
    """Write `tokenizer.json` and its configuration."""
    tokens, merges = vocabulary(size)
    special = [_special(number, text) for number, text in enumerate(SPECIAL)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": 40_960,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _special(number: int, text: str) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": text, **flags}
