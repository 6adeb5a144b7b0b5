"""RULER's tasks in text, made without a network: needles, chains of variables, common and frequent words.

The wording is RULER's (Hsieh et al., 2024), and so are its sizes: the answer's first words stand at the prompt's end,
and a length counts the prompt and the tokens that are written after it. What is ours:

* Words are an adjective of four letters and a noun of three, from the lists below, in all combinations (`bold-cat` as a
  key, `boldcat` in a list); RULER's come from the package wonderwords. No word contains another.
* Keys, values and names are all different, so that no question has two answers.
* Essays are the text that the user gives (RULER's are Paul Graham's), cut into sentences at `.`, `!` and `?`.
* Where one needle answers, its depth takes ten evenly spaced values in turn, so that every ten examples have each of
  them once; RULER draws it. Other needles lie at random ones of RULER's forty depths.
* The haystack is the largest that fits, found by bisection; a length for which there is none is an error.

Common words (`cwe`) come with RULER's worked example and its line ` Answer: …`; lm-evaluation-harness leaves out the
one and puts the other into a paragraph of its own.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from random import Random
from string import ascii_lowercase, ascii_uppercase

from halflife.registry import Registry

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {} for {} is: {}."
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # RULER's
LEVELS = 10  # depths of a needle that alone answers
WORKED = 500  # tokens of the worked example of variable tracking, RULER's
USER_TEXT = "user text"

ADJECTIVES = (  # noqa: SIM905 (a list literal would be a line a word)
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


@dataclass(frozen=True)
class Example:
    """A prompt and what its continuation must contain.

    Attributes:
        prompt: the text to read.
        references: strings; the score is the fraction of them that is found in the continuation.
        new_tokens: how many are to be written, RULER's number for the task.
        haystack: what surrounds the answer; "user text" where it is the user's.
        depth: where the needle that alone answers lies, 0 (start) … 1 (end); None if there is no such needle.
    """

    prompt: str
    references: tuple[str, ...]
    new_tokens: int
    haystack: str
    depth: float | None = None


@dataclass(frozen=True)
class Request:
    """What an example is made from; `length` and `count` as in `example`, the essay in words."""

    draw: Random
    length: int
    count: Callable[[str], int]
    depth: float
    essay: list[str]


@dataclass(frozen=True)
class Draft:
    """An example but for the size of its haystack: `render(size)` is the prompt, for sizes from `least` to `most`."""

    render: Callable[[int], str]
    references: list[str]
    new_tokens: int
    haystack: str
    least: int
    most: int
    depth: float | None = None


RULER: Registry[Callable[[Request], Draft]] = Registry("RULER task")


@dataclass(frozen=True)
class Needles:
    """What is hidden in what.

    Attributes:
        haystack: "repeat" (five short sentences, over and over), "needles" (of other keys) or "user text".
        keys, values: "words", "numbers" (of seven digits) or "uuids".
        num_keys, num_values: needles are so many keys, each with so many values.
        num_queries: keys that are asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


NEEDLES = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles(USER_TEXT),
    "niah_single_3": Needles(USER_TEXT, values="uuids"),
    "niah_multikey_1": Needles(USER_TEXT, num_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", keys="uuids", values="uuids"),
    "niah_multivalue": Needles(USER_TEXT, num_values=4),
    "niah_multiquery": Needles(USER_TEXT, num_keys=4, num_queries=4),
}


