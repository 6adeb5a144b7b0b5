"""Draw the pictures of the concept pages, and some of results, with `python docs/pictures.py` in half a minute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import claims  # beside this file
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halflife import decay
from halflife.files import read_json
from halflife.lab.experiments.evidence.post_parts import PARTS
from halflife.ops import gate_rank, koopman_attention, linear_attention
from halflife.report.intervals import bootstrap
from halflife.report.style import COLOURS, INK, REFERENCE_LINE, WIDTH, ModelStyle, model_styles, styled

DOCS = Path(__file__).parent
IMAGES, RESULTS = DOCS / "images", DOCS / "results"
LENGTH = 512  # T of training, in the pictures


@styled
@torch.no_grad()
def decays() -> Figure:
    """Draw what is left after s tokens for four λ, and the initial half-lives of several decay strategies."""
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = torch.logspace(0, 4, 200)
    for value, look in model_styles(("0.9", "0.97", "0.99", "0.997")).items():
        half = math.log(0.5) / math.log(float(value))
        left.plot(steps, float(value) ** steps, color=look.color, linestyle=look.linestyle, label=f"λ = {value}")
        left.plot(half, 0.5, look.marker, color=look.color)
        left.annotate(f"{half:.0f}", (half, 0.5), (5, 4), textcoords="offset points", fontsize=8)
    left.axhline(0.5, **REFERENCE_LINE)
    left.set(xscale="log", xlabel="tokens since it was written, s", ylabel=r"what is left, $\lambda^s$")
    left.legend(loc="upper right")
    for row, name in enumerate(STRATEGIES):
        halves = math.log(2) * strategy(name).timescales().flatten()
        right.plot(halves, [row] * len(halves), "|", color=INK, markersize=11, markeredgewidth=1.4)
    right.set(yticks=range(len(STRATEGIES)), yticklabels=STRATEGIES, xscale="log", xlabel="initial half-life, tokens")
    right.invert_yaxis()
    return figure


STRATEGIES = ("retnet", "tnl", "gla", "simple", "mamba2", "mamba2 + PoST")


@torch.no_grad()
def strategy(name: str) -> decay.Decay:
    """Return an untrained decay of eight heads, for the first of four layers."""
    torch.manual_seed(0)
    base, _, wrapped = name.partition(" + ")
    plain = decay.build(base, num_heads=8, head_dim=16, layer_idx=0, num_layers=4)
    return decay.PoST(plain, train_length=LENGTH) if wrapped else plain


@styled
def spectra() -> Figure:
    """Draw the coherence of random and of geometric time-scales, and their errors as approximations of a power law."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.45))
    random = approximation.random_rates(16, LENGTH, torch.Generator().manual_seed(3))
    geometric = approximation.geometric_rates(16, LENGTH)
    for axes, name, rates in zip(panels, ("random", "geometric"), (random, geometric), strict=False):
        image = axes.imshow(coherence(rates.log()), cmap="cividis", vmin=0, vmax=1)
        axes.set(title=f"{name} rates", xlabel="channel", xticks=(0, 15), yticks=(0, 15))
        axes.grid(False)
    figure.colorbar(image, ax=panels[:2], location="bottom", shrink=0.5, label="coherence", aspect=30)
    t = torch.linspace(0, math.log(LENGTH), 400, dtype=torch.float64).exp()
    best = approximation.geometric_rates(16, LENGTH, *approximation.best_endpoints(16, LENGTH))
    fits = {"random": random, "geometric, [1/T, 1]": geometric, "geometric, best ends": best}
    for (name, look), rates in zip(model_styles(tuple(fits)).items(), fits.values(), strict=True):
        result = approximation.fit(rates, LENGTH, continuous=True)
        left = (t**-0.5 - torch.exp(-t.unsqueeze(-1) * rates) @ result.weights).abs()
        panels[2].plot(t, left.clamp(min=1e-12), color=look.color, linestyle=look.linestyle, linewidth=1.2, label=name)
    panels[2].set(xscale="log", yscale="log", xlabel="lag t", ylim=(1e-8, 1e5), title=r"error against $t^{-1/2}$")
    panels[2].legend(loc="upper left", fontsize=8)
    return figure


