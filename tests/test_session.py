"""Sessions: pieces, forks, files, sampling and text; `halflife generate`."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from combinations import SIZES
from helpers import add_noise, assert_raises, cases
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import TopKLogitsWarper, TopPLogitsWarper

from halflife import LanguageModel, Session, preset
from halflife.cli import main
from halflife.data.byte_tokenizer import ByteTokenizer
from halflife.hf import HalflifeForCausalLM
from halflife.models import checkpoint, graphs
from halflife.models.session import next_token
from halflife.models.text import TextStream, draw, pieces_of_text, probabilities
from halflife.ops import arguments

NAMES = ["mamba2", "rwkv7", "llama", "mamba2+ska", "mamba2+gate_rank", "simple+tpe"]


def build(name, **options):
    return add_noise(LanguageModel(preset(name, **{**SIZES, **options})).eval())


@pytest.mark.parametrize("name", NAMES)
def test_pieces_forks_and_files_go_on_from_the_same_state(name, tmp_path):
    model = build(name).double()
    ids = torch.randint(SIZES["vocab_size"], (13,))
    expected = model(ids[None])[0][0, -1]
    session = Session(model, piece_size=5).feed(ids[:7]).feed([]).feed(ids[7:8].tolist())
    assert session.position == 8
    fork = session.fork().feed([0, 1, 2])
    restored = Session(model).load(session.save(tmp_path / "state.safetensors"))
    assert fork.position == 11
    assert restored.position == 8
    assert torch.equal(restored.next_logits, session.next_logits)
    for one in (session, restored):
        # The tolerance is four times the largest error over these models, 1.4e-15.
        torch.testing.assert_close(one.feed(ids[8:]).next_logits, expected, rtol=0, atol=5.6e-15)


def test_bad_files_are_one_line_errors(tmp_path):
    session = Session(build("mamba2")).feed([1, 2])
    path = session.save(tmp_path / "state")
    assert_raises(FileNotFoundError, "there is no file", session.load, tmp_path / "other")
    assert_raises(ValueError, "another configuration", Session(build("mamba2", num_layers=3)).load, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated") as error:
        session.load(path)
    assert "\n" not in str(error.value)
    checkpoint.save(session.model, tmp_path / "model")
    assert_raises(ValueError, "of format", session.load, tmp_path / "model" / "model.safetensors")
    assert session.position == 2
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@cases(
    "use, message",
    (lambda s: s.next_logits, "read nothing"),
    (lambda s: s.sample(1), "read nothing"),
    (lambda s: s.save("x"), "read nothing"),
    (lambda s: s.feed("text"), "tokenizer"),
    (lambda s: s.feed([1]).write(1), "tokenizer"),
    (lambda s: s.feed([31]), "between 0 and 30"),
    (lambda s: s.feed(torch.tensor([0.5])), "integers"),
    (lambda s: s.feed(torch.zeros(1, 2, dtype=torch.long)), "integers"),
    (lambda s: s.feed([1]).sample(1, temperature=-1), "temperature"),
    (lambda s: s.feed([1]).sample(1, top_p=0.0), "top_p"),
    (lambda s: Session(s.model, piece_size=0), "piece_size"),
    (lambda s: Session(s.model.to("meta")), "in memory"),
)
def test_errors(use, message):
    assert_raises(ValueError, message, use, Session(build("mamba2")))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint16, torch.uint32])
def test_tokens_may_have_any_dtype_of_integers(dtype):
    """As those of a corpus on disk, which are as small as its vocabulary allows."""
    model = build("mamba2")
    logits = [Session(model).feed(ids).next_logits for ids in ([3, 1, 2], torch.tensor([3, 1, 2], dtype=dtype))]
    assert torch.equal(*logits)
    assert_raises(ValueError, "between 0 and 30; got 1 to 31", Session(model).feed, torch.tensor([1, 31], dtype=dtype))


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, None), (None, 0.6), (5, 0.5), (1, None), (99, 1.0)])
def test_probabilities_are_those_of_transformers(top_k, top_p):
    logits = 2 * torch.randn(31)
    expected = logits[None] / 0.7
    if top_k is not None:
        expected = TopKLogitsWarper(min(top_k, 31))(None, expected)
    if top_p is not None and top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    # The tolerance is four times the measured error, 6e-8.
    torch.testing.assert_close(probabilities(logits, 0.7, top_k, top_p), expected.softmax(-1)[0], rtol=0, atol=2.4e-7)


def test_samples_have_the_probabilities_of_the_model():
    session = Session(build("mamba2", vocab_size=5)).feed([1])
    expected = session.next_logits.softmax(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(session.next_logits, generator=generator) for _ in range(400)]
    counts = torch.bincount(torch.tensor(drawn), minlength=5) / 400
    assert (counts - expected).abs().max() < 4 * (0.25 / 400) ** 0.5  # four standard deviations at most


def test_what_is_yielded_is_read_and_a_seed_repeats():
    start = Session(build("gla")).feed([1, 2, 3])
    one, other = start.fork(), start.fork()
    tokens = [
        token for token, _ in zip(one.sample(9, generator=torch.Generator().manual_seed(3)), range(4), strict=False)
    ]
    again = list(other.sample(4, generator=torch.Generator().manual_seed(3)))
    assert tokens[:4] == again
    assert other.position == 7
    expected = start.fork().feed(again).next_logits
    torch.testing.assert_close(other.next_logits, expected, rtol=0, atol=1.8e-6)  # four times the error, 4.5e-7
    greedy = list(start.fork().sample(3, temperature=0))
    assert greedy[0] == int(start.next_logits.argmax())


class Fixed(LanguageModel):
    """A stand-in for a model. It writes the bytes of a text, one after the other."""

    def __init__(self, data):
        super().__init__(preset("mamba2", **{**SIZES, "vocab_size": 256}))
        self.data = data

    def logits(self, hidden):
        return torch.nn.functional.one_hot(torch.tensor(self.data.pop(0) if self.data else 0), 256).float()


@pytest.mark.parametrize("tokenizer", [False, True])
def test_text_comes_in_whole_characters(tokenizer):
    text = "aé≠😀z"
    decode = (lambda ids: bytes(ids).decode("utf-8", "replace")) if tokenizer else None
    session = Session(Fixed(list(text.encode())), decode=decode).feed("x")
    assert list(session.write(len(text.encode()), temperature=0)) == list(text)


def test_bytes_that_are_no_text_and_ends():
    data = [0xFF, 0x61, 0xC3, 0xC3, 0xA9, 0xE2, 0x89]
    session = Session(Fixed(list(data))).feed("x")
    assert "".join(session.write(len(data), temperature=0)) == bytes(data).decode("utf-8", "replace")
    session = Session(Fixed(list(b"ab.cd"))).feed("x")
    assert "".join(session.write(5, temperature=0, stop=[ord(".")])) == "ab"


def test_texts_end_the_text():
    """Also where a text begins twice, or ends in the middle of a piece. Text comes as early as it can."""
    for text, stop, expected in [
        ("one. two", ["."], "one"), ("a\n\nb", ["\n\n"], "a"), ("xaaab", ["aab"], "xa"), ("U: hi", ["END", "U:"], ""),
        ("abcd", ["cd", "bc"], "a"), ("abab", ["abc"], "abab"), ("é.😀", ["😀"], "é."),
    ]:  # fmt: skip
        tokens = list(text.encode())
        assert "".join(pieces_of_text(iter(tokens), frozenset(), TextStream(None, stops=stop))) == expected
        assert TextStream(None, stops=stop).push(tokens, final=True) == expected
    pieces = pieces_of_text(iter(b"ab--cd"), frozenset(), TextStream(None, stops=["-->"]))
    assert list(pieces) == ["a", "b", "--c", "d"]
    for stop, expected in (("c", "ab."), ([ord("."), "zz"], "ab")):
        assert "".join(Session(Fixed(list(b"ab.cd"))).feed("x").write(5, temperature=0, stop=stop)) == expected
    session = Session(Fixed(list(b"ab"))).feed("x")
    with pytest.raises(TypeError, match=r"a text, or a list of tokens and texts; got \[True\]"):
        session.write(1, stop=[True])  # other types are refused by the annotations in tests
    assert_raises(ValueError, "must not be empty", session.write, 1, stop="")


def test_generate_reads_folders_of_both_kinds(tmp_path, capsys):
    model = build("mamba2", vocab_size=256)
    checkpoint.save(model, tmp_path / "ours")
    HalflifeForCausalLM.of(model).save_pretrained(tmp_path / "theirs")
    expected = "".join(Session(model).feed("ab").write(6, temperature=0))
    for folder in ("ours", "theirs"):
        capsys.readouterr()
        main(["generate", str(tmp_path / folder), "ab", "--greedy", "--max-new-tokens", "6", "--device", "cpu"])
        assert capsys.readouterr().out == f"ab{expected}\n"
    sampled = ["generate", str(tmp_path / "ours"), "ab", "--seed", "1", "--top-k", "9", "--top-p", "0.9"]
    outputs = []
    for _ in range(2):
        main([*sampled, "--max-new-tokens", "6", "--temperature", "0.5", "--device", "cpu"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_generate_with_more_ids_than_bytes(tmp_path, capsys):
    model = build("mamba2", vocab_size=300)
    checkpoint.save(model, tmp_path)
    ByteTokenizer().save(tmp_path)
    main(["generate", str(tmp_path), "ab", "--greedy", "--max-new-tokens", "6", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("ab")


def test_generate_with_a_tokenizer(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<end>", "red", "green", "blue"])}
    own = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    model = build("mamba2", vocab_size=4)
    checkpoint.save(model, tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path)
    main(["generate", str(tmp_path), "red green", "--greedy", "--max-new-tokens", "3", "--device", "cpu"])
    tokens = list(Session(model).feed([1, 2]).sample(3, temperature=0))
    names = list(words)
    assert capsys.readouterr().out.split() == ["red", "green", *(names[token] for token in tokens)]


@cases(
    "arguments, message",
    (["nowhere", "x"], "there is no folder"),
    (["words", "x"], "no tokenizer"),
    (["bytes", ""], "empty"),
    (["bytes", "x", "--temperature", "0"], "temperature"),
    (["bytes", "x", "--top-p", "2"], "top_p"),
    (["other", "x"], "convert"),
    (["broken", "x"], "tokenizer"),
)
def test_generate_errors_are_one_line(arguments, message, tmp_path, refused):
    checkpoint.save(build("mamba2", vocab_size=256), tmp_path / "bytes")
    checkpoint.save(build("mamba2"), tmp_path / "words")
    checkpoint.save(build("mamba2"), tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    assert message in refused("generate", str(tmp_path / arguments[0]), *arguments[1:], "--device", "cpu")


def test_a_tiny_temperature_takes_the_likeliest_token():
    assert draw(torch.tensor([-1.0, 3.0, 2.0]), temperature=1e-40) == 1
    assert probabilities(torch.tensor([-1.0, 3.0, 3.0]), 1e-300).tolist() == [0.0, 0.5, 0.5]


@pytest.fixture
def by_graphs(monkeypatch):
    """The host's part of CUDA graphs: a replay runs the captured function again, on the tensors that stay in place."""
    devices = []

    @contextmanager
    def device_of(x):
        devices.append(x.device)
        yield
        devices.pop()

    def capture(function):
        assert devices, "not on the device of the model"
        return function

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs.TokenGraphs, "_possible", lambda self: True)


