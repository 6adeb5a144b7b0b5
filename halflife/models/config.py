"""The configuration of a model: a frozen dataclass that is written to JSON and read from it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from halflife.layers import LAYERS
from halflife.registry import check_choice

MLPS = ("swiglu", "koopman", "koopman_gated", "koopman_paper", "koopman_gated_paper", "rwkv7", "none")
NORMS = ("rms", "rms_plus_one", "layer")
NORM_PLACES = ("before", "after")
ATTACHMENTS = ("instead", "beside")
INITIALIZATIONS = ("default", "mamba2_released", "rwkv7_released", "gated_deltanet_released")
POSITIONS = ("none", "tpe", "tpe_paper", "tpe_released")
MAX_LAYERS = 1000  # a damaged config.json with a million would take an hour to build


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What `LanguageModel` is built from.

    Attributes:
        name: name of the preset, for tables.
        vocab_size: number of token ids.
        hidden_size: width of the model.
        num_layers: number of blocks.
        mixer: sequence mixer of every block, a name of `layers.LAYERS`.
        mixer_options: options of the mixer.
        hybrid: second mixer for some layers, `{"mixer": …, "options": {…}, "layers": [counted from 0]}`; or empty. With
            `"attach": "beside"` the second mixer comes after the first one and reads the residual stream without a norm
            (Echo, Appendix G.1). Otherwise it takes the place of the first. With `"norm_place": "after"` these blocks
            have their norms after mixer and MLP (OLMo).
        more_hybrids: further kinds of layers, each a mapping like `hybrid`. No two kinds share a layer.
        mlp: "swiglu", "koopman" or "koopman_gated" (Echo's), "koopman_paper" or "koopman_gated_paper" (Echo's with
            clamped moduli), "rwkv7" (squared ReLU after a token shift), or "none" for blocks without an MLP.
        intermediate_size: width inside the MLP; None means 8/3 of the hidden size, rounded up to a multiple of 64, and
            4 times the hidden size for "rwkv7".
        tie_embeddings: whether the output head shares the weight of the embedding.
        norm: norm before every mixer, MLP and head: "rms", "rms_plus_one" (with weights 1 + w) or "layer" (with bias).
        norm_eps: epsilon of every norm.
        embedding_norm: whether a norm follows the embedding (RWKV).
        embedding_dropout: share of the entries of the embeddings that training sets to 0, in [0, 1).
        position: "tpe" adds a Toeplitz layer to the embeddings, "tpe_paper" and "tpe_released" replace them by its
            output, and "none" leaves positions to the mixers.
        initializer_range: initial standard deviation of the embeddings.
        initialization: "default", where every module draws its weights. "mamba2_released": linear maps, short
            convolutions and embeddings are normal with `initializer_range` and have no bias at the start, and the
            output projections of the mixers are PyTorch's default divided by √num_layers (PoST's released Mamba-2).
            "gated_deltanet_released": the same, and the output projections are normal too. "rwkv7_released": embeddings
            are uniform in ±1e-4.

    Raises:
        ValueError: a size is below 1, there are more than `MAX_LAYERS` layers, a hybrid layer does not exist, or a
            mixer, MLP, norm or position is unknown.
    """

    name: str = "custom"
    vocab_size: int
    hidden_size: int
    num_layers: int
    mixer: str
    mixer_options: dict[str, Any] = field(default_factory=dict)
    hybrid: dict[str, Any] = field(default_factory=dict)
    mlp: str = "swiglu"
    intermediate_size: int | None = None
    tie_embeddings: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-5
    embedding_norm: bool = False
    embedding_dropout: float = 0.0
    position: str = "none"
    initializer_range: float = 0.02
    initialization: str = "default"
    more_hybrids: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size"):
            size = getattr(self, name)
            if name == "intermediate_size" and size is None:
                continue
            if not isinstance(size, Integral) or int(size) < 1:
                raise ValueError(f"{name} must be at least 1 and a whole number; got {size!r}")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers must be at most {MAX_LAYERS:,}; got {self.num_layers:,}")
        for epsilon in (self.norm_eps, *(given.get("norm_eps", 1.0) for given in self._options)):
            if not 0 < epsilon < math.inf:
                raise ValueError(f"norm_eps must be positive; got {epsilon}")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"initializer_range must be 0 or more; got {self.initializer_range}")
        if not 0 <= self.embedding_dropout < 1:
            raise ValueError(f"embedding_dropout must lie in [0, 1); got {self.embedding_dropout}")
        LAYERS[self.mixer]
        for kind in self.hybrids:
            self._check_hybrid(kind)
        if len(self.other_layers) != len(set(self.other_layers)):
            raise ValueError(f"two kinds of hybrid layers share a layer; got {self.other_layers}")
        named = (("mlp", MLPS), ("norm", NORMS), ("position", POSITIONS), ("initialization", INITIALIZATIONS))
        for kind, choices in named:
            check_choice(kind, getattr(self, kind), choices)

    def _check_hybrid(self, kind: dict[str, Any]) -> None:
        if set(kind) - {"attach", "norm_place"} != {"mixer", "options", "layers"}:
            raise ValueError(f"hybrid must have the keys mixer, options and layers; got {', '.join(kind)}")
        check_choice("attachment of a hybrid", kind.get("attach", "instead"), ATTACHMENTS)
        check_choice("norm_place of a hybrid", kind.get("norm_place", "before"), NORM_PLACES)
        LAYERS[kind["mixer"]]
        for layer in kind["layers"]:
            if not 0 <= layer < self.num_layers:
                raise ValueError(f"hybrid layers must lie between 0 and {self.num_layers - 1}; got {layer}")

    @property
    def _options(self) -> list[dict[str, Any]]:
        return [self.mixer_options, *(kind.get("options", {}) for kind in self.hybrids)]

    @property
    def hybrids(self) -> list[dict[str, Any]]:
        """All kinds of layers beside the base's: `hybrid`, if it is not empty, and `more_hybrids`."""
        return [kind for kind in (self.hybrid, *self.more_hybrids) if kind]

    @property
    def other_layers(self) -> list[int]:
        """The layers of all kinds in `hybrids`, in rising order."""
        return sorted(layer for kind in self.hybrids for layer in set(kind["layers"]))

    def mixer_of(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Return the name and the options of a layer's mixer."""
        kind = self._kind_of(layer)
        if kind and kind.get("attach") != "beside":
            return kind["mixer"], kind["options"]
        return self.mixer, self.mixer_options

    def beside_of(self, layer: int) -> tuple[str, dict[str, Any]] | None:
        """Return the name and the options of the mixer that comes after a layer's mixer, or None."""
        kind = self._kind_of(layer)
        if kind and kind.get("attach") == "beside":
            return kind["mixer"], kind["options"]
        return None

    def norms_after(self, layer: int) -> bool:
        """Whether the norms of a layer come after its mixer and its MLP."""
        return self._kind_of(layer).get("norm_place") == "after"

    @property
    def reads_action_mask(self) -> bool:
        """Whether a layer of the model uses an action mask."""
        places = range(self.num_layers)
        names = {self.mixer_of(i)[0] for i in places} | {found[0] for i in places if (found := self.beside_of(i))}
        return any(LAYERS[name].reads_action_mask for name in names)

    def _kind_of(self, layer: int) -> dict[str, Any]:
        return next((kind for kind in self.hybrids if layer in kind["layers"]), {})

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data for JSON."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Return the configuration that `to_dict` wrote.

        Raises:
            ValueError: a key is missing or unknown; the message lists the known keys.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in data:
            check_choice("key of ModelConfig", key, fields)
        required = [name for name in ("vocab_size", "hidden_size", "num_layers", "mixer") if name not in data]
        if required:
            raise ValueError(f"ModelConfig needs {', '.join(required)}")
        return cls(**data)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the text is no JSON of a ModelConfig: {error}") from error
        return cls.from_dict(data)
