"""The cost of decoding as the context grows: `python benchmarks/decode.py [--write docs/benchmarks.md]`.

The script decodes one sequence with one layer of hidden size 768 in float32. It reports milliseconds a token and bytes
of the state after 1K to 64K tokens. Recurrent states come from a forward pass over that many tokens in pieces. Softmax
attention gets a cache of random keys and values. A second table compares rank-one updates with factorisations of the
Gram matrix for spectral Koopman attention with one operator a token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife import layers  # noqa: E402
from halflife.layers import Mixer, State  # noqa: E402
from halflife.models import preset  # noqa: E402
from halflife.models.states import size as size_of  # noqa: E402
from halflife.ops import koopman_attention  # noqa: E402
from halflife.ops.koopman import KoopmanCall, solve  # noqa: E402
from halflife.ops.koopman import op as koopman  # noqa: E402
from halflife.ops.koopman.readout import KoopmanReadout  # noqa: E402
from halflife.ops.koopman.state import KoopmanMemory, add_to_sums  # noqa: E402

HIDDEN, HEADS, PIECE = 768, 12, 2048
RANKS, WIDTH = (64, 128), 64
MARK = "<!-- decode -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the first table here, after the line " + MARK)
    parser.add_argument("--lengths", type=int, nargs="+", default=(1024, 4096, 16384, 65536))
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure for, each context or batch size")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        text = "\n".join(contexts(sorted(arguments.lengths), arguments.seconds))
        print(text, *updates(arguments.seconds), sep="\n")
    if arguments.write:
        timing.write_section(arguments.write, MARK, text)


# --------------------------------------------------------------------------------------------- contexts


def contexts(lengths: list[int], seconds: float) -> Iterator[str]:
    """Yield Markdown lines with one row a layer: milliseconds and bytes at each length."""
    mixers = _mixers()
    states: dict[str, State | None] = dict.fromkeys(mixers)
    times, sizes, done = [], [], 0
    for length in lengths:
        states = {name: _state(mixer, states[name], done, length) for name, mixer in mixers.items()}
        done = length
        times.append(timing.medians({n: _step(mixer, states[n]) for n, mixer in mixers.items()}, seconds))
        sizes.append({n: size_of((state,)) for n, state in states.items() if state is not None})
    yield "## Decoding"
    yield ""
    yield timing.command()
    yield ""
    yield f"One layer, d {HIDDEN}, one sequence, float32, {torch.get_num_threads()} threads: ms a token (state kB)."
    yield "SKA also stores the inverse factor of its operator, r² numbers per head. With an operator a token, the state"
    yield "contains it. With an operator a chunk, it comes on top (110 kB here)."
    yield ""
    yield "| layer | " + " | ".join(f"after {length:,} tokens" for length in lengths) + " |"
    yield "|---|" + "---:|" * len(lengths)
    for name in mixers:
        cells = (f"{1e3 * time[name]:.2f} ({size[name] / 1e3:,.0f})" for time, size in zip(times, sizes, strict=True))
        yield f"| {name} | " + " | ".join(cells) + " |"


def _mixers() -> dict[str, Mixer]:
    torch.manual_seed(0)
    ska = {"num_heads": HEADS, "rank": 48}
    built = {
        "SKA, an operator a chunk of 64": layers.build("ska", hidden_size=HIDDEN, **ska),
        "SKA, an operator a token": layers.build("ska", hidden_size=HIDDEN, refresh="token", **ska),
    }
    for name, title in (("mamba2", "Mamba-2"), ("llama", "softmax attention")):
        config = preset(name, hidden_size=HIDDEN, num_layers=2)
        built[title] = layers.build(config.mixer, hidden_size=HIDDEN, layer_idx=0, num_layers=2, **config.mixer_options)
    return built


def _state(mixer: Mixer, state: State | None, done: int, length: int) -> State:
    """Return the state after `length` tokens, from the state after `done` tokens."""
    if isinstance(mixer, layers.LAYERS["attention"]):
        shape = 1, length, HIDDEN // 64, 64
        return {"position": torch.tensor([length]), "keys": torch.randn(shape), "values": torch.randn(shape)}
    while done < length:
        piece = min(PIECE, length - done)
        state, done = mixer(torch.randn(1, piece, HIDDEN), state)[1], done + piece
    # A single token gives the state the form that decoding gives it.
    return mixer(torch.randn(1, 1, HIDDEN), state)[1]


def _step(mixer: Mixer, state: State | None):
    x = torch.randn(1, 1, HIDDEN)
    return timing.decoding(lambda before: mixer(x, before)[1], state)


# ------------------------------------------------------------------------------------ an operator a token


def updates(seconds: float) -> Iterator[str]:
    """Yield Markdown lines on the cost of a token with rank-one updates and with factorisations of its operator."""
    yield f"An operator a token, P {WIDTH}, K 2, {HEADS} heads: ms a token. *Update* is the time of a rank-one"
    yield "update of the inverse factor, or of a Cholesky factorisation. *Token* adds the read-out (K + 1 solves, K"
    yield "products with M, one with C) and the three sums, which every variant needs. *As the paper* forms A_w and B_v"
    yield "for each token (Eq. 11 to 13, without the power iterations)."
    yield ""
    yield "| r | sequences | update, rank one | factorised (×) | token, rank one | factorised (×) | as the paper (×) |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for rank in RANKS:
        for batch in (1, 16):
            time = timing.medians(_updates(rank, batch), seconds)
            rank_one, cholesky, token, anew, paper = (1e3 * seconds for seconds in time.values())
            yield (
                f"| {rank} | {batch} | {rank_one:.3f} | {cholesky:.3f} ({cholesky / rank_one:.1f} ×) | {token:.3f} "
                f"| {anew:.3f} ({anew / token:.1f} ×) | {paper:.3f} ({paper / token:.1f} ×) |"
            )


def _updates(rank: int, batch: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    q, k = torch.randn(2, batch, 2 * rank, HEADS, rank)
    v = torch.randn(batch, 2 * rank, HEADS, WIDTH)
    k[:, 0] *= 3  # the longest key, so that later keys do not change the unit
    options = {"refresh": "token", "output_final_state": True}
    _, state = koopman_attention(q[:, :-1], k[:, :-1], v[:, :-1], **options)
    q, k, v = (x[:, -1:] for x in (q, k, v))
    _, state = koopman_attention(q, k, v, initial_state=state, **options)
    assert state is not None
    memory, call = KoopmanMemory.from_state(state), KoopmanCall(q, k, v, refresh="token")
    readout = KoopmanReadout(1.0, 1.0, 1e-3, 2, k, "whitened")
    z = k[:, 0] / state["norm"].sqrt().unsqueeze(-1)
    eye = 1e-3 * torch.eye(rank)
    return {
        "rank one": lambda: solve.rank_one(state["inverse"], z),
        "cholesky": lambda: solve.cholesky(state["gram"] / state["norm"][..., None, None] + eye),
        "token": lambda: koopman._step(call, memory, readout),
        "token, anew": lambda: _factorised(call, memory, readout),
        "token, as the paper": lambda: _formed(call, memory),
    }


def _factorised(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout):
    """As `koopman._step`, but the operator is factorised for each token."""
    y, _ = readout.read(memory.sums, call.q.transpose(1, 2))
    return y.transpose(1, 2), add_to_sums(call.k[:, 0], call.v[:, 0], None, memory)


def _formed(call: KoopmanCall, memory: KoopmanMemory, power: int = 2):
    """A step of the paper: the Cholesky factor, A_w by two triangular solves of matrices, B_v, then the read-out."""
    sums, q = memory.sums, call.q
    unit = sums.norm[..., None, None]
    factor, _ = solve.cholesky(sums.gram / unit + 1e-3 * torch.eye(q.shape[-1]))
    half = torch.linalg.solve_triangular(factor, sums.transition / unit, upper=False)
    operator = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
    readout = torch.cholesky_solve(sums.values.mT, factor).mT
    w = torch.linalg.solve_triangular(factor, q[:, 0].unsqueeze(-1) / unit, upper=False)
    for _ in range(power):
        w = operator @ w
    return readout @ (factor @ w), add_to_sums(call.k[:, 0], call.v[:, 0], None, memory)


if __name__ == "__main__":
    main()
