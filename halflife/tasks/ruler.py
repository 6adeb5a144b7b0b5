"""RULER's tasks in text, generated without a network: needles, chains of variables, common and frequent words.

The wording and the sizes are those of RULER's current code (Hsieh et al., 2024; `NVIDIA/RULER`). The prompt ends with
the first words of the answer, and a length counts the tokens of the prompt and of its continuation. The tasks here
differ from RULER's as follows:

* A word is an adjective of four letters and a noun of three from the lists in `words.py` (`bold-cat` as a key,
  `boldcat` in a list). RULER takes words from the package wonderwords. Here no word contains another.
* Keys, values and names are all different, so no question has two answers.
* The user gives the essay, which is split into sentences at `.`, `!` and `?`. RULER uses essays of Paul Graham.
* If one needle is the answer, ten examples in a row have it once in each tenth of the haystack. In an essay it lies at
  ten evenly spaced depths, where RULER draws one of forty depths. Between repeated sentences and between other needles
  its place is uniform within the tenth, where RULER draws it uniformly from all places. Other needles in an essay are
  at random ones of RULER's forty depths.
* The haystack is the largest that fits, by bisection. If none fits, the length is an error.

lm-evaluation-harness has an older copy of RULER. Its `vt` has "assgined", puts an assignment on the line of the next
sentence, has an empty line before a question and four line breaks after the worked example, counts 30 tokens of an
answer for the example's length, and no space ends the prompt. Its `cwe` leaves out the space before the worked answer
and puts the line ` Answer: …` into a separate paragraph. Its `fwe` has length/50 words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase

from halflife.registry import Registry
from halflife.tasks.words import PAIRS, draw_codes, draw_distinct, numbered

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {} for {} is: {}."
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # RULER's depths
HAYSTACK_PARTS = 10  # parts of the haystack, for a needle that is the only answer
WORKED_TOKENS = 500  # tokens of the worked example of variable tracking without its answer, as in RULER
NUM_LINKS = 5  # variables of a chain
USER_TEXT = "user text"


@dataclass(frozen=True)
class Example:
    """A prompt, and the strings that its continuation must contain.

    Examples 0 to 9 have one depth in each tenth, and so do the next ten.
    """

    prompt: str  # the text to read
    references: tuple[str, ...]  # the score is the fraction of these strings that the continuation contains
    new_tokens: int  # number of tokens of the continuation, RULER's number for the task
    haystack: str  # kind of text around the answer; "user text" is the user's essay
    depth: float | None = None  # position, from 0 (start) to 1 (end), of the only needle that is an answer


@dataclass(frozen=True)
class Request:
    """The inputs from which an example is made; `length` and `count` as in `example`."""

    draw: Random
    length: int
    count: Callable[[str], int]
    level: int  # tenth of the haystack that has a needle that is the only answer, 0 to 9
    essay: list[str]  # words


@dataclass(frozen=True)
class Draft:
    """An example whose haystack has no size yet: `render(size)` is its prompt, for sizes from `least` to `most`."""

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
    """A kind of needles in a kind of haystack."""

    haystack: str  # "repeat" (five short sentences, repeated), "needles" (with other keys) or "user text"
    keys: str = "words"  # kind of keys, "words", "numbers" (of seven digits) or "uuids"
    values: str = "numbers"  # kind of values, as for keys
    num_keys: int = 1
    num_values: int = 1  # number of values, and of needles, for each key
    num_queries: int = 1  # number of keys that are queried


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
    """Needles `One of the special magic numbers for KEY is: VALUE.` in a haystack, queried by their keys."""
    draw, hidden = request.draw, kind.num_keys * kind.num_values
    single = kind.num_values * kind.num_queries == 1
    others = min(request.length, len(PAIRS) - kind.num_keys) if kind.haystack == "needles" else 0
    keys = draw_distinct(kind.keys, kind.num_keys + others, draw)
    values = draw_distinct(kind.values, hidden + others, draw)
    owners = [key for key in keys[: kind.num_keys] for _ in range(kind.num_values)] + keys[kind.num_keys :]
    lines = [NEEDLE.format(kind.values, key, value) for key, value in zip(owners, values, strict=True)]
    depths = draw.sample(DEPTHS, hidden)
    if kind.haystack != USER_TEXT:
        depths[0] = (request.level + draw.random()) / HAYSTACK_PARTS
    elif single:
        depths[0] = request.level / (HAYSTACK_PARTS - 1)
    asked = keys[: kind.num_queries]
    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    some, are, what = ("A", "is", "What is") if single else ("Some", "are", "What are all")
    magic = kind.values[:-1] if single else kind.values

    def render(size: int) -> str:
        if kind.haystack == USER_TEXT:
            units, space = re.split(r"(?<=[.!?]) ", " ".join(request.essay[:size])), " "
        else:
            units, space = [NOISE] * size if kind.haystack == "repeat" else lines[hidden : hidden + size], "\n"
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
    return Draft(render, references, 128, kind.haystack, 1, most, depths[0] if single else None)


for name, needles in NEEDLES.items():
    RULER.add(name)(partial(needle_in_a_haystack, needles))


@RULER.add("vt")
def variable_tracking(request: Request) -> Draft:
    """`VAR A = 12345`, `VAR B = VAR A`, … among short sentences; all five names are queried.

    A worked example comes first. It has names of three letters and as many sentences as fit into 500 tokens.
    """
    worked, known = _chain(request.draw, 3)
    size = _largest(lambda size: request.count(worked(size)), WORKED_TOKENS, NUM_LINKS, WORKED_TOKENS)
    example = f"{worked(size)} {' '.join(known)}\n\n"
    render, asked = _chain(request.draw, 5)
    return Draft(lambda size: example + render(size), asked, 30, "repeat", NUM_LINKS, request.length)


def _chain(draw: Random, letters: int) -> tuple[Callable[[int], str], list[str]]:
    """Return the prompt as a function of its number of noise sentences, and the names in it."""
    names = draw_codes(ascii_uppercase, letters, NUM_LINKS, draw)
    value, order = draw.randrange(10_000, 99_999), draw.getrandbits(64)
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]

    def render(size: int) -> str:
        lines = [NOISE] * size
        for before, place in enumerate(sorted(Random(order).sample(range(size), NUM_LINKS))):
            lines.insert(place + before, chain[before])
        context = "\n".join(lines)
        return (
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            f"the chain(s) of variable assignment in the text above, {NUM_LINKS} variables are assigned "
            f"the value {value}, they are: "
        )

    return render, names


@RULER.add("cwe")
def common_words(request: Request) -> Draft:
    """Ten words of a numbered list occur 30 times each, the others 3 times (below 4096 tokens: 6 and 1)."""
    shown, often, asked = (20, (3, 1), (6, 1)) if request.length < 4096 else (40, (10, 3), (30, 3))
    drawn = ["".join(pair) for pair in request.draw.sample(PAIRS, len(PAIRS))]
    known, rest, order = drawn[:shown], drawn[shown:], request.draw.getrandbits(64)

    def ask(words: list[str], times: tuple[int, int]) -> str:
        listed = words[:10] * times[0] + words[10:] * times[1]
        Random(order).shuffle(listed)
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{numbered(listed)}\nQuestion: What are the 10 most common words in the above "
            "list? Answer: The top 10 words that appear most often in the list are:"
        )

    example = f"{ask(known, often)} {numbered(known[:10])}"
    return Draft(lambda size: f"{example}\n{ask(rest[:size], asked)}", rest[:10], 120, "words", 20, len(rest))


@RULER.add("fwe")
def frequent_words(request: Request) -> Draft:
    """Coded words whose frequencies follow Zipf's law with exponent 2; dots come first, the next three are queried.

    The vocabulary has (length − 50)/50 words, but at least five. The text has at least 74 words, because with fewer the
    fifth word could be as frequent as the fourth.
    """
    codes = draw_codes(ascii_lowercase, 6, max((request.length - 50) // 50, 5), request.draw)
    order = request.draw.getrandbits(64)
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
    """Return the tasks that are possible with an essay or without."""
    return [name for name in RULER if essay or name not in NEEDLES or NEEDLES[name].haystack != USER_TEXT]


def example(
    task: str, length: int, count: Callable[[str], int], *, seed: int = 0, index: int = 0, essay: str | None = None
) -> Example:
    """Return example `index` of a task. The result depends only on the arguments.

    Args:
        task: one of `names()`.
        length: largest number of tokens of the prompt and its continuation together.
        count: function that returns the number of tokens of a text.
        seed: seed of the examples.
        index: index of the example.
        essay: text in which the needles of some tasks are hidden.

    Raises:
        ValueError: the task is unknown, it needs an essay and has none, or the length is less than the shortest prompt
            needs or more than the task's words or the essay can fill.
    """
    draft_of, words = RULER[task], (essay or "").split()
    if task not in names(essay=bool(words)):
        raise ValueError(f"{task} needs an essay; without one, choose from: {', '.join(names(essay=False))}")
    level = 3 * index % HAYSTACK_PARTS  # steps of 3 put the first few examples far apart
    draft = draft_of(Request(Random(f"{task}/{length}/{seed}/{index}"), length, count, level, words))
    size = _largest(lambda size: count(draft.render(size)), length - draft.new_tokens, draft.least, draft.most)
    prompt = draft.render(size)
    tokens = count(prompt) + draft.new_tokens
    if tokens > length:
        raise ValueError(f"{task} needs at least {tokens} tokens with this tokenizer; got a length of {length}")
    if size == draft.most and tokens < length:
        raise ValueError(f"{task} has at most {tokens} tokens with this tokenizer and essay; got a length of {length}")
    return Example(prompt, tuple(draft.references), draft.new_tokens, draft.haystack, draft.depth)


def _largest(tokens: Callable[[int], int], budget: int, least: int, most: int) -> int:
    """Return the largest size from `least` to `most` with at most `budget` tokens, or `least` if there is none.

    The size is doubled until it is too large. Then bisection alternates with linear interpolation between both ends.
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
