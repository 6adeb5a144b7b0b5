"""Decay masks: their rank below the diagonal, the gates of models, the pictures, and `halflife mask`."""

import json
import math
from io import BytesIO

import numpy as np
import pytest
import torch
from helpers import assert_raises, cases

from halflife.analysis.masks import (
    RANK_TOLERANCE,
    Gates,
    block_ranks,
    capture_gates,
    cut_values,
    decay_masks,
    head_masks,
    measure_masks,
    off_diagonal_rank,
)
from halflife.cli import main
from halflife.evaluation import evaluating
from halflife.layers.memory import gate_rank as gate_rank_layer
from halflife.models import LanguageModel, checkpoint, preset
from halflife.report.figures import masks as mask_figure
from halflife.report.figures.masks import Head, example_gates, example_symbols, most_resets
from halflife.report.figures.matplotlib_renderer import DPI, arrange, draw

ROUNDING = 4 * 3e-15  # 4 times the largest σ₃/σ₁ (with one decay σ₂/σ₁) measured over 30 seeds of 80 tokens


def tiny(name, **sizes):
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "train_length": 32, "vocab_size": 256, **sizes}
    return LanguageModel(preset(name, **sizes))


def random_gates(length, rate, heads=1):
    """Draw mild decays, for which no singular value is small without being 0."""
    slow = -0.5 * torch.rand(1, length, heads).double() * (torch.rand(1, length, heads) < rate)
    return slow, -0.05 - 0.5 * torch.rand(1, length, heads).double()


def by_recurrence(slow, fast):
    """Compute the mask of one head from gates `[T]` and the two states. Each token writes a 1 into its column."""
    length = len(fast)
    rows, state, taken = (
        torch.zeros(length, length).double(),
        torch.zeros(length).double(),
        torch.zeros(length).double(),
    )
    for t in range(length):
        state = state * fast[t].exp()
        if slow[t] != 0:
            taken, state = slow[t].exp() * (taken + state), torch.zeros_like(state)
        state[t] += 1
        rows[t] = state + taken
    return rows


def rank(matrix):
    values = torch.linalg.svdvals(matrix)
    return int((values > RANK_TOLERANCE * values[0]).sum())


def predicted(slow, fast, rows, columns):
    """Return the rank by the condition of the proof: two kinds of keys, and a fast decay that varies between rows."""
    resets = (slow != 0).nonzero().flatten().tolist()
    last = max(columns)
    taken = [any(j < r <= last for r in resets) for j in columns]
    until = min((r for r in resets if r > last), default=len(slow))
    levels = {round(fast[: min(until, i) + 1].sum().item(), 9) for i in rows}
    return 2 if any(taken) and not all(taken) and len(levels) > 1 else 1


@pytest.mark.parametrize("rate", [0, 0.05, 0.3, 0.7, 1])
def test_every_submatrix_below_the_diagonal_has_rank_2_at_most(rate):
    seen = set()
    for _ in range(20):
        slow, fast = (g[0, :, 0] for g in random_gates(14, rate))
        mask = by_recurrence(slow, fast)
        for _ in range(10):
            cut = int(torch.randint(1, 13, ()))
            rows = [cut + i for i in torch.randperm(14 - cut)[: torch.randint(1, 7, ())].tolist()]
            columns = torch.randperm(cut + 1)[: torch.randint(1, 7, ())].tolist()
            part = mask[rows][:, columns]
            values = torch.linalg.svdvals(part)
            assert (values[2:] <= ROUNDING * values[0]).all()
            assert rank(part) == predicted(slow, fast, rows, columns)
            seen.add(rank(part))
    assert seen == ({1, 2} if rate else {1})


