"""What a checkpoint's own Python code says about its tokenizer. The code is parsed, not run.

A file of ranks does not have the pattern that splits texts, nor, if tokenizer_config.json does not
list them, the special tokens; the code assigns both to names (`PAT_STR`, `SPECIAL_TOKENS`). Only
values built from constants are used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sglcore.core.errors import ConfigError

CODE = "tokenization_*.py"
"""Pattern of the names of files with a checkpoint's tokenizer code."""
REMEDY = (
    "fetch that file of the checkpoint, save a tokenizer.json next to the weights, or start with"
    " --skip-tokenizer (token ids in and out)"
)
MOST = 10_000
"""Maximum number of characters of a text and of elements of a tuple; a person writes no longer
constants."""

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
"""Unicode normal forms, as `unicodedata.normalize` names them."""


class Stated(NamedTuple):
    """What a checkpoint's code assigns for its tokenizer; `stated_by` reads it: the pattern that
    splits texts, the Unicode form to which they are normalized before (None: none), and special
    tokens."""

    pattern: str
    """The regular expression that splits texts."""
    form: Form | None
    """The Unicode normal form to which a text is normalized before it is split; None: no
    normalization."""
    specials: tuple[Any, ...]
    """Special tokens: either texts, which get the ids after the ranks in order, or pairs (id,
    text)."""

    def special_ids(self, file: Path, first: int) -> dict[int, dict[str, Any]]:
        """Return the special tokens by id, in the form of `added_tokens_decoder` in
        tokenizer_config.json. `first`: the first id after the ranks of `file`. Raises ConfigError
        if an id is below `first`."""
        pairs = [each if isinstance(each, tuple) else (first + place, each) for place, each in enumerate(self.specials)]
        taken = [(token_id, text) for token_id, text in pairs if token_id < first]
        if taken:
            raise ConfigError(
                f"{file} has {first} ranks, and the code next to it gives the special token"
                f" {taken[0][1]!r} the id {taken[0][0]}",
                wanted="ids after the ranks",
                remedy=f"download both again, or {REMEDY.partition(', ')[2]}",
            )
        return {token_id: {"content": text, "special": True} for token_id, text in pairs}


def stated_by(file: Path) -> Stated:
    """Return what the code in the folder of `file`, a file of ranks, assigns. Raises ConfigError
    unless it has exactly one pattern, and at most one normal form and one list of special tokens.
    """
    codes = sorted(file.parent.glob(CODE))
    named = ", ".join(code.name for code in codes) or "none"
    trees = [tree for tree in map(_tree, codes) if tree is not None]
    patterns = {pattern for tree in trees for pattern in _patterns(tree)}
    if len(patterns) != 1:
        raise ConfigError(
            f"{file} has only ranks, and {len(patterns)} patterns to split text are given next to it (in {named})",
            wanted=f"one pat_str in a file {CODE}, which is read and not run",
            remedy=REMEDY,
        )
    forms = {form for tree in trees for form in _forms(tree)}
    known = [form for form in get_args(Form) if form in forms]
    if len(forms) > 1 or len(known) < len(forms):
        raise ConfigError(
            f"{file} has only ranks, and the code next to it (in {named}) normalises text to the forms {sorted(forms)}",
            wanted=f"one of {', '.join(get_args(Form))}, or none",
            remedy=REMEDY,
        )
    specials = {found for tree in trees for found in _specials(tree)}
    if len(specials) > 1:
        raise ConfigError(
            f"{len(specials)} lists of special tokens are given next to {file} (in {named})",
            wanted="one",
            remedy=REMEDY,
        )
    return Stated(patterns.pop(), known[0] if known else None, specials.pop() if specials else ())