@styled
def stretching() -> Figure:
    """Draw time-scales of sixteen channels by position, for both reference lengths, and the responses of three."""
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    panels = figure.subplots(1, 3)
    positions = [2**k for k in range(14)]
    for axes, reference in zip(panels, (1, LENGTH), strict=False):
        wrapped = decay.PoST(
            decay.build("mamba2", num_heads=16, head_dim=1), train_length=LENGTH, reference_length=reference
        )
        with torch.no_grad():
            scales = torch.stack([wrapped.timescales(t) for t in positions])
        shades = torch.linspace(0.15, 1, 16).flip(0)
        for channel in range(16):
            axes.plot(positions, scales[:, channel], color=COLOURS[0], alpha=float(shades[channel]), linewidth=1.1)
        axes.plot(positions, positions, **REFERENCE_LINE)
        axes.axvline(LENGTH, **REFERENCE_LINE)
        axes.annotate("T", (LENGTH, 0.45), (3, 0), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlabel="position t", ylim=(0.3, 3e7))
        axes.set_title(r"$t_{ref} = $" + ("1, the algorithm" if reference == 1 else "T, the theorem"))
    panels[0].set_ylabel("time-scale, tokens")
    tapered(panels[2])
    return figure


def tapered(axes: Axes) -> None:
    """Draw the response after s tokens of the slowest, a middle and the fastest channel, at T and at 16 T."""
    lags = torch.logspace(-0.5, 5, 200)
    for alpha, look in zip((1.0, 0.5, 0.0), model_styles("abc").values(), strict=True):
        for factor, line in ((1, "-"), (16, (0, (3, 2)))):
            scale = (factor * LENGTH) ** alpha
            axes.plot(lags, torch.exp(-lags / scale), color=look.color, linestyle=line, linewidth=1.4)
        axes.annotate(f"α = {alpha:g}", (LENGTH**alpha, 1.04), color=look.color, fontsize=8, ha="center")
    axes.set(xscale="log", xlabel="tokens since it was written", title="left at T; dashed: at 16 T", ylim=(0, 1.15))


