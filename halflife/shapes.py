"""The meaning of the letters in shapes, everywhere in this library.

| letter | meaning                                                                    |
|--------|----------------------------------------------------------------------------|
| B      | batch: independent sequences (1 when sequences are packed)                 |
| T      | tokens along the sequence (the sum of all lengths when packed)             |
| H      | heads                                                                      |
| G      | heads of queries and keys, each of which serves H / G heads in a row       |
| K      | key and query size of a head: rows of the state                            |
| V      | value size of a head: columns of the state                                 |
| N      | sequences in a packed batch, or channels of a decay spectrum               |
| C      | tokens in a chunk; `n` counts chunks                                       |
| R      | rank, or the low-rank width of a projection                                |
| D      | hidden size of a model, or channels of a convolution                       |
| W      | taps of a short convolution                                                |

Tensors are `[B, T, H, K]`. States are `[B, H, K, V]`, with one row a sequence.

Where jaxtyping is installed, `Float` and `Int` are its types, and pytest checks the shapes in annotations. Elsewhere
they are plain tensors, because `import halflife` needs torch alone.
"""

from __future__ import annotations

import torch

try:
    from jaxtyping import Float, Int  # pyright: ignore
except ImportError:  # annotations only; no code path depends on this

    class Float:  # type: ignore
        """A stand-in for jaxtyping.Float."""

        def __class_getitem__(cls, item: object) -> type[torch.Tensor]:
            return torch.Tensor

    Int = Float  # type: ignore

__all__ = ["Float", "Int"]
