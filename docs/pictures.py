"""Draw the pictures of the concept pages with `python docs/pictures.py` in half a minute."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halflife import decay
from halflife.analysis.model_spectrum import coherence
from halflife.decay import minimax
from halflife.evaluation.memory import ska_crossover, ska_state_size
from halflife.lab.theory.approximation import random_rates
from halflife.ops import gate_rank, koopman_attention, linear_attention
from halflife.report.style import COLOURS, INK, PAGE_WIDTH, REFERENCE_LINE, model_styles, styled

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
LENGTH = 512  # T of training, in the pictures


@styled
@torch.no_grad()
def decays() -> Figure:
    """Draw what is left after s tokens for four λ, and the initial half-lives of several decay strategies."""
    figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
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
    figure = Figure(figsize=(PAGE_WIDTH, 2.6), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.45))
    random = random_rates(16, LENGTH, torch.Generator().manual_seed(3))
    geometric = minimax.geometric_rates(16, LENGTH)
    for axes, name, rates in zip(panels, ("random", "geometric"), (random, geometric), strict=False):
        image = axes.imshow(coherence(rates.log()), cmap="cividis", vmin=0, vmax=1)
        axes.set(title=f"{name} rates", xlabel="channel", xticks=(0, 15), yticks=(0, 15))
        axes.grid(False)
    figure.colorbar(image, ax=panels[:2], location="bottom", shrink=0.5, label="coherence", aspect=30)
    t = torch.linspace(0, math.log(LENGTH), 400, dtype=torch.float64).exp()
    best = minimax.geometric_rates(16, LENGTH, *minimax.best_endpoints(16, LENGTH))
    fits = {"random": random, "geometric, [1/T, 1]": geometric, "geometric, best ends": best}
    for (name, look), rates in zip(model_styles(tuple(fits)).items(), fits.values(), strict=True):
        result = minimax.fit(rates, LENGTH, continuous=True)
        left = (t**-0.5 - torch.exp(-t.unsqueeze(-1) * rates) @ result.weights).abs()
        panels[2].plot(t, left.clamp(min=1e-12), color=look.color, linestyle=look.linestyle, linewidth=1.2, label=name)
    panels[2].set(xscale="log", yscale="log", xlabel="lag t", ylim=(1e-8, 1e5), title=r"error against $t^{-1/2}$")
    panels[2].legend(loc="upper left", fontsize=8)
    return figure


@styled
def stretching() -> Figure:
    """Draw time-scales of sixteen channels by position, for both reference lengths, and the responses of three."""
    figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
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
        axes.annotate("T", (LENGTH, 8e6), (3, 0), textcoords="offset points")
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
    figure = Figure(figsize=(PAGE_WIDTH, 2.6), layout="constrained")
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
    figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
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
    sizes = {"KV cache": (rank + width) * tokens, "SKA": ska_state_size(rank, width), "linear attention": rank * width}
    for (name, look), size in zip(model_styles(tuple(sizes)).items(), sizes.values(), strict=True):
        right.plot(tokens, size * torch.ones(60), color=look.color, linestyle=look.linestyle, label=name)
    right.axvline(ska_crossover(rank, width), **REFERENCE_LINE)
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


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for draw in (decays, spectra, stretching, gate_rank_reset, koopman):
        path = IMAGES / f"{draw.__name__}.png"
        draw().savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
