"""PoST taken apart: ordering, geometric rates, stretching, t_ref, end points and gain, one by one."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.language_models.base import LARGE, SMOKE, LanguageExperiment, LanguageSettings
from halflife.lab.experiments.mqar import LARGE_RATES, MQARExperiment, MQARSettings, mqar_model
from halflife.lab.experiments.mqar import PAPER as MQAR_LARGE
from halflife.lab.experiments.mqar import SMALL as MQAR_SMALL
from halflife.lab.experiments.mqar import SMOKE as MQAR_SMOKE
from halflife.models import ModelConfig
from halflife.models.presets.modifiers import merge
from halflife.registry import unknown

T = "T"  # stands for the training length
GEOMETRIC = {"rate_start": "geometric", "train_length": T}
FIXED_STEP = {"step_bias": "frozen"}
# The decay of `gla+post_released`, without PoST.
RELEASED_DECAY = {"decay": "mamba2_headwise", "granularity": "vector", "decay_rank": 0, "decay_bias": False}
# Part → options of PoST and of the mixer; `base:part` names a model. "post" is our form, `base+post`, and the others
# differ from it in what the name says. "frozen" is the paper's algorithm on Mamba-2 and Gated DeltaNet, which fixes Δ.
# A part with options of the "base" has no PoST.
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "post": {},
    "ordered": {"post": {"stretch": False, "rate_range": (1.0, 16.0)}},  # sorted, on the range of Mamba-2
    "static": {"post": {"stretch": False}},  # sorted and geometric
    "geometric": {"base": {"decay_options": GEOMETRIC}},  # not sorted
    "trained": {"base": {"decay_options": {"trained_rates": True}}},
    "geometric-trained": {"base": {"decay_options": {"trained_rates": True, **GEOMETRIC}}},
    "mamba2-decay": {"base": RELEASED_DECAY},
    "frozen": {"mixer": {"decay_options": FIXED_STEP}},
    "frozen-gain": {"mixer": {"decay_options": FIXED_STEP, "stretch_gain": True}},
    "theorem": {"post": {"reference_length": T}},
    "slow0.1": {"post": {"endpoints": (0.1, 1.0)}},
    "slow0.01": {"post": {"endpoints": (0.01, 1.0)}},
    "theorem-slow0.01": {"post": {"reference_length": T, "endpoints": (0.01, 1.0)}},
    "optimal": {"post": {"endpoints": "optimal"}},
    "moving": {"post": {"endpoints": "moving"}},
    "held": {"post": {"last_position": T}},
    "gain": {"mixer": {"stretch_gain": True}},
    "gain-theorem": {"post": {"reference_length": T}, "mixer": {"stretch_gain": True}},
    "gain-held": {"post": {"last_position": T}, "mixer": {"stretch_gain": True}},
    "gain-moving": {"post": {"endpoints": "moving"}, "mixer": {"stretch_gain": True}},
    "head-norm": {"mixer": {"norm_per_head": True}},
    "static-head-norm": {"post": {"stretch": False}, "mixer": {"norm_per_head": True}},
    "gain-head-norm": {"mixer": {"stretch_gain": True, "norm_per_head": True}},
    "slow0.01-head-norm": {"post": {"endpoints": (0.01, 1.0)}, "mixer": {"norm_per_head": True}},
    "plain-head-norm": {"base": {"norm_per_head": True}},  # without PoST
}
HEAD_NORM = tuple(part for part in PARTS if part.endswith("head-norm"))
BASES = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")
# Parts that an architecture does not have: all but Mamba-2 have a norm for each head; RWKV-7's base parameters are no
# log-rates, and the slow end of "moving" is faster than its fastest rate; only the decay of Mamba-2 and Gated DeltaNet
# has Δ; these two and RetNet have free rates, and RetNet alone has fixed ones; and under t_ref = T a stretched β of a
# delta rule grows beyond 2. GLA alone has the decay of `gla+post_released` without PoST.
OF_RETNET, OF_GLA = ("trained", "geometric-trained"), ("mamba2-decay",)
OF_ONE = OF_RETNET + OF_GLA
FROZEN = ("frozen", "frozen-gain")
WITHOUT = {
    "mamba2": OF_ONE,
    "rwkv7": ("ordered", "geometric", "moving", "gain-theorem", "gain-moving", *FROZEN, *OF_ONE, *HEAD_NORM),
    "gated_deltanet": ("gain-theorem", *OF_ONE, *HEAD_NORM),
    "gla": ("geometric", *FROZEN, *OF_RETNET, *HEAD_NORM),
    "retnet": (*FROZEN, *OF_GLA, *HEAD_NORM),
}


def models(base: str) -> tuple[str, ...]:
    """The base alone, and the base with each part that it has."""
    return base, *(f"{base}:{part}" for part in PARTS if part not in WITHOUT.get(base, ()))


def split(name: str) -> tuple[str, str]:
    """The preset of a name `base:part` or `base`, and the part, "" for none; a ValueError if the architecture does not
    have it.
    """
    base, _, part = name.partition(":")
    if part and part not in PARTS:
        raise unknown("part of PoST", part, list(PARTS))
    if part in WITHOUT.get(base, ()):
        raise ValueError(f"{base} has no {part!r}: choose from {', '.join(models(base)[1:])}")
    return (f"{base}+post" if part and "base" not in PARTS[part] else base), part


def with_part(config: ModelConfig, name: str, part: str, train_length: int) -> ModelConfig:
    """The configuration of a model, with the options of a part."""
    if not part:
        return config
    chosen = _at_length(PARTS[part], train_length)
    options = merge(config.mixer_options, {**chosen.get("mixer", {}), **chosen.get("base", {})})
    if "post" in options:
        options["post"] = {**options["post"], **chosen.get("post", {})}
    return dataclasses.replace(config, name=name, mixer_options=options)


def _at_length(value: Any, train_length: int) -> Any:
    """The options with the training length in the place of `T`."""
    if isinstance(value, dict):
        return {key: _at_length(one, train_length) for key, one in value.items()}
    return train_length if value == T else value


@EXPERIMENTS.add("post-taken-apart")
class PostTakenApart(MQARExperiment):
    """PoST taken apart on MQAR: each part alone, at 1 to 16 T. Groups such as `gla-parts` have other architectures.

    | model | what it is |
    |---|---|
    | mamba2 | no PoST |
    | mamba2:frozen | PoST as its paper prints it: t_ref = 1, rates from 1/T to 1, Δ fixed, the input left alone |
    | mamba2:post | our form: the same with Δ trained, from which the parts below start |
    | mamba2:ordered | sorted rates e^p from 1 to 16, which do not stretch |
    | mamba2:static | sorted geometric rates from 1/T to 1, which do not stretch |
    | mamba2:geometric | rates that start geometric from 1/T to 1, and are neither sorted nor stretched |
    | mamba2:theorem | t_ref = T |
    | mamba2:slow0.1, mamba2:slow0.01 | the slow end at 0.1/T and 0.01/T |
    | mamba2:theorem-slow0.01 | t_ref = T with the slow end at 0.01/T |
    | mamba2:optimal | the end points that approximate t^(−1/2) best |
    | mamba2:moving | the best ones at T for gates that move with the position (RWKV-7 has no rates as fast) |
    | mamba2:held | positions beyond T count as T |
    | mamba2:gain, mamba2:frozen-gain | the input Δ x stretched as the decay is, with Δ trained and fixed |
    | mamba2:gain-theorem, mamba2:gain-held | `gain` with t_ref = T, and with held positions |
    | mamba2:gain-moving | `gain` with the end points of `moving` |
    | mamba2:head-norm, mamba2:slow0.01-head-norm | `post` and `slow0.01` with an output norm for each head alone |
    | mamba2:static-head-norm, mamba2:gain-head-norm | `static` and `gain` with an output norm for each head alone |
    | mamba2:plain-head-norm | Mamba-2 without PoST, with an output norm for each head alone |

    In other architectures the gain is β of the delta rule, k of GLA and RetNet, and k and κ̂ ⊙ a of RWKV-7. The rates of
    RetNet are fixed without PoST. It has `retnet:geometric`, whose rates are fixed too, `retnet:trained`, which starts
    at its own rates, and `retnet:geometric-trained`. None of these is sorted or stretched. `gla:mamba2-decay` has the
    decay of `gla+post_released` without PoST.
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(MQAR_SMOKE, length_factors=(1, 2, 4, 8), test_examples=256),
        "small": dataclasses.replace(
            MQAR_SMALL, train_length=64, pairs=(4, 8, 16, 16), length_factors=(1, 2, 4, 8, 16), test_examples=256
        ),
        "large": MQAR_LARGE,
    }
    models: ClassVar = models("mamba2")
    held: ClassVar = "persist"
    groups: ClassVar = {f"{base}-parts": models(base) for base in BASES}
    rates: ClassVar = {"large": LARGE_RATES, "": (3e-3, 1e-2, 3e-2)}

    def model(self, name: str, settings: MQARSettings) -> ModelConfig:
        preset, part = split(name)
        return with_part(mqar_model(preset, settings), name, part, settings.train_length)


