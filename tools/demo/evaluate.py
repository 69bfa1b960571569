"""Measures the demo model on unseen text: loss and next-token accuracy by category, exact answers
by task.

Runs the shipped model in transformers with greedy sampling, and prints two tables for the model
card.
"""

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo.text import CATEGORIES, arithmetic, chat, facts, functions, records
from tools.demo.text.corpus import document

FOLDER = Path(__file__).resolve().parents[2] / "sglcore" / "assets" / "demo"
SEED = 1001
BATCH = 50


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its special tokens, and the text that must follow; `kind` says how the answer
    is compared with it: "text", "line", "json" or "python"."""

    prompt: str
    wanted: str
    kind: str = "text"


def asked(*turns: tuple[str, str], question: str, system: str = "") -> str:
    """Return the prompt of a dialogue that ends with `question`."""
    found = chat.Dialogue(system, (*turns, (question, "")))
    return chat.render(found.messages()).removesuffix(chat.END)


def sums_in_chat(rng: random.Random) -> Question:
    """A held-out sum or difference, asked in chat."""
    question, answer, _ = arithmetic.question(rng, "test")
    return Question(asked(question=question), answer)


def sums_as_text(rng: random.Random) -> Question:
    """A held-out sum or difference, as the beginning of a line."""
    found = arithmetic.equation(rng, "test")
    prompt = "{a} {sign} {b} =".format(**found.fields)
    return Question(chat.BOS + prompt, f" {found.result}", "line")


def products(rng: random.Random) -> Question:
    """A product up to 12 times 12 (all are in the training text)."""
    left, right = rng.randint(0, 12), rng.randint(0, 12)
    return Question(asked(question=f"What is {left} * {right}?"), f"{left} * {right} = {left * right}.")


def word_problems(rng: random.Random) -> Question:
    """A problem about things that people have, with held-out numbers."""
    question, answer, _ = arithmetic.word_problem(rng, "test")
    return Question(asked(question=question), answer)


def questions(rng: random.Random) -> Question:
    """A fact in a wording that was never seen with it."""
    found = facts.fact(rng, "test")
    return Question(asked(question=found.question), found.answer)


def short_answers(rng: random.Random) -> Question:
    """The same with a system message that asks for one word."""
    found = facts.fact(rng, "test")
    return Question(asked(question=found.question, system="Answer in one word."), found.short)


def remembered(rng: random.Random) -> Question:
    """Something that the user said, asked again at the end of a dialogue."""
    *turns, (question, answer) = chat.memory(rng, "test")
    return Question(asked(*turns, question=question), answer)


def remembered_long(rng: random.Random) -> Question:
    """The same over ten to twenty turns."""
    *turns, (question, answer) = chat.long_dialogue(rng, "test").turns
    return Question(asked(*turns, question=question), answer)


def json_records(rng: random.Random) -> Question:
    """A request for a JSON record; every value that the request names must be in the answer."""
    wish = records.request(rng)
    return Question(asked(question=wish.question), json.dumps(wish.record), "json")


def python_functions(rng: random.Random) -> Question:
    """A request for a function; the answer must be one of the spellings that the recipe allows."""
    question, answer = functions.request(rng)
    return Question(asked(question=question), answer, "python")


TASKS = (
    sums_in_chat,
    sums_as_text,
    products,
    word_problems,
    questions,
    short_answers,
    remembered,
    remembered_long,
    json_records,
    python_functions,
)


def is_right(question: Question, answer: str) -> bool:
    """Return whether the greedy continuation is the wanted one."""
    if question.kind == "json":
        return is_right_record(question, answer)
    if question.kind == "python":
        return same_function(question.wanted, answer)
    return (answer.split("\n")[0] if question.kind == "line" else answer) == question.wanted


def is_right_record(question: Question, answer: str) -> bool:
    """Return whether the answer parses, has the wanted keys, and agrees in the values that the
    request mentions."""
    try:
        found = json.loads(answer)
    except json.JSONDecodeError:
        return False
    wanted: dict[str, Any] = json.loads(question.wanted)
    spoken = {
        key for key, value in wanted.items() if not isinstance(value, list | bool) and str(value) in question.prompt
    }
    return found.keys() == wanted.keys() and all(found[key] == wanted[key] for key in spoken)


def same_function(wanted: str, answer: str) -> bool:
    """Return whether both blocks hold the same function, except for its docstring and the names of
    its parameters."""
    try:
        return shape_of(wanted) == shape_of(answer)
    except SyntaxError:
        return False


def shape_of(block: str) -> str:
    """Return the syntax tree of a fenced function as text, without docstring and with parameters
    renamed in order. Raises SyntaxError."""
    body = ast.parse(block.removeprefix("```python\n").removesuffix("```")).body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise SyntaxError(f"found {len(body)} statements, wanted one function")
    function = body[0]
    function.body = function.body[ast.get_docstring(function) is not None :]
    order = {parameter.arg: f"p{place}" for place, parameter in enumerate(function.args.args)}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.arg = order[node.arg]
        if isinstance(node, ast.Name) and node.id in order:
            node.id = order[node.id]
    return ast.dump(function)


class Referee:
    """The model under test, through transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(self, text: str) -> tuple[float, int, int]:
        """Return the summed loss in nats, the number of correctly predicted tokens, and the number
        of predicted tokens of one document."""
        ids: Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        logits = self.model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        return float(loss), int((logits.argmax(-1) == ids[0, 1:]).sum()), ids.shape[1] - 1

    @torch.no_grad()
    def answers(self, prompts: list[str], length: int = 160) -> list[str]:
        """Return greedy continuations up to <|end|>."""
        batch = self.tokenizer(prompts, add_special_tokens=False, return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        made = self.model.generate(**batch, do_sample=False, max_new_tokens=length)
        return self.tokenizer.batch_decode(made[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def category_rows(referee: Referee, count: int) -> Iterator[str]:
    """Yield loss (nats per token), next-token accuracy and tokens for every category."""
    for category in CATEGORIES:
        scores = [referee.score(document(SEED, index, "test", category).text) for index in range(count)]
        loss, right, tokens = (sum(column) for column in zip(*scores, strict=True))
        yield f"| {category} | {loss / tokens:.3f} | {100 * right / tokens:.1f} % | {tokens:,} |"


def task_rows(referee: Referee, count: int, is_verbose: bool) -> Iterator[str]:
    """Yield the share of exact answers for every task."""
    for task in TASKS:
        rng = random.Random(f"{task.__name__}:{SEED}")
        asked_here = [task(rng) for _ in range(count)]
        right = 0
        for start in range(0, count, BATCH):
            part = asked_here[start : start + BATCH]
            for question, answer in zip(part, referee.answers([one.prompt for one in part]), strict=True):
                right += is_right(question, answer)
                if is_verbose and not is_right(question, answer):
                    print(f"{task.__name__}: {question.prompt!r} wanted {question.wanted!r}, found {answer!r}")
        yield f"| {task.__name__.replace('_', ' ')} | {100 * right / count:.1f} % | {count} |"


def main(words: list[str]) -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--documents", type=int, default=300, help="test documents for each category")
    parser.add_argument("--questions", type=int, default=300, help="test questions for each task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print every wrong answer")
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    referee = Referee(given.folder)
    print("| category | loss | next-token accuracy | tokens |\n|---|---|---|---|")
    for row in category_rows(referee, given.documents):
        print(row, flush=True)
    print("\n| task | exact answers | questions |\n|---|---|---|")
    for row in task_rows(referee, given.questions, given.verbose):
        print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
