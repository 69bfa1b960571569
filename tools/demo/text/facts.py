"""Questions about the closed world, each with a sentence and a one-word answer, and the same facts
as plain statements."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from .sampling import Split, a, held_out, length, say
from .words import (
    ANIMALS,
    CAPITALS,
    DAYS,
    LETTERS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    PLURALS,
    SEASONS,
    SHAPES,
    SPELLED,
    THING_COLOURS,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One question; `answer` is a sentence that is true by itself, `short` the answer in a word or
    two.

    A fact with a single wording is always taught: holding its question out would hold out the fact.
    """

    question: str
    answer: str
    short: str
    has_one_wording: bool = False

    def belongs_to(self, split: Split) -> bool:
        """Whether the question may occur in `split`."""
        return (held_out(self.question) and not self.has_one_wording) == (split == "test")


def capital(rng: random.Random) -> Fact:
    """A country and its capital, in either direction."""
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.25:
        asked = say(
            rng, ("{city} is the capital of which country?", "Which country has the capital {city}?"), city=city
        )
        return Fact(asked, f"{city} is the capital of {country}.", country)
    choices = (
        "What is the capital of {country}?",
        "Which city is the capital of {country}?",
        "Tell me the capital of {country}.",
        "What's the capital of {country}?",
        "Name the capital city of {country}.",
        "Do you know the capital of {country}?",
    )
    return Fact(say(rng, choices, country=country), f"The capital of {country} is {city}.", city)


def animal(rng: random.Random) -> Fact:
    """A property of an animal."""
    name, (sound, legs, food, young, place) = rng.choice(tuple(ANIMALS.items()))
    one = a(name)
    the_one = one.capitalize()
    return rng.choice(
        (
            Fact(
                say(rng, ("What does {one} say?", "What sound does {one} make?"), one=one),
                f"{the_one} says {sound}.",
                sound,
            ),
            Fact(
                say(rng, ("How many legs does {one} have?", "How many legs has {one}?"), one=one),
                f"{the_one} has {legs} legs.",
                str(legs),
            ),
            Fact(
                say(rng, ("What does {one} eat?", "What does {one} like to eat?"), one=one),
                f"{the_one} eats {food}.",
                food,
            ),
            Fact(
                say(rng, ("What is a baby {name} called?", "What do you call a baby {name}?"), name=name),
                f"A baby {name} is called {a(young)}.",
                young,
            ),
            Fact(
                say(rng, ("Where does {one} live?", "What is the home of {one}?"), one=one),
                f"{the_one} lives in {place}.",
                place,
            ),
            Fact(
                say(rng, ("Which animal says {sound}?", "What animal goes {sound}?"), sound=sound),
                f"{the_one} says {sound}.",
                name,
            ),
        )
    )


def opposite(rng: random.Random) -> Fact:
    """The opposite of a word, in either direction."""
    first, second = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        first, second = second, first
    choices = (
        "What is the opposite of {word}?",
        "Tell me the opposite of {word}.",
        "What's the opposite of {word}?",
        "Opposite of {word}?",
    )
    return Fact(say(rng, choices, word=first), f"The opposite of {first} is {second}.", second)


def colour(rng: random.Random) -> Fact:
    """The colour of a well-known thing."""
    thing, shade = rng.choice(tuple(THING_COLOURS.items()))
    choices = (
        "What color is {thing}?",
        "What colour is {thing}?",
        "Which color does {thing} have?",
        "Tell me the color of {thing}.",
    )
    return Fact(say(rng, choices, thing=thing), f"{thing[0].upper()}{thing[1:]} is {shade}.", shade)


def neighbour(rng: random.Random) -> Fact:
    """What comes before or after a day, a month, a season, a letter or a number."""
    kind, row = rng.choice(
        (("day", DAYS), ("day", DAYS), ("month", MONTHS), ("season", SEASONS), ("letter", tuple(LETTERS)))
    )
    place = rng.randrange(len(row))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    if kind == "letter":
        place = min(max(place, 1), len(row) - 2)
    here, there = row[place], row[(place + step) % len(row)]
    choices = ("What {kind} comes {word} {here}?", "Which {kind} comes {word} {here}?", "What {kind} is {word} {here}?")
    subject = (
        f"The {kind} {word} {here} is {there}." if kind in ("letter", "season") else f"{there} comes {word} {here}."
    )
    return Fact(say(rng, choices, kind=kind, word=word, here=here), subject, there)