# The models of docs/results/post_parts_text.md.
SMALL = LanguageSettings(
    hidden_size=192, num_layers=3, train_length=512, batch_size=1, steps=1464, learning_rate=1e-3, bf16=True,
    validate_every=366, save_every=366, validation_tokens=1 << 15, test_tokens=1 << 16, num_heads=6,
)  # fmt: skip


@EXPERIMENTS.add("post-taken-apart-text")
class PostTakenApartText(LanguageExperiment):
    """PoST taken apart on text: the parts of `post-taken-apart`, with bits per token at 1 to 16 T.

    | scale | text | tokens |
    |---|---|---:|
    | smoke | the source of Python's standard library, in bytes | 61 thousand |
    | small | the same | 0.75 M |
    | large | FineWeb-Edu, in bytes, T 2,048, 12 layers of width 768 | 2,000 M |
    """

    scales: ClassVar = {
        "smoke": LanguageSettings(**SMOKE),
        "small": SMALL,
        "large": LanguageSettings(
            **LARGE, hidden_size=768, num_layers=12, num_heads=24, train_length=2048, batch_size=32, steps=30_518,
            learning_rate=6e-4, text=("hf:HuggingFaceFW/fineweb-edu",), warmup=0.01,
        ),
    }  # fmt: skip
    models: ClassVar = models("mamba2")
    groups: ClassVar = {f"{base}-parts": models(base) for base in BASES}

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        rate = self.scales[scale].learning_rate
        return (rate / 2, rate, 2 * rate)

    def model(self, name: str, settings: LanguageSettings) -> ModelConfig:
        preset, part = split(name)
        return with_part(super().model(preset, settings), name, part, settings.train_length)
