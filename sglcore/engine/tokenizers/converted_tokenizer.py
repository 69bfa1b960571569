"""The tokenizer of a checkpoint folder without tokenizer.json, converted by transformers from other
tokenizer files.

transformers and sentencepiece are imported only here and only when needed. A tokenizer from a
sentencepiece file is compared with sentencepiece itself before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.tiktoken_tokenizer import RANKS, TEKKEN, has_ranks, read_ranks, read_tekken
from sglcore.engine.tokenizers.tokenizer_code import CODE
from sglcore.engine.tokenizers.tokenizer_conversion import PROBES, cut_otherwise, library, unreadable

PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
"""Names of sentencepiece model files."""
LISTS = ("vocab.json", "vocab.txt")
"""Names of files with the vocabulary as a plain list: byte-level BPE (with merges in merges.txt),
and WordPiece."""
FILES = (TEKKEN, *RANKS, *PIECES, *LISTS)
"""Files from which a tokenizer can be made if there is no tokenizer.json."""
MORE_FILES = (*FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", CODE)
"""FILES, and further files that a checkpoint may have with them."""
SPACE = "\u2581"


def convert_tokenizer(folder: Path, end_ids: frozenset[int]) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a folder without tokenizer.json, and settings as in a
    tokenizer_config.json: special tokens by name, and a chat template if the file has one. Raises
    ConfigError if the folder has no tokenizer file, a library is not installed, the conversion
    fails or splits texts differently from the file's own library, or the tokenizer lacks one of the
    checkpoint's `end_ids`."""
    found = next((name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(
            f"there is no tokenizer in {folder}",
            wanted=f"tokenizer.json, or one of {', '.join(FILES)}",
            remedy="save the tokenizer next to the weights, or start with --skip-tokenizer (token ids in and out)",
        )
    file = folder / found
    if found == TEKKEN:
        tokenizer, settings = read_tekken(file)
    elif found in RANKS or has_ranks(file):
        tokenizer, settings = read_ranks(file)
    else:
        tokenizer, settings = _by_class(folder, file)
    for token_id in sorted(end_ids):
        if tokenizer.id_to_token(token_id) is None:
            raise ConfigError(
                f"{file} makes a tokenizer of {tokenizer.get_vocab_size()} tokens without the checkpoint's"
                f" eos_token_id {token_id}",
                wanted="a tokenizer_config.json that lists the special tokens (added_tokens_decoder)",
                remedy="fetch it, or save a tokenizer.json next to the weights",
            )
    return tokenizer, settings


def _by_class(folder: Path, file: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer as transformers reads it by the folder's tokenizer class, and its
    special tokens by name. Raises ConfigError."""
    made = _by_transformers(folder, file)
    tokenizer: Tokenizer = made.backend_tokenizer
    if file.name in PIECES:
        _hold_to_pieces(tokenizer, file, is_generic=type(made).__name__ == "TokenizersBackend")
    return tokenizer, {name: str(text) for name, text in made.special_tokens_map.items() if isinstance(text, str)}


def _by_transformers(folder: Path, file: Path) -> Any:
    """Return the fast tokenizer that transformers makes from a folder. `file`: the tokenizer file
    there, which decides which libraries are needed. Raises ConfigError."""
    needs = ("transformers", "sentencepiece", "google.protobuf") if file.name in PIECES else ("transformers",)
    for name in needs:
        library(name, file)
    from transformers import AutoTokenizer

    try:
        with _errors_only():
            made = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise unreadable(file, error) from None
    if not made.is_fast:
        raise ConfigError(
            f"transformers has no fast tokenizer for {file}: found {type(made).__name__}",
            remedy="save a tokenizer.json next to the weights",
        )
    return made


@contextmanager
def _errors_only() -> Iterator[None]:
    """Hide transformers' warnings inside the context; the result is checked afterwards."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _hold_to_pieces(tokenizer: Tokenizer, file: Path, *, is_generic: bool) -> None:
    """Raise ConfigError if the tokenizer splits one of PROBES differently from sentencepiece.
    `is_generic`: transformers has no class for it; then the space that sentencepiece puts before
    texts, which transformers leaves out, is added first."""
    pieces = library("sentencepiece", file).SentencePieceProcessor(model_file=str(file))
    if is_generic and pieces.encode("a", out_type=str)[0].startswith(SPACE):
        _put_space_before(tokenizer)
    unknown = {pieces.id_to_piece(pieces.unk_id()), "<unk>", "[UNK]"}
    for text in PROBES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        given = _spelled([str(tokenizer.id_to_token(each)) for each in ids], unknown)
        wanted = _spelled(pieces.id_to_piece(pieces.encode(text)), unknown)
        if given != wanted:
            raise cut_otherwise(file, text, given, wanted, "sentencepiece")


def _put_space_before(tokenizer: Tokenizer) -> None:
    """Make the tokenizer put a space before texts, as the tokenizer.json of Llama 2 does. Changes
    the tokenizer."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), tokenizer.normalizer])
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def _spelled(tokens: list[str], unknown: set[str]) -> list[str]:
    """Return the tokens with each run of tokens in `unknown` replaced by one "<unk>", because
    libraries count unknown characters differently."""
    named = ["<unk>" if token in unknown else token for token in tokens]
    return [token for place, token in enumerate(named) if token != "<unk>" or named[place - 1 : place] != ["<unk>"]]