def needle_in_a_haystack(kind: Needles, request: Request) -> Draft:
    """`One of the special magic numbers for KEY is: VALUE.`, hidden in a haystack and asked for by its key."""
    draw, hidden = request.draw, kind.num_keys * kind.num_values
    single = kind.num_values * kind.num_queries == 1
    others = min(request.length, len(PAIRS) - kind.num_keys) if kind.haystack == "needles" else 0
    keys, values = _distinct(kind.keys, kind.num_keys + others, draw), _distinct(kind.values, hidden + others, draw)
    owners = [key for key in keys[: kind.num_keys] for _ in range(kind.num_values)] + keys[kind.num_keys :]
    lines = [NEEDLE.format(kind.values, key, value) for key, value in zip(owners, values, strict=True)]
    depths = draw.sample(DEPTHS, hidden)
    if single:
        depths[0] = request.depth
    asked = keys[: kind.num_queries]
    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    some, are, what = ("A", "is", "What is") if single else ("Some", "are", "What are all")
    magic = kind.values[:-1] if single else kind.values

    def render(size: int) -> str:
        if kind.haystack == USER_TEXT:
            units, space = re.split(r"(?<=[.!?]) ", " ".join(request.essay[:size])), " "
        else:
            units, space = ([NOISE] * size if kind.haystack == "repeat" else lines[hidden : hidden + size]), "\n"
        whole = len(units)
        for depth, needle in sorted(zip(depths, lines[:hidden], strict=True), reverse=True):
            units.insert(int(depth * whole), needle)
        return (
            f"{some} special magic {magic} {are} hidden within the following text. Make sure to memorize it. I will "
            f"quiz you about the {magic} afterwards.\n{space.join(units)}\n{what} the special magic {magic} for "
            f"{query} mentioned in the provided text? The special magic {magic} for {query} mentioned in the provided "
            f"text {are}"
        )

    most = {"repeat": request.length, "needles": others, USER_TEXT: len(request.essay)}[kind.haystack]
    references = values[: kind.num_queries * kind.num_values]
    return Draft(render, references, 128, kind.haystack, 1, most, request.depth if single else None)


for name, needles in NEEDLES.items():
    RULER.add(name)(partial(needle_in_a_haystack, needles))


@RULER.add("vt")
def variable_tracking(request: Request) -> Draft:
    """`VAR A = 12345`, `VAR B = VAR A`, … among short sentences; all five names are asked for.

    A worked example stands before it, of names of three letters and as many sentences as fit 500 tokens.
    """
    worked, known = _chain(request.draw, 3)
    size = _largest(lambda size: request.count(worked(size)), WORKED - 30, 1, WORKED)
    example = f"{worked(size)}  {' '.join(known)}\n\n\n\n"
    render, asked = _chain(request.draw, 5)
    return Draft(lambda size: example + render(size), asked, 30, "repeat", 1, request.length)


def _chain(draw: Random, letters: int) -> tuple[Callable[[int], str], list[str]]:
    """The prompt by its number of noise sentences, and the names in it, of so many letters."""
    names = _codes(ascii_uppercase, letters, 5, draw)
    value, order = draw.randrange(10_000, 99_999), draw.getrandbits(64)
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]

    def render(size: int) -> str:
        sentences = [f"{NOISE}\n"] * size
        if size <= len(chain):  # too few places between them: RULER cuts them up
            parts = [part for sentence in sentences for part in sentence.split(".")]
            sentences = [f"{part}." if part.strip() else part for part in parts]
        places = sorted(Random(order).sample(range(len(sentences)), len(chain)))
        for before, (place, assignment) in enumerate(zip(places, chain, strict=True)):
            sentences.insert(place + before, assignment)
        context = " ".join(sentences).replace(". \n", ".\n")
        return (
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            f"the chain(s) of variable assignment in the text above, {len(chain)} variables are assgined the value "
            f"{value}, they are:"
        )

    return render, names


@RULER.add("cwe")
def common_words(request: Request) -> Draft:
    """Ten words of a numbered list stand there 30 times, the others 3 times (below 4096 tokens: 6 and 1)."""
    shown, often, asked = (20, (3, 1), (6, 1)) if request.length < 4096 else (40, (10, 3), (30, 3))
    drawn = ["".join(pair) for pair in request.draw.sample(PAIRS, len(PAIRS))]
    known, rest, order = drawn[:shown], drawn[shown:], request.draw.getrandbits(64)

    def ask(words: list[str], times: tuple[int, int]) -> str:
        listed = words[:10] * times[0] + words[10:] * times[1]
        Random(order).shuffle(listed)
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{_numbered(listed)}\nQuestion: What are the 10 most common words in the above "
            "list? Answer: The top 10 words that appear most often in the list are:"
        )

    example = ask(known, often) + _numbered(known[:10])
    return Draft(lambda size: f"{example}\n{ask(rest[:size], asked)}", rest[:10], 120, "words", 20, len(rest))


