"""Words, numbers and codes for RULER's tasks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import product
from random import Random

ADJECTIVES = (  # noqa: SIM905 (a list literal would need one line for each word)
    "aged arid avid bald bare blue bold busy calm cold cool cozy cute damp dark deep dull easy fair fast fine firm "
    "flat fond free full glad gold good gray hard hazy high holy huge idle keen kind lazy lone long loud main meek "
    "mild mute near neat nice numb open oval pale past pink rare real rich ripe rosy safe sage salt slim slow smug "
    "snug soft sore sour tall tame tart thin tidy tiny torn trim true vain vast warm wary wavy weak wide wild wise"
).split()
NOUNS = (  # noqa: SIM905
    "ant ape art ash axe bag bar bat bay bed bee bin bow box bud bug bun bus cab cap car cat cow cub cup den dew dog "
    "dot ear eel egg elf elk elm emu eye fan fig fir fly fog fox fur gem gnu gum hat hay hen hut ice ink inn jam jar "
    "jaw jet jug keg key lab log map mat mug net nut oak oat ore owl pan paw pen pet pie pig pit pod pot pup ram rat "
    "ray rod rug rye saw sea ski sky sun tar tea tie tin top toy tub van wax web wig yak zoo"
).split()
PAIRS = list(product(ADJECTIVES, NOUNS))


def draw_distinct(kind: str, number: int, draw: Random) -> list[str]:
    """Draw different keys or values of a kind."""
    if kind == "words":
        return ["-".join(pair) for pair in draw.sample(PAIRS, number)]
    if kind == "numbers":
        return [str(i) for i in draw.sample(range(10**6, 10**7), number)]
    return [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(number)]


def draw_codes(alphabet: str, letters: int, number: int, draw: Random) -> list[str]:
    """Draw different strings of random letters."""
    codes = draw.sample(range(len(alphabet) ** letters), number)
    return ["".join(alphabet[code // len(alphabet) ** i % len(alphabet)] for i in range(letters)) for code in codes]


def numbered(words: Sequence[str]) -> str:
    """Return the words as a numbered list, "1. first 2. second"."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
