"""What a checkpoint's code states about its tokenizer: without running it, the values that running
it would give."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.tokenizer_code import MOST, Form, Stated, stated_by

PATTERN = "PAT_STR = 'a+'\n"


def stated(folder: Path, code: str | bytes, **others: str) -> Stated:
    """Return what code, and other files named here, state about a file of ranks."""
    (folder / "tokenization_own.py").write_bytes(code if isinstance(code, bytes) else code.encode())
    for name, text in others.items():
        (folder / f"{name}.py").write_text(text)
    return stated_by(folder / "own.tiktoken")


def ran(code: str) -> dict[str, Any]:
    """Return what the names of a module are after it ran."""
    names: dict[str, Any] = {"unicodedata": unicodedata, "self": SimpleNamespace()}
    exec(code, names)
    return names


@pytest.mark.parametrize(
    "code",
    [
        "PAT_STR = 'a' 'b'",
        "PAT_STR = r'\\d' + '|' + r'\\s'",
        "PAT_STR: str = 'a'",
        "OTHER = PAT_STR = 'a'",
        "PAT_STR = OTHER = 'a'",
        "A = B = 'x'\nPAT_STR = A + B",
        "A = 'x'\nA = A + 'y'\nPAT_STR = A",
        "A, B = 'x', 'y'\nA = 'z'\nPAT_STR = A",
        "A = 1\nPAT_STR = f'{A}b{2 + A}{\"c\"}'",
        "PAT_STR = '|'.join(['a', 'b'])",
        "BETWEEN, ANY = 1, 2\nBETWEEN = '|'\nPAT_STR = BETWEEN.join(('a', 'b'))",
        "PAT_STR = ''.join(f'[{letter}]' for letter in ('a', 'b'))",
        "PAT_STR = ''.join([f'{number}' for number in range(3)])",
        "A = 'x'\nPAT_STR = ''.join(f'{A}{A}' for A in ('y',)) + A",
        f"PAT_STR = '{'a' * MOST}'",
    ],
    ids=lambda code: code[:60],
)
def test_a_pattern_is_what_running_the_code_would_give(code: str, tmp_path: Path) -> None:
    found = stated(tmp_path, f"{code}\n")
    assert found == (ran(code)["PAT_STR"], None, ())


@pytest.mark.parametrize(
    "code",
    [
        "class Own:\n    pat_str = 'a'",
        "class Own:\n    def __init__(self):\n        self.pat_str = 'a'",
        "def make():\n    Pat_Str = 'a'",
        "if True:\n    PAT_STR: str = 'a'",
    ],
)
def test_a_pattern_may_stand_anywhere_in_the_code(code: str, tmp_path: Path) -> None:
    assert stated(tmp_path, code).pattern == "a"


@pytest.mark.parametrize(
    "code",
    [
        "",
        "PAT_STR: str",
        "PAT_STR = 1",
        "PAT_STR = ('a',)",
        "PAT_STR = 'a' + 1",
        "PAT_STR = 1 + 'a'",
        "PAT_STR = 'a' * 2",
        "PAT_STR = b'a'",
        "PAT_STR = '|'.join((1, 2))",
        "PAT_STR = '|'.join(('a', 2))",
        "PAT_STR = unknown.join(('a', 'b'))",
        "PAT_STR = (1).join(('a', 'b'))",
        "PAT_STR = '|'.join(('a',), more=1)",
        "PAT_STR = join(('a', 'b'))",
        "PAT_STR = f'{unknown}'",
        "PAT_STR = f'{1:02}'",
        "PAT_STR = 'a'.upper()",
        "PAT_STR += 'a'",
        "PATTERN_STR = 'a'",
        f"PAT_STR = '{'a' * (MOST + 1)}'",
        f"A = '{'a' * MOST}'\nPAT_STR = A + 'b'",
        "PAT_STR = 'a'\n(",
        b"PAT_STR = 'a'\n\0",
        b"PAT_STR = 'a\xff'",
    ],
    ids=lambda code: str(code[:40]),
)
def test_what_is_no_text_of_constants_is_no_pattern(code: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"own.tiktoken has only ranks, and 0 patterns .*\(in tokenization_own.py\)"):
        stated(tmp_path, code)


def test_patterns_are_counted_over_all_code_of_the_tokenizer_and_no_other(tmp_path: Path) -> None:
    same = stated(tmp_path, PATTERN, tokenization_more=PATTERN, modeling_own="PAT_STR = 'b'")
    assert same.pattern == "a+"
    with pytest.raises(ConfigError, match=r"2 patterns .*\(in tokenization_more.py, tokenization_own.py\)"):
        stated(tmp_path, PATTERN, tokenization_more="PAT_STR = 'b'")
    for code in tmp_path.iterdir():
        code.unlink()
    with pytest.raises(ConfigError, match=r"0 patterns .*\(in none\)"):
        stated_by(tmp_path / "own.tiktoken")


@pytest.mark.parametrize(
    "value",
    [
        "('<a>', '<b>')",
        "['<a>', '<b>']",
        "((5, '<a>'), (7, '<b>'))",
        "tuple(['<a>'])",
        "list(('<a>',))",
        "('<a>',) + ('<b>',)",
        "[f'<{number}>' for number in range(3)]",
        "tuple(f'<{number + 1}>' for number in range(3))",
        "enumerate(('<a>', '<b>'))",
        "enumerate(('<a>', '<b>'), start=FIRST)",
        "tuple((number, f'<{number}>') for number in range(2))",
        f"tuple(f'<{{number}}>' for number in range({MOST}))",
    ],
)
def test_special_tokens_are_what_running_the_code_would_give(value: str, tmp_path: Path) -> None:
    code = f"{PATTERN}FIRST = 40 + 2\nSPECIAL_TOKENS = {value}\n"
    assert stated(tmp_path, code).specials == tuple(ran(code)["SPECIAL_TOKENS"])


@pytest.mark.parametrize(
    "value",
    [
        "()",
        "'<a>'",
        "('<a>', (5, '<b>'))",
        "((5, '<b>'), '<a>')",
        "((5, '<b>', '<c>'),)",
        "((5,),)",
        "((True, '<b>'),)",
        "(('<b>', 5),)",
        "((5, 6),)",
        "(5, 6)",
        "('<a>', unknown)",
        "tuple(('<a>',), more=1)",
        "set(('<a>',))",
        "tuple()",
        "range(2, 3)",
        "range('<a>')",
        "range(3, step=1)",
        "range(-1)",
        "enumerate('<a>')",
        "enumerate(('<a>',), start='<b>')",
        "enumerate(('<a>',), first=3)",
        "[f'<{one}>' for one in range(2) for two in range(2)]",
        "[f'<{one}>' for one, two in (('<a>', '<b>'),)]",
        "[f'<{one}>' for one in '<a>']",
        "[f'<{one}>' for one in unknown]",
        f"tuple(f'<{{number}}>' for number in range({MOST} + 1))",
        f"tuple(f'<{{number}}>' for number in range({MOST})) + ('<a>',)",
    ],
)
def test_what_is_no_list_of_tokens_or_of_numbered_ones_is_no_special_tokens(value: str, tmp_path: Path) -> None:
    assert stated(tmp_path, f"{PATTERN}SPECIAL_TOKENS = {value}\n").specials == ()


def test_special_tokens_are_those_of_the_module_itself(tmp_path: Path) -> None:
    inner = "class Own:\n    SPECIAL_TOKENS = ('<b>',)\ndef make():\n    special_tokens = ('<c>',)\n"
    assert stated(tmp_path, PATTERN + inner).specials == ()
    assert stated(tmp_path, f"{PATTERN}{inner}own.special_tokens: list = ['<a>']\n").specials == ("<a>",)


@pytest.mark.parametrize("form", get_args(Form))
def test_the_form_of_texts_is_that_of_the_only_call_that_makes_one(form: Form, tmp_path: Path) -> None:
    call = "def tokenize(text):\n    return unicodedata.normalize({}, text)\n"
    assert stated(tmp_path, PATTERN + call.format(repr(form))).form == form
    assert stated(tmp_path, f"{PATTERN}FORM = {form!r}\n" + call.format("FORM")).form == form
    assert stated(tmp_path, PATTERN + call.format(repr(form)) * 2).form == form
    assert stated(tmp_path, PATTERN + f"other.normalize('NFC', '')\nunicodedata.category({form!r})\n").form is None
    with pytest.raises(ConfigError, match=rf"\(in tokenization_own.py\) normalises .* forms \['{form}x'\]"):
        stated(tmp_path, PATTERN + call.format(repr(form + "x")))


def test_special_tokens_have_their_own_ids_or_those_after_the_ranks() -> None:
    def ids(*specials: Any, first: int = 9) -> dict[int, dict[str, Any]]:
        return Stated("a", None, specials).special_ids(Path("own.tiktoken"), first)

    wanted = {9: {"content": "<a>", "special": True}, 12: {"content": "<b>", "special": True}}
    assert ids((9, "<a>"), (12, "<b>")) == wanted and ids() == {}
    assert ids("<a>", "<b>") == {9: wanted[9], 10: wanted[12]}
    with pytest.raises(ConfigError, match=r"has 9 ranks, .* special token '<b>' the id 8; wanted ids after the ranks"):
        ids((9, "<a>"), (8, "<b>"))