@RULER.add("fwe")
def frequent_words(request: Request) -> Draft:
    """Coded words by Zipf's law with exponent 2, the first of them dots; the next three are asked for.

    The vocabulary has length/50 words, but at least five. So has the text 74: in fewer, the fifth word might stand
    there as often as the fourth.
    """
    codes, order = _codes(ascii_lowercase, 6, max(request.length // 50, 5), request.draw), request.draw.getrandbits(64)
    words = ["...", *codes[1:]]

    def render(size: int) -> str:
        listed = [word for k, word in enumerate(words, 1) for _ in range(int(size * 6 / (math.pi * k) ** 2))]
        Random(order).shuffle(listed)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(listed)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text? Answer: According "
            "to the coded text above, the three most frequently appeared words are:"
        )

    return Draft(render, words[1:4], 50, "coded words", 74, request.length)


def names(essay: bool = True) -> list[str]:
    """The tasks that can be made, with an essay or without."""
    return [name for name in RULER if essay or name not in NEEDLES or NEEDLES[name].haystack != USER_TEXT]


def example(
    task: str, length: int, count: Callable[[str], int], *, seed: int = 0, index: int = 0, essay: str | None = None
) -> Example:
    """Example `index` of a task, a pure function of its arguments.

    Args:
        task: one of `names()`.
        length: tokens of the prompt and of what is written after it, together; the example has at most so many.
        count: the number of tokens of a text.
        essay: the text that the needles of some tasks are hidden in.

    Raises:
        ValueError: an unknown task, a task that needs an essay without one, or a length for which there is no prompt:
            shorter than the least, or longer than the task's words or the essay can fill.
    """
    draft_of, words = RULER[task], (essay or "").split()
    if task not in names(essay=bool(words)):
        raise ValueError(f"{task} needs an essay; without one, choose from: {', '.join(names(essay=False))}")
    depth = 3 * index % LEVELS / (LEVELS - 1)  # in steps of 3, so that the first few lie far apart
    draft = draft_of(Request(Random(f"{task}/{length}/{seed}/{index}"), length, count, depth, words))
    size = _largest(lambda size: count(draft.render(size)), length - draft.new_tokens, draft.least, draft.most)
    prompt = draft.render(size)
    tokens = count(prompt) + draft.new_tokens
    if tokens > length:
        raise ValueError(f"{task} needs at least {tokens} tokens with this tokenizer; got a length of {length}")
    if size == draft.most and tokens < length:
        raise ValueError(f"{task} has at most {tokens} tokens with this tokenizer and essay; got a length of {length}")
    return Example(prompt, tuple(draft.references), draft.new_tokens, draft.haystack, draft.depth)


def _largest(tokens: Callable[[int], int], budget: int, least: int, most: int) -> int:
    """The largest size of `least` … `most` with at most `budget` tokens; `least` if none has.

    Doubles the size until it is too large; then bisects, every other time where the line through both ends crosses.
    """
    low = high = least
    at_low = at_high = tokens(least)
    while at_high <= budget:
        low, at_low = high, at_high
        if low == most:
            return low
        high = min(2 * low, most)
        at_high = tokens(high)
    halve = False
    while high - low > 1:
        crossing = low + (budget - at_low) * (high - low) // (at_high - at_low)
        middle = (low + high) // 2 if halve else max(crossing, low + 1)
        at, halve = tokens(middle), not halve
        if at <= budget:
            low, at_low = middle, at
        else:
            high, at_high = middle, at
    return low


def _distinct(kind: str, number: int, draw: Random) -> list[str]:
    """So many different keys or values of a kind."""
    if kind == "words":
        return ["-".join(pair) for pair in draw.sample(PAIRS, number)]
    if kind == "numbers":
        return [str(i) for i in draw.sample(range(10**6, 10**7), number)]
    return [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(number)]


def _codes(alphabet: str, letters: int, number: int, draw: Random) -> list[str]:
    """So many different strings of random letters."""
    codes = draw.sample(range(len(alphabet) ** letters), number)
    return ["".join(alphabet[code // len(alphabet) ** i % len(alphabet)] for i in range(letters)) for code in codes]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
