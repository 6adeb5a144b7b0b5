"""Keys, queries and values that a Mamba layer passes to later layers of the same forward pass (Echo, §6.1)."""

from __future__ import annotations

from torch import Tensor

from halflife.layers.mixer import Shared

NAMES = ("ssm_query", "ssm_key", "ssm_value")


def pass_on(shared: Shared | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Put the features `[B, T, G, K]`, `[B, T, G, K]` and `[B, T, H, V]` of a layer into `shared`, if there is one."""
    if shared is not None:
        for name, x in zip(NAMES, (q, k, v), strict=True):
            shared[name] = x


def taken(shared: Shared | None, tokens: tuple[int, ...], num_heads: int, rank: int, width: int) -> list[Tensor]:
    """The features of the nearest layer before, for each head: `[B, T, H, K]` twice and `[B, T, H, V]`.

    Args:
        shared: tensors of this forward pass.
        tokens: B and T of the layer that takes them.
        num_heads, rank, width: its H, K and H · V.

    Raises:
        ValueError: no layer before passes its features on, or they have other sizes.
    """
    if shared is None or any(name not in shared for name in NAMES):
        raise ValueError("features 'mixer' are those of a Mamba layer before this one that has share_features=True")
    q, k, v = (shared[name] for name in NAMES)
    if q.shape[:2] != tokens or q.shape[-1] != rank or v.shape[2:] != (num_heads, width // num_heads):
        raise ValueError(
            f"features 'mixer' must have {num_heads} heads, keys of {rank} (rank) and values of {width // num_heads} "
            f"numbers (value_dim); got {tuple(q.shape)} and {tuple(v.shape)}"
        )
    return [*(x.repeat_interleave(num_heads // x.shape[2], 2) for x in (q, k)), v]