@styled
@torch.no_grad()
def gate_rank_reset() -> Figure:
    """Draw what is left of three tokens in one decaying state, and in a fast and a slow state with three resets."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    length, written, resets = 80, (5, 25, 45), [20, 40, 60]
    k = torch.zeros(3, length, 1, 1)
    k[range(3), written] = 1
    ones, fast, slow = torch.ones_like(k), torch.full(k.shape[:3], math.log(0.93)), torch.zeros(k.shape[:3])
    slow[:, resets] = math.log(0.9)
    alone, _ = linear_attention(ones, k, k, fast, scale=1)
    both, _ = gate_rank(ones, k, k, slow, fast, scale=1)
    for axes, left in zip(panels, (alone, both), strict=True):
        for token, row, look in zip(written, left, model_styles("abc").values(), strict=True):
            axes.plot(range(token, length), row[token:, 0, 0], color=look.color, linestyle=look.linestyle)
        axes.set(xlabel="token", ylim=(0, 1.08))
    for reset in resets:
        panels[1].axvline(reset, **REFERENCE_LINE)
    panels[0].set(title="one state, λ = 0.93", ylabel="what is left of a token")
    panels[1].set_title("a fast and a slow state, resets dashed")
    return figure


@styled
@torch.no_grad()
def koopman() -> Figure:
    """Draw the recall of random pairs by their number for each power, and the size of the state against a KV cache."""
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    pairs = (4, 8, 16, 24, 32, 48, 64)
    names = {"K = 0": 0, "K = 1": 1, "K = 2": 2}
    for (name, look), power in zip(model_styles(tuple(names)).items(), names.values(), strict=True):
        left.plot(pairs, [100 * recall(count, power) for count in pairs], **look._asdict(), label=name)
    left.axvline(48, **REFERENCE_LINE)
    left.annotate("r = 48", (48, 52), (-38, 0), textcoords="offset points", fontsize=8)
    left.set(xlabel="pairs", ylabel="recalled, %", title="an untrained layer, queried with a key", ylim=(-3, 103))
    tokens = torch.logspace(1, 4, 60)
    rank = width = 48
    sizes = {"KV cache": (rank + width) * tokens, "SKA": state_size(rank, width), "linear attention": rank * width}
    for (name, look), size in zip(model_styles(tuple(sizes)).items(), sizes.values(), strict=True):
        right.plot(tokens, size * torch.ones(60), color=look.color, linestyle=look.linestyle, label=name)
    right.axvline(crossover(rank, width), **REFERENCE_LINE)
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="numbers per head", title="size of the state")
    right.legend(loc="lower right")
    right.set_ylim(30, None)
    left.legend(loc="center left", bbox_to_anchor=(0.0, 0.45))
    return figure


def recall(pairs: int, power: int, rank: int = 48, trials: int = 40) -> float:
    """Return the fraction of right answers of `koopman_attention` to one key, after `pairs` keys with their values.

    Keys and values are random unit vectors. The token after a key carries its value, as in a sequence of pairs.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(trials, 2 * pairs, 1, rank, generator=draw), dim=-1)
    asked = torch.randint(pairs, (trials, 1), generator=draw)
    q = tokens[torch.arange(trials).unsqueeze(-1), 2 * asked]
    y, _ = koopman_attention(q, tokens, tokens, power=power, mode="prefix")
    answers = tokens[:, 1::2, 0]
    guess = torch.einsum("bp,bnp->bn", y[:, 0, 0], answers).argmax(-1, keepdim=True)
    return (guess == asked).float().mean().item()


TEXT_FILES = {
    "mamba2": (
        "post_parts_text.csv",
        "post_parts_text_more.csv",
        "post_parts_text_norm.csv",
        "post_parts_text_norm_float32.csv",
    ),
    "gla": ("post_parts_text_gla.csv",),
    "gated_deltanet": ("post_parts_text_gated_deltanet.csv",),
    "rwkv7": ("post_parts_text_rwkv7.csv",),
    "retnet": ("post_parts_text_retnet.csv",),
}
OTHER_BASES = {"gla": "GLA", "gated_deltanet": "Gated DeltaNet", "rwkv7": "RWKV-7", "retnet": "RetNet"}
BASES = {"mamba2": "Mamba-2", **OTHER_BASES}
RECALL_FILES = {base: f"post_parts_{base}.csv" for base in OTHER_BASES} | {"mamba2": "post_parts_mqar.csv"}


@styled
def post_parts_text() -> Figure:
    """Draw the perplexity of each part of PoST over that of Mamba-2, by seed, for the last T bytes of T and of 16 T."""
    order = sorted(parts_on_text("mamba2"), key=lambda part: over_base(part, 16 * LENGTH).mean())
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    looks = model_styles(("no stretching", "decay and gain stretched", "decay alone stretched"))
    for axes, length, title in zip(panels, (LENGTH, 16 * LENGTH), ("T", "16 T"), strict=True):
        for row, part in enumerate(order):
            kind = stretched(part)
            draw_seeds(axes, row, over_base(part, length), looks[kind], kind)
        axes.axvline(1, **REFERENCE_LINE)
        axes.set(xscale="log", title=f"{length:,} bytes, {title}", xlabel="perplexity over that of Mamba-2")
    panels[0].set(yticks=range(len(order)), yticklabels=order, xticks=(1, 1.1, 1.2), xticklabels=("1", "1.1", "1.2"))
    panels[1].set(xticks=(1, 2, 3, 5), xticklabels=("1", "2", "3", "5"))
    for axes in panels:
        axes.minorticks_off()
    name_looks(figure, panels[1])
    return figure


