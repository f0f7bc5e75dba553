"""Prompts to ask a target, and which of them training must never see.

Every prompt is held out or not by a hash of its text, whatever file it came from: a held-out prompt stays held out in every
data set that is ever made.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.api import Engine

HELD_OUT_SHARE = 0.5  # of the benchmark tasks, which are few
TASKS = ("humaneval", "gsm8k", "mtbench", "hellaswag", "truthfulqa", "copy")


def is_held_out(text: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a prompt belongs to the evaluation side."""
    digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def prompt_text(prompt: Any) -> str:
    """The user message, or the raw text, of a benchmark prompt."""
    return prompt.text if prompt.text is not None else prompt.messages[-1]["content"]


def task_prompts(held_out: bool, tasks: tuple[str, ...] = TASKS) -> list[str]:
    """User messages of one side of the benchmark tasks."""
    from outrider.bench.tasks import load_task

    texts = [prompt_text(prompt) for task in tasks for prompt in load_task(task)]
    return [text for text in texts if is_held_out(text) == held_out]


def self_asked(engine: Engine, number: int, seed: int, batch: int = 192, longest: int = 96) -> list[str]:
    """User messages that the target writes itself: its chat template up to the user's turn, continued at temperature 1.

    Args:
        number: which batch; the same number and seed give the same messages.

    Raises:
        ValueError: when the tokenizer has no chat template to begin a user's turn with.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(f"{engine.name!r} has no chat template, so it cannot ask itself; give a file of prompts")
    mark = "<<here>>"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    ids = tokenizer(whole.split(mark)[0], add_special_tokens=False)["input_ids"]
    seeds = [seed + number * batch + i for i in range(batch)]
    results = engine.generate(
        [ids] * batch, seed=seeds, shape="off", max_new_tokens=longest, temperature=1.0, min_p=0.02
    )
    texts = [result.text.strip() for result in results if result.finish_reason == "stop"]
    return [text for text in dict.fromkeys(texts) if len(text) > 12]


TOPICS = [
    "photosynthesis",
    "the French Revolution",
    "binary search",
    "black holes",
    "a sourdough starter",
    "the water cycle",
    "chess openings",
    "recursion",
    "the stock market",
    "jazz music",
    "vaccines",
    "plate tectonics",
    "a good night's sleep",
    "public speaking",
    "bicycles",
    "machine learning",
    "the Roman Empire",
    "tea",
    "databases",
    "mountain climbing",
    "friendship",
    "solar panels",
    "Shakespeare",
    "the human heart",
    "email etiquette",
    "gardening in small spaces",
    "a city in the year 2200",
    "an old lighthouse keeper",
    "the rules of football",
    "time zones",
    "coral reefs",
    "compound interest",
    "a detective and her cat",
    "hash tables",
    "the periodic table",
    "learning a language",
]
FORMS = (
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "List five interesting facts about {}.",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a friend about {}.",
    "Summarize what is known about {} in one paragraph.",
    "Give me step-by-step advice about {}.",
    "Write a dialogue between a teacher and a student about {}.",
)
CODE = [
    "sorts a list of tuples by their second item",
    "counts the vowels in a string",
    "checks whether a number is prime",
    "reverses the words of a sentence",
    "merges two sorted lists",
    "finds the longest common prefix of a list of strings",
    "computes the n-th Fibonacci number",
    "removes duplicates from a list but keeps the order",
    "parses a CSV line",
    "flattens a nested list",
    "finds the second largest number of a list",
    "checks whether two strings are anagrams",
    "converts a Roman numeral to an integer",
    "computes the moving average of a list",
    "validates an email address",
    "rotates a matrix by ninety degrees",
    "counts how often each word occurs in a text",
    "finds all pairs that sum to a target",
    "implements a stack with push and pop",
    "groups a list of dictionaries by a key",
    "computes the greatest common divisor",
]
CODE_FORMS = (
    "Write a Python function that {}.",
    "Write a Python function that {}. Include a docstring and a few tests.",
    "Show me how to write code that {} in JavaScript.",
)
SUMS = (
    "{name} has {a} {things}. {name} buys {b} boxes with {c} {things} each and gives {d} away. How many {things} are left?",
    "A shop sells {things} for ${a} each. {name} buys {b} of them and pays with ${e}. How much change does {name} get?",
    "{name} walks {a} km every day for {b} weeks. How many km does {name} walk in total?",
    "There are {b} shelves with {c} {things} each. {name} takes {d} {things}. Then {name} puts {a} back. How many are there now?",
)


def templates() -> list[str]:
    """Prompts of common kinds, from a few forms and topics."""
    made = [form.format(topic) for form in FORMS for topic in TOPICS]
    made += [form.format(task) for form in CODE_FORMS for task in CODE]
    names, things = ("Mia", "Tom", "Aisha", "Li"), ("apples", "marbles", "books", "stickers")
    for number, (form, name, thing) in enumerate(itertools.product(SUMS, names, things)):
        a, b, c, d = 3 + number % 11, 2 + number % 7, 4 + number % 9, 1 + number % 5
        made.append(form.format(name=name, things=thing, a=a, b=b, c=c, d=d, e=a * b + 10 + number % 20))
    return made
