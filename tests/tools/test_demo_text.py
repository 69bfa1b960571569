"""The generated text keeps its promises, as do the shipped tokenizer and folder."""

import ast
import json
import random
import re
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer

from tools.demo.text import CATEGORIES, arithmetic, chat, document, facts, functions, long_document, records, stories
from tools.demo.text.words import TOYS

FOLDER = Path(__file__).resolve().parents[2] / "sglcore" / "assets" / "demo"
SEED = 20240
COMPRESSED = 15_000_000
"""Bytes of the folder in a wheel: the model, three heads next to it and one in its file."""
EQUATION = re.compile(r"\b(\d+) ?([-+*]|plus|minus|times) ?(\d+) ?(?:=|is) ?(\d+)\b")
SIGNS = {"+": "plus", "-": "minus", "*": "times"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def body(text: str) -> str:
    """The text of a plain document between its special tokens."""
    return text.removeprefix(chat.BOS).removesuffix(chat.END)


def texts(category: str, count: int = 200) -> list[str]:
    """Some documents of one category, without their special tokens."""
    return [body(document(SEED, index, category=category).text) for index in range(count)]


def wrong_equations(text: str) -> list[str]:
    """Every equation in `text` that is not true."""
    found = EQUATION.finditer(text)
    wrong = []
    for match in found:
        left, sign, right, result = match.groups()
        if arithmetic.Equation(SIGNS.get(sign) or sign, int(left), int(right)).result != int(result):
            wrong.append(match.group())
    return wrong


def lost_things_that_stay_lost(text: str) -> list[str]:
    """The coloured things that a story of loss mentions but does not find again."""
    loss = re.search(r"I lost my (\w+ \w+)|I cannot find my (\w+ \w+)", text)
    if loss is None:
        return []
    thing = loss.group(1) or loss.group(2)
    return [] if f"the {thing}" in text[loss.end() :].lower() else [thing]


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_same_seed_writes_the_same_text_and_another_seed_another(category: str) -> None:
    first = [document(SEED, index, category=category) for index in range(30)]
    assert first == [document(SEED, index, category=category) for index in range(30)]
    assert first != [document(SEED + 1, index, category=category) for index in range(30)]


def test_every_document_ends_with_the_end_token() -> None:
    for index in range(300):
        text = document(SEED, index).text
        assert text.startswith(chat.BOS) and text.endswith(chat.END)


def test_json_pages_parse_and_repeat_their_keys() -> None:
    keys = set()
    for text in texts("json"):
        try:
            rows = [json.loads(text)]
        except json.JSONDecodeError:
            rows = [json.loads(line) for line in text.splitlines()]
        flat = [row for part in rows for row in (part if isinstance(part, list) else [part])]
        keys |= {tuple(row) for row in flat}
    assert len(keys) == len(set(records.MAKERS))


def test_python_pages_compile_and_each_recipe_defines_its_function() -> None:
    for text in texts("python"):
        compile(text, "page", "exec")
    for recipe in functions.RECIPES:
        tree = ast.parse(functions.function(random.Random(SEED), recipe))
        assert isinstance(tree.body[0], ast.FunctionDef) and tree.body[0].name == recipe.name


def test_generated_functions_compute_what_their_docstrings_say() -> None:
    calls = {
        "add(2, 3)": 5,
        "maximum(2, 3)": 3,
        "minimum(2, 3)": 2,
        "factorial(5)": 120,
        "fibonacci(10)": 55,
        "is_prime(9)": False,
    }
    calls |= {"is_prime(7)": True, "count_vowels('banana')": 3, "largest([1, 9, 4])": 9, "is_palindrome('level')": True}
    space: dict[str, object] = {}
    for recipe in functions.RECIPES:
        exec(functions.function(random.Random(SEED), recipe), space)
    assert {call: eval(call, space) for call in calls} == calls


def test_every_equation_in_the_text_is_true() -> None:
    for text in texts("arithmetic") + texts("chat"):
        assert wrong_equations(text) == []


def test_the_equation_check_catches_a_wrong_sum() -> None:
    assert wrong_equations("2 + 3 = 5\n7 * 8 = 54") == ["7 * 8 = 54"]


def test_sums_of_the_test_split_never_occur_in_the_training_text() -> None:
    for text in texts("arithmetic", 400) + texts("chat", 400):
        for left, sign, right, _ in EQUATION.findall(text):
            assert not arithmetic.Equation(SIGNS.get(sign) or sign, int(left), int(right)).is_held_out


def test_questions_of_the_test_split_are_disjoint_from_those_of_training() -> None:
    rng = random.Random(SEED)
    taught = {facts.fact(rng, "train").question for _ in range(2000)}
    kept = {facts.fact(rng, "test").question for _ in range(500)}
    assert len(kept) > 30 and taught.isdisjoint(kept)


def test_a_lost_thing_is_found_again() -> None:
    losses = 0
    for index in range(300):
        text = stories.story(random.Random(SEED + index))
        losses += "I lost my" in text or "I cannot find my" in text
        assert lost_things_that_stay_lost(text) == []
    assert losses > 20


def test_the_story_check_catches_a_thing_that_stays_lost() -> None:
    assert lost_things_that_stay_lost('"I lost my red ball," said Tom. Then they found the blue ball.') == ["red ball"]


def test_a_story_keeps_to_the_pronouns_of_its_only_person() -> None:
    for index in range(200):
        text = stories.story(random.Random(SEED + index), stories.Wish(name="Mia", thing="ball"))
        assert "Mia" in text and "ball" in text
        assert not re.search(r"\b(he|him|his)\b", text, re.IGNORECASE)


def test_a_story_about_a_thing_names_no_other_toy() -> None:
    for index in range(200):
        words = set(
            re.findall(r"\w+", stories.story(random.Random(SEED + index), stories.Wish(name="Tom", thing="kite")))
        )
        assert words & set(TOYS) == {"kite"}


def test_remembered_answers_repeat_what_the_user_said() -> None:
    for index in range(100):
        *before, (_, answer) = chat.memory(random.Random(SEED + index), "train")
        said = " ".join(asked for asked, _ in before)
        assert answer.rstrip(".").split()[-1] in said


def test_the_chat_template_renders_what_the_model_was_trained_on() -> None:
    def refuse(message: str) -> None:
        raise ValueError(message)

    template = Environment().from_string((FOLDER / "chat_template.jinja").read_text())
    for index in range(50):
        messages = chat.dialogue(random.Random(SEED + index), "train").messages()
        rendered = template.render(messages=messages, bos_token=chat.BOS, raise_exception=refuse)
        assert rendered == chat.render(messages)
        assert (
            template.render(messages=messages, bos_token=chat.BOS, add_generation_prompt=True)
            == rendered + "<|assistant|>"
        )
    with pytest.raises(ValueError, match="tool"):
        template.render(messages=[{"role": "tool", "content": "x"}], bos_token=chat.BOS, raise_exception=refuse)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text())