@styled
def post_parts_text_others() -> Figure:
    """Draw the same for the other architectures, with T and 16 T in one panel."""
    parts = {base: parts_on_text(base) for base in OTHER_BASES}
    figure, panels, order = panels_of_parts(parts)
    lengths = {"T": LENGTH, "16 T": 16 * LENGTH}
    looks = model_styles(tuple(lengths))
    for axes, base in zip(panels, parts, strict=True):
        for part in parts[base]:
            for shift, (name, length) in zip((0.17, -0.17), lengths.items(), strict=True):
                draw_seeds(axes, order.index(part) + shift, over_base(part, length, base), looks[name], name)
        axes.axvline(1, **REFERENCE_LINE)
        axes.set(xlabel=f"over that of {BASES[base]}")
    panels[0].set(xlabel="perplexity over that of GLA")
    name_looks(figure, panels[0])
    return figure


@styled
def post_parts() -> Figure:
    """Draw the recall of 32 pairs at 4 T of each part of PoST minus that of its architecture, by seed."""
    read = claims.Files()
    parts = {base: [part for part in PARTS if read.measured(RECALL_FILES[base], f"{base}:{part}")] for base in BASES}
    figure, panels, order = panels_of_parts(parts)
    (look,) = model_styles(("recall",)).values()
    for axes, base in zip(panels, parts, strict=True):
        of_base = read.accuracy(RECALL_FILES[base], base, "capacity", 128, 32)
        for part in parts[base]:
            own = read.accuracy(RECALL_FILES[base], f"{base}:{part}", "capacity", 128, 32)
            draw_seeds(axes, order.index(part), 100 * (own - of_base), look, "")
        axes.axvline(0, **REFERENCE_LINE)
    figure.supxlabel("points of 32 pairs at 4 T", fontsize="medium")
    return figure


def panels_of_parts(parts: Mapping[str, Sequence[str]]) -> tuple[Figure, Sequence[Axes], list[str]]:
    """Return a figure with a panel for each architecture of `parts`, and the parts in the order of their rows."""
    order = [part for part in PARTS if any(part in own for own in parts.values())][::-1]
    figure = Figure(figsize=(0.3 * len(parts) * WIDTH, 5), layout="constrained")
    panels = figure.subplots(1, len(parts), sharex=True, sharey=True)
    for axes, base in zip(panels, parts, strict=True):
        axes.set(title=BASES[base])
    panels[0].set(yticks=range(len(order)), yticklabels=order)
    return figure, panels, order


@styled
def gate_rank_states() -> Figure:
    """Draw needles and recall of a base, the base with GateRank, and the base with as large a state, by seed."""
    tests = {
        "8 needles at 8 T": ("gate_rank_niah.csv", "niah:hard", 256, 8),
        "32 pairs at 4 T": ("gate_rank_mqar.csv", "capacity", 128, 32),
    }
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    panels = figure.subplots(1, len(tests), sharey=True)
    looks = dict(zip(("mamba2", "gated_deltanet"), model_styles("ab").values(), strict=True))
    rows = [(base, form) for base in looks for form in ("{}", "{}+gate_rank", "{0}@state({0}+gate_rank)")][::-1]
    for axes, (title, (file, test, length, pairs)) in zip(panels, tests.items(), strict=True):
        for height, (base, form) in enumerate(rows):
            values = 100 * claims.Files().accuracy(file, form.format(base), test, length, pairs)
            draw_seeds(axes, height, values, looks[base], "")
        axes.set(title=title, xlabel="right, %")
    names = {"{}": "", "{}+gate_rank": " + GateRank", "{0}@state({0}+gate_rank)": ", equal state"}
    panels[0].set(yticks=range(len(rows)), yticklabels=[f"{BASES[base]}{names[form]}" for base, form in rows])
    return figure


