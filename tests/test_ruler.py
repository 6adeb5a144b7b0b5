"""RULER's tasks: RULER's wording, answers that the prompts determine, lengths; scores; the figure."""

import importlib
import re
import sys
from collections import Counter
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_raises

from halflife import LanguageModel, preset
from halflife.data.tokenizers import ByteTokenizer
from halflife.evaluation import ruler as evaluation
from halflife.evaluation.batched import generate
from halflife.evaluation.ruler import standard_error
from halflife.report.figures.matplotlib_renderer import draw
from halflife.report.figures.ruler import ruler_figure, write_figure
from halflife.report.tables.evaluation import evaluation_table
from halflife.tasks.ruler import HAYSTACK_PARTS, NEEDLES, NOISE, RULER, Request, example, names

ESSAY = " ".join(f"Some day number {i} of the year {i * i} was rather {'un' * (i % 5)}eventful." for i in range(900))
NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.")
LENGTHS = {"cwe": 2048, "vt": 2048}  # all others have 1500
MODEL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}

each_task = pytest.mark.parametrize("name", names())
quiet = pytest.mark.filterwarnings("ignore")  # warnings of the harness and its imports


def count(text):
    return len(text.encode())


def make(name, index=0, seed=0, length=None, count=count):
    return example(name, length or LENGTHS.get(name, 1500), count, seed=seed, index=index, essay=ESSAY)


def solve(name, prompt):
    if name in NEEDLES:
        asked = re.findall(r"[\w-]+", re.search(r"magic \w+ for (.*?) mentioned", prompt)[1].replace(" and ", " "))
        return [value for key in asked for found, value in NEEDLE.findall(prompt) if found == key]
    if name == "vt":
        question = prompt.split("\n\nMemorize")[1]
        known, value = [], re.search(r"assigned the value (\d+)", question)[1]
        for new, old in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", question):
            known += [new] if old == value or old in known else []
        return known
    if name == "cwe":
        words = re.findall(r"\d+\. (\w+)", prompt.split("Below is")[2].split("Question")[0])
        return [word for word, _ in Counter(words).most_common(10)]
    text = prompt.split("coded words. ")[1].split("\nQuestion")[0].split()
    return [word for word, _ in Counter(text).most_common(4)[1:]]


@pytest.fixture(scope="module")
def theirs():
    """RULER of lm-evaluation-harness, without the word lists and the sentence splitter that it would download."""
    lists = {kind: ["word"] for kind in ("nouns", "adjectives", "verbs", "noun", "adjective", "verb")}
    words = SimpleNamespace(RandomWord=lambda: SimpleNamespace(_categories=lists))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wonderwords", words)
        patch.setattr("nltk.data.find", lambda name: name)
        files = ("prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils")
        yield SimpleNamespace(**{file: importlib.import_module(f"lm_eval.tasks.ruler.{file}") for file in files})
        for module in [module for module in sys.modules if module.startswith("lm_eval.tasks.ruler.")]:
            del sys.modules[module]


def squeezed(text):
    """Remove the empty sentences that RULER puts around needles at the ends of an essay."""
    return re.sub(" +", " ", text).replace("\n ", "\n")


