# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Instructions that a small model can follow in part, whose responses have from 2 to some thousands of tokens.

Each has a reward between 0 and 1 that a program can check, in the manner of instruction-following benchmarks: an
answer, a count, a number of words, sentences or chapters, words that must occur.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Prompt(NamedTuple):
    """One instruction."""

    name: str
    kind: str
    text: str
    target: str  # what the reward of its kind checks


class Kind(NamedTuple):
    """A kind of instruction: how to draw one, and its reward."""

    draw: Callable[[random.Random], tuple[str, str]]  # text and target
    reward: Callable[[str, str], float]  # of a response and a target
    weight: int  # share of the prompts
    long: bool = False  # too long to train on here: only measured, few responses to a prompt


_CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris Japan:Tokyo Italy:Rome Egypt:Cairo Brazil:Brasilia Canada:Ottawa Spain:Madrid Germany:Berlin "
        "India:Delhi China:Beijing Russia:Moscow Mexico:Mexico Peru:Lima Kenya:Nairobi Norway:Oslo Sweden:Stockholm "
        "Greece:Athens Turkey:Ankara Iran:Tehran Iraq:Baghdad Cuba:Havana Chile:Santiago Poland:Warsaw Austria:Vienna "
        "Portugal:Lisbon Ireland:Dublin Finland:Helsinki Denmark:Copenhagen Hungary:Budapest Belgium:Brussels "
        "Argentina:Aires Australia:Canberra Thailand:Bangkok Vietnam:Hanoi Ukraine:Kyiv Romania:Bucharest "
        "Bulgaria:Sofia Croatia:Zagreb Serbia:Belgrade Nigeria:Abuja Ghana:Accra Senegal:Dakar Syria:Damascus "
        "Lebanon:Beirut Jordan:Amman Qatar:Doha Nepal:Kathmandu Mongolia:Ulaanbaatar Iceland:Reykjavik Latvia:Riga "
        "Estonia:Tallinn Lithuania:Vilnius Ecuador:Quito Colombia:Bogota Venezuela:Caracas Uruguay:Montevideo "
        "Jamaica:Kingston Tunisia:Tunis Morocco:Rabat Algeria:Algiers"
    ).split()
)
_TOPICS = (
    "photosynthesis|the French Revolution|how airplanes fly|the water cycle|black holes|the history of bread|volcanoes|"
    "the human heart|democracy|the internet|elephants|electric cars|the Roman Empire|dreams|solar panels|chess|"
    "the moon landing|vaccines|coral reefs|the printing press|jazz music|friendship|inflation|bees|the Sahara desert|"
    "recycling|mountain climbing|the violin|gravity|Shakespeare|earthquakes|coffee|penguins|time management|"
    "the Amazon rainforest|learning a language|the immune system|steam engines|robots|the ocean tides|glaciers|sleep|"
    "architecture|honesty|the Great Wall of China|batteries|dinosaurs|healthy eating"
).split("|")
_WORDS = "river stone apple cloud green horse music paper seven table water yellow garden house light moon".split()


def _log_uniform(rng: random.Random, low: float, high: float) -> int:
    return round(low * (high / low) ** rng.random())


def _capital(rng):
    country = rng.choice(list(_CAPITALS))
    return f"What is the capital of {country}? Answer with one word.", _CAPITALS[country]


def _add(rng):
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    return f"What is {a} + {b}? Give only the number.", str(a + b)


def _count(low: int, high: int):
    def draw(rng):
        start, steps = rng.randint(1, 40), _log_uniform(rng, low, high)
        return f"Count from {start} to {start + steps}.", f"{start} {start + steps}"

    return draw


def _repeat(rng):
    word, times = rng.choice(_WORDS), _log_uniform(rng, 2, 60)
    return f"Write the word '{word}' {times} times.", f"{word} {times}"


def _sentence(rng):
    words = rng.randint(8, 30)
    return f"Describe {rng.choice(_TOPICS)} in one sentence of {words} words.", str(words)


def _explain(rng):
    words = _log_uniform(rng, 30, 150)
    return f"Explain {rng.choice(_TOPICS)} to a child in about {words} words.", str(words)


def _essay(rng):
    words = rng.sample(_WORDS, 3)
    return f"Write a long and detailed essay about {rng.choice(_TOPICS)}. Use the words {', '.join(words)}.", " ".join(
        words
    )


def _story(rng):
    chapters = rng.randint(12, 30)
    topic = rng.choice(_TOPICS)
    return (
        f"Write a very long story about {topic} in {chapters} chapters. Start each with 'Chapter' and its number.",
        str(chapters),
    )


def _closeness(found: int, wanted: int) -> float:
    return max(0.0, 1.0 - abs(found - wanted) / wanted)


def _one_word(text, target):
    words = re.findall(r"\w+", text.lower())
    return (target.lower() in words) / max(len(words), 1)


def _last_number(text, target):
    numbers = re.findall(r"\d+", text)
    return (numbers[-1:] == [target]) / max(len(numbers), 1)


def _in_order(text, target):
    """Share of the numbers that come in order before the first mistake; every further number is one."""
    start, end = map(int, target.split())
    numbers = [int(number[:9]) for number in re.findall(r"\d+", text)]
    right = next((i for i, number in enumerate(numbers) if number != start + i), len(numbers))
    return min(right, end - start + 1) / max(end - start + 1, len(numbers))


def _times(text, target):
    word, times = target.split()
    return _closeness(len(re.findall(rf"\b{word}\b", text.lower())), int(times))


def _one_sentence(text, target):
    return _number_of_words(text, target) / max(len(re.findall(r"[.!?](?:\s|$)", text)), 1)


def _number_of_words(text, target):
    return _closeness(len(text.split()), int(target))


def _words_used(text, target):
    words = target.split()
    return sum(word in text.lower() for word in words) / len(words)


def _chapters(text, target):
    return _closeness(len(set(re.findall(r"chapter (\d+)", text.lower()))), int(target))


KINDS = {
    "capital": Kind(_capital, _one_word, 40),
    "add": Kind(_add, _last_number, 30),
    "sentence": Kind(_sentence, _one_sentence, 50),
    "count": Kind(_count(3, 50), _in_order, 45),
    "repeat": Kind(_repeat, _times, 30),
    "explain": Kind(_explain, _number_of_words, 42),
    "essay": Kind(_essay, _words_used, 30, long=True),
    "long count": Kind(_count(150, 500), _in_order, 16, long=True),
    "story": Kind(_story, _chapters, 24, long=True),
}


def draw(count: int, seed: int, kinds: Sequence[str] | None = None) -> list[Prompt]:
    """About ``count`` different prompts, of each kind by its weight and at least one; the same at every call."""
    kinds = list(KINDS) if kinds is None else kinds
    total = sum(KINDS[kind].weight for kind in kinds)
    prompts = []
    for kind in kinds:
        rng, found = random.Random(f"{seed} {kind}"), {}
        for _ in range(100 * count):  # a kind may have fewer different prompts than are asked for
            if len(found) == max(1, round(count * KINDS[kind].weight / total)):
                break
            found.setdefault(*KINDS[kind].draw(rng))
        prompts += [Prompt(f"{kind} {i}", kind, text, target) for i, (text, target) in enumerate(found.items())]
    return prompts