@styled
def endpoints() -> Figure:
    """Draw recall by length with a quarter of the length in pairs, and with 16 pairs, of three models, by seed."""
    figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    looks = model_styles(("mamba2", "mamba2+post", "mamba2+post_optimal"))
    for axes, test, lengths in zip(panels, ("capacity", "persist"), ((128, 256, 512), (256, 512)), strict=True):
        tests = [("in_distribution", 64), *((test, length) for length in lengths)]
        for model, look in looks.items():
            values = [100 * claims.Files().accuracy("endpoints.csv", model, *each) for each in tests]
            where = [length for _, length in tests]
            axes.plot(where, [seeds.mean() for seeds in values], **look._asdict(), label=model)
            for length, seeds in zip(where, values, strict=True):
                axes.plot([length] * len(seeds), seeds, look.marker, color=look.color, markersize=3, alpha=0.5)
        axes.set_xscale("log", base=2)
        axes.set(xticks=(64, *lengths), xticklabels=(64, *lengths), xlabel="tokens")
        axes.minorticks_off()
    panels[0].set(title="a quarter of the length in pairs", ylabel="recalled, %")
    panels[1].set(title="16 pairs")
    panels[1].legend(loc="lower left")
    return figure


@styled
def speed() -> Figure:
    """Draw the milliseconds of a training step of 65,536 tokens on one H100 by the length of its sequences."""
    data = read_json(RESULTS / "speed_attention.json")
    figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    axes = figure.subplots()
    looks = model_styles(tuple(row["model"] for row in data["models"]))
    for row, look in zip(data["models"], looks.values(), strict=True):
        axes.plot(data["lengths"], [1e3 * seconds for seconds in row["seconds"]], **look._asdict(), label=row["model"])
    axes.set_xscale("log", base=2)
    axes.set(xticks=data["lengths"], xticklabels=[f"{length:,}" for length in data["lengths"]], ylim=(0, None))
    axes.set(xlabel="tokens of a sequence", ylabel="milliseconds of a training step")
    axes.minorticks_off()
    axes.legend(loc="lower right")
    return figure


def draw_seeds(axes: Axes, height: float, values: np.ndarray, look: ModelStyle, name: str) -> None:
    """Draw one number per seed at a height, with their interval."""
    ends = bootstrap(values.tolist())
    axes.plot([ends.low, ends.high], [height, height], color=look.color)
    axes.plot(values, np.full(len(values), height), look.marker, color=look.color, markersize=5, label=name)


def name_looks(figure: Figure, axes: Axes) -> None:
    """Name every look once, below the panels."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named))


def over_base(part: str, length: int, base: str = "mamba2") -> np.ndarray:
    """Return the perplexity of a part over that of the architecture trained with it, for every seed of both."""
    return claims.Files().perplexity_over(file_of(part, base), f"{base}:{part}", base, length)


def parts_on_text(base: str) -> list[str]:
    """Return the parts of PoST that have runs on text."""
    return [part for part in PARTS if file_of(part, base)]


def file_of(part: str, base: str) -> str:
    """Return the name of the file of results that has a part, or "" if none has."""
    return next((name for name in TEXT_FILES[base] if claims.Files().measured(name, f"{base}:{part}")), "")


def stretched(part: str) -> str:
    """Return what a part of PoST stretches with the position."""
    options = PARTS[part]
    if "base" in options or not options.get("post", {}).get("stretch", True):
        return "no stretching"
    return "decay and gain stretched" if "stretch_gain" in options.get("mixer", {}) else "decay alone stretched"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    pages = dict.fromkeys((decays, spectra, stretching, gate_rank_reset, koopman), IMAGES)
    pages |= dict.fromkeys((post_parts, post_parts_text, post_parts_text_others, gate_rank_states, endpoints, speed), RESULTS)
    for draw, folder in pages.items():
        path = folder / f"{draw.__name__}.png"
        draw().savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
