"""What an op takes: its tensors with their shapes, stated once.

The check of arguments reads these specifications; so do the self-check, the test of docstrings and the fuzz.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halflife.packing import check_integers
from halflife.registry import Registry

CHANNELS = "KVRP"  # letters of axes that a head cannot be without
GROUPS = "G"  # the letter of heads that serve H / G heads each
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Implementation:
    """One backend of an op.

    Attributes:
        why_not: (op, device, call or None) → the reason why it cannot run there, or None if it can. Without a call,
            only the device and what is installed are judged.
        steps: whether it is also the fast one for single tokens, while decoding.
        traceable: whether torch.func and forward-mode differentiation see through it.
    """

    function: Callable[..., Any]
    why_not: Callable[..., str | None] | None = None
    steps: bool = False
    traceable: bool = False


class Shape:
    """The shapes that a tensor may have, as "B T H | B T H K | None".

    Axes are letters of `halflife.shapes`. A letter is one number in all tensors of a call, but "G" is any divisor of H,
    for each tensor its own. "L-1" is a number relative to a letter, and a digit is that number. "None" allows the
    tensor to be absent, "number" a number in its place. "int" before the axes is a tensor of integers, and "any" one of
    any dtype; all others hold floating-point numbers. "..." are any axes before.
    """

    def __init__(self, text: str) -> None:
        choices = [choice.split() for choice in text.split("|")]
        self.optional, self.number = ["None"] in choices, ["number"] in choices
        choices = [choice for choice in choices if choice not in (["None"], ["number"])]
        self.dtype = choices[0][0] if choices[0][:1] in (["int"], ["any"]) else "float"
        self.leading = "..." in choices[0]
        self.choices = [tuple(_axis(a) for a in choice if a not in ("int", "any", "...")) for choice in choices]
        self.grouped = (GROUPS, 0) in self.choices[0]

    def sizes(self, known: Mapping[str, int]) -> tuple[int, ...]:
        """The first shape with the numbers of a call."""
        return tuple([known[letter] + offset for letter, offset in self.choices[0]])

    def check(self, name: str, x: Any, known: dict[str, int], device: torch.device | None) -> torch.device:
        """Check the argument `name`, add the numbers of its letters to `known`, and return its device.

        `known` and `device` are those of the tensors before it. The message of an error says what would fit.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {'None' if x is None else type(x).__name__}")
        if self.dtype == "float" and x.dtype not in FLOATS:
            raise ValueError(f"{name} must hold floating-point numbers of 16 bits or more; got {x.dtype}")
        if device is not None and x.device != device:
            raise ValueError(f"all tensors must be on one device; got {device}, and {name} on {x.device}")
        if self.number and not x.ndim:
            return x.device
        shape = x.shape
        for axes in self.choices:
            if self.leading:
                shape = x.shape[x.ndim - len(axes) :]
            if len(axes) != len(shape):
                continue
            for (letter, offset), size in zip(axes, shape, strict=True):
                if letter != GROUPS and known.setdefault(letter, size - offset) != size - offset:
                    break
            else:
                return x.device
        raise ValueError(f"{name} must be {self.describe(known)}; got {list(shape)}")

    def describe(self, known: Mapping[str, int]) -> str:
        """The shapes in words, with the numbers that are known: "None or [B, T, H] = [1, 5, 2]"."""
        words = ["None"] * self.optional + ["a number"] * self.number
        for axes in self.choices:
            letters = [_letter(letter, offset) for letter, offset in axes]
            numbers = [str(known[a] + b) if a in known else _letter(a, b) for a, b in axes]
            shown = f"[{', '.join(letters)}]"
            words.append(shown if numbers == letters else f"{shown} = [{', '.join(numbers)}]")
        if self.grouped:
            words[-1] += f", where G divides H = {known['H']}" if "H" in known else ", where G divides H"
        return " or ".join(words)


