"""Writes short letters in which a person greets and introduces himself; the ending repeats facts
from the beginning."""

import random

from .sampling import a, any_name, say, two
from .words import CITIES, COLOURS, FOODS, PEOPLE, SKILLS

GREETINGS = (
    "Hello, my name is {name}.",
    "Hello! My name is {name}.",
    "Hi, I am {name}.",
    "My name is {name}.",
    "Dear {friend},\n\nmy name is {name}.",
)
PARTS = (
    ("I am {age} years old.", "I am {age}."),
    ("I live in {city}.", "I come from {city}."),
    ("My favorite color is {shade}.", "I like the color {shade}."),
    ("I have {a_animal} named {pet}.", "My {animal} is called {pet}."),
    ("I like to {skill} and to {other}.", "In my free time, I {skill} and {other}."),
    ("Today I ate {a_food}.", "I would like to eat {a_food}."),
    ("My best friend is {friend}.", "{friend} is my best friend."),
)
ENDINGS = (
    "What is your name?",
    "Nice to meet you!",
    "Goodbye!",
    "Yours, {name}",
    "Best wishes from {city},\n{name}",
    "See you soon!\n{name}",
)


def letter(rng: random.Random) -> str:
    """One letter of three to seven sentences."""
    skill, other = two(rng, [skill for skill in SKILLS if " " not in skill])
    animal, food = rng.choice(("cat", "dog", "rabbit", "horse", "duck", "mouse")), rng.choice(FOODS)
    name = any_name(rng)
    words = {
        "name": name,
        "friend": rng.choice([person for person in PEOPLE if person != name]),
        "age": rng.randint(5, 80),
        "city": rng.choice(CITIES),
        "shade": rng.choice(COLOURS),
        "animal": animal,
        "a_animal": a(animal),
        "pet": any_name(rng),
        "food": food,
        "a_food": a(food),
        "skill": skill,
        "other": other,
    }
    middle = [say(rng, part, **words) for part in rng.sample(PARTS, rng.randint(1, 5))]
    ending = say(rng, ENDINGS, **words)
    gap = "\n\n" if "\n" in ending or ending.startswith("Yours") else " "
    return " ".join((say(rng, GREETINGS, **words), *middle)) + gap + ending