def test_more_segments_do_not_give_more():
    """Masks of 2 to 40 segments: the singular values of every cut, and those of Γ and Λ alone."""
    for segments in (2, 3, 5, 10, 40):
        slow, fast = random_gates(80, 0)
        slow[:, :: 80 // segments] = -0.1
        gamma, lam = (x[0, 0] for x in decay_masks(fast, slow))
        assert cut_values(gamma)[1:-1, 1].max() <= ROUNDING
        for mask in (lam, gamma * lam):
            values = cut_values(mask, 3)
            assert values[2:-2, 1].max() > 1e-3
            assert values[2:-2, 2].max() <= ROUNDING


def test_one_decay_has_rank_1():
    _, fast = random_gates(40, 0, heads=3)
    gamma, lam = decay_masks(fast)
    assert torch.equal(gamma, torch.ones(1, 3, 40, 40).double().tril())
    for block in (1, 7, 16, 39):
        highest, mean = off_diagonal_rank(lam, block)
        assert highest.tolist() == [[1, 1, 1]]
        assert mean.tolist() == [[1, 1, 1]]
    assert max(cut_values(one)[1:-1, 1].max() for one in lam[0]) <= ROUNDING


def test_blocks_are_those_of_the_partition():
    """The last block is shorter, and a single block has another rank than the rest."""
    slow, fast = random_gates(22, 0.2)
    mask = by_recurrence(slow[0, :, 0], fast[0, :, 0])
    spans = [slice(start, start + 5) for start in range(0, 22, 5)]
    expected = [rank(mask[spans[i], spans[j]]) for i in range(5) for j in range(i)]
    assert set(expected) == {1, 2}
    assert block_ranks(mask, 5).tolist() == expected
    highest, mean = off_diagonal_rank(mask, 5)
    assert (highest.item(), mean.item()) == (2, pytest.approx(sum(expected) / 10))
    for block in (0, 22):
        assert_raises(ValueError, "choose 1 to 21", off_diagonal_rank, mask, block)


def test_what_is_forgotten_has_no_rank():
    """Products below the smallest normal number are rounded one by one, which does not count as a higher rank."""
    fast = -7.3 * torch.ones(1, 128, 1).double() - torch.rand(1, 128, 1).double()
    ranks = block_ranks(decay_masks(fast)[1][0, 0], 8)
    assert set(ranks.tolist()) == {0, 1}
    assert block_ranks(decay_masks(fast.fill_(-1000.0))[1][0, 0], 8).max() == 0


def test_the_papers_example():
    """The entries are those of Figure 2a, plus α₅ in the first three of the last row, as Γ = γ_i/γ_j requires."""
    gamma = [["1"], ["α_1", "1"], ["α_1", "1", "1"], ["α_3 α_1", "α_3", "α_3", "1"],
             ["α_3 α_1", "α_3", "α_3", "1", "1"], ["α_5 α_3 α_1", "α_5 α_3", "α_5 α_3", "α_5", "α_5", "1"]]  # fmt: skip
    lam = [["1"], ["β_1", "1"], ["β_1", "β_2", "1"], ["β_1", "β_3 β_2", "β_3", "1"],
           ["β_1", "β_3 β_2", "β_3", "β_4", "1"], ["β_1", "β_3 β_2", "β_3", "β_5 β_4", "β_5", "1"]]  # fmt: skip
    got = [[[entry for entry in row if entry] for row in symbols] for symbols in example_symbols()]
    assert got[:2] == [gamma, lam]
    assert got[2][5][:2] == ["α_5 α_3 α_1 β_1", "α_5 α_3 β_3 β_2"]
    values = {"α": mask_figure.EXAMPLE_SLOW, "β": mask_figure.EXAMPLE_FAST, "1": 1.0}
    for symbols, mask in zip(got, Head("", example_gates(), 0).masks(), strict=True):
        for i, row in enumerate(symbols):
            expected = [math.prod(values[name[0]] for name in entry.split()) for entry in row]
            assert mask[i].tolist() == pytest.approx(expected + [0.0] * (5 - i), abs=1e-15)


def test_rank_of_the_papers_example():
    """If the rows begin with a reset, as at the chunk boundary of the figure, one state is enough."""
    gates = example_gates()
    mask = Head("", gates, 0).masks()[2]
    assert block_ranks(mask, 3).tolist() == [1]
    assert block_ranks(mask, 2).tolist() == [2, 1, 2]
    assert cut_values(mask)[:, 1].gt(RANK_TOLERANCE).tolist() == [False, True, True, True, True, False]


def test_picture_of_the_example():
    figure = draw(mask_figure.example())
    figure.canvas.draw()
    panels = figure.axes[:3]
    assert [axes.get_title("left").strip() for axes in panels] == ["Γ", "Λ", "Γ ⊙ Λ"]
    for axes in panels:
        assert sum("$" in text.get_text() for text in axes.texts) == 21
        assert axes.get_xticks(minor=True).tolist() == [1, 3, 5]
        assert axes.get_yticks(minor=True).tolist() == [1, 3, 5]


@pytest.mark.parametrize("name", ["mamba2+gate_rank", "gated_deltanet+gate_rank", "mamba2+post+gate_rank"])
def test_gates_are_those_that_the_op_gets(name, monkeypatch):
    model, ids = tiny(name), torch.randint(256, (2, 20))
    gates = capture_gates(model, ids)
    given = []

    def spy(q, k, v, g_slow, g_fast, *rest, op=gate_rank_layer.gate_rank, **options):
        given.append((g_slow, g_fast))
        return op(q, k, v, g_slow, g_fast, *rest, **options)

    monkeypatch.setattr(gate_rank_layer, "gate_rank", spy)
    with evaluating(model):
        model(ids)
    assert [layer.layer for layer in gates] == [0, 1]
    for layer, (slow, fast) in zip(gates, given, strict=True):
        assert torch.equal(layer.g_slow, slow.double())
        assert torch.equal(layer.g_fast, fast.double())


def test_layers_without_gate_rank_give_one_decay():
    ids = torch.randint(256, (2, 9))
    for name in ("mamba2", "retnet", "mamba2+ska"):
        gates = capture_gates(tiny(name), ids)
        assert gates
        assert all(layer.g_slow is None and layer.g_fast.shape == (2, 9, 2) for layer in gates)
        assert not any(layer.resets().any() for layer in gates)
    assert capture_gates(tiny("simple+vector"), ids) == []
    assert capture_gates(tiny("llama"), ids) == []


def test_capturing_changes_nothing():
    model, ids = tiny("mamba2+gate_rank"), torch.randint(256, (1, 12))
    model.train()
    model.blocks[1].eval()
    gate = model.blocks[0].mixer.gate_rank
    model(ids)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    modes, counts = [m.training for m in model.modules()], gate.counts.clone()
    capture_gates(model, ids)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(gate.counts, counts)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_numbers_of_a_head():
    """Read two sequences of 8 tokens. The reset at the first token of one has no effect."""
    slow, fast = torch.zeros(2, 8, 2).double(), torch.full((2, 8, 2), -math.log(2.0)).double()
    slow[0, [0, 2, 4], 0] = -0.7
    slow[1, 5, 0] = -0.7
    first, second = head_masks(Gates(3, fast, slow), 4)
    assert (first.layer, first.head, second.head) == (3, 0, 1)
    assert (first.resets, first.segment) == (1.5, 16 / 5)
    assert (second.resets, second.segment, second.slow) == (0, 8, math.inf)
    assert first.fast == pytest.approx(1)
    assert first.slow == pytest.approx(math.log(2) / (3 * 0.7 / 14))
    # The block has rows 4 to 7 and columns 0 to 3. The first sequence resets at 4, the second not in its columns.
    assert (first.rank_max, first.rank_mean) == (1, 1)
    slow[0, 4, 0] = 0
    found = head_masks(Gates(3, fast, slow), 4)[0]
    assert (found.rank_max, found.rank_mean) == (2, 1.5)
    assert head_masks(Gates(3, fast), 4)[0].slow is None


def test_the_head_in_the_picture():
    slow = torch.zeros(1, 6, 2).double()
    slow[0, 2:4, 1] = -1.0
    fast = torch.full_like(slow, -0.1)
    found = [Gates(0, fast), Gates(2, fast, slow)]
    head = most_resets("m", found)
    assert (head.gates.layer, head.head, head.resets()) == (2, 1, [2, 3])
    assert most_resets("m", found, layer=0).gates.layer == 0
    assert most_resets("m", found, layer=2, head=0).head == 0
    assert head.title() == "m, layer 2, head 1: 2 resets in 6 tokens, mean segment 2"
    assert most_resets("m", found, layer=0).title().endswith("no reset in 6 tokens")
    assert_raises(ValueError, "choose from 0, 2", most_resets, "m", found, layer=1)
    assert_raises(ValueError, "choose 0 to 1", most_resets, "m", found, head=2)


def test_the_picture_of_a_head_has_the_masks_of_its_layer():
    """The masks of log-linear attention are not those of its decay."""
    slow, fast = map(torch.cat, zip(random_gates(6, 0.3), random_gates(6, 0.3), strict=True))
    masks = (torch.rand(2, 1, 6, 6).tril(), torch.rand(2, 1, 6, 6).tril())
    for gates in (Gates(0, fast, slow), Gates(0, fast, factors=masks)):
        gamma, lam, both = Head("m", gates, 0, sequence=1).masks()
        assert torch.equal(gamma, gates.masks()[0][1, 0])
        assert torch.equal(lam, gates.masks()[1][1, 0])
        assert torch.equal(both, gamma * lam)


@pytest.mark.parametrize("models", [1, 3, 6])
def test_picture(models):
    slow, fast = random_gates(12, 0.3)
    slow[0, 4, 0] = -0.1
    heads = [Head(f"model ${n}", Gates(0, fast, None if n == 2 else slow), 0) for n in range(models)]
    figure = draw(mask_figure.mask(heads))
    figure.canvas.draw()
    shown = min(models, 4)
    *panels, cuts = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(panels) == 3 * shown
    for axes in panels[:3]:
        assert axes.get_xticks(minor=True).tolist() == heads[0].resets()
    drawn = panels[2].images[0].get_array()
    assert np.isnan(drawn[0, 1]) or drawn.mask[0, 1]
    assert drawn[7, 3] == pytest.approx(by_recurrence(slow[0, :, 0], fast[0, :, 0])[7, 3].item())
    rounding, *lines = cuts.lines
    assert set(rounding.get_ydata()) == {mask_figure.ROUNDING}
    assert len(lines) == 1 + 2 * shown
    one_decay, second, third = (torch.tensor(line.get_ydata())[2:-2] for line in lines[:3])
    assert max(one_decay.max(), third.max()) <= ROUNDING
    assert second.max() > 1e-3


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "run"
    for name in ("mamba2+gate_rank", "mamba2"):
        folder = checkpoint.save(tiny(name), run / name / "lr0.01-seed0")
        task = {"name": "mqar", "vocab_size": 256, "length": 16, "num_pairs": 4}
        (folder / "run.json").write_text(json.dumps({"validation": [task]}))
    (tmp_path / "text").write_bytes(b"Before we proceed any further, hear me speak.\n" * 4)
    return run


def test_end_to_end(run_dir, capsys):
    main(["mask", str(run_dir), "--tokens", "24", "--sequences", "2"])
    out = capsys.readouterr().out
    for expected in ("mamba2+gate_rank", "segment", "2 × 24 tokens", "blocks of 8 tokens", "–", "written: "):
        assert expected in out
    assert (run_dir / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in run_dir.iterdir()) == ["mamba2", "mamba2+gate_rank", "mask.png"]


def test_what_is_read(run_dir, tmp_path):
    own = measure_masks([run_dir], tokens=24, sequences=2)
    named = measure_masks([run_dir], task="mqar", tokens=24, sequences=2)
    text = measure_masks([run_dir], text=[tmp_path / "text"], tokens=24, sequences=2)
    for found in (own, named, text):
        assert {name: len(gates) for name, gates in found.items()} == {"mamba2": 2, "mamba2+gate_rank": 2}
        assert found["mamba2"][0].g_fast.shape == (2, 24, 2)
    assert not torch.equal(own["mamba2"][0].g_fast, text["mamba2"][0].g_fast)
    assert not torch.equal(own["mamba2"][0].g_fast, named["mamba2"][0].g_fast)


def test_options_choose_the_picture(run_dir, tmp_path, capsys):
    output = tmp_path / "out" / "picture.svg"
    main(["mask", str(run_dir / "mamba2+gate_rank"), "--text", str(tmp_path / "text"), "--layer", "1", "--head", "1",
          "--tokens", "20", "--block", "4", "--output", str(output)])  # fmt: skip
    assert "layer 1, head 1" in output.read_text()  # as the name of its path
    assert "blocks of 4 tokens" in capsys.readouterr().out


def test_example_needs_no_model(tmp_path, capsys):
    main(["mask", "--example", "--output", str(tmp_path / "example.png")])
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")
    assert "written: " in capsys.readouterr().out


@cases(
    "arguments, message",
    (["{run}", "--text", "{run}/nowhere"], "no file"),
    (["{run}", "--text", "{run}/../empty"], "is empty"),
    (["{run}", "--text", "{run}/../text", "--task", "s5"], "not both"),
    (["{run}", "--task", "nonsense"], "nonsense"),
    (["{run}", "--task", "s5"], "group s5 has 120 elements"),
    (["{run}", "--task", "s5:s6"], "tier of s5"),
    (["{run}", "--tokens", "1"], "2 tokens or more"),
    (["{run}", "--tokens", "8", "--task", "mqar"], "choose 1 to 7"),
    (["{run}", "--layer", "7"], "choose from 0, 1"),
    (["{run}", "--head", "7"], "choose 0 to 1"),
    (["{run}", "--output", "{run}/picture.gif"], "unknown format 'gif'; choose from png, svg, pdf"),
    (["{run}/../elsewhere"], "no folder"),
    (["{run}/.."], "what its model was trained on"),
    (["{run}/../plain"], "no layer with one decay per head"),
    (["{run}", "--example"], "--example alone"),
    (["--tokens", "8"], "name at least one checkpoint"),
)
def test_errors_are_one_line_and_exit_code_2(run_dir, tmp_path, refused, arguments, message):
    (tmp_path / "empty").write_bytes(b"")
    folder = checkpoint.save(tiny("llama"), tmp_path / "plain")
    if "{run}/.." not in arguments:
        task = {"name": "mqar", "vocab_size": 256, "length": 16, "num_pairs": 4}
        (folder / "run.json").write_text(json.dumps({"validation": [task]}))
    assert message in refused("mask", *(argument.replace("{run}", str(run_dir)) for argument in arguments))
    assert not list(run_dir.glob("*.*"))


@pytest.mark.parametrize("count", [1, 2])
def test_rounding_is_drawn_as_such_and_labels_end_inside_the_picture(count):
    """One decay has rank 1, so its second singular value is rounding. The three masks of one model stand in a row."""
    torch.manual_seed(0)
    fast = -torch.rand(1, 24, 1, dtype=torch.float64)
    figure = mask_figure.mask([Head(f"model {i}", Gates(0, fast, None), 0) for i in range(count)])
    panel = figure.panels[-1]
    assert {value for series in panel.series for value in series.y if math.isfinite(value)} == {mask_figure.ROUNDING}
    assert [reference.y for reference in panel.references] == [mask_figure.ROUNDING]
    drawn = arrange(draw(figure))
    drawn.savefig(BytesIO(), dpi=DPI)
    tops = [round(axes.get_position().y1, 3) for axes in drawn.axes[:3]]
    assert len(set(tops)) == 1
    label = drawn.axes[-1].yaxis.label.get_window_extent()
    assert 0 <= label.x0 < label.x1 <= drawn.bbox.x1
    assert 0 <= label.y0 < label.y1 <= drawn.bbox.y1
