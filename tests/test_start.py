"""Training that starts from trained weights: embeddings that grow, frozen parameters, resuming, what is refused."""

import json
import shutil

import pytest
import torch
from corpora import write_texts
from helpers import assert_raises
from tiny_runs import interrupt_after

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.cli.train import Shape, Start, Text, Train
from halflife.data.hub import no_model
from halflife.models import checkpoint
from halflife.training.start import freeze, load_start, local_folder, start_of

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


def saved(folder, name="mamba2+post", vocab_size=256, seed=1):
    torch.manual_seed(seed)
    model = LanguageModel(preset(name, vocab_size=vocab_size, train_length=32, **SIZES))
    checkpoint.save(model, folder)
    return model


def test_weights_are_copied_and_embeddings_grow(tmp_path):
    old = saved(tmp_path, vocab_size=250)
    config, folder, written, rows = start_of(str(tmp_path), 256)
    assert (config.vocab_size, folder, rows) == (256, str(tmp_path.resolve()), 250)
    new = LanguageModel(config)
    fresh = new.embedding.weight.detach().clone()
    load_start(new, tmp_path, written)
    assert torch.equal(new.embedding.weight[:250], old.embedding.weight)
    assert torch.equal(new.embedding.weight[250:], fresh[250:])
    others = {name: x for name, x in new.state_dict().items() if x.shape[:1] != (256,)}
    assert all(torch.equal(x, old.state_dict()[name]) for name, x in others.items())
    assert start_of(str(tmp_path), 100)[0].vocab_size == 250  # rows that a tokenizer does not use stay


def test_what_load_start_refuses(tmp_path):
    model = saved(tmp_path / "a")
    _, _, written, _ = start_of(str(tmp_path / "a"), 256)
    with pytest.raises(ValueError, match="do not fit the model"):
        load_start(
            LanguageModel(preset("mamba2", vocab_size=256, **{**SIZES, "hidden_size": 32})), tmp_path / "a", written
        )
    saved(tmp_path / "a", seed=2)
    assert_raises(ValueError, "have changed since it began", load_start, model, tmp_path / "a", written)
    assert_raises(FileNotFoundError, "there is no folder", local_folder, str(tmp_path / "missing"))
    with pytest.raises(ConnectionError, match="there is no folder nobody/no-model, and the hub cannot be asked for it"):
        local_folder("nobody/no-model")
    assert str(no_model("a/b", "no answer\nof the hub " * 20)).endswith(" …")


def test_freeze():
    model = LanguageModel(preset("mamba2", vocab_size=256, **SIZES))
    freeze(model, ("embedding.*", "blocks.0.*"))
    frozen = {name for name, x in model.named_parameters() if not x.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("embedding.", "blocks.0."))}
    with pytest.raises(ValueError, match=r"--freeze nothing\* matches no parameter; there are embedding.weight"):
        freeze(model, ("nothing*",))
    assert_raises(ValueError, "leaves no parameter to train", freeze, model, ("*",))


@pytest.fixture
def text(tmp_path):
    return write_texts(tmp_path / "text", "slow decay and fast decay, number {i}. " * 6, count=40)


def train(*arguments):
    main(["train", *map(str, arguments), "--quiet", "--held-out", "0.2"])


@pytest.mark.slow
def test_a_run_continues_a_model(tmp_path, text, capsys):
    """The frozen parameters stay those of the start, others move, and a second run from the result begins there."""
    old = saved(tmp_path / "old", vocab_size=250).state_dict()
    recipe = ["--data", text, "--context", 32, "--batch-size", 4, "--tokens", 8 * 4 * 32, "--validate-every", 4]
    output = tmp_path / "new"
    train("--from", tmp_path / "old", *recipe, "--freeze", "embedding*", "blocks.1.*", "--output", output)
    assert "the model has 250 tokens and the tokenizer 256; the embeddings grow to 256" in capsys.readouterr().out
    new = checkpoint.load(output).state_dict()
    assert torch.equal(new["embedding.weight"][:250], old["embedding.weight"])
    for name, x in old.items():
        if name.startswith("blocks."):
            assert torch.equal(new[name], x) == name.startswith("blocks.1."), name
    run = json.loads((output / "run.json").read_text())
    assert run["start"] == str(tmp_path / "old")
    assert run["freeze"] == ["embedding*", "blocks.1.*"]
    train("--from", output, *recipe, "--lr", 1e-9, "--output", tmp_path / "third")
    third = checkpoint.load(tmp_path / "third").state_dict()
    assert all((third[name] - x).abs().max() < 1e-6 for name, x in new.items())


@pytest.mark.slow
def test_an_interrupted_run_does_not_start_again(tmp_path, text, monkeypatch):
    saved(tmp_path / "old")
    recipe = ["--data", text, "--context", 32, "--batch-size", 4, "--tokens", 8 * 4 * 32, "--save-every", 4]
    recipe += ["--validate-every", 4, "--from", tmp_path / "old"]
    train(*recipe, "--output", tmp_path / "whole")
    with monkeypatch.context() as patched:
        interrupt_after(patched, 6)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(*recipe, "--output", tmp_path / "parts")
    shutil.rmtree(tmp_path / "old")
    main(["train", "--resume", str(tmp_path / "parts"), "--quiet"])
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_options_that_from_replaces():
    with pytest.raises(ValueError, match="--from takes the model from its folder; leave out model, num_layers"):
        Train("mamba2", Text(("text",)), Shape(num_layers=3), Start("old"))._folder()
    assert_raises(ValueError, "give a model", Train(text=Text(("text",)))._folder)


def test_a_model_in_the_current_folder_gives_the_run_its_name(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert str(Train(text=Text(("text",)), start=Start("."))._folder()).endswith("-my-model")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("name", ["gated_deltanet", "gated_deltanet+post", "rwkv7"])
def test_lora(name, tmp_path):
    """Only adapters train, on `qkv_proj` and `out_proj` where a mixer has them. The merged model has their function."""
    peft = pytest.importorskip("peft")
    from halflife.hf import HalflifeForCausalLM

    torch.manual_seed(0)
    ours = LanguageModel(preset(name, vocab_size=64, train_length=32, **SIZES))
    before = {key: x.clone() for key, x in ours.state_dict().items()}
    targets = ["r_proj", "out_proj"] if name == "rwkv7" else ["qkv_proj", "out_proj"]
    adapted = peft.get_peft_model(HalflifeForCausalLM.of(ours), peft.LoraConfig(r=2, target_modules=targets))
    trained = [key for key, x in adapted.named_parameters() if x.requires_grad]
    assert len(trained) == 2 * 2 * SIZES["num_layers"]  # A and B of two projections in each layer
    assert all(any(target in key for target in targets) and "lora_" in key for key in trained)
    optimizer = torch.optim.AdamW((x for x in adapted.parameters() if x.requires_grad), lr=1e-1)
    ids, losses = torch.randint(64, (4, 16)), []
    for _ in range(8):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    checkpoint.save(merged.to_halflife(), tmp_path / "merged")
    after = checkpoint.load(tmp_path / "merged").state_dict()
    assert after.keys() == before.keys()
    for key, x in after.items():
        assert torch.equal(x, before[key]) != any(f"{target}.weight" in key for target in targets), key
