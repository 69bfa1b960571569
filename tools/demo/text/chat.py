"""Writes dialogues: greetings, questions about the closed world, questions about earlier turns, and
system messages."""

import json
import random
from dataclasses import dataclass

from . import arithmetic, facts, functions, records, stories
from .sampling import Split, a, any_name, say, two
from .words import ANIMALS, CAPITALS, COLOURS, DAYS, FOODS, PEOPLE, SEASONS, TOYS

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)

Turns = list[tuple[str, str]]

ABOUT = (
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."),
        "I am the demo model of sglcore, a very small language model. I can tell stories, answer simple questions and do easy sums.",
    ),
    (
        ("What is your name?", "What's your name?", "Do you have a name?"),
        "I am the demo model of sglcore. You can call me Demo.",
    ),
    (
        ("What can you do?", "How can you help me?", "Can you help me?", "Help", "What can I ask you?"),
        "I can tell short stories, answer simple questions, do easy sums, write JSON records and write small Python functions.",
    ),
    (
        ("What is sglcore?", "Tell me about sglcore.", "What does sglcore do?", "What is sglcore"),
        "sglcore is an engine that runs large language models. I am its small demo model.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained from scratch for sglcore, on text that a program wrote.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "Are you big?"),
        "I am very small. I have about 5 million parameters.",
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you real?", "Are you a robot?"),
        "No, I am a very small language model.",
    ),
    (("How old are you?", "When were you born?"), "I am a language model, so I have no age."),
    (
        ("How are you?", "How are you doing?", "How do you do?", "Are you okay?"),
        "I am fine, thank you. How can I help you?",
    ),
)
GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there!",
    "Hey",
    "Hey!",
    "Good morning!",
    "Good evening!",
    "Hello there!",
    "Hello, how are you?",
)
GREETED = "Hello! I am the demo model of sglcore. How can I help you?"
THANKS = (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!"), "You are welcome!")
PARTING = (("Goodbye!", "Bye!", "Bye", "See you later!", "Good night!"), "Goodbye! Have a nice day.")
STRANGE = (
    "Who will win the election?", "What is the weather today?", "What is the meaning of life?", "How do I fix my car?",
    "What is quantum physics?", "Who is the king of the moon?", "What time is it?", "What is the price of gold?",
    "Explain relativity.", "What is love?", "Who wrote this book?", "What happened yesterday?", "Write a poem about the sea.",
    "Translate this into French.", "What is the capital of Atlantis?", "What is the capital of Mars?", "Why is the sky blue?",
    "Can you drive a car?", "What should I cook today?", "Tell me a joke.", "What is your favorite movie?", "Who am I?",
)  # fmt: skip
UNKNOWN = "I am sorry, I do not know that. I am only a small demo model."
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are the demo model of sglcore.",
    "You are a friendly assistant.", "Answer the questions of the user.", "You are a kind and helpful model.",
)  # fmt: skip
BRIEF = (
    "Answer in one word.",
    "Give short answers.",
    "Answer with one word only.",
    "Be brief.",
    "You are a helpful assistant. Answer in one word.",
)
STORY_SYSTEMS = ("You tell stories.", "You are a story teller.")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A system message (empty: none) and turns of user and assistant."""

    system: str
    turns: tuple[tuple[str, str], ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the dialogue as messages for a chat template."""
        rows = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            rows += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return rows


def render(messages: list[dict[str, str]]) -> str:
    """Return the text of a dialogue with its special tokens, as the model's chat template does."""
    return BOS + "".join(f"<|{row['role']}|>{row['content'].strip()}{END}" for row in messages)


def sloppy(rng: random.Random, text: str) -> str:
    """Return the text as people type it: sometimes without capitals or the final punctuation."""
    if rng.random() < 0.12:
        text = text.rstrip("?.!") or text
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    return text


def about(rng: random.Random) -> tuple[str, str]:
    """A question about the model itself, a greeting, thanks, or something that it cannot know."""
    kind = rng.choice(("about", "about", "about", "greeting", "greeting", "thanks", "parting", "strange"))
    if kind == "greeting":
        return rng.choice(GREETINGS), GREETED
    if kind == "strange":
        return rng.choice(STRANGE), UNKNOWN
    asked, answer = rng.choice(ABOUT) if kind == "about" else (THANKS if kind == "thanks" else PARTING)
    return rng.choice(asked), answer


def story_request(rng: random.Random) -> tuple[str, str]:
    """A request for a story, about a person, a thing, both or neither."""
    name, thing = any_name(rng, 0.1), rng.choice(TOYS)
    kind = rng.choice(("any", "name", "thing", "both"))
    if kind == "any":
        choices = (
            "Tell me a story.",
            "Tell me a short story.",
            "Write a story.",
            "Can you tell me a story?",
            "I would like to hear a story.",
        )
        return rng.choice(choices), stories.story(rng)
    start = rng.choice(
        ("Tell me a story about", "Write a short story about", "Write a story about", "Can you tell me a story about")
    )
    mark = "?" if start.startswith("Can") else "."
    if kind == "name":
        return f"{start} {name}{mark}", stories.story(rng, stories.Wish(name=name))
    if kind == "thing":
        return f"{start} {a(thing)}{mark}", stories.story(rng, stories.Wish(thing=thing))
    return f"{start} {name} and {a(thing)}{mark}", stories.story(rng, stories.Wish(name=name, thing=thing))