@quiet
@pytest.mark.parametrize("name", NEEDLES)
@pytest.mark.parametrize("index", [0, 1])
def test_needles_are_worded_as_rulers(name, index, theirs, monkeypatch):
    """RULER's generator writes our prompt if it is given our needles and their places."""
    prepare, kind, made = theirs.prepare_niah, NEEDLES[name], make(name, index)
    context = made.prompt.split("\n", 1)[1].rsplit("\nWhat ", 1)[0]
    essay = kind.haystack == "user text"
    units = re.split(r"(?<=[.!?]) ", context) if essay else context.split("\n")
    # Keys that are asked for come before other needles' keys; all other lines with keys and values are haystack.
    values = dict.fromkeys(made.references)
    needles = [i for i, unit in enumerate(units) if NEEDLE.match(unit) and (essay or NEEDLE.match(unit)[2] in values)]
    assert len(needles) == kind.num_keys * kind.num_values
    pairs = [NEEDLE.match(units[i]).groups() for i in needles]
    grouped: dict[str, list[str]] = {}
    for key, value in sorted(pairs, key=lambda pair: list(made.references).index(pair[1]) if pair[1] in values else 99):
        grouped.setdefault(key, []).append(value)
    others = [unit for i, unit in enumerate(units) if i not in needles]
    drawn = [text for key, own in grouped.items() for text in (key, *own)]
    drawn += [text for unit in others if kind.haystack == "needles" for text in NEEDLE.match(unit).groups()]
    random_texts = iter(drawn)
    places = [i - before for before, i in enumerate(needles)]
    depths = [100 * (place + 0.5) / len(others) for place in places] if essay else places
    samples = iter([depths, list(range(kind.num_queries))])
    stub = SimpleNamespace(
        sample=lambda *_: next(samples),
        Random=lambda _: SimpleNamespace(shuffle=lambda lines: lines.sort(key=context.index)),
    )
    monkeypatch.setattr(prepare, "random", stub)
    monkeypatch.setattr(prepare, "generate_random", lambda _: next(random_texts))
    monkeypatch.setattr(prepare, "cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?]) ", text))
    style = {"repeat": "repeat", "needles": "needle", "user text": "essay"}[kind.haystack]
    haystack = " ".join(others).split() if essay else prepare.get_haystack(type_haystack=style)
    settings = {
        "type_haystack": style, "type_needle_k": kind.keys, "type_needle_v": kind.values,
        "num_needle_k": kind.num_keys, "num_needle_v": kind.num_values, "num_needle_q": kind.num_queries,
        "template": theirs.niah_utils.TEMPLATE,
    }  # fmt: skip
    text, answers, query = prepare.generate_input_output(len(haystack) if essay else len(others), haystack, **settings)
    assert answers == list(made.references)
    monkeypatch.setattr(prepare, "generate_input_output", lambda *_, **__: (text, answers, query))
    ten = SimpleNamespace(input_ids=range(10))  # so few tokens that the sample fits unchanged
    (row,) = prepare.generate_samples(haystack, lambda _: ten, max_seq_length=138, num_samples=1, **settings)
    assert squeezed(made.prompt) == squeezed(f"{row['input']} {row['gen_prefix']}")


@quiet
@pytest.mark.parametrize("length", [1800, 4096])
def test_chains_are_worded_as_rulers(length, theirs):
    """The prompts agree except for names, numbers, places, the number of noise sentences, and RULER's later changes."""

    def skeleton(text):
        text = re.sub(r"VAR [A-Z]+ = (?:VAR [A-Z]+ |\d+)\s?", "", text)
        text = re.sub(r"\d{5}", "NUMBER", re.sub(r"\b([A-Z]{3}|[A-Z]{5})\b", "NAME", text))
        return re.sub(f"({re.escape(NOISE)}\n ?)+", "NOISE\n", squeezed(text))

    def words(text):
        return SimpleNamespace(input_ids=text.split())

    module = theirs.vt_utils
    module.random.seed(0)  # theirs fails where it draws the same name twice, about once in 2,000 times
    (shot,) = module.sys_vartrack_w_noise_random(words, num_samples=1, max_seq_length=500, incremental=5)
    (row,) = module.sys_vartrack_w_noise_random(words, num_samples=1, max_seq_length=900, icl_example=shot)
    made = make("vt", length=length)
    later = skeleton(f"{row['input']} {row['gen_prefix']} ").replace("assgined", "assigned")
    assert skeleton(made.prompt) == re.sub("\n{4}", "\n\n", later).replace("\n\nQuestion", "\nQuestion")