def _axis(text: str) -> tuple[str, int]:
    """`"L-1"` → `("L", -1)`."""
    found = re.fullmatch(r"([A-Z]|\d)([+-]\d)?", text)
    assert found is not None, text
    return found[1], int(found[2] or 0)


def _letter(letter: str, offset: int) -> str:
    return f"{letter} {'+' if offset > 0 else '−'} {abs(offset)}" if offset else letter


@dataclass(frozen=True)
class Spec:
    """The specification of an op."""

    name: str
    tensors: dict[str, Shape]  # name → shapes, in the order of the arguments; the first one is always there
    state: dict[str, Shape] = field(default_factory=dict)  # its states; one is a tensor, and several are a tuple
    log_decays: Sequence[str] = ()  # the tensors that are log-decays, which are not positive
    wide: bool = True  # whether a float64 state makes the whole call float64
    constants: Sequence[str] = ()  # the tensors for which kernels have no gradient
    settings: dict[str, Any] = field(default_factory=dict)  # other arguments with which the self-check runs the op
    backends: dict[str, Implementation] = field(default_factory=dict)
    steps: dict[str, Implementation] = field(default_factory=dict)  # others that run one token of each sequence

    def check(self, tensors: Mapping[str, Any]) -> tuple[dict[str, int], torch.device]:
        """Check all tensors; return the number that each letter stands for, and the device.

        It raises a TypeError for what is no tensor, and a ValueError for a dtype, device or shape that does not fit.
        """
        known, device = {"1": 1}, None
        for name, shape in self.tensors.items():
            x: Any = tensors.get(name)
            if not isinstance(x, Tensor) and (shape.number or (x is None and shape.optional)):
                continue
            device = shape.check(name, x, known, device)
        for name, shape in self.tensors.items():  # without a function, because a token passes here too
            if shape.grouped:
                groups, heads = tensors[name].shape[shape.choices[0].index((GROUPS, 0))], known["H"]
                if groups != heads and (groups == 0 or heads % groups):
                    raise ValueError(f"{name} must be {shape.describe(known)}; got {list(tensors[name].shape)}")
        if 0 in known.values() and any(known.get(letter) == 0 for letter in CHANNELS):
            found = " and ".join(f"{letter} = {known[letter]}" for letter in CHANNELS if letter in known)
            raise ValueError(f"a head needs at least one channel; got {found}")
        assert device is not None
        return known, device

    def check_state(self, state: Any, known: dict[str, int], device: Any) -> tuple[Tensor, ...] | None:
        """Check the states before the first token, and return them as a tuple."""
        if state is None:
            return None
        if len(self.state) == 1:
            given, names = (state,), ["initial_state"]
        else:
            given, names = state, [*self.state]
            if not isinstance(state, tuple | list) or len(state) != len(names):
                kind = "the pair" if len(names) == 2 else "the tuple"
                raise ValueError(f"initial_state must be {kind} ({', '.join(names)})")
        for name, x, shape in zip(names, given, self.state.values(), strict=True):
            if shape.dtype == "int":
                check_integers(name, x)
            owner = name if len(names) == 1 else f"initial_state must be ({', '.join(names)}), and {name}"
            shape.check(owner, x, known, device)
        return tuple(given)


OPS: Registry[Spec] = Registry("op")


def define(
    name: str, *, state: str | Mapping[str, str] | None = None, log_decays: Sequence[str] = (), wide: bool = True,
    constants: Sequence[str] = (), settings: Mapping[str, Any] | None = None, **tensors: str,
) -> Spec:  # fmt: skip
    """Register an op, and return its specification; the arguments are those of `Spec`, with texts for `Shape`."""
    states = {"state": state} if isinstance(state, str) else state or {}
    spec = Spec(
        name, {key: Shape(text) for key, text in tensors.items()}, {key: Shape(text) for key, text in states.items()},
        log_decays, wide, constants, dict(settings or {}),
    )  # fmt: skip
    OPS.add(name)(spec)
    return spec