def listing(rng: random.Random) -> tuple[str, str]:
    """A request for three things of a kind, or for a whole closed list."""
    kinds = {
        "colors": COLOURS,
        "animals": tuple(ANIMALS),
        "toys": TOYS,
        "names": PEOPLE,
        "countries": tuple(CAPITALS),
        "foods": FOODS,
    }
    if rng.random() < 0.3:
        days, seasons = (
            "The days of the week are " + ", ".join(DAYS) + ".",
            "The four seasons are " + ", ".join(SEASONS) + ".",
        )
        return rng.choice(
            (
                ("Name the days of the week.", days),
                ("What are the days of the week?", days),
                ("Name the seasons.", seasons),
            )
        )
    kind = rng.choice(tuple(kinds))
    count = rng.choice((2, 3, 3, 4))
    word = ("two", "three", "four")[count - 2]
    asked = say(rng, ("Name {word} {kind}.", "Tell me {word} {kind}.", "List {word} {kind}."), word=word, kind=kind)
    return asked, ", ".join(rng.sample(kinds[kind], count)) + "."


def echo(rng: random.Random) -> tuple[str, str]:
    """A request to repeat some words exactly."""
    words = (*COLOURS, *TOYS, *ANIMALS, *PEOPLE, *FOODS)
    text = " ".join(rng.choice(words) for _ in range(rng.randint(1, 6)))
    return say(
        rng, ("Repeat after me: {text}", "Say this: {text}", "Repeat: {text}", "Please say: {text}"), text=text
    ), text


def exchange(rng: random.Random, split: Split) -> tuple[str, str]:
    """One question of any kind with its full answer."""
    kind = rng.choices(
        ("fact", "sum", "problem", "about", "json", "code", "list", "echo"), (32, 22, 6, 16, 8, 8, 4, 4)
    )[0]
    if kind == "fact":
        found = facts.fact(rng, split)
        return found.question, found.answer
    if kind == "sum":
        return arithmetic.question(rng, split)[:2]
    if kind == "problem":
        return arithmetic.word_problem(rng, split)[:2]
    if kind == "json":
        wish = records.request(rng)
        return wish.question, json.dumps(wish.record)
    return {"about": about, "code": functions.request, "list": listing, "echo": echo}[kind](rng)


def brief_exchange(rng: random.Random, split: Split) -> tuple[str, str]:
    """A question with its short answer."""
    if rng.random() < 0.3:
        asked, _, short = arithmetic.question(rng, split)
        return asked, short
    found = facts.fact(rng, split)
    return found.question, found.short


def memory(rng: random.Random, split: Split) -> Turns:
    """The user says something about himself and asks for it later, with other questions between."""
    name, (shade, other) = any_name(rng, 0.4), two(rng, COLOURS)
    pet, animal = any_name(rng), rng.choice(("cat", "dog", "rabbit", "horse", "duck", "mouse"))
    known = [
        (say(rng, ("My name is {name}.", "Hello, my name is {name}.", "Hi, I am {name}.", "I am {name}."), name=name), f"Nice to meet you, {name}!",
         say(rng, ("What is my name?", "Do you know my name?", "What's my name?"),), f"Your name is {name}."),
        (f"My favorite color is {shade}.", f"{shade.capitalize()} is a nice color.", "What is my favorite color?", f"Your favorite color is {shade}."),
        (f"I have {a(animal)} named {pet}.", f"{pet} is a nice name for {a(animal)}.",
         say(rng, ("What is the name of my {animal}?", "What is my {animal} called?"), animal=animal), f"Your {animal} is called {pet}."),
        (f"I like {shade}, but I do not like {other}.", "I will remember that.", "Which color do I not like?", f"You do not like {other}."),
    ]  # fmt: skip
    chosen = rng.sample(known, rng.choice((1, 1, 2)))
    turns = [(said, reply) for said, reply, _, _ in chosen]
    turns += [exchange(rng, split) for _ in range(rng.choice((0, 1, 1, 2)))]
    rng.shuffle(chosen)
    return turns + [(asked, answer) for _, _, asked, answer in chosen]


def named(rng: random.Random, split: Split) -> Dialogue:
    """The system message gives the assistant a name, which it uses when asked."""
    name = any_name(rng, 0.5)
    system = say(
        rng, ("Your name is {name}.", "You are {name}, a helpful assistant.", "You are called {name}."), name=name
    )
    turns = [exchange(rng, split) for _ in range(rng.choice((0, 0, 1)))]
    turns.append((rng.choice(("What is your name?", "Who are you?", "What's your name?")), f"My name is {name}."))
    return Dialogue(system, tuple(turns))


def dialogue(rng: random.Random, split: Split) -> Dialogue:
    """A dialogue of one to eight turns."""
    kind = rng.choices(("single", "several", "brief", "memory", "named", "story"), (47, 15, 10, 12, 5, 9))[0]
    if kind == "named":
        return named(rng, split)
    system = rng.choice(SYSTEMS) if rng.random() < 0.3 else ""
    if kind == "brief":
        system = rng.choice(BRIEF)
        turns = [brief_exchange(rng, split) for _ in range(rng.choice((1, 2, 3)))]
    elif kind == "memory":
        turns = memory(rng, split)
    elif kind == "story":
        system = rng.choice(STORY_SYSTEMS) if rng.random() < 0.1 else system
        turns = [story_request(rng)]
    else:
        turns = [exchange(rng, split) for _ in range(1 if kind == "single" else rng.randint(2, 6))]
    return Dialogue(system, tuple((sloppy(rng, asked), answer) for asked, answer in turns))


def long_dialogue(rng: random.Random, split: Split) -> Dialogue:
    """Many turns with something to remember from the start; up to 1,000 tokens."""
    opening = memory(rng, split)
    middle = [exchange(rng, split) for _ in range(rng.randint(8, 18))]
    return Dialogue("", tuple(opening[:1] + middle + opening[1:]))