def test_the_tokenizer_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=50, deadline=None, derandomize=True)
@given(number=st.integers(0, 10**12))
def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer, number: int) -> None:
    tokens = tokenizer.encode(f"x {number} y", add_special_tokens=False).tokens
    assert [token for token in tokens if token.isdigit()] == list(str(number))


def test_special_tokens_are_single_ids_and_bos_comes_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello").tokens[0] == chat.BOS
    for token in (chat.BOS, chat.END, chat.PAD, *chat.ROLE_TOKENS):
        assert tokenizer.encode(token, add_special_tokens=False).tokens == [token]


def test_long_documents_reach_far_positions_and_fit_the_model(tokenizer: Tokenizer) -> None:
    lengths = [
        len(tokenizer.encode(long_document(SEED, index).text, add_special_tokens=False).ids) for index in range(100)
    ]
    assert max(lengths) > 500 and max(lengths) <= 1024


def test_the_shipped_folder_is_complete_and_small() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert wanted | {"chat_template.jinja", "README.md"} <= names
    assert sum(len(zlib.compress(path.read_bytes(), 1)) for path in files) <= COMPRESSED


def test_the_special_ids_of_the_configuration_are_those_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    for name in ("config.json", "generation_config.json"):
        found = json.loads((FOLDER / name).read_text())
        assert found["bos_token_id"] == tokenizer.token_to_id(chat.BOS)
        assert found["eos_token_id"] == tokenizer.token_to_id(chat.END)
        assert found["pad_token_id"] == tokenizer.token_to_id(chat.PAD)
    assert json.loads((FOLDER / "config.json").read_text())["vocab_size"] == tokenizer.get_vocab_size()
