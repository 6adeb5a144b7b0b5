"""Streamed and served text is what `decode` says of all tokens, for any kind of tokenizer."""

from functools import cache
from itertools import chain

import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from halflife import LanguageModel, Session, preset
from halflife.data.byte_tokenizer import ByteTokenizer
from halflife.data.tokenizers import HuggingFaceTokenizer
from halflife.models.text import CONTEXT, TextStream
from halflife.serve.app import build
from halflife.serve.engine import Engine

SPECIAL = ["<unk>", "<s>", "</s>", "<|tool|>"]
WORDS = ["▁", "▁▁", "▁Hello", "▁world", "lo", "é", ".", "▁'", "n't", "▁.", "a▁b"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
MARKS = sorted(pre_tokenizers.ByteLevel.alphabet())  # the bytes in byte-level BPE
SOME = "é≠a\n"


def pieces(*tokens):
    return {token: i for i, token in enumerate([*SPECIAL, *dict.fromkeys(tokens)])}


def scored(*tokens):
    return [(token, -1.0) for token in pieces(*tokens)]


KINDS = {
    "byte-level BPE": (models.BPE(pieces(*MARKS, "Ġthe", "Ã©", "Ġâ"), []), decoders.ByteLevel()),
    "SentencePiece BPE": (models.BPE(pieces(*WORDS), []), decoders.Sequence([LLAMA[0], *LLAMA[2:]])),
    "SentencePiece with byte fallback": (models.BPE(pieces(*BYTES, *WORDS), []), decoders.Sequence(LLAMA)),
    "Metaspace": (models.BPE(pieces(*WORDS), []), decoders.Metaspace()),
    "unigram": (models.Unigram(scored(*WORDS), 0), decoders.Metaspace()),
    "unigram with byte fallback": (models.Unigram(scored(*WORDS, *BYTES), 0, True), decoders.Sequence(LLAMA)),
    "WordPiece": (models.WordPiece(pieces("hello", "##lo", ".", "'", "##s", "n't", "do", "not"), unk_token="<unk>"),
                  decoders.WordPiece()),
    "words that end": (models.BPE(pieces("a</w>", "b", "c</w>"), []), decoders.BPEDecoder()),
    "no decoder": (models.WordLevel(pieces("a", "b", "."), unk_token="<unk>"), None),
}  # fmt: skip


@cache
def tokenizer_of(kind):
    if kind == "bytes":
        return ByteTokenizer(end_of_document=True)
    model, decoder = KINDS[kind]
    core = Tokenizer(model)
    if decoder is not None:
        core.decoder = decoder
    core.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True,
        additional_special_tokens=["<|tool|>"],
    )  # fmt: skip
    return HuggingFaceTokenizer(wrapped, kind)


def texts(kind):
    """The tokens of a prompt and of its continuation, with special tokens and characters in several tokens."""
    tokenizer = tokenizer_of(kind)
    parts = [st.integers(0, tokenizer.vocab_size - 1), st.just(256 if kind == "bytes" else 3)]
    if kind == "bytes":
        parts += [st.sampled_from(list(SOME.encode()))] * 2
    elif "byte" in kind:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        names = list(level.pre_tokenize_str(SOME)[0][0]) if "level" in kind else [BYTES[i] for i in SOME.encode()]
        parts += [st.sampled_from([tokenizer.tokenizer.convert_tokens_to_ids(name) for name in names])] * 2
    some = st.lists(st.one_of(parts), max_size=12)
    return st.tuples(some, some)


def right(tokenizer, prompt, new):
    """Return what the tokens `new` add to the text. A character that the prompt begins is shown whole."""
    known, text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    if text.startswith(known):
        return text[len(known) :]
    common = 0
    while known[common : common + 1] == text[common : common + 1] != "":
        common += 1
    return text[common if known.endswith("\N{REPLACEMENT CHARACTER}") else len(known) :]


