"""Special tokens, chats and batches in lm-evaluation-harness, beside its own models of transformers."""

import pytest
import torch
from helpers import assert_raises
from lm_eval.api.instance import Instance
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from halflife import LanguageModel, preset
from halflife.cli.checkpoint import special_tokens
from halflife.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from halflife.evaluation import batched
from halflife.evaluation.harness import harness_model
from halflife.hf import HalflifeForCausalLM

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
quiet = pytest.mark.filterwarnings("ignore")  # warnings of the harness and its imports


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory")])
def test_batches_are_halved_where_memory_is_short(error, monkeypatch):
    rows, sizes = [[*range(11)], [*range(11, 14)]], []

    def work(batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise error
        return [-i for i in batch]

    assert list(batched.in_batches(work, rows, 8)) == [(i, -i) for i in range(14)]
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 1, 2, 1]
    with pytest.raises(type(error)):
        list(batched.in_batches(lambda batch: (_ for _ in ()).throw(error), rows, 8))


CHAT = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"


def with_bos(model_max_length=64):
    """Letters. A text begins with <s> by default, and <|turn|> divides a chat."""
    names = ["<end>", "<s>", "<|turn|>", *map(chr, range(32, 127))]
    own = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<end>"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    own.decoder = decoders.Fuse()
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<end>", bos_token="<s>", additional_special_tokens=["<|turn|>"],
        chat_template=CHAT, model_max_length=model_max_length,
    )  # fmt: skip


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


@quiet
@pytest.mark.parametrize("special", [
    {}, {"add_bos_token": True}, {"add_bos_token": False}, {"prefix_token_id": 7},
    {"add_bos_token": False, "prefix_token_id": 0},
])  # fmt: skip
def test_special_tokens_are_those_of_the_harness_own_models(special):
    """Also in a text that has them already, and in a chat."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model, tokenizer = LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 98})).eval(), with_bos()
    theirs = HFLM(
        HalflifeForCausalLM.of(model), tokenizer=tokenizer, max_length=4096, logits_cache=False, **special
    )  # fmt: skip
    ours = harness_model(model, HuggingFaceTokenizer(tokenizer, "some/letters"), **special)
    asked = [{"role": "user", "content": "x"}]
    both = [{"role": "system", "content": "be"}, *asked]
    chats = [ours.apply_chat_template(chat) for chat in (asked, both)]
    assert chats[1] == theirs.apply_chat_template(both) == "<s><|turn|>system:be<|turn|>user:x<|turn|>assistant:"
    texts = ["the cat", "", "<end>a<end>b", "$x" * 50]
    if special != {"prefix_token_id": 7}:  # then theirs begins some texts with two of <s>
        texts += ["<s>the", *chats]
    for text in texts:
        for add in (None, True, False):
            assert ours.tok_encode(text, add_special_tokens=add) == theirs.tok_encode(text, add_special_tokens=add)
    pairs = requests("loglikelihood", *((text, " sat") for text in texts), ("", "<s>x"))
    close = {"rel": 5.2e-7}  # four times the largest error, 1.3e-7
    found, expected = ours.loglikelihood(pairs), theirs.loglikelihood(pairs)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], **close)
    whole = requests("loglikelihood_rolling", *((text,) for text in texts if text))
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), **close)
    asked = requests("generate_until", *((text, {"until": ["~"], "max_gen_toks": 6}) for text in texts if text))
    assert ours.generate_until(asked) == theirs.generate_until(asked)
    assert ours.tokenizer_name == "some__letters"
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT


def test_a_chat_needs_a_template():
    model = harness_model(LanguageModel(preset("mamba2", **SIZES)), ByteTokenizer())
    assert_raises(ValueError, "'bytes' has no chat template", model.apply_chat_template, [])


def test_what_was_trained_here_begins_after_an_end_token(tmp_path):
    """Its documents have no other special token, whatever its tokenizer adds by default."""
    tokenizer = HuggingFaceTokenizer(with_bos(), "letters")
    assert special_tokens(tmp_path, tokenizer) == {}
    (tmp_path / "run.json").write_text('{"context": 64}')
    model = LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 98}))
    trained = harness_model(model, tokenizer, **special_tokens(tmp_path, tokenizer))
    assert (trained.tok_encode("a"), trained.prefix_token_id) == ([68], 0)