def quantity(rng: random.Random) -> Fact:
    """Well-known quantities, and the larger of two numbers."""
    shape, sides = rng.choice(tuple(SHAPES.items()))
    low, high = sorted(rng.sample(range(100), 2))
    first, second = (low, high) if rng.random() < 0.5 else (high, low)
    value = rng.randrange(len(NUMBER_WORDS))
    return rng.choice(
        (
            Fact(
                f"How many sides does {a(shape)} have?", f"{a(shape).capitalize()} has {sides} sides.", str(sides), True
            ),
            Fact(f"Which is bigger, {first} or {second}?", f"{high} is bigger than {low}.", str(high)),
            Fact(f"Which is smaller, {first} or {second}?", f"{low} is smaller than {high}.", str(low)),
            Fact(
                f"How do you write {value} as a word?",
                f"{value} is written {NUMBER_WORDS[value]}.",
                NUMBER_WORDS[value],
                True,
            ),
            Fact("How many days are in a week?", "There are 7 days in a week.", "7", True),
            Fact("How many months are in a year?", "There are 12 months in a year.", "12", True),
            Fact("How many hours are in a day?", "There are 24 hours in a day.", "24", True),
            Fact("How many minutes are in an hour?", "There are 60 minutes in an hour.", "60", True),
        )
    )


def word_form(rng: random.Random) -> Fact:
    """The plural or the spelling of a word."""
    if rng.random() < 0.5:
        one, many = rng.choice(tuple(PLURALS.items()))
        return Fact(
            say(rng, ("What is the plural of {one}?", "Tell me the plural of {one}."), one=one),
            f"The plural of {one} is {many}.",
            many,
        )
    word = rng.choice(SPELLED)
    spelled = "-".join(word)
    return Fact(
        say(rng, ("How do you spell {word}?", "Spell {word}.", "Please spell the word {word}."), word=word),
        f"{word} is spelled {spelled}.",
        spelled,
    )


def counting(rng: random.Random) -> Fact:
    """Counting up or down over a short range."""
    if rng.random() < 0.4:
        last = rng.randint(3, 20)
        numbers = ", ".join(str(value) for value in range(1, last + 1))
        return Fact(say(rng, ("Count to {last}.", "Can you count to {last}?"), last=last), f"{numbers}.", numbers)
    first = rng.randint(0, 40)
    last = first + rng.randint(3, 10)
    if rng.random() < 0.3:
        numbers = ", ".join(str(value) for value in range(last, first - 1, -1))
        return Fact(f"Count down from {last} to {first}.", f"{numbers}.", numbers)
    numbers = ", ".join(str(value) for value in range(first, last + 1))
    return Fact(f"Count from {first} to {last}.", f"{numbers}.", numbers)


FACTS: MappingProxyType[str, tuple[Callable[[random.Random], Fact], int]] = MappingProxyType(
    {
        "capital": (capital, 4),
        "animal": (animal, 4),
        "opposite": (opposite, 3),
        "colour": (colour, 2),
        "neighbour": (neighbour, 3),
        "quantity": (quantity, 2),
        "word_form": (word_form, 2),
        "counting": (counting, 1),
    }
)


def fact(rng: random.Random, split: Split) -> Fact:
    """A fact with a question of `split`: the test split asks known facts in wordings that training
    does not use for them."""
    makers = tuple(maker for maker, _ in FACTS.values())
    weights = tuple(weight for _, weight in FACTS.values())
    while True:
        found = rng.choices(makers, weights)[0](rng)
        if found.belongs_to(split):
            return found


def statements(rng: random.Random, split: Split) -> str:
    """A page of one to six different plain statements."""
    return " ".join(dict.fromkeys(fact(rng, split).answer for _ in range(length(rng, 6))))
