"""Writes short, consistent stories: a person finds the thing that was lost, and pronouns and
colours stay the same."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .sampling import a, any_name, pronouns, say
from .words import (
    COLOURS,
    FOODS,
    HIDING,
    HOMES,
    MORALS,
    PEOPLE,
    PLACES,
    SEEDS,
    SKILLS,
    STORY_ANIMALS,
    TOYS,
    TRAITS,
    WEATHER,
)

Words = dict[str, object]

OPENINGS = (
    "Once upon a time, there was {a_trait} {child} named {name}. {He} lived in a small {home} near the {place}.",
    "Once upon a time, in a small {home}, there lived {a_trait} {child} named {name}.",
    "Once upon a time, {a_trait} {child} named {name} lived in a little house near the {place}.",
    "Long ago, in a quiet {home}, there lived {a_trait} {child}. {His} name was {name}.",
    "There was once {a_trait} {child} called {name}, who lived near the {place}.",
    "{name} was {a_trait} {child} who lived in a little {home}.",
    "One day, {a_trait} {child} named {name} woke up early in {his} house near the {place}.",
)
CLOSINGS = (
    "From that day on, {name} and the {animal} were the best of friends.",
    "{name} smiled all the way home. {moral}",
    "That night, {name} fell asleep with a smile. {moral}",
    "And {name} never forgot that day. {moral}",
    "Everyone was happy, and {name} was the happiest of all.",
    "The end.",
)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a story must contain; None: chosen at random."""

    name: str | None = None
    thing: str | None = None
    plot: str | None = None


def lost_and_found(rng: random.Random) -> tuple[str, ...]:
    """A thing is lost, searched for in two wrong places, and found with an animal's help."""
    return (
        rng.choice(
            (
                "{name} had {a_colour} {thing}. {He} loved the {colour} {thing} more than anything else.",
                "{name}'s favorite thing was {a_colour} {thing}. {He} took it everywhere.",
                "For {his} birthday, {name} got {a_colour} {thing}. {He} loved it very much.",
            )
        ),
        rng.choice(
            (
                "But one {weather} morning, the {thing} was gone! {name} looked {spot1}, but it was not there. "
                "{He} looked {spot2}, but it was not there. {name} was very sad.",
                "One {weather} day, {name} could not find the {colour} {thing}. {He} looked {spot1}. Nothing. "
                '{He} looked {spot2}. Nothing. "Where is my {thing}?" {he} cried.',
            )
        ),
        rng.choice(
            (
                'Then {name} met {a_animal}. "Why are you sad?" asked the {animal}. "I lost my {colour} {thing}," said {name}. '
                '"I saw {a_colour} {thing} {spot3}," said the {animal}. "Come with me!"',
                '{A_animal} heard {him}. "What is wrong?" asked the {animal}. "I cannot find my {colour} {thing}," said {name}. '
                '"Let us look {spot3}," said the {animal}.',
            )
        ),
        rng.choice(
            (
                'They went together, and there it was! The {colour} {thing} was {spot3}. "Thank you, {animal}!" said {name}.',
                'So they looked {spot3}, and there was the {colour} {thing}! {name} hugged the {animal}. "You found my {thing}!" {he} said.',
            )
        ),
    )


def rescue(rng: random.Random) -> tuple[str, ...]:
    """An animal is stuck; the person frees it; it brings a gift."""
    return (
        rng.choice(
            (
                'One {weather} day, {name} walked to the {place2}. Suddenly {he} heard a small voice. "Help! Help!"',
                'On {a_weather} afternoon, {name} was playing near the {place2} when {he} heard a cry. "Please help me!"',
            )
        ),
        rng.choice(
            (
                'It was {a_animal}. The {animal} was stuck {spot1}. "Do not worry," said {name}. "I will help you."',
                '{name} looked {spot1} and saw {a_animal}. It could not get out. "Stay calm," said {name}. "I am here."',
            )
        ),
        rng.choice(
            (
                '{name} pulled and pulled, and at last the {animal} was free. "Thank you, {name}!" said the {animal}.',
                '{name} was very careful. Soon the {animal} was free. "You saved me!" said the {animal}.',
            )
        ),
        rng.choice(
            (
                "The next day, the {animal} came back with a gift. It was {a_colour} {thing}! {name} was so happy with the {colour} {thing}.",
                "A week later, {name} found {a_colour} {thing} at {his} door. It was a gift from the {animal}.",
            )
        ),
    )


def sharing(rng: random.Random) -> tuple[str, ...]:
    """One has food, the other has none; they share it."""
    return (
        rng.choice(
            (
                "One day, {name} packed {a_food} and took it to the {place2}. {He} sat down to eat.",
                "{name} had {a_food} in {his} bag. It was {weather}, so {he} went to the {place2} to eat it.",
            )
        ),
        'Then {friend} came by. {friend} looked hungry. "I have nothing to eat today," said {friend}.',
        rng.choice(
            (
                '{name} thought for a moment. Then {he} cut the {food} in two. "Half of the {food} is for you," said {name}.',
                '"Do not be sad, {friend}," said {name}. "We can share my {food}." And {he} gave {friend} half of it.',
            )
        ),
        rng.choice(
            (
                '{friend} smiled. "Thank you, {name}! This is the best {food} in the world." They ate together and laughed.',
                'They ate the {food} together. "You are a good friend," said {friend}.',
            )
        ),
        "The next day, {friend} gave {name} {a_colour} {thing} to say thank you.",
    )


