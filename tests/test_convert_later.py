"""Converted Mamba-3 of fla and RWKV-7 of its author, with random weights, against their equations in float64."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, cases
from safetensors.torch import save_file
from test_convert_fla import rms

from halflife.models import checkpoint
from halflife.models.convert import SOURCES, assemble, convert, from_rwkv7_pth

LENGTH, VOCABULARY, HIDDEN = 13, 19, 16

# Relative to the largest logit: four times the worst difference over four seeds, in float64.
EXACT = 4 * 5.1e-15


def draw(shapes, seed=0):
    """Random weights, of which none hides a term."""
    random = torch.Generator().manual_seed(seed)
    return {name: 0.4 * torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def compare(model, expected, ids):
    with torch.no_grad():
        assert_close(model(ids)[0], expected, EXACT)
        _, state = model(ids[:, :5])
        assert_close(model(ids[:, 5:], state)[0], expected[:, 5:], EXACT)


def under(weights, prefix):
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


SIZE, VALUE = 8, 4


def mamba3(**changes):
    config = {
        "model_type": "mamba3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "expand": 2,
        "head_dim": VALUE, "num_heads": 8, "state_size": SIZE, "n_groups": 2, "rope_fraction": 0.5, "A_floor": 0.5,
        "is_outproj_norm": False, "is_mimo": False, "mimo_rank": 3, "norm_eps": 1e-3, **changes,
    }  # fmt: skip
    rank, pairs = config["mimo_rank"] if config["is_mimo"] else 1, int(SIZE * config["rope_fraction"]) // 2
    layer = {"in_proj.weight": (2 * 32 + 2 * rank * 2 * SIZE + 24 + pairs, HIDDEN), "dt_bias": (8,), "D": (8,)}
    layer |= {f"{n}_bias": (8, rank, SIZE) for n in "BC"} | {f"{n}_norm.weight": (SIZE,) for n in "BC"}
    layer |= {"out_proj.weight": (HIDDEN, 32)}
    layer |= {f"mimo_{n}": (8, rank, VALUE) for n in "xzo"} if config["is_mimo"] else {}
    layer |= {"norm.weight": (32,)} if config["is_outproj_norm"] else {}
    shapes = {"backbone.embeddings.weight": (VOCABULARY, HIDDEN), "backbone.norm_f.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for i in range(2):
        shapes[f"backbone.layers.{i}.norm.weight"] = (HIDDEN,)
        shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in layer.items()}
    return config, draw(shapes)


def rotated(x, angle, mimo):
    """The rotations of the kernels: of the pairs (2i, 2i + 1) for SISO, and (i, i + K/2) for MIMO. `[B, H, R, K]`."""
    x, angle = x.clone(), angle.unsqueeze(2)
    first = torch.arange(angle.shape[-1]) * (1 if mimo else 2)
    second = first + (SIZE // 2 if mimo else 1)
    a, b = x[..., first], x[..., second]
    x[..., first], x[..., second] = angle.cos() * a - angle.sin() * b, angle.sin() * a + angle.cos() * b
    return x


def mamba3_mixer(config, w, u):
    mimo, eps = config["is_mimo"], config["norm_eps"]
    rank, batch = config["mimo_rank"] if mimo else 1, len(u)
    pairs = int(SIZE * config["rope_fraction"]) // 2
    ones = torch.ones(8, 1, VALUE, dtype=u.dtype)
    of_x, of_z, of_o = (w.get(f"mimo_{n}", ones) for n in "xzo")
    memory = torch.zeros(batch, 8, SIZE, VALUE, dtype=u.dtype)
    angle = torch.zeros(batch, 8, pairs, dtype=u.dtype)
    last_k, last_v = torch.zeros(batch, 8, rank, SIZE, dtype=u.dtype), torch.zeros(batch, 8, rank, VALUE, dtype=u.dtype)
    outputs = []
    for t in range(u.shape[1]):
        sizes = [32, 32, rank * 2 * SIZE, rank * 2 * SIZE, 8, 8, 8, pairs]
        z, x, b, c, dt, a, trap, turn = (u[:, t] @ w["in_proj.weight"].T).split(sizes, -1)
        rate, step, end = F.softplus(a).clamp(min=config["A_floor"]), F.softplus(dt + w["dt_bias"]), trap.sigmoid()
        angle = angle + turn.tanh().unsqueeze(1) * math.pi * step.unsqueeze(-1)
        k, q = (
            rms(part.view(batch, rank, 2, SIZE), w[f"{n}_norm.weight"], eps).repeat_interleave(4, 2).transpose(1, 2)
            for n, part in (("B", b), ("C", c))
        )
        k, q = rotated(k + w["B_bias"], angle, mimo), rotated(q + w["C_bias"], angle, mimo)
        v = x.view(batch, 8, 1, VALUE) * of_x
        decay = (-rate * step).exp()
        memory = decay[..., None, None] * (
            memory + torch.einsum("bh,bhrk,bhrv->bhkv", (1 - end) * step, last_k, last_v)
        ) + torch.einsum("bh,bhrk,bhrv->bhkv", end * step, k, v)
        last_k, last_v = k, v
        y = torch.einsum("bhrk,bhkv->bhrv", q, memory) + w["D"][:, None, None] * v
        gate = F.silu(z.view(batch, 8, 1, VALUE) * of_z)
        if config["is_outproj_norm"]:
            y = rms(y, w["norm.weight"].view(8, 1, VALUE), eps)
        outputs.append((y * gate * of_o).sum(2).flatten(1) @ w["out_proj.weight"].T)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"is_outproj_norm": True, "rope_fraction": 1.0}, {"is_mimo": True},
        {"is_mimo": True, "is_outproj_norm": True, "rope_fraction": 1.0},
    ],
)  # fmt: skip
def test_mamba3(changes):
    config, weights = mamba3(**changes)
    ids, eps = torch.randint(VOCABULARY, (2, LENGTH)), config["norm_eps"]
    x = weights["backbone.embeddings.weight"][ids]
    for i in range(2):
        w = under(weights, f"backbone.layers.{i}.")
        x = x + mamba3_mixer(config, under(w, "mixer."), rms(x, w["norm.weight"], eps))
    expected = rms(x, weights["backbone.norm_f.weight"], eps) @ weights["lm_head.weight"].T
    compare(assemble(*SOURCES["mamba3"](config, weights)), expected, ids)


@cases(
    "changes, message",
    ({"use_bias": True}, "use_bias"),
    ({"A_floor": -1.0}, "A_floor = -1.0"),
    ({"complex": True}, "unknown settings.*: complex"),
)
def test_what_cannot_be_represented_is_named(changes, message):
    config, weights = mamba3()
    assert_raises(ValueError, message, SOURCES["mamba3"], {**config, **changes}, weights)


def test_a_folder_of_fla(tmp_path):
    config, weights = mamba3()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    save_file({name: x.float() for name, x in weights.items()}, tmp_path / "in" / "model.safetensors")
    model = checkpoint.load(convert(tmp_path / "in", tmp_path / "out"))
    assert (model.config.mixer, model.config.mlp) == ("mamba3", "none")


def rwkv7(dtype=torch.float64, heads=2, size=8):
    hidden = heads * size
    vectors = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "k_k", "k_a")
    shapes = {"emb.weight": (VOCABULARY, hidden), "head.weight": (VOCABULARY, hidden)}
    shapes |= {f"{at}.{part}": (hidden,) for at in ("blocks.0.ln0", "ln_out") for part in ("weight", "bias")}
    for i in range(2):
        at = f"blocks.{i}."
        shapes |= {f"{at}{n}.{part}": (hidden,) for n in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")}
        shapes |= {f"{at}att.{name}": (1, 1, hidden) for name in (*vectors, *(["v0"] if i else []))}
        shapes |= {f"{at}att.r_k": (heads, size), f"{at}ffn.x_k": (1, 1, hidden)}
        for name, rank in (("w", 3), ("a", 4), ("g", 5), *([("v", 2)] if i else [])):
            shapes |= {f"{at}att.{name}1": (hidden, rank), f"{at}att.{name}2": (rank, hidden)}
        shapes |= {f"{at}att.{n}.weight": (hidden, hidden) for n in ("receptance", "key", "value", "output")}
        shapes |= {f"{at}ffn.key.weight": (3 * hidden, hidden), f"{at}ffn.value.weight": (hidden, 3 * hidden)}
    return {name: x.to(dtype) for name, x in draw(shapes).items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_norm(x, w, at):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w[f"{at}.weight"] + w[f"{at}.bias"]


def rwkv7_logits(weights, ids, heads=2, size=8):
    """One sequence by the published recurrence in numpy, one token after another."""
    w = {name: x.numpy().squeeze() for name, x in weights.items()}
    state, before = np.zeros((2, heads, size, size)), np.zeros((2, 2, heads * size))
    outputs = []
    for token in ids:
        x, first = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0"), None
        for i in range(2):
            p = {name.removeprefix(f"blocks.{i}.att."): y for name, y in w.items() if f"blocks.{i}.att." in name}
            y = layer_norm(x, w, f"blocks.{i}.ln1")
            xr, xw, xk, xv, xa, xg = (y + p[f"x_{n}"] * (before[i, 0] - y) for n in "rwkvag")
            before[i, 0] = y
            r, k, v = p["receptance.weight"] @ xr, p["key.weight"] @ xk, p["value.weight"] @ xv
            decay = np.exp(-math.exp(-0.5) * sigmoid(np.tanh(xw @ p["w1"]) @ p["w2"] + p["w0"]))
            if first is None:
                first = v
            else:
                v = v + (first - v) * sigmoid(xv @ p["v1"] @ p["v2"] + p["v0"])
            a, gate = sigmoid(xa @ p["a1"] @ p["a2"] + p["a0"]), sigmoid(xg @ p["g1"]) @ p["g2"]
            kk, k = k * p["k_k"], k * (1 + (a - 1) * p["k_a"])
            r, decay, k, v, kk, a = (z.reshape(heads, size) for z in (r, decay, k, v, kk, a))
            kk = kk / np.linalg.norm(kk, axis=1, keepdims=True)
            for h in range(heads):  # rows are values, columns keys
                removed = np.outer(state[i, h] @ kk[h], kk[h] * a[h])
                state[i, h] = state[i, h] * decay[h] - removed + np.outer(v[h], k[h])
            o = np.stack([state[i, h] @ r[h] for h in range(heads)])
            o = (o - o.mean(1, keepdims=True)) / np.sqrt(o.var(1, keepdims=True) + 64e-5)
            o = o.reshape(-1) * p["ln_x.weight"] + p["ln_x.bias"]
            o = o + ((r * k * p["r_k"]).sum(1, keepdims=True) * v).reshape(-1)
            x = x + p["output.weight"] @ (o * gate)
            y = layer_norm(x, w, f"blocks.{i}.ln2")
            k = w[f"blocks.{i}.ffn.key.weight"] @ (y + w[f"blocks.{i}.ffn.x_k"] * (before[i, 1] - y))
            before[i, 1] = y
            x = x + w[f"blocks.{i}.ffn.value.weight"] @ np.maximum(k, 0) ** 2
        outputs.append(w["head.weight"] @ layer_norm(x, w, "ln_out"))
    return torch.from_numpy(np.stack(outputs))


def test_rwkv7_of_its_author():
    weights = rwkv7()
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    expected = torch.stack([rwkv7_logits(weights, row.tolist()) for row in ids])
    compare(assemble(*from_rwkv7_pth(weights)), expected, ids)


def test_a_pth_file(tmp_path):
    """It is read without running code, and halflife writes its checkpoint with the same dtypes."""
    torch.save(rwkv7(torch.bfloat16), tmp_path / "rwkv.pth")
    model = checkpoint.load(convert(tmp_path / "rwkv.pth", tmp_path / "out"))
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model.blocks[1].mixer.decay.logit.dtype == torch.float32
    with pytest.raises(ValueError, match=r"a \.pth is converted to halflife"):
        convert(tmp_path / "rwkv.pth", tmp_path / "other", to="transformers")
    assert_raises(FileNotFoundError, "there is no file", convert, tmp_path / "missing.pth", tmp_path / "other")


def test_a_pth_file_that_is_refused(tmp_path):
    file = tmp_path / "rwkv.pth"
    torch.save({"run": Unsafe()}, file)
    assert_raises(ValueError, "damaged, or holds more than tensors", convert, file, tmp_path / "out")
    file.write_bytes(b"no model")
    assert_raises(ValueError, "damaged, or holds more than tensors", convert, file, tmp_path / "out")
    torch.save([torch.ones(2)], file)
    assert_raises(ValueError, "holds no named tensors", convert, file, tmp_path / "out")
    torch.save({**rwkv7(), "blocks.0.att.time_maa_x": torch.ones(1, 1, HIDDEN)}, file)
    assert_raises(ValueError, r"blocks\.0\.att\.time_maa_x is unknown", convert, file, tmp_path / "out")
    torch.save({"emb.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match=r"no RWKV-7 of version x070: blocks\.0\.att\.r_k is missing"):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Unsafe:
    def __reduce__(self):
        return (print, ("this code must not run",))
