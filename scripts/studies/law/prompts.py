# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Three kinds of prompts, whose responses have from a few to a thousand tokens, each with a reward of a program.

text: plain text goes on; it is cut by chance, so that its length says nothing of its content. chat: an answer of about
so many words. steps: a sum worked out line by line, as in a chain of thought.
"""

import random
import re
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple


class Prompt(NamedTuple):
    """One prompt."""

    kind: str
    text: str
    target: str  # what the reward of its kind checks


class Kind(NamedTuple):
    """A kind of prompt."""

    draw: Callable[[random.Random], tuple[str, str]]  # text and target
    reward: Callable[[str, str], float]  # of a response and a target, 0 to 1
    is_chat: bool = True  # else the text is handed to the model as it is, and chance cuts the response


_TOPICS = (
    "photosynthesis|the French Revolution|the airplane|the water cycle|the black hole|the history of bread|the volcano|"
    "the human heart|democracy|the internet|the elephant|the electric car|the Roman Empire|dreaming|solar power|chess|"
    "the moon landing|vaccination|the coral reef|the printing press|jazz music|friendship|inflation|the honey bee|"
    "the Sahara desert|recycling|mountain climbing|the violin|gravity|William Shakespeare|the earthquake|coffee|"
    "the penguin|time management|the Amazon rainforest|language learning|the immune system|the steam engine|"
    "the robot|the tide|the glacier|sleep|architecture|honesty|the Great Wall of China|the battery|the dinosaur|tea"
).split("|")
_OPENINGS = (
    "{} is one of the|When people first heard of {}, they|The history of {} began|In my childhood, {} was|"
    "A common mistake about {} is|Few people know that {}|The book about {} starts with|Last year, {} made"
).split("|")
_SENTENCE = 12  # words in a sentence of a text that earns most


def _log_uniform(rng: random.Random, low: float, high: float) -> int:
    return round(low * (high / low) ** rng.random())


def _text(rng):
    text = rng.choice(_OPENINGS).format(rng.choice(_TOPICS))
    return text[0].upper() + text[1:], str(_SENTENCE)


def _chat(rng):
    words = _log_uniform(rng, 5, 400)
    return f"Write about {rng.choice(_TOPICS)} in about {words} words.", str(words)


def _steps(rng):
    terms = [str(rng.randint(2, 40)) for _ in range(_log_uniform(rng, 2, 24))]
    return (
        f"Add the numbers {', '.join(terms)} step by step. Write each step on a line of its own, then the sum.",
        " ".join(terms),
    )


def _closeness(found: float, wanted: float) -> float:
    return max(0.0, 1.0 - abs(found - wanted) / wanted)


def _words_per_sentence(text, target):
    return _closeness(len(text.split()) / max(len(re.findall(r"[.!?](?:\s|$)", text)), 1), int(target))


def _number_of_words(text, target):
    return _closeness(len(text.split()), int(target))


def _running_sums(text, target):
    """Share of the running sums that stand in the text, in their order, before the first that does not."""
    sums = list(accumulate(map(int, target.split())))[1:]
    numbers = (int(number[:9]) for number in re.findall(r"\d+", text))
    return sum(value in numbers for value in sums) / len(sums)  # each is sought behind the one before


KINDS = {
    "text": Kind(_text, _words_per_sentence, is_chat=False),
    "chat": Kind(_chat, _number_of_words),
    "steps": Kind(_steps, _running_sums),
}


def draw(kind: str, count: int, seed: int) -> list[Prompt]:
    """So many different prompts of a kind, the same at every call."""
    rng, found = random.Random(f"{seed} {kind}"), {}
    while len(found) < count:
        found.setdefault(*KINDS[kind].draw(rng))
    return [Prompt(kind, text, target) for text, target in found.items()]