def garden(rng: random.Random) -> tuple[str, ...]:
    """A seed is planted, waited for, and grows."""
    return (
        'One morning, {name} found a tiny seed {spot1}. "I will plant it," {he} said. {He} put the seed in the ground.',
        rng.choice(
            (
                "Every day, {name} gave the seed some water. One day passed. Two days passed. Nothing happened.",
                "{name} watered the seed every morning. {He} waited and waited, but nothing came up.",
            )
        ),
        rng.choice(
            (
                '"Maybe it is sleeping," said {friend}. "Be patient." So {name} did not give up.',
                '{friend} said, "It will never grow." But {name} did not give up.',
            )
        ),
        "Then, on the seventh day, {name} saw something green. It grew and grew. At last it was a tall {plant}, "
        "and it was as {plant_colour} as could be.",
        '"Look, {friend}!" said {name}. "My little seed is a {plant} now!"',
    )


def practice(rng: random.Random) -> tuple[str, ...]:
    """Somebody wants to learn, fails, practises and succeeds."""
    return (
        "{name} wanted to learn to {skill}. But it was hard. The first time, {he} could not do it at all.",
        rng.choice(
            (
                '"I will never learn to {skill}," said {name}. {He} sat down {spot1} and was sad.',
                '{name} tried again and again, but it did not work. "I cannot {skill}," {he} said.',
            )
        ),
        'Then {a_animal} came along. "I could not {skill} at first," said the {animal}. "Try a little every day."',
        "So {name} practiced every day at the {place2}. On Monday it was bad. On Wednesday it was better. On Sunday, {name} could {skill}!",
        '"I did it!" said {name}. The {animal} clapped. "I knew that you could {skill}," said the {animal}.',
    )


def journey(rng: random.Random) -> tuple[str, ...]:
    """A walk past three things, which the person lists at home in the same order."""
    return (
        "One {weather} day, {name} went for a walk to the {place2}. {He} took {his} {colour} {thing} along.",
        "First, {he} saw {a_animal} {spot1}. Then {he} saw {a_animal2} {spot2}. At the {place2}, {he} met {his} friend {friend}.",
        rng.choice(
            (
                "{name} and {friend} played with the {colour} {thing} until the sun went down.",
                "{friend} liked the {colour} {thing} very much, and they played together all day.",
            )
        ),
        'In the evening, {name} went home. "What did you see today?" asked {his} mother. '
        '"I saw {a_animal} and {a_animal2}," said {name}, "and I met {friend} at the {place2}."',
    )


PLOTS: tuple[Callable[[random.Random], tuple[str, ...]], ...] = (
    lost_and_found,
    rescue,
    sharing,
    garden,
    practice,
    journey,
)
THING_PLOTS = (lost_and_found, lost_and_found, rescue, journey)


def cast(rng: random.Random, wish: Wish) -> Words:
    """Draw everything that a story may mention; the fields of every plot."""
    name = wish.name or any_name(rng, 0.1)
    friend = rng.choice([person for person in PEOPLE if person != name])
    animal, animal2 = rng.sample(STORY_ANIMALS, 2)
    spot1, spot2, spot3 = rng.sample(HIDING, 3)
    place, place2 = rng.sample(PLACES, 2)
    plant, plant_colour = rng.choice(tuple(SEEDS.items()))
    words: Words = {
        "name": name,
        "friend": friend,
        "animal": animal,
        "animal2": animal2,
        "spot1": spot1,
        "spot2": spot2,
    }
    words |= {"spot3": spot3, "place": place, "place2": place2, "plant": plant, "plant_colour": plant_colour}
    words |= {"thing": wish.thing or rng.choice(TOYS), "colour": rng.choice(COLOURS), "food": rng.choice(FOODS)}
    words |= {"weather": rng.choice(WEATHER), "skill": rng.choice(SKILLS), "home": rng.choice(HOMES)}
    words |= {"moral": rng.choice(MORALS), "trait": rng.choice(TRAITS)}
    return words | with_articles(words) | pronouns(name)


def with_articles(words: Words) -> Words:
    """The nouns of `words` with an article: `a_thing`, and `A_animal` for the beginning of a
    sentence."""
    nouns = ("thing", "colour", "food", "animal", "animal2", "weather", "trait")
    articles: Words = {f"a_{noun}": a(str(words[noun])) for noun in nouns}
    return articles | {"A_animal": a(str(words["animal"])).capitalize()}


def paragraphs(rng: random.Random, plot: tuple[str, ...], words: Words) -> str:
    """The parts of a plot, joined into one to `len(plot)` paragraphs."""
    text = plot[0].format(**words)
    for part in plot[1:]:
        text += rng.choice(("\n\n", "\n\n", " ")) + part.format(**words)
    return text


def story(rng: random.Random, wish: Wish | None = None) -> str:
    """One whole story of three to seven paragraphs, about 120 to 250 words."""
    wish = wish or Wish()
    words = cast(rng, wish)
    make = rng.choice(THING_PLOTS if wish.thing else PLOTS)
    plot = (rng.choice(OPENINGS), *make(rng))
    has_animal = any("{animal}" in part for part in plot)
    closing = rng.choice(CLOSINGS if has_animal else CLOSINGS[1:])
    return paragraphs(rng, (*plot, closing), words)


def long_story(rng: random.Random) -> str:
    """Three or four numbered chapters about one person, each with its own plot; up to 1,000
    tokens."""
    name = rng.choice(PEOPLE)
    chapters = []
    for number, make in enumerate(rng.sample(PLOTS, rng.choice((3, 4))), start=1):
        words = cast(rng, Wish(name=name))
        opening = (rng.choice(OPENINGS),) if number == 1 else ()
        body = paragraphs(rng, (*opening, *make(rng)), words)
        chapters.append(f"Chapter {number}\n\n{body}")
    ending = say(rng, ("The end.", "And that was the story of {name}."), name=name)
    return "\n\n".join((f"The story of {name}", *chapters, ending))
