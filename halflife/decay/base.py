"""The contract of a decay: it turns an activation and a position into a log-decay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halflife.initial import draws
from halflife.ops.backends.widened import product
from halflife.ops.laws import Law, Product, Spectrum, Unevaluated, log_decay, log_stretch
from halflife.packing import Packing
from halflife.precision import Float32Module
from halflife.registry import Registry, check_options, constructor_parameters

DECAYS: Registry[type[Decay]] = Registry("decay")

ROUNDED = (
    "a policy of mixed precision rounds the parameters of decays while they compute; "
    "halflife.training.sharding.fully_shard(model, mp_policy=…) leaves them in float32"
)
GRANULARITIES = ("scalar", "vector")


class DecayParts(NamedTuple):
    """Log-decays with the factors in them by which layers also scale what they write."""

    g: Any  # log-decays; `Unevaluated`, if so asked for
    step: Tensor | None  # the step size (`Decay.step_size`), or None if the strategy has none or it was not asked for
    # computes the logarithm of PoST's factor on g (`PoST.log_stretch`); None without PoST
    log_stretch: Callable[[], Tensor] | None
    key: Tensor | None = None  # the key under parameter sharing, where the pass that computes g has it


class Decay(Float32Module):
    """Log-decays `g ≤ 0` from activations f, `[B, T, H]` (scalar) or `[B, T, H, K]` (vector).

    A strategy is one file. It creates its parameters, draws them in `reset_parameters` and states its law in `law`, or
    computes it in `log_decay` if it is of another form. A strategy with base rates is a `SpectralDecay`, and PoST can
    wrap it. Class attributes describe the strategy:

    * `data_dependent`: whether `g` depends on f. If not, layers have no projection for f, and only its shape counts.
    * `shares_keys`: whether the architecture that it comes from writes `k = 1 − λ`.
    * `stateful`: whether `g` depends on earlier tokens, so that streaming carries a state (see `scan`).
    * `granularities`: the granularities for which it is defined.
    * `has_step_size`: whether it has a `step_size`.
    * `reads_shared`: whether `forward` takes `shared`, tensors that the layers of one forward pass share.

    A layer reads everything from one call, `decay(f, …)`, because only inside its `forward` are a module's parameters
    sure to be there (offloaded or sharded models).

    Args:
        num_heads: heads H.
        head_dim: key channels of a head, K.
        granularity: "scalar" (one rate per head) or "vector" (one rate per key channel).
        layer_idx, num_layers: the index of the layer and the number of layers. Some strategies decay more slowly in
            deep layers.

    Attributes:
        shape: the shape of one token's log-decays, `(H,)` or `(H, K)`.

    Raises:
        ValueError: the strategy is not defined for the granularity, or a size is below 1.
    """

    data_dependent = True
    shares_keys = False
    stateful = False
    granularities: tuple[str, ...] = GRANULARITIES
    has_step_size = False
    reads_shared = False

    def __init__(
        self, num_heads: int, head_dim: int, granularity: str = "scalar", layer_idx: int = 0, num_layers: int = 1
    ) -> None:
        super().__init__()
        if granularity not in self.granularities:
            raise ValueError(
                f"{type(self).__name__} is defined for granularity {' and '.join(self.granularities)}; "
                f"got {granularity!r}"
            )
        if min(num_heads, head_dim, num_layers) < 1 or not 0 <= layer_idx < num_layers:
            raise ValueError(
                f"need num_heads, head_dim ≥ 1 and 0 ≤ layer_idx < num_layers; got {num_heads}, {head_dim}, "
                f"{layer_idx} of {num_layers}"
            )
        self.num_heads, self.head_dim, self.granularity = num_heads, head_dim, granularity
        self.layer_idx, self.num_layers = layer_idx, num_layers
        self.shape: tuple[int, ...] = (num_heads,) if granularity == "scalar" else (num_heads, head_dim)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("law", "law_of_token"):
            if "log_decay" in vars(cls) and name not in vars(cls):  # which takes the place of an inherited law
                setattr(cls, name, getattr(Decay, name))

    def reset_parameters(self) -> None:
        """Draw the parameters from the initial distribution of the strategy. Each call gives a new draw."""

    def forward(
        self, f: Tensor | Product, *, position: Tensor | None = None, log_rate: Tensor | None = None,
        step: Tensor | None = None, parts: bool = False, with_step: bool = True,
        taper: Tensor | Spectrum | None = None, offset: Tensor | None = None,
        then: Callable[[DecayParts], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Compute log-decays `g ≤ 0` in float32 (float64 for float64 activations).

        Args:
            f: activations `[B, T, H]` or `[B, T, H, K]`; the gradient flows into them. Also a `Product`.
            position: token positions, from 1, `[T]` or `[B, T]`. Only position-adaptive decays use them.
            log_rate: base log-rates `[H]` or `[H, K]` that replace the strategy's (PoST), or None.
            step: `step_size(f)`, if the caller has it already.
            parts: whether to return `DecayParts`.
            with_step: whether the parts have the step size.
            taper, offset: PoST's α and the part of its stretch that does not depend on the position, see
                `ops.laws`, in the shape of the base log-rates.
            then: a function whose result is returned, for another kernel that computes g. It gets the parts, where g
                is `ops.laws.Unevaluated` if there is a law. Its tensors may be freed after this call (FSDP).
        """
        with_step = parts and with_step and self.has_step_size
        law = None if step is not None else self.law(log_rate) if then is None else self.law_of_token(log_rate)
        if then is not None and law is not None:
            law, at = law if offset is None else law.moved(offset), None if taper is None else position
            return then(DecayParts(Unevaluated(f, law, taper, at, self.shape), None, None))
        if isinstance(f, Product):
            bias = f.bias
            if law is not None and law.bias is None and bias is not None:  # the pass of the law adds it
                law, bias = law._replace(bias=bias.view(self.shape)), None
            f = product(f.x, f.weight, bias).unflatten(-1, self.shape)
        if law is not None:
            self._check(f)
            options = {"taper": taper, "offset": offset, "position": position, "with_step": with_step}
            g, step = log_decay(f, law, **options)
            return DecayParts(g, step, None) if parts else g
        self._check(f)
        f = f if f.dtype == torch.float64 else f.float()
        if step is None and with_step:
            step = self.step_size(f)
        g = self.log_decay(f, log_rate) if step is None else self.log_decay(f, log_rate, step)
        if isinstance(taper, Tensor) and position is not None:
            g = g * log_stretch(position, taper, offset).exp().to(g.dtype)
        found = DecayParts(g, step, None)
        return then(found) if then is not None else found if parts else g

    @property
    def leaves_law(self) -> bool:
        """Whether `forward` takes `then`. It does not where a hook reads the log-decays that it returns."""
        return not (self.stateful or self.reads_shared or self._forward_hooks)

    @property
    def passes_law(self) -> bool:
        """Whether the log-decays that `then` gets are those of a law that `ops.laws.gates` knows."""
        return self.leaves_law and self.has_law()

    @classmethod
    def has_law(cls) -> bool:
        """Whether the strategy states its law in `law`."""
        return cls.law is not Decay.law

    def law(self, log_rate: Tensor | None) -> Law | None:
        """The law in the form of `ops.laws`, or None if it is of another form, which `log_decay` computes.

        Args:
            log_rate: base log-rates in the place of the strategy's, or None.
        """
        return None

    def law_of_token(self, log_rate: Tensor | None) -> Law | None:
        """The law of a single token, which may have the shape "constant", φ = 1, for a kernel that knows it."""
        return self.law(log_rate)

    def log_decay(self, f: Tensor, log_rate: Tensor | None, step: Tensor | None = None) -> Tensor:
        """The law: `g` from float32 activations, base log-rates (None: the strategy's), and a `step_size`, if any."""
        if (law := self.law(log_rate)) is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a law nor a log_decay")
        return law.log_decay(law.step(f) if step is None else step)

    def scan(
        self, f: Tensor, *, position: Tensor | None = None, state: Tensor | None = None,
        cu_seqlens: Tensor | Packing | None = None, parts: bool = False,
    ) -> tuple[Any, Tensor | None]:  # fmt: skip
        """Return `(g, state)` for streaming, with g or `parts` of `forward`. Only a `stateful` decay has a state."""
        return self(f, position=position, parts=parts), None

    def shared_key(
        self, f: Tensor, parts: DecayParts, state: Tensor | None, cu_seqlens: Tensor | Packing | None
    ) -> Tensor:
        """The key under parameter sharing, `1 − λ`, in f's shape. `parts` are those of f; the rest is as in `scan`."""
        return -torch.expm1(parts.g) if parts.key is None else parts.key

    def step_size(self, f: Tensor) -> Tensor:
        """The step size by which a layer also scales its values. Only Mamba-2's decays have one."""
        raise ValueError(f"{type(self).__name__} has no step size")

    def base_log_rate(self) -> Tensor:
        """Log of the decay rate, log(−g), at zero activation: `[H]` or `[H, K]`."""
        return self.log_decay(self._rest(), None).neg().log()[0, 0]

    def timescales(self, position: float = 1) -> Tensor:
        """Tokens after which a channel has decayed by 1/e, at zero activation: `[H]` or `[H, K]`.

        Args:
            position: position of the token, from 1. Only position-adaptive decays depend on it.
        """
        return (-self.base_log_rate()).exp()

    def _check(self, f: Tensor) -> None:
        if f.shape[2:] != self.shape:
            raise ValueError(f"f must be [B, T, {', '.join(map(str, self.shape))}]; got {tuple(f.shape)}")
        for x in self._parameters.values():
            if x is not None and x.dtype.itemsize < 4:
                warnings.warn(ROUNDED, stacklevel=2)

    def _rest(self) -> Tensor:
        """Zero activation of one token, `[1, 1, H]` or `[1, 1, H, K]`."""
        tensors = [*self.parameters(), *self.buffers()]
        return torch.zeros(1, 1, *self.shape, device=tensors[0].device if tensors else None)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, granularity={self.granularity}"


