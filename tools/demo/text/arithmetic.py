"""Writes sums, differences and products of small whole numbers, as equations, questions and word
problems."""

import random
from dataclasses import dataclass

from .sampling import Split, held_out, length, say, two
from .words import COUNTED, PEOPLE

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
QUESTIONS = (
    "What is {a} {sign} {b}?",
    "{a} {sign} {b} = ?",
    "{a} {sign} {b} =",
    "{a} {sign} {b}",
    "What is {a} {word} {b}?",
    "How much is {a} {word} {b}?",
    "Calculate {a} {sign} {b}.",
    "What is {a}{sign}{b}?",
    "{a}{sign}{b}",
    "{a}{sign}{b}=",
    "Can you tell me what {a} {sign} {b} is?",
    "Please compute {a} {word} {b}.",
)
EQUATION = "{a} {sign} {b} = {result}"
STATEMENTS = (EQUATION, EQUATION, EQUATION, "{a}{sign}{b}={result}", "{a} {word} {b} is {result}.")


@dataclass(frozen=True, slots=True)
class Equation:
    """`left word right = result`; results are never negative."""

    word: str
    left: int
    right: int

    @property
    def result(self) -> int:
        """The correct answer."""
        if self.word == "plus":
            return self.left + self.right
        return self.left - self.right if self.word == "minus" else self.left * self.right

    @property
    def fields(self) -> dict[str, object]:
        """The format fields of the phrasings."""
        return {"a": self.left, "b": self.right, "word": self.word, "sign": SIGNS[self.word], "result": self.result}

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to the test split: never a product or a pair of one-digit numbers; of
        the others one in ten."""
        if self.word == "times" or max(self.left, self.right) < 10:
            return False
        return held_out(f"{self.left} {self.word} {self.right}")


def any_equation(rng: random.Random) -> Equation:
    """A random equation: sums and differences of up to two digits, products up to 12 times 12."""
    word = rng.choice(("plus", "plus", "minus", "minus", "times"))
    if word == "times":
        return Equation(word, rng.randint(0, 12), rng.randint(0, 12))
    top = rng.choice((9, 20, 99, 99, 99))
    left, right = rng.randint(0, top), rng.randint(0, top)
    if word == "minus" and left < right:
        left, right = right, left
    return Equation(word, left, right)


def equation(rng: random.Random, split: Split) -> Equation:
    """A random equation that belongs to `split`."""
    while True:
        found = any_equation(rng)
        if found.is_held_out == (split == "test"):
            return found


def question(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A question, its answer as a sentence, and its answer as a bare number."""
    found = equation(rng, split)
    answer = "{a} {sign} {b} = {result}.".format(**found.fields)
    return say(rng, QUESTIONS, **found.fields), answer, str(found.result)


def small_equation(rng: random.Random, split: Split) -> Equation:
    """A sum or difference for a word problem: numbers up to 20 and up to 9."""
    while True:
        word = rng.choice(("plus", "minus"))
        left, right = rng.randint(2, 20), rng.randint(1, 9)
        if word == "minus" and left < right:
            left, right = right, left
        found = Equation(word, left, right)
        if found.is_held_out == (split == "test"):
            return found


def word_problem(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A short problem about things that people have; numbers up to 20."""
    (who, other), thing = two(rng, PEOPLE), rng.choice(COUNTED)
    found = small_equation(rng, split)
    left, right, is_gain = found.left, found.right, found.word == "plus"
    verb = f"{other} gives {who} {right} more" if is_gain else f"{who} gives {other} {right} of them"
    asked = f"{who} has {left} {thing}. {verb}. How many {thing} does {who} have now?"
    return (
        asked,
        f"{left} {SIGNS[found.word]} {right} = {found.result}. {who} has {found.result} {thing} now.",
        str(found.result),
    )


def sheet(rng: random.Random, split: Split) -> str:
    """A page of one to sixteen different equations, one on each line, all in one phrasing."""
    phrasing = rng.choice(STATEMENTS)
    lines = [phrasing.format(**equation(rng, split).fields) for _ in range(length(rng, 16))]
    return "\n".join(dict.fromkeys(lines))
