"""The cross-entropy of tokens from their logits, and its gradient where the logits were.

    loss = log Σ_j e^{x_j} − x_y,    ∂loss/∂x_j = e^{x_j} / Σ_i e^{x_i} − [j = y]

On a GPU one kernel reads the logits for the losses, and one writes the gradient (cross_entropy.py in
`backends/triton/passes`). Elsewhere these are torch's passes. `backend` is as in `ops.fused`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from halflife.ops.arguments import is_transformed
from halflife.ops.backends import dispatch, triton
from halflife.ops.backends.dispatch import implements_pass, run_pass
from halflife.ops.spec import OPS, define
from halflife.precision import compute_dtype


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int = -100, backend: str = "auto") -> Tensor:
    """The losses `[...]` in nats, in float32 or wider, of `logits [..., V]` and integers `labels [...]`.

    Those of labels that are `ignored` are 0, without gradients.
    """
    return run_pass("cross_entropy", backend, (logits, labels), ignored)


def _expression(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    rows = logits.to(compute_dtype(logits)).flatten(0, -2)
    losses = F.cross_entropy(rows, labels.flatten().long(), reduction="none", ignore_index=ignored)
    return losses.view(labels.shape)


def _kernel(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return triton.custom_op("cross_entropy")(logits, labels.long(), ignored)[0]


define("cross_entropy", logits="... V", labels="int ...", constants=["labels"], settings={"ignored": -100})
implements_pass("cross_entropy", _expression, triton=(_kernel, triton.why_not_pass), kind="op")


def takes_place(logits: Tensor, labels: Tensor, backend: str = "auto") -> bool:
    """Whether `losses_and_errors` writes errors where the logits were; of these, dtypes and devices alone count."""
    if is_transformed():
        return False
    known = OPS["cross_entropy"].backends["triton"].function
    return dispatch.choose("cross_entropy", backend, logits.device, (logits, labels)) is known


def losses_and_errors(
    logits: Tensor, labels: Tensor, factor: Tensor, ignored: int = -100, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The losses `[N]` of `logits [N, V]`, and `factor` times their gradients `[N, V]`; without autograd.

    The factor is a number in the dtype of the losses, and the gradients are in that of the logits. The logits must not
    be read afterwards, because the gradients may take their place.
    """
    if takes_place(logits, labels, backend):
        losses, *sums = triton.custom_op("cross_entropy")(logits, labels, ignored)
        triton.custom_op("cross_entropy_errors")(logits, labels, *sums, factor, ignored)
        return losses, logits
    counts, target = labels != ignored, labels.unsqueeze(1).clamp_min(0)
    log_p = logits.to(compute_dtype(logits)).log_softmax(-1)
    losses = -log_p.gather(1, target).squeeze(1).where(counts, 0)  # also of a label whose logit is −inf
    errors = log_p.exp_().scatter_add_(1, target, log_p.new_full(target.shape, -1.0))
    return losses, errors.mul_((counts * factor).unsqueeze(1)).to(logits.dtype)
