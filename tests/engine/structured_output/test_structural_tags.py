"""Structural tags, compared with a walk by hand: free text up to a trigger, then one of its tags,
with both libraries."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcore.engine.structured_output import tag_grammar as module
from sglcore.engine.structured_output.grammar_llguidance import Llguidance
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.grammar_xgrammar import Xgrammar
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, GrammarError
from tests.planted import planted

CODEC = TextCodec(Path(str(files("sglcore") / "assets" / "demo")))
VOCABULARY = Vocabulary(CODEC.tokenizer, CODEC.tokenizer.get_vocab_size(with_added_tokens=True), (2,))
TAGS = {("<f=", "a>"): ("12", "x"), ("<f=", "b>"): ("true", "1"), ("[[", ""): ('"k"', "k")}
"""Trigger and rest of a begin tag: a value that its schema accepts, and one that it refuses."""
KINDS = ("integer", "boolean", "string")
ENDS = ("</f>", "</f>", "]]")
STRUCTURES = [
    {"begin": trigger + rest, "schema": {"type": kind}, "end": end}
    for (trigger, rest), kind, end in zip(TAGS, KINDS, ENDS, strict=True)
]
GIVEN = {"structures": STRUCTURES, "triggers": ["<f=", "[["]}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f=", "[["],
        "tags": [
            {
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in STRUCTURES
        ],
        "stop_after_first": True,
    },
}


def compiled(backend: Any, given: Any = GIVEN) -> Any:
    return backend.compile(Grammar("structural_tag", json.dumps(given)))


def follow(grammar: Any, text: str) -> bool | None:
    """Whether the text may end there; None if it is not accepted to its end."""
    matcher = grammar.start()
    for token in CODEC.encode(text, special=False):
        words = np.zeros(-(-VOCABULARY.size // 32), np.int32)
        matcher.fill(words)
        if not words.view(np.uint32)[token >> 5] >> (token & 31) & 1 or not matcher.accept(token):
            return None
    words = np.zeros(-(-VOCABULARY.size // 32), np.int32)
    matcher.fill(words)
    return bool(words.view(np.uint32)[0] >> 2 & 1)


def some_text(rng: random.Random) -> tuple[str, bool | None]:
    """Return a text, and the expected result of `follow`."""
    text = ""
    for _ in range(rng.randint(0, 3)):
        text += rng.choice(("", "one <f ", "a\n[ b", "the fox < f= "))
        number = rng.randrange(3)
        (trigger, rest), end = list(TAGS)[number], ENDS[number]
        right, wrong = list(TAGS.values())[number]
        how = rng.random()
        if how < 0.15:
            return text + trigger + rest + wrong, None
        if how < 0.3:
            return text + trigger + rest + right, False
        if how < 0.4 and rest:
            return text + trigger + "z>", None
        text += trigger + rest + right + end
    return text + rng.choice(("", " the end.")), True


@pytest.mark.parametrize("backend", [Llguidance, Xgrammar])
def test_text_is_free_up_to_a_trigger_and_then_bound_to_a_tag(backend: Any) -> None:
    grammar = compiled(backend(VOCABULARY))
    for seed in range(25):
        text, wanted = some_text(random.Random(seed))
        assert follow(grammar, text) is wanted, text


@pytest.mark.parametrize("backend", [Llguidance, Xgrammar])
def test_the_newer_form_ends_with_its_first_tag(backend: Any) -> None:
    grammar = compiled(backend(VOCABULARY), FORMAT)
    assert follow(grammar, "plain text") is True
    assert follow(grammar, "so <f=a>7</f>") is True
    assert follow(grammar, "so <f=a>7</f> and") is None
    assert follow(grammar, "so <f=a>x") is None


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("tagged* rest", "tagged rest"),
        ("[lazy]", ""),
        ("tag.begin[len(trigger) :]", "tag.begin"),
        ("tag.end)", "trigger)"),
    ],
)
def test_a_planted_defect_is_caught(sound: str, defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = planted(module, sound, defect)
    monkeypatch.setattr("sglcore.engine.structured_output.grammar_llguidance.lark_of_tags", broken.lark_of_tags)
    with pytest.raises((AssertionError, GrammarError)):
        grammar = compiled(Llguidance(VOCABULARY))
        for seed in range(25):
            text, wanted = some_text(random.Random(seed))
            assert follow(grammar, text) is wanted


def _changed(**more: Any) -> dict[str, Any]:
    return {**GIVEN, **more}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "an object"),
        ({"triggers": ["a"]}, "structures"),
        (_changed(triggers=[]), "triggers"),
        (_changed(triggers=["<f="]), "has no trigger"),
        (_changed(triggers=["<f=", "[[", "{"]), "no tag begins with"),
        (_changed(triggers=["<f=", "[[", "<"]), "contains another"),
        (_changed(more=1), "'more'"),
        (_changed(structures=[{"begin": "<f=", "schema": False, "end": ""}]), "false"),
        (_changed(structures=[{"begin": "", "schema": {}, "end": ""}]), "begin"),
        ({"format": {"type": "any_text"}}, "any_text"),
        ({"format": {**FORMAT["format"], "at_least_one": True}}, "at_least_one"),
        ({"format": {**FORMAT["format"], "excludes": ["a"]}}, "excludes"),
        (
            {"format": {**FORMAT["format"], "tags": [{"begin": "a", "content": {"type": "regex"}, "end": ""}]}},
            "'regex'",
        ),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(given: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason.replace("[", r"\[")):
        Grammar("structural_tag", json.dumps(given))


def test_a_schema_that_can_not_be_enforced_is_refused() -> None:
    given = {"structures": [{"begin": "<a>", "schema": {"x-guidance": {}}, "end": ""}], "triggers": ["<a>"]}
    with pytest.raises(GrammarError, match="x-guidance"):
        Llguidance(VOCABULARY).compile(Grammar("structural_tag", json.dumps(given)))


@pytest.mark.parametrize("backend", [Llguidance, Xgrammar])
@pytest.mark.parametrize(
    "trigger", ["</f>", "a\nb", "x.y", "[c]", "(d", "e|f", "g*", "h\\i", '"j"', "k{2}", "^l$", "m?"]
)
def test_a_trigger_is_text_whatever_its_characters_mean_in_a_pattern(backend: Any, trigger: str) -> None:
    tag = {"begin": trigger, "schema": {"type": "integer"}, "end": trigger[::-1]}
    grammar = compiled(backend(VOCABULARY), {"structures": [tag], "triggers": [trigger]})
    assert follow(grammar, "free: xzy c d e f gg hi k2 l") is True
    assert follow(grammar, f"one {trigger}12") is False
    assert follow(grammar, f"one {trigger}12{trigger[::-1]} more") is True
    assert follow(grammar, f"one {trigger}word") is None


@pytest.mark.parametrize("backend", [Llguidance, Xgrammar])
@pytest.mark.parametrize(
    ("rest", "end"),
    [(" ", " "), ("\n", "\n\n"), (' name="q">', "\\"), ("\t\u00e9", "\u3000"), ("", "\n"), ("  x", "</a> ")],
)
def test_a_tag_begins_and_ends_with_all_its_characters(backend: Any, rest: str, end: str) -> None:
    tag = {"begin": f"<a{rest}", "schema": {"type": "boolean"}, "end": end}
    grammar = compiled(backend(VOCABULARY), {"structures": [tag], "triggers": ["<a"]})
    assert follow(grammar, f"so <a{rest}true{end}and") is True
    assert follow(grammar, f"so <a{rest}true{end}<a{rest}false{end}") is True
    assert follow(grammar, f"so <a{rest}true") is False
    assert follow(grammar, f"so <a{rest}true{end.strip()}and") is (True if end.strip() == end else None)
    assert not rest or follow(grammar, f"so <a{rest.strip()}true{end}and") is (True if rest.strip() == rest else None)


@pytest.mark.parametrize("backend", [Llguidance, Xgrammar])
def test_each_tag_has_its_own_schema_and_end_also_behind_one_trigger(backend: Any) -> None:
    kinds = {"a": ("integer", "1", "!"), "b": ("boolean", "true", "?"), "c": ("null", "null", "")}
    tags = [
        {"begin": f"<{name}>", "schema": {"type": kind}, "end": f"{mark}</{name}>"}
        for name, (kind, _, mark) in kinds.items()
    ]
    for triggers in (["<"], ["<a", "<b", "<c"], ["<c", "<a", "<b"]):
        grammar = compiled(backend(VOCABULARY), {"structures": tags, "triggers": triggers})
        for name in kinds:
            for other, (_, value, mark) in kinds.items():
                right = name == other
                assert follow(grammar, f"<{name}>{value}{mark}</{name}>") is (True if right else None), (name, other)