def test_chains_have_a_line_for_each_assignment():
    """A literal listing of RULER's current prompt, for the chains and the places of ours."""
    for length in (1800, 4096):
        made = make("vt", length=length)
        worked, question = re.split(r"\n\n(?=Memorize)", made.prompt)
        names_of = [re.findall(r"VAR ([A-Z]+) = ", part) for part in (worked, question)]
        assert [len(name) for part in names_of for name in part] == [3] * 5 + [5] * 5
        assert list(made.references) == names_of[1]
        for part, named in zip((worked, question), names_of, strict=True):
            value = re.search(r"= (\d{5})\n", part)[1]
            chain = [f"VAR {named[0]} = {value}"] + [f"VAR {new} = VAR {old} " for old, new in pairwise(named)]
            lines = part.split("\n\n", 1)[1].split("\nQuestion")[0].split("\n")
            assert [line for line in lines if line != NOISE] == chain
            literal = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            literal += "".join(line + "\n" for line in lines)
            literal += f"Question: Find all variables that are assigned the value {value} in the text above."
            literal += " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are"
            literal += f" assigned the value {value}, they are: "
            assert part == literal + (f" {' '.join(named)}" if part == worked else "")
        # The worked example has the largest number of sentences within 500 tokens, here bytes, but at least five.
        assert worked.count(NOISE) == 5


def test_the_worked_chain_has_500_tokens():
    made = make("vt", length=3000, count=lambda text: len(text.split()))
    worked, _ = re.split(r"\n\n(?=Memorize)", made.prompt)
    prompt = worked.rsplit(" ", 5)[0]
    assert 500 - len(NOISE.split()) < len(prompt.split()) <= 500


@quiet
@pytest.mark.parametrize("length", [2048, 8192])
def test_common_words_are_asked_for_as_ruler_does(length, theirs, monkeypatch):
    made = make("cwe", length=length)
    lists = re.findall(r"often\.\n(.*)\nQuestion", made.prompt)
    counts = [Counter(re.findall(r"[a-z]+", text)) for text in lists]
    worked = re.findall(r"\d+\. (\w+)", re.search(r"are: (1\..*)\n", made.prompt)[1])

    def get_example(num_words, common_repeats=30, uncommon_repeats=3, common_nums=10):
        text, found = lists.pop(0), counts.pop(0)
        times = [common_repeats] * common_nums + [uncommon_repeats] * (num_words - common_nums)
        assert sorted(found.values(), reverse=True) == times
        return text, worked if len(counts) else list(made.references)

    monkeypatch.setattr(theirs.cwe_utils, "get_example", get_example)
    shown, asked, answers = theirs.cwe_utils.generate_input_output(len(counts[1]), length)
    assert made.prompt == f"{shown}\n{asked}".replace("are:1.", "are: 1.")
    assert answers == list(made.references)