class ConstantDecay(Decay):
    """g = −e^p with one log-rate p per head, fixed or trained, whatever the input."""

    data_dependent = False
    granularities = ("scalar",)

    def __init__(self, trained_rates: bool = False, **sizes) -> None:
        super().__init__(**sizes)
        self.trained_rates = trained_rates
        if trained_rates:
            self.log_rate = nn.Parameter(torch.empty(self.shape))
        else:
            self.register_buffer("log_rate", torch.empty(self.shape))

    @draws
    def reset_parameters(self) -> None:
        if self.log_rate is not None:
            self.log_rate.copy_(self.rates().log())

    def rates(self) -> Tensor:
        """The fixed, or the initial rates −log λ, `[H]`."""
        raise NotImplementedError

    def law_of_token(self, log_rate: Tensor | None) -> Law:
        return Law("constant", rate=self.log_rate if log_rate is None else log_rate)

    def log_decay(self, f: Tensor, log_rate: Tensor | None, step: Tensor | None = None) -> Tensor:
        rate: Tensor = self.log_rate if log_rate is None else log_rate
        return (-rate.exp()).to(f.dtype).expand(f.shape)


def build(
    name: str, *, num_heads: int, head_dim: int, granularity: str = "scalar",
    layer_idx: int = 0, num_layers: int = 1, **options: object,
) -> Decay:  # fmt: skip
    """Build the decay strategy `name` and draw its parameters.

    Args:
        name: one of `DECAYS.names()`.
        num_heads, head_dim, granularity, layer_idx, num_layers: see `Decay`.
        **options: options of the strategy (`p` of "simple", `tau` of "gla", …).

    Raises:
        ValueError: a name is unknown (the message lists the choices), or a granularity or size does not fit.
    """
    check_options(f"decay {name}", DECAYS[name], options, constructor_parameters(Decay))
    return DECAYS[name](
        num_heads=num_heads, head_dim=head_dim, granularity=granularity,
        layer_idx=layer_idx, num_layers=num_layers, **options,
    )  # fmt: skip