def _tree(code: Path) -> ast.Module | None:
    try:
        return ast.parse(code.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _patterns(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that are assigned to PAT_STR, in upper or lower case, anywhere in the
    code."""
    names = _constants(tree)
    for node in ast.walk(tree):
        for name, value in _assigned(node):
            if name == "pat_str" and isinstance(found := _value(value, names), str):
                yield found


def _specials(tree: ast.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the tuples of tokens that are assigned to SPECIAL_TOKENS, in upper or lower case, at
    the top level of the module."""
    names = _constants(tree)
    for node in tree.body:
        for name, value in _assigned(node):
            if name == "special_tokens" and isinstance(found := _value(value, names), tuple) and _are_tokens(found):
                yield found


def _are_tokens(found: Sequence[Any]) -> bool:
    """Return whether `found` is not empty and has only texts, or only pairs (id, text)."""
    if all(isinstance(each, str) for each in found):
        return bool(found)
    pairs = [each for each in found if isinstance(each, tuple) and len(each) == 2]
    return len(pairs) == len(found) and all(type(key) is int and isinstance(text, str) for key, text in pairs)


def _forms(tree: ast.Module) -> Iterator[str]:
    """Yield the first argument of each call of `unicodedata.normalize` in the code; if its value is
    not known, its source text."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="normalize", value=ast.Name(id="unicodedata")), args=[form, *_]):
                found = _value(form, _constants(tree))
                yield found if isinstance(found, str) else ast.unparse(form)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that an assignment sets, without its prefix and in lower case, and the value.
    Nothing for other nodes."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    else:
        return
    for target in targets:
        if node.value is not None:
            yield ast.unparse(target).rpartition(".")[2].lower(), node.value


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the values of the names that the module assigns at its top level, in order; None for a
    value that is not built from constants."""
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            value = _value(node.value, names)
            names |= {ast.unparse(target): value for target in node.targets}
    return names


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression: text, a whole number, or a tuple of these; None for
    anything else. `names`: values of known names."""
    match node:
        case ast.Constant(value=str() | int() as value):
            found: Any = value
        case ast.Name(id=name):
            found = names.get(name)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            found = _whole(_value(part, names) for part in parts)
        case ast.JoinedStr(values=parts):
            texts = _whole(_value(part, names) for part in parts)
            found = None if texts is None else "".join(map(str, texts))
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            found = _value(value, names)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            found = _sum(_value(left, names), _value(right, names))
        case ast.GeneratorExp() | ast.ListComp():
            found = _each(node, names)
        case ast.Call():
            found = _called(node, names)
        case _:
            found = None
    return None if isinstance(found, str | tuple) and len(found) > MOST else found


def _whole(values: Iterator[Any]) -> tuple[Any, ...] | None:
    """Return the values as a tuple; None if one of them is None."""
    found = tuple(values)
    return None if None in found else found


def _sum(left: Any, right: Any) -> Any:
    is_one_kind = type(left) is type(right) and isinstance(left, str | tuple | int)
    return left + right if is_one_kind else None


def _each(node: ast.GeneratorExp | ast.ListComp, names: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the value of `... for name in tuple` without conditions; None for anything else."""
    match node.generators:
        case [ast.comprehension(target=ast.Name(id=name), iter=over, ifs=[])]:
            values = _value(over, names)
            if isinstance(values, tuple):
                return _whole(_value(node.elt, {**names, name: value}) for value in values)
    return None


def _called(node: ast.Call, names: Mapping[str, Any]) -> Any:
    """Return the value of a call of `tuple`, `list`, `range`, `enumerate` or `"...".join` on known
    values; None for anything else."""
    given = [_value(each, names) for each in node.args]
    more = {each.arg: _value(each.value, names) for each in node.keywords}
    match ast.unparse(node.func), given:
        case (("tuple" | "list"), [tuple(values)]) if not more:
            return values
        case "range", [int(count)] if not more and 0 <= count <= MOST:
            return tuple(range(count))
        case "enumerate", [tuple(values)] if set(more) <= {"start"} and isinstance(start := more.get("start", 0), int):
            return tuple(enumerate(values, start))
        case _, [tuple(texts)] if isinstance(node.func, ast.Attribute) and node.func.attr == "join" and not more:
            between = _value(node.func.value, names)
            if isinstance(between, str) and all(isinstance(text, str) for text in texts):
                return between.join(texts)
    return None
