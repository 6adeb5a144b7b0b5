"""The multiplications of one layer, counted, beside the orders of Echo's Table 1.

A count is of multiplications and divisions, without projections, norms and convolutions, which all mixers have. The
counts of SKA are those of the paper's chunk-causal training and of its decoding, where each token solves again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer of Echo."""

    # hidden_size, num_heads: d and H
    hidden_size: int = 448
    num_heads: int = 7
    # rank, width: r and P, of a head of SKA
    rank: int = 56
    width: int = 64
    chunk: int = 64  # S
    power: int = 2  # K
    # state_size, expand: rows of Mamba-2's state, and its inner width divided by d
    state_size: int = 64
    expand: int = 2
    # mlp, koopman: d_ff of SwiGLU and d_k of the Koopman MLP
    mlp: int = 1216
    koopman: int = 1216


def cholesky(rank: int) -> int:
    """Count a factorisation of `[R, R]`: r(r−1)/2 divisions, and the products of the entries below the diagonal."""
    return rank * (rank - 1) * (rank + 4) // 6


def solve(rank: int) -> int:
    """Count the solution of L Lᵀ x = b, two triangular systems of r(r+1)/2 each."""
    return rank * (rank + 1)


def ska_statistics(rank: int, width: int) -> int:
    """Count what a token adds to G, M and C of a head: 2r² + Pr."""
    return 2 * rank**2 + width * rank


def ska_read(rank: int, width: int, power: int) -> int:
    """Count the read-out of a query: K + 1 solves, K products with M, one with C. Scalars γ and η are left out."""
    return (power + 1) * solve(rank) + power * rank**2 + width * rank


def layer_costs(sizes: LayerSizes, length: int) -> dict[str, dict[str, int]]:
    """Count the multiplications of each component of Table 1, and evaluate the table's orders with a factor of 1.

    T is the number of tokens of a training sequence, and the position of a decoding step.

    Returns:
        The component → "train" and "step", the counts for a sequence and for one token at position T, and "printed
        train" and "printed step", the orders of the table.
    """
    s, d, t = sizes, sizes.hidden_size, length
    chunks = -(-t // s.chunk)
    token = ska_statistics(s.rank, s.width) + ska_read(s.rank, s.width, s.power)
    state = 3 * s.expand * d * s.state_size  # decay, outer product, read
    counts = {
        "Causal Attention": (d * t * (t + 1), 2 * d * t), "Mamba-2": (t * state, state),
        "SKA": (s.num_heads * (t * token + chunks * cholesky(s.rank)), s.num_heads * (token + cholesky(s.rank))),
        "SwiGLU MLP": (t * (3 * d * s.mlp + s.mlp), 3 * d * s.mlp + s.mlp),
        "Koopman MLP": (t * (2 * d * s.koopman + 2 * s.koopman), 2 * d * s.koopman + 2 * s.koopman),
    }  # fmt: skip
    printed = {
        "Causal Attention": (t * t * d, t * d), "Mamba-2": (t * d, d),
        "SKA": (t * s.rank**2 // s.chunk + s.rank**3, s.rank**3),
        "SwiGLU MLP": (t * d * s.mlp, d * s.mlp), "Koopman MLP": (t * d * s.koopman, d * s.koopman),
    }  # fmt: skip
    names = ("train", "step", "printed train", "printed step")
    return {name: dict(zip(names, (*counts[name], *printed[name]), strict=True)) for name in counts}


def cost_table(lengths: Sequence[int] = (256, 1024, 4096, 16384, 65536)) -> dict[str, Any]:
    """Compute `layer_costs` for some lengths.

    The table gives SKA O(T r²/S + r³) for training and calls it sublinear in T. Each token adds an outer product to G
    and M, and each query is solved, so the count is linear in T: O(T r² + T r³/S). The two differ by the factor of
    about S. The table also says that the Koopman MLP saves a third of SwiGLU's parameters "at identical FLOPs". With
    equal inner widths it saves a third of both.

    Returns:
        "sizes", "lengths", and "counts": component → each number of `layer_costs` → a list over the lengths.
    """
    sizes = LayerSizes()
    by_length = [layer_costs(sizes, length) for length in lengths]
    counts = {
        name: {kind: [costs[name][kind] for costs in by_length] for kind in kinds}
        for name, kinds in by_length[0].items()
    }  # fmt: skip
    return {"sizes": asdict(sizes), "lengths": list(lengths), "counts": counts}
