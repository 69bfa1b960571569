"""Writes small Python functions with docstrings; all compile, and their doctests pass."""

import random
from dataclasses import dataclass

from .sampling import length, say


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function: what it does in words, its name, its parameters (several spellings) and its body.

    `{0}`, `{1}`, ... in the body are the parameters.
    """

    wish: str
    doc: str
    name: str
    parameters: tuple[tuple[str, ...], ...]
    body: str


PAIR = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"))
NUMBER = (("n",), ("n",), ("number",), ("x",))
WORD = (("text",), ("text",), ("s",), ("word",))
ROW = (("numbers",), ("numbers",), ("values",), ("items",))

RECIPES = (
    Recipe("adds two numbers", "Return the sum of {0} and {1}.", "add", PAIR, "return {0} + {1}"),
    Recipe("subtracts two numbers", "Return {0} minus {1}.", "subtract", PAIR, "return {0} - {1}"),
    Recipe("multiplies two numbers", "Return the product of {0} and {1}.", "multiply", PAIR, "return {0} * {1}"),
    Recipe("divides two numbers", "Return {0} divided by {1}.", "divide", PAIR, "return {0} / {1}"),
    Recipe(
        "returns the larger of two numbers",
        "Return the larger of {0} and {1}.",
        "maximum",
        PAIR,
        "if {0} > {1}:\n    return {0}\nreturn {1}",
    ),
    Recipe(
        "returns the smaller of two numbers",
        "Return the smaller of {0} and {1}.",
        "minimum",
        PAIR,
        "if {0} < {1}:\n    return {0}\nreturn {1}",
    ),
    Recipe(
        "computes the average of two numbers",
        "Return the average of {0} and {1}.",
        "average",
        PAIR,
        "return ({0} + {1}) / 2",
    ),
    Recipe("squares a number", "Return the square of {0}.", "square", NUMBER, "return {0} * {0}"),
    Recipe("doubles a number", "Return twice {0}.", "double", NUMBER, "return {0} * 2"),
    Recipe("checks if a number is even", "Return True if {0} is even.", "is_even", NUMBER, "return {0} % 2 == 0"),
    Recipe("checks if a number is odd", "Return True if {0} is odd.", "is_odd", NUMBER, "return {0} % 2 == 1"),
    Recipe(
        "checks if a number is positive", "Return True if {0} is positive.", "is_positive", NUMBER, "return {0} > 0"
    ),
    Recipe(
        "returns the absolute value of a number",
        "Return the absolute value of {0}.",
        "absolute",
        NUMBER,
        "if {0} < 0:\n    return -{0}\nreturn {0}",
    ),
    Recipe(
        "computes the factorial of a number",
        "Return the factorial of {0}.",
        "factorial",
        NUMBER,
        "result = 1\nfor i in range(2, {0} + 1):\n    result *= i\nreturn result",
    ),
    Recipe(
        "computes the Fibonacci numbers",
        "Return the {0}-th Fibonacci number.",
        "fibonacci",
        NUMBER,
        "a, b = 0, 1\nfor _ in range({0}):\n    a, b = b, a + b\nreturn a",
    ),
    Recipe(
        "checks if a number is prime",
        "Return True if {0} is a prime number.",
        "is_prime",
        NUMBER,
        "if {0} < 2:\n    return False\nfor i in range(2, {0}):\n    if {0} % i == 0:\n        return False\nreturn True",
    ),
    Recipe("reverses a string", "Return {0} backwards.", "reverse", WORD, "return {0}[::-1]"),
    Recipe("makes a string upper case", "Return {0} in upper case.", "shout", WORD, "return {0}.upper()"),
    Recipe(
        "checks if a string is a palindrome",
        "Return True if {0} reads the same backwards.",
        "is_palindrome",
        WORD,
        "return {0} == {0}[::-1]",
    ),
    Recipe(
        "counts the words in a string",
        "Return the number of words in {0}.",
        "count_words",
        WORD,
        "return len({0}.split())",
    ),
    Recipe(
        "counts the vowels in a string",
        "Return the number of vowels in {0}.",
        "count_vowels",
        WORD,
        'count = 0\nfor letter in {0}:\n    if letter in "aeiou":\n        count += 1\nreturn count',
    ),
    Recipe(
        "greets a person",
        "Return a greeting for {0}.",
        "greet",
        (("name",), ("name",), ("person",)),
        'return "Hello, " + {0} + "!"',
    ),
    Recipe(
        "sums a list",
        "Return the sum of {0}.",
        "sum_list",
        ROW,
        "total = 0\nfor value in {0}:\n    total += value\nreturn total",
    ),
    Recipe(
        "finds the largest number in a list",
        "Return the largest of {0}.",
        "largest",
        ROW,
        "best = {0}[0]\nfor value in {0}:\n    if value > best:\n        best = value\nreturn best",
    ),
    Recipe("computes the mean of a list", "Return the mean of {0}.", "mean", ROW, "return sum({0}) / len({0})"),
    Recipe("returns the first element of a list", "Return the first of {0}.", "first_of", ROW, "return {0}[0]"),
    Recipe("returns the last element of a list", "Return the last of {0}.", "last_of", ROW, "return {0}[-1]"),
    Recipe(
        "keeps the even numbers of a list",
        "Return the even numbers in {0}.",
        "only_even",
        ROW,
        "return [i for i in {0} if i % 2 == 0]",
    ),
    Recipe("sorts a list", "Return {0} in order.", "sort_list", ROW, "return sorted({0})"),
    Recipe("counts the elements of a list", "Return how many elements {0} has.", "count_items", ROW, "return len({0})"),
)


def function(rng: random.Random, recipe: Recipe) -> str:
    """The source of the recipe's function, with or without its docstring."""
    names = rng.choice(recipe.parameters)
    lines = [f"def {recipe.name}({', '.join(names)}):"]
    if rng.random() < 0.6:
        lines.append(f'    """{recipe.doc.format(*names)}"""')
    lines += [f"    {line}" for line in recipe.body.format(*names).split("\n")]
    return "\n".join(lines)


def module(rng: random.Random) -> str:
    """A file of one to four different functions."""
    return "\n\n\n".join(function(rng, recipe) for recipe in rng.sample(RECIPES, length(rng, 4)))


def request(rng: random.Random) -> tuple[str, str]:
    """A request for a function in words, and the function in a fenced block."""
    recipe = rng.choice(RECIPES)
    choices = (
        "Write a Python function that {wish}.",
        "Write a function that {wish}.",
        "Show me a Python function that {wish}.",
        "Can you write a Python function that {wish}?",
        "Please write Python code that {wish}.",
    )
    return say(rng, choices, wish=recipe.wish), f"```python\n{function(rng, recipe)}\n```"
