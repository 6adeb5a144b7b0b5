"""Float32 against float64 in Koopman attention over long streams, with decays and without."""

import pytest
import torch
from helpers import cases, generator, relative_error, run_pieces

from halflife.ops.koopman import koopman_attention

DECAYS = [0.0, -1e-8, -1e-6, -1e-5, -1e-4, -1e-3, -1e-2]  # one per head
PIECE, RANK, WIDTH = 2000, 12, 6

# Form → the worst error of outputs at 100,000 tokens, relative to the largest one of the head: of the first five heads,
# and of the two that decay by 10⁻³ or more per token; and the worst error of the sums.
FORMS = {
    "chunk": ({"chunk_size": 64}, 1.1e-6, 3.5e-7, 1.3e-6),
    "trace": ({"chunk_size": 64, "normalization": "trace"}, 1.1e-6, 4e-7, 1.3e-6),
    "token": ({"refresh": "token"}, 2.8e-5, 1.6e-6, 3.1e-5),
}


def stream(tokens, options, spread=None, granularity="scalar"):
    """Yield the error of each head at the last piece: read in pieces, by the same keys in float32 and float64."""
    draw, single, exact = generator("long stream"), None, None
    for _ in range(tokens // PIECE):
        q, k = torch.randn(2, 1, PIECE, len(DECAYS), RANK, generator=draw)
        v = torch.randn(1, PIECE, len(DECAYS), WIDTH, generator=draw)
        beta = torch.rand(1, PIECE, len(DECAYS), generator=draw)
        k = k if spread is None else 1 + spread * k
        g = torch.tensor(DECAYS).expand(1, PIECE, -1)
        g = g if granularity == "scalar" else g.unsqueeze(-1) * torch.linspace(0, 1, RANK)
        settings = {"gamma": 1.2, "mix": 0.5, "power": 1, "output_final_state": True, "backend": "chunked", **options}
        y, single = koopman_attention(q, k, v, g=g, beta=beta, initial_state=single, **settings)
        wide = [x.double() for x in (q, k, v)]
        expected, exact = koopman_attention(*wide, g=g.double(), beta=beta.double(), initial_state=exact, **settings)
    return torch.tensor([relative_error(y[:, :, h], expected[:, :, h]) for h in range(len(DECAYS))]), single, exact


@pytest.mark.slow
@cases("form, granularity", *((form, "scalar") for form in FORMS), ("chunk", "vector"), ("token", "vector"))
def test_100_000_tokens_in_float32(form, granularity):
    options, slow, fast, sums = FORMS[form]
    errors, single, exact = stream(100_000, options, granularity=granularity)
    assert errors[:5].max() <= 4 * slow
    assert errors[5:].max() <= 4 * fast
    assert max(relative_error(single[name], exact[name]) for name in ("gram", "transition", "values")) <= 4 * sums


@pytest.mark.slow
def test_keys_that_hardly_differ_need_trace_or_a_decay():
    """Without either, G grows while the ridge stays. A decay bounds G, and `trace` bounds its condition number."""
    plain, *_ = stream(100_000, {"chunk_size": 64}, spread=0.01)
    trace, *_ = stream(100_000, {"chunk_size": 64, "normalization": "trace"}, spread=0.01)
    assert plain.max() <= 4 * 3.4e-2
    assert plain[-1] <= 4 * 1.8e-3 < plain[0]
    assert trace.max() <= 4 * 2.9e-4


@torch.no_grad()
@pytest.mark.slow
def test_rank_one_updates_of_a_decayed_factor_do_not_drift():
    """Single tokens in float32, whose inverse factor is updated from token to token, against the whole in float64."""
    draw, length = generator("rank one"), 2000
    q, k, v = torch.randn(3, 1, length, 2, 6, generator=draw)
    g, beta = -0.01 * torch.rand(1, length, 2, generator=draw), torch.rand(1, length, 2, generator=draw)

    def run(x, state):
        q, k, v, g, beta = x
        options = {"refresh": "token", "output_final_state": True}
        return koopman_attention(q, k, v, g=g, beta=beta, initial_state=state, **options)

    y, _ = run_pieces(run, (q, k, v, g, beta), range(length + 1))
    expected, _ = run([part.double() for part in (q, k, v, g, beta)], None)
    assert relative_error(y[:, 100:], expected[:, 100:]) <= 4 * 1e-5