@pytest.mark.parametrize("name", ["mamba2+gate_rank", "gated_deltanet", "llama"])
def test_tokens_by_a_graph_are_those_of_the_model(name, by_graphs):
    """Also after a fork, and where a graph goes on from another state; softmax attention has no graph."""
    model, ids = build(name), [3, 1, 4, 1, 5]
    plain, session = Session(model).feed(ids), Session(model)
    session._next = graphs.TokenGraphs(model, next_token)
    session.feed(ids)
    assert [*session.sample(4, temperature=0)] == [*plain.sample(4, temperature=0)]
    fork, expected = session.fork(), [*plain.sample(5, temperature=0)]
    assert [*session.sample(5, temperature=0)] == expected
    assert [*fork.sample(5, temperature=0)] == expected
    session.state, session._results = fork.state, [fork.next_logits]
    assert [*session.sample(2, temperature=0)] == [*plain.sample(2, temperature=0)]
    assert torch.equal(session.next_logits, plain.next_logits)
    made = session._next._graphs
    assert made is None if name == "llama" else len(made) == 1


def test_a_graph_is_of_weights_at_their_places_and_of_one_mode(by_graphs):
    """Tensors of inference mode take no copies outside of it, and a model that moves leaves its graphs behind."""
    model, ids = build("mamba2"), [3, 1, 4]
    plain, session = Session(model).feed(ids), Session(model)
    session._next = graphs.TokenGraphs(model, next_token)
    session.feed(ids)
    with torch.inference_mode():
        found = [*session.sample(3, temperature=0)]
    found += session.sample(3, temperature=0)
    assert found == [*plain.sample(6, temperature=0)]
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert [*session.sample(3, temperature=0)] == [*plain.sample(3, temperature=0)]
    assert len(session._next._graphs) == 3