def streamed(tokenizer, prompt, new):
    stream = TextStream(tokenizer.decode, prompt)
    return "".join([stream.push([token]) for token in new] + [stream.push([], final=True)])


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_text_in_pieces_is_the_text_of_all_tokens(kind):
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(texts(kind))
    def check(drawn):
        prompt, new = drawn
        assert streamed(tokenizer, prompt, new) == right(tokenizer, prompt, new)
        assert streamed(tokenizer, [], new) == tokenizer.decode(new)

    check()


def decided(data, vocab_size):
    """A model whose likeliest tokens are `data`, one after the other."""
    model = LanguageModel(preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=vocab_size)).eval()
    rest = list(data)

    def logits(hidden):
        row = torch.nn.functional.one_hot(torch.tensor(rest.pop(0) if rest else 0), vocab_size).float()
        return row.expand(*hidden.shape[:-1], vocab_size)

    model.logits = logits
    return model


def of_session(tokenizer, reads, new, folder):
    """Read in pieces, go on from a file in a fork, and write."""
    model = decided([0] * (len(reads) - 1) + new, tokenizer.vocab_size)
    session = Session(model, decode=tokenizer.decode)
    for read in reads:
        session.feed(read)
    other = Session(model, decode=tokenizer.decode).load(session.save(folder / "state")).fork()
    return "".join(other.write(len(new), temperature=0))


def of_server(tokenizer, reads, new, folder):
    """The same in a session of the server."""
    with TestClient(build(Engine(decided(new, tokenizer.vocab_size), tokenizer), "tiny")) as client:
        name = client.post("/v1/sessions", json={}).json()["id"]
        for read in reads:
            assert client.post(f"/v1/sessions/{name}/append", json={"input": read}).status_code == 200
        body = {"max_tokens": len(new), "temperature": 0}
        return client.post(f"/v1/sessions/{name}/generate", json=body).json()["choices"][0]["text"]


def of_completion(tokenizer, reads, new, folder):
    with TestClient(build(Engine(decided(new, tokenizer.vocab_size), tokenizer), "tiny")) as client:
        body = {"prompt": [*chain(*reads)], "max_tokens": len(new), "temperature": 0}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.parametrize("written", [of_session, of_server, of_completion])
@pytest.mark.parametrize("kind", ["SentencePiece BPE", "Metaspace", "WordPiece", "byte-level BPE", "bytes"])
def test_what_precedes_a_text_is_known_behind_any_number_of_special_tokens(kind, written, tmp_path):
    tokenizer = tokenizer_of(kind)
    special, word, other = (256, 65, 66) if kind == "bytes" else (3, 6, 7)
    new = [other, word, other] if kind == "bytes" else [other, special, word, other]  # of bytes it is the end
    for reads in ([[word], [special]], [[other, word], [special] * 3 * CONTEXT, [special]]):
        assert written(tokenizer, reads, new, tmp_path) == right(tokenizer, [*chain(*reads)], new)


@pytest.mark.parametrize("kind", ["SentencePiece BPE", "Metaspace", "unigram", "WordPiece", "byte-level BPE", "bytes"])
def test_the_names_of_tokens_join_to_the_answer(kind):
    tokenizer = tokenizer_of(kind)
    new = [65, 66, 65, 32] if kind == "bytes" else [6, 7, 8, 7, 4]
    with TestClient(build(Engine(decided(new, tokenizer.vocab_size), tokenizer), "tiny")) as client:
        body = {"prompt": new[:2], "max_tokens": len(new), "temperature": 0, "logprobs": 0}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("end", [False, True])
def test_a_byte_tokenizer_is_saved_as_transformers_saves_its_own(end, tmp_path, monkeypatch):
    """Into a folder by its name, which is made."""
    monkeypatch.chdir(tmp_path)
    ours = ByteTokenizer(end)
    ours.save("new/folder")
    theirs = AutoTokenizer.from_pretrained("new/folder")
    text = "naïve ≠ 🙂\n a  b"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.decode(ours.encode(text).tolist()) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.eos, ours.vocab_size)
