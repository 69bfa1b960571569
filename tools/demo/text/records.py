"""Writes small JSON records with consistent keys, and requests for them."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from .sampling import a, any_name, say
from .words import CAPITALS, CITIES, COLOURS, COUNTED, FOODS, PEOPLE, SKILLS, TOYS

Record = dict[str, object]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a record in words, and a matching record."""

    question: str
    record: Record


def person(rng: random.Random) -> Request:
    """A person with age, city and likes."""
    name, age, city = any_name(rng), rng.randint(5, 80), rng.choice(CITIES)
    record: Record = {"name": name, "age": age, "city": city, "likes": rng.sample(SKILLS, rng.randint(1, 3))}
    choices = (
        "Write a JSON record for a person named {name}, age {age}, from {city}.",
        "Give me a JSON object for {name}, who is {age} years old and lives in {city}.",
        "Make a JSON record: name {name}, age {age}, city {city}.",
        "Write JSON for a person called {name} who is {age} and lives in {city}.",
    )
    return Request(say(rng, choices, name=name, age=age, city=city), record)


def pet(rng: random.Random) -> Request:
    """A pet with kind, colour and owner."""
    name, kind, shade = (
        any_name(rng),
        rng.choice(("cat", "dog", "rabbit", "duck", "horse", "mouse")),
        rng.choice(COLOURS),
    )
    record: Record = {
        "name": name,
        "kind": kind,
        "color": shade,
        "age": rng.randint(1, 15),
        "owner": rng.choice(PEOPLE),
    }
    choices = (
        "Write a JSON record for a {shade} {kind} named {name}.",
        "Give me JSON for {a_shade} {kind} called {name}.",
        "Make a JSON object for a pet: {name}, {a_shade} {kind}.",
    )
    return Request(say(rng, choices, name=name, kind=kind, shade=shade, a_shade=a(shade)), record)


def item(rng: random.Random) -> Request:
    """Something in a shop with price and stock."""
    thing, shade, price = rng.choice(TOYS + FOODS), rng.choice(COLOURS), rng.randint(1, 99)
    record: Record = {"item": thing, "color": shade, "price": price, "in_stock": rng.random() < 0.7}
    choices = (
        "Write a JSON record for a {shade} {thing} that costs {price}.",
        "Give me JSON for an item: {thing}, color {shade}, price {price}.",
    )
    return Request(say(rng, choices, thing=thing, shade=shade, price=price), record)


def country(rng: random.Random) -> Request:
    """A country and its capital."""
    name, city = rng.choice(tuple(CAPITALS.items()))
    record: Record = {"country": name, "capital": city}
    return Request(
        say(
            rng, ("Write a JSON record for {name} with its capital.", "Give me JSON for the country {name}."), name=name
        ),
        record,
    )


def order(rng: random.Random) -> Request:
    """An order of some things by a customer, with a nested list."""
    customer, thing, count = any_name(rng), rng.choice(COUNTED), rng.randint(1, 20)
    record: Record = {"customer": customer, "items": [{"item": thing, "count": count}], "paid": rng.random() < 0.5}
    choices = (
        "Write a JSON order: {customer} buys {count} {thing}.",
        "Give me a JSON order of {count} {thing} for {customer}.",
    )
    return Request(say(rng, choices, customer=customer, thing=thing, count=count), record)


MAKERS: tuple[Callable[[random.Random], Request], ...] = (person, person, pet, item, country, order)


def request(rng: random.Random) -> Request:
    """A request of any kind."""
    return rng.choice(MAKERS)(rng)


def page(rng: random.Random) -> str:
    """One record on a line, an indented record, a list of records of one kind, or one record per
    line."""
    make = rng.choice(MAKERS)
    layout = rng.choice(("line", "line", "indent", "list", "lines"))
    if layout == "line":
        return json.dumps(make(rng).record)
    if layout == "indent":
        return json.dumps(make(rng).record, indent=2)
    rows = [make(rng).record for _ in range(rng.randint(2, 5))]
    return json.dumps(rows) if layout == "list" else "\n".join(json.dumps(row) for row in rows)