@quiet
@pytest.mark.parametrize("size", [74, 75, 300, 1000])
def test_frequent_words_are_as_frequent_as_rulers(size, theirs):
    draft = RULER["fwe"](Request(Random(0), 4146, count, 0, []))
    one = SimpleNamespace(input_ids=[0])
    text, _, _ = theirs.fwe_utils.generate_input_output(4096, lambda _: one, num_words=size, vocab_size=4096 // 50)

    def parts(text):
        start, rest = text.split("coded words. ", 1)
        coded, question = rest.split("\n", 1)
        return start, sorted(Counter(coded.split()).values()), coded.split().count("..."), question

    assert parts(draft.render(size)) == parts(text)


@each_task
def test_prompts_have_their_answers(name):
    """The references are the answers of a reader, have the requested number, and differ from each other."""
    number = {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    for index in range(12):
        made = make(name, index)
        assert sorted(solve(name, made.prompt)) == sorted(made.references)
        assert len(set(made.references)) == number
        if name in NEEDLES:
            assert all(made.prompt.count(value) == 1 for value in made.references)


# Largest number of bytes by which a haystack grows: a sentence, a line, or a word (three times, with its numbers).
UNITS = {"niah_single_1": 91, "niah_multikey_2": 70, "niah_multikey_3": 127, "vt": 92, "cwe": 51, "fwe": 30}


@each_task
def test_prompts_fill_their_length(name):
    longest = max(map(len, ESSAY.split())) + 1
    for length in (8192, 10_001, 16_384):
        made = make(name, length=length)
        tokens = count(made.prompt) + made.new_tokens
        assert length - UNITS.get(name, longest) < tokens <= length


def test_prompts_fill_their_length_in_any_tokens():
    """A token may have 64 characters, or a character seven tokens."""
    for tokens in (lambda text: len(text) // 64, lambda text: 7 * len(text)):
        made = make("niah_single_1", length=8192, count=tokens)
        assert 8192 - tokens(92 * ".") <= tokens(made.prompt) + made.new_tokens <= 8192


@each_task
def test_examples_are_a_function_of_seed_and_index(name):
    first = make(name)
    assert make(name) == first
    answers = {make(name, index, seed).references for seed in range(3) for index in range(3)}
    assert len(answers) == 9


@pytest.mark.parametrize("name", [name for name in NEEDLES if make(name).depth is not None])
def test_needles_lie_at_every_depth(name):
    examples = [make(name, index, length=8192) for index in range(HAYSTACK_PARTS)]
    depths = sorted(made.depth for made in examples)
    assert [min(int(10 * depth), 9) for depth in depths] == list(range(10))
    assert (depths == pytest.approx([i / 9 for i in range(10)])) == (NEEDLES[name].haystack == "user text")
    for made in examples:
        context = made.prompt.split("\n", 1)[1].rsplit("\nWhat ", 1)[0]
        units = re.split(r"(?<=[.!?]) ", context) if NEEDLES[name].haystack == "user text" else context.split("\n")
        (place,) = [i for i, unit in enumerate(units) if made.references[0] in unit]
        # Each of the other needles, at most three, moves it by one.
        assert abs(place - made.depth * (len(units) - 1)) <= NEEDLES[name].num_keys


def test_places_between_repeated_sentences_are_uniform():
    """RULER draws the place from all places. Every place occurs, equally often within the error of the draws."""
    draws, size = 2000, 25
    places = Counter()
    for index in range(draws):
        draft = RULER["niah_single_1"](Request(Random(index), 4096, count, 3 * index % HAYSTACK_PARTS, []))
        lines = draft.render(size).split("\n")[1:-1]
        (place,) = [i for i, line in enumerate(lines) if line != NOISE]
        assert len(lines) == size + 1
        places[place] += 1
    assert set(places) == set(range(size))
    chi_squared = sum((n - draws / size) ** 2 / (draws / size) for n in places.values())
    assert chi_squared < 43  # 99 % of uniform draws, with 24 degrees of freedom


def test_several_answers_have_no_depth():
    assert all(make(name).depth is None for name in ("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"))


def test_haystacks_of_the_user_are_labelled():
    mine = {name for name in names() if make(name).haystack == "user text"}
    assert mine == set(names()) - set(names(essay=False))
    assert names(essay=False) == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]


@each_task
def test_a_length_that_is_too_short(name):
    with pytest.raises(ValueError, match=f"{name} needs at least [0-9]+ tokens") as error:
        make(name, length=100)
    least = int(re.search(r"least (\d+)", str(error.value))[1])
    assert count(make(name, length=least + 100).prompt) <= least + 100


def test_a_length_that_cannot_be_filled():
    with pytest.raises(ValueError, match=r"at most \d+ tokens with this tokenizer and essay"):
        example("niah_single_2", 8192, count, essay="A short text. It ends here.")
    assert_raises(ValueError, "at most 128 tokens", make, "niah_single_1", count=lambda text: 0)


def test_unknown_tasks_and_missing_essays():
    with pytest.raises(ValueError, match=r"unknown RULER task 'niah_single'.*niah_single_1, niah_single_2.*fwe"):
        example("niah_single", 1024, count)
    for essay in (None, " \n"):
        with pytest.raises(
            ValueError, match=r"niah_multiquery needs an essay; without one.* niah_single_1, niah_multikey_2"
        ):
            example("niah_multiquery", 1024, count, essay=essay)


class Reader(LanguageModel):
    """A stand-in for a model with padding and state; it writes the entry of `answers` for the text before."""

    def __init__(self, answers):
        super().__init__(preset("simple", vocab_size=300, **MODEL))
        self.answers = answers
        self.calls = []

    def hidden(self, ids, state=None, cu_seqlens=None, attention_mask=None, action_mask=None, call=None):
        self.calls.append(ids.shape)
        new = ids if attention_mask is None else torch.where(attention_mask, ids, -1)
        seen = new if state is None else torch.cat([state[0]["seen"], new], 1)
        wanted = torch.zeros(*ids.shape, 1)
        for row, line in enumerate(seen.tolist()):
            text = bytes(i for i in line if i >= 0).decode()
            prompt = next((prompt for prompt in self.answers if text.startswith(prompt)), None)
            if prompt is not None:
                rest = self.answers[prompt].encode()[len(text) - len(prompt) :]
                wanted[row, -1] = rest[0] if rest else 256
        return wanted, ({"seen": seen},)

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[..., 0].long(), 300).float()


def evaluate(model, tasks, lengths, **settings):
    settings = {"examples": 5, "essay": ESSAY, "seed": 3, **settings}
    return evaluation.evaluate(model, ByteTokenizer(end_of_document=True), tasks, lengths, **settings)


def reader(write, tasks=names(), lengths=(2048,)):  # noqa: B008 (the list is never changed)
    prompts = [make(task, i, 3, length) for task in tasks for length in lengths for i in range(5)]
    return Reader({made.prompt: write(made.references) for made in prompts})


def test_a_model_that_finds_the_needle_scores_one(monkeypatch):
    """Case does not matter, and prompts are read in pieces. Ten words of a list fit RULER's number of new tokens."""
    monkeypatch.setattr("halflife.evaluation.batched.PIECE_TOKENS", 1500)
    model = reader(lambda references: f" {' '.join(references).upper()}").train()
    result = evaluate(model, names(), [2048], batch_size=3)
    assert [row["score"] for row in result.rows] == [1.0] * len(names())
    assert [(row["task"], row["length"], row["examples"]) for row in result.rows] == [(t, 2048, 5) for t in names()]
    assert {row["task"] for row in result.rows if row["haystack"] == "user text"} == set(names()) - set(names(False))
    assert [row["depth"] for row in result.details if row["task"] == "niah_single_1"] == [
        make("niah_single_1", i, 3, 2048).depth for i in range(5)
    ]
    assert {width for rows, width in model.calls if rows == 3 and width > 1} <= set(range(501))  # a piece of 1500
    assert model.training


def test_the_score_is_the_fraction_that_was_found():
    tasks = ("niah_multivalue", "vt")
    result = evaluate(reader(lambda references: f"{references[0]} {references[2]}", tasks), tasks, [2048])
    assert [row["score"] for row in result.rows] == pytest.approx([2 / 4, 2 / 5])
    assert [row["score"] for row in result.details] == pytest.approx([2 / 4] * 5 + [2 / 5] * 5)


def test_a_model_that_writes_nothing_scores_zero():
    tasks = ("niah_single_1", "vt")
    model = reader(lambda references: "", tasks)
    assert [row["score"] for row in evaluate(model, tasks, [2048]).rows] == [0, 0]
    # The end token stops a batch at once. Each batch (of 4 and of 1) is read, without another call.
    assert all(width > 1 for _, width in model.calls)


def test_text_after_the_last_token_does_not_count():
    """A UUID that ends with the 128th token counts; one that ends a letter later does not."""
    for before, score in ((92, 1), (93, 0)):
        model = reader(lambda references, before=before: "." * before + references[0], ["niah_multikey_3"])
        assert evaluate(model, ["niah_multikey_3"], [2048]).rows[0]["score"] == score


class Uneven(ByteTokenizer):
    """A tokenizer of bytes without vowels, so that words of equal length differ in their number of tokens."""

    def encode(self, text):
        return super().encode(re.sub("[aeiou]", "", text))


@pytest.mark.parametrize("name", ["mamba2+post", "gated_deltanet", "llama"])
def test_batches_change_nothing(name, monkeypatch):
    model = LanguageModel(preset(name, vocab_size=257, **MODEL)).double()
    tokenizer, read, written = Uneven(), [], []

    def spy(model, prompts, *arguments, **settings):
        texts = generate(model, prompts, *arguments, **settings)
        read.extend(map(len, prompts))
        written.extend(texts)
        return texts

    monkeypatch.setattr(evaluation, "generate", spy)
    one, three = (evaluation.evaluate(model, tokenizer, ["fwe"], [650], examples=3, batch_size=n) for n in (1, 3))
    assert one == three
    assert written[:3] == written[3:]
    assert [len(ids) for ids in written] == [50] * 6
    assert len(set(read[3:])) > 1


def test_settings_of_the_evaluation(capsys):
    model = reader(lambda references: references[0], ["fwe"])
    assert evaluate(model, ["fwe", "fwe"], [2048], show=True).rows[0]["score"] == pytest.approx(1 / 3)
    assert_raises(ValueError, "name at least one task and one length", evaluate, model, [], [2048])
    assert_raises(ValueError, "at least 1; got 0 and 4", evaluate, model, ["fwe"], [2048], examples=0)
    model.calls.clear()
    assert_raises(ValueError, "vt needs at least", evaluate, model, ["niah_single_1", "vt"], [2048, 700])
    assert not model.calls  # all lengths are checked before the model reads


def test_the_figure_shows_every_mean(tmp_path):
    scores = {("niah_single_2", 1024): 0.2, ("niah_single_2", 1500): 0.4, ("vt", 1024): 0.6, ("vt", 1500): 1.0}
    details = [
        {"task": task, "length": length, "depth": depth if task != "vt" else None, "score": score * (1 - depth)}
        for (task, length), score in scores.items()
        for depth in (0.0, 0.5)
    ]
    every, deep = draw(ruler_figure(details)).axes
    assert [text.get_text() for text in every.texts] == ["15", "30", "45", "75"]
    assert [text.get_text() for text in deep.texts] == ["20", "40", "10", "20"]  # one row for each tenth
    assert [label.get_text() for label in deep.get_yticklabels()] == ["0 to 10", "50 to 60"]
    assert [label.get_text() for label in every.get_yticklabels()] == ["niah_single_2 (user text)", "vt"]
    assert [label.get_text() for label in deep.get_xticklabels()] == ["1K", "1,500"]
    assert [file.name for file in write_figure(details, tmp_path)] == ["ruler.png", "ruler.svg"]
    assert all(file.stat().st_size > 1000 for file in tmp_path.iterdir())
    assert_raises(ValueError, "no example", ruler_figure, [])


def test_scores_have_errors_also_where_nothing_is_found():
    """Agresti and Coull's: 0 of 20 is (2/24)(22/24)/24 under the root. A table has it beside the level of a guess."""
    assert standard_error(0, 20) == pytest.approx((2 / 24 * 22 / 24 / 24) ** 0.5)
    assert standard_error(20, 20) == pytest.approx(standard_error(0, 20))
    row = {"task": "niah", "metric": "found", "value": 0.0, "stderr": standard_error(0, 20), "guess": 0.0}
    assert evaluation_table([row]).markdown().splitlines()[-1] == "| niah | found | 0.0000 | 0.0564 | 0.0000 |"