class Host(TorchDispatchMode):
    """Counts what a host launches and what it reads. A replay is one launch."""

    def __init__(self):
        super().__init__()
        self.launches, self.reads = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        free = function.is_view or function.name().startswith(("aten::empty", "aten::scalar_tensor"))
        self.launches += torch.is_tensor(out) and not free
        return out

    def replayed(self, function):
        def replay():
            self.launches += 1
            with _disable_current_modes():
                function()

        return replay


@cases(
    "settings, launches",
    ({"temperature": 0}, 2),
    ({"temperature": 0.7}, 13),
    ({"temperature": 1e-40, "top_k": 3}, 15),
    ({"top_p": 0.5}, 20),
)
def test_a_token_of_a_gpu_takes_a_replay_and_one_read(settings, launches, monkeypatch, by_graphs):
    """What is drawn is what a CPU draws, where `torch.multinomial` reads whether the probabilities are some."""
    model, host = build("mamba2"), Host()
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    expected = [*Session(model).feed([1, 2]).sample(9, generator=draws[0], **settings)]
    monkeypatch.setattr(arguments, "HOSTS", set())
    monkeypatch.setattr(graphs, "capture", host.replayed)
    session = Session(model)
    session._next = graphs.TokenGraphs(model, next_token)
    tokens = session.feed([1, 2]).sample(9, generator=draws[1], **settings)
    found = [next(tokens)]  # makes the graph
    host.launches = 0
    with host:
        found += tokens
    assert found == expected
    assert (host.launches, host.reads) == (8 * launches, 8)
    kept = session.next_logits
    before = kept.clone()
    session.feed([1])
    assert torch.equal(kept, before)
    session.model.norm.weight.data.fill_(torch.nan)
    assert_raises(ValueError, "not finite", list, session.feed([1]).sample(1, **settings))


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_stream_and_autocast_as_they_were(fails, monkeypatch):
    """torch's own context stays in the stream of a capture that fails."""
    log, now = [], ["main"]

    class Graph:
        replay = staticmethod(lambda: None)

        def __init__(self, graph=None, stream=None, **_):
            self.stream = stream

        def __enter__(self):
            now[0] = self.stream.name

        def __exit__(self, error, *_):
            now[0] = now[0] if error else "main"

    def stream_named(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def aside(stream):
        now[0], before = stream.name, now[0]
        yield
        now[0] = before

    def step():
        log.append((now[0], torch.is_autocast_cache_enabled()))
        if fails and len(log) == 5:
            raise RuntimeError

    fakes = {"Stream": lambda: stream_named("aside"), "CUDAGraph": Graph, "graph": Graph, "stream": aside}
    fakes |= {"current_stream": lambda: stream_named("main"), "set_stream": lambda x: now.__setitem__(0, x.name)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        assert graphs.capture(step) is Graph.replay
    once = ("aside", False)
    assert log[:4] == ["aside waits for main", once, once, "main waits for aside"]
    assert log[4:] == [once]
    assert now == ["main"]
    assert torch.is_autocast_cache_enabled()


def test_what_cannot_be_captured_runs_without_a_graph(by_graphs, monkeypatch):
    def refuse(function):
        raise RuntimeError("no graph")

    monkeypatch.setattr(graphs, "capture", refuse)
    model = build("mamba2")
    session, plain = Session(model), Session(model).feed([1, 2])
    session._next = graphs.TokenGraphs(model, next_token)
    with pytest.warns(UserWarning, match="without CUDA graphs: no graph"):
        session.feed([1]).feed([2])
    assert torch.equal(session.next_logits, Session(model).feed([1]).feed([2]).next_logits)
    assert session.position == plain.position
