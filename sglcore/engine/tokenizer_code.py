"""What a checkpoint's own Python code states of its tokenizer: read, and not run.

A file of ranks has neither the pattern that texts are split by nor, where tokenizer_config.json
does not list them, the special tokens; the code assigns both to names (`PAT_STR`,
`SPECIAL_TOKENS`). Only values that are made of constants are taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sglcore.device.errors import ConfigError

CODE = "tokenization_*.py"
"""The checkpoint's code of its tokenizer."""
REMEDY = (
    "fetch that file of the checkpoint, save a tokenizer.json beside the weights, or start with"
    " --skip-tokenizer (token ids in and out)"
)
MOST = 10_000
"""Characters of a text and elements of a tuple; what is longer is no constant that a person
wrote."""

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
"""Of Unicode, as `unicodedata.normalize` names them."""


class Stated(NamedTuple):
    """What the code of one tokenizer states."""

    pattern: str
    """The regular expression that texts are split by."""
    form: Form | None
    """Into which it puts a text before; None: it does not."""
    specials: tuple[Any, ...]
    """Special tokens: texts, whose ids follow the ranks, or pairs of an id and a text."""

    def special_ids(self, file: Path, first: int) -> dict[int, dict[str, Any]]:
        """The special tokens by their ids, as tokenizer_config.json lists them; `first`: the id
        behind the ranks of `file`. Raises ConfigError where an id is that of a rank."""
        pairs = [each if isinstance(each, tuple) else (first + place, each) for place, each in enumerate(self.specials)]
        taken = [(token_id, text) for token_id, text in pairs if token_id < first]
        if taken:
            raise ConfigError(
                f"{file} has {first} ranks, and the code beside it gives the special token"
                f" {taken[0][1]!r} the id {taken[0][0]}",
                wanted="ids behind the ranks",
                remedy=f"download both again, or {REMEDY.partition(', ')[2]}",
            )
        return {token_id: {"content": text, "special": True} for token_id, text in pairs}


def stated_by(file: Path) -> Stated:
    """What the code beside a file of ranks states. Raises ConfigError where that is not one
    pattern, and one form at most."""
    codes = sorted(file.parent.glob(CODE))
    named = ", ".join(code.name for code in codes) or "none"
    trees = [tree for tree in map(_tree, codes) if tree is not None]
    patterns = {pattern for tree in trees for pattern in _patterns(tree)}
    if len(patterns) != 1:
        raise ConfigError(
            f"{file} has ranks alone, and {len(patterns)} patterns to split texts by are stated beside it (in {named})",
            wanted=f"one pat_str in a file {CODE}, which is read and not run",
            remedy=REMEDY,
        )
    forms = {form for tree in trees for form in _forms(tree)}
    known = [form for form in get_args(Form) if form in forms]
    if len(forms) > 1 or len(known) < len(forms):
        raise ConfigError(
            f"{file} has ranks alone, and the code beside it (in {named}) puts texts into the forms {sorted(forms)}",
            wanted=f"one of {', '.join(get_args(Form))}, or none",
            remedy=REMEDY,
        )
    specials = {found for tree in trees for found in _specials(tree)}
    if len(specials) > 1:
        raise ConfigError(
            f"{len(specials)} lists of special tokens are stated beside {file} (in {named})",
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
    """What is assigned to a name like pat_str, wherever that is."""
    names = _constants(tree)
    for node in ast.walk(tree):
        for name, value in _assigned(node):
            if name == "pat_str" and isinstance(found := _value(value, names), str):
                yield found


def _specials(tree: ast.Module) -> Iterator[tuple[Any, ...]]:
    """What is assigned to a name like SPECIAL_TOKENS in the module itself, if it is tokens."""
    names = _constants(tree)
    for node in tree.body:
        for name, value in _assigned(node):
            if name == "special_tokens" and isinstance(found := _value(value, names), tuple) and _are_tokens(found):
                yield found


def _are_tokens(found: Sequence[Any]) -> bool:
    """Texts, or pairs of an id and a text; and some."""
    if all(isinstance(each, str) for each in found):
        return bool(found)
    pairs = [each for each in found if isinstance(each, tuple) and len(each) == 2]
    return len(pairs) == len(found) and all(type(key) is int and isinstance(text, str) for key, text in pairs)


def _forms(tree: ast.Module) -> Iterator[str]:
    """Those that `unicodedata.normalize` is called with."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="normalize", value=ast.Name(id="unicodedata")), args=[form, *_]):
                found = _value(form, _constants(tree))
                yield found if isinstance(found, str) else ast.unparse(form)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The last part of each name that a statement assigns to, in lower case, and the value."""
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
    """What the module's own statements assign, in their order, where it is made of constants."""
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            value = _value(node.value, names)
            names |= {ast.unparse(target): value for target in node.targets}
    return names


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Of an expression: text, a number, or a tuple of such; None of anything else."""
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
    """Of values that are all known."""
    found = tuple(values)
    return None if None in found else found


def _sum(left: Any, right: Any) -> Any:
    is_one_kind = type(left) is type(right) and isinstance(left, str | tuple | int)
    return left + right if is_one_kind else None


def _each(node: ast.GeneratorExp | ast.ListComp, names: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """`... for name in tuple`."""
    match node.generators:
        case [ast.comprehension(target=ast.Name(id=name), iter=over, ifs=[])]:
            values = _value(over, names)
            if isinstance(values, tuple):
                return _whole(_value(node.elt, {**names, name: value}) for value in values)
    return None


def _called(node: ast.Call, names: Mapping[str, Any]) -> Any:
    """`tuple`, `list`, `range` and `enumerate` of known values, and "...".join."""
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
