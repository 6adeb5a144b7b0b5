"""A model that reads and writes one sequence. Its state can be copied, saved to a file, and continued later."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from halflife.models import text
from halflife.models.lm import LanguageModel, ModelState
from halflife.models.tensor_file import read_tensors, write_tensors
from halflife.ops.arguments import may_branch
from halflife.ops.linear import fast_linears

Decoded = tuple[list[Tensor], ModelState]
FORMAT = 1  # increased when older files can no longer be read
RECURRENT = ("memory", "slow")  # names of the states that ops carry from token to token
BYTE_VOCABULARY = 256  # without a tokenizer, a vocabulary of this size means that tokens are bytes


def decoder(model: LanguageModel, step: Callable[..., Decoded]) -> Callable[[Tensor, ModelState | None], Decoded]:
    """Return `step(model, ids, state)` as a function of ids and state, which returns tensors and the next state.

    On a GPU CUDA graphs run it on single tokens, and each overwrites the results and the state of the last one.
    """
    if not model.embedding.weight.is_cuda:
        return partial(step, model)
    from halflife.models.graphs import TokenGraphs

    return TokenGraphs(model, step)


def next_token(model: LanguageModel, ids: Tensor, state: ModelState | None) -> Decoded:
    """The logits `[V]` of the token after one sequence, and on a GPU the likeliest token, which its graph computes."""
    hidden, state = model.hidden(ids, state)
    logits = model.logits(hidden[0, -1])
    return [logits] if may_branch(logits.device) else [logits, text.likeliest(logits)], state


class Session:
    """One sequence, read and written in pieces of any size. The session stores only the model's state.

    Its memory does not grow with the sequence, except in softmax attention, whose cache grows.

        session = Session(model).feed("The capital of France is")
        draft = session.fork()
        print("".join(draft.write(20, temperature=0.8)))

    Args:
        model: the model. It runs without gradients, and its training mode is not changed: call `eval()` first.
        encode: the tokenizer's function from text to ids; None for a vocabulary of 256, whose tokens are bytes.
        decode: the tokenizer's function from ids to text; None as above.
        piece_size: number of tokens that the model reads at once; it bounds the memory that a long text needs.
        state_dtype: torch.float64 keeps the matrices of linear and delta updates (and the slow states of GateRank) in
            float64 from the second piece on, for streams of hundreds of thousands of tokens (`docs/streaming.md`). They
            then take twice the memory. The sums of Koopman attention keep their dtype. None keeps all dtypes.

    Attributes:
        state: the model's state, or None before the first token. Its tensors are never modified.
        position: number of tokens read so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        piece_size: int = 4096,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if piece_size < 1:
            raise ValueError(f"piece_size must be at least 1; got {piece_size}")
        if state_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"state_dtype must be None, torch.float32 or torch.float64; got {state_dtype}")
        if model.embedding.weight.is_meta:
            raise ValueError("the weights are on the meta device, or offloaded: a session needs them in memory")
        self.model, self.encode, self.decode, self.piece_size = model, encode, decode, piece_size
        self.state_dtype, self._next = state_dtype, decoder(model, next_token)
        self.state: ModelState | None = None
        self.position = 0
        self._results: list[Tensor] = []  # those of `next_token`
        self._recent: list[int] = []  # the last tokens, as far as the text of later ones depends on them

    def feed(self, tokens: str | Sequence[int] | Tensor) -> Session:
        """Read token ids `[T]` or text, and return the session.

        Raises:
            ValueError: the ids are not integers of the vocabulary, or text is given without a tokenizer.
        """
        numbers = self._ids(tokens)
        ids = numbers.to(self.model.embedding.weight.device, non_blocking=True)
        with fast_linears(self.model) if len(ids) > 1 else nullcontext():
            for piece, copy in zip(ids.split(self.piece_size), numbers.split(self.piece_size), strict=True):
                self._read(piece, copy.tolist())
        return self

    @torch.no_grad()
    def _read(self, ids: Tensor, numbers: list[int]) -> None:
        """Read token ids `[T]` of the vocabulary, which the host knows as `numbers`."""
        if numbers:
            self._results, state = self._next(ids.unsqueeze(0), self.state)
            self.state = self._cast(state)
            self._remember(numbers)
            self.position += len(numbers)

    def _remember(self, tokens: list[int]) -> None:
        self._recent = [*self._recent, *tokens]
        if len(self._recent) > 2 * text.CONTEXT:  # so most tokens need no call of the tokenizer
            self._recent = text.context(self.decode, self._recent) if self._has_text else self._recent[-text.CONTEXT :]

    @property
    def _has_text(self) -> bool:
        return self.decode is not None or self.model.config.vocab_size == BYTE_VOCABULARY

    def _cast(self, state: ModelState) -> ModelState:
        if self.state_dtype is None:
            return state
        return tuple(
            {name: x.to(self.state_dtype) if name.rpartition(".")[2] in RECURRENT else x for name, x in layer.items()}
            for layer in state
        )

    def _ids(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        """Token ids `[T]` in the host's memory, where they are checked without a wait for the device."""
        size = self.model.config.vocab_size
        if isinstance(tokens, str):
            if self.encode is None and size != BYTE_VOCABULARY:
                raise ValueError(
                    f"text needs a tokenizer's encode: the vocabulary has {size} tokens, so they are not bytes"
                )
            tokens = list(tokens.encode()) if self.encode is None else self.encode(tokens)
        if isinstance(tokens, Tensor) and tokens.is_meta:
            raise ValueError("tokens are on the meta device, which has no values")
        ids = torch.as_tensor(tokens).cpu()
        wrong = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
        if ids.ndim != 1 or (wrong and ids.numel()):
            raise ValueError(f"tokens must be integers [T]; got {ids.dtype} {tuple(ids.shape)}")
        ids = ids.long()  # uint16, as in a corpus on disk, has no minimum
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(f"tokens must lie between 0 and {size - 1}; got {int(ids.min())} to {int(ids.max())}")
        return ids

    @property
    def next_logits(self) -> Tensor:
        """The logits `[vocab_size]` of the next token.

        Raises:
            ValueError: the session has read nothing yet.
        """
        if not self._results:
            raise ValueError("the session has read nothing yet: feed it a token first")
        return self._own(self._results)[0]

    def _own(self, results: list[Tensor]) -> list[Tensor]:
        """The results themselves, or copies of what CUDA graphs overwrite."""
        return [x.clone() for x in results] if hasattr(self._next, "own") else results

    def fork(self) -> Session:
        """Return a second session that continues from here independently."""
        other = Session(
            self.model, encode=self.encode, decode=self.decode, piece_size=self.piece_size, state_dtype=self.state_dtype
        )
        own = getattr(self._next, "own", None)  # a copy of what CUDA graphs overwrite
        other.state, other.position = own(self.state) if own and self.state else self.state, self.position
        other._results, other._recent = self._own(self._results), self._recent
        return other

    def sample(
        self,
        n: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """Draw n tokens, one at a time. The session has read each token before it is yielded, so any stop is safe.

        Args:
            temperature: divisor of the logits; 0 takes the likeliest token.
            top_k: draw from the k likeliest tokens only.
            top_p: draw only from the likeliest tokens that together have at least this probability.
            generator: random number generator on the model's device.

        Raises:
            ValueError: a setting is out of range, or the session has read nothing yet.
        """
        if (
            not 0 <= temperature < math.inf
            or (top_k is not None and top_k < 1)
            or (top_p is not None and not 0 < top_p <= 1)
        ):
            raise ValueError(
                f"need temperature ≥ 0, top_k ≥ 1 and 0 < top_p ≤ 1; got {temperature}, {top_k} and {top_p}"
            )
        self.next_logits  # noqa: B018 (raises now instead of at the first token)

        def draw_next() -> int:
            logits, *best = self._results
            chosen = text.choose(logits, temperature, top_k, top_p, generator, *best)
            token = text.number_of(chosen)
            self._read(chosen.view(1), [token])
            return token

        return (draw_next() for _ in range(n))

    def write(self, n: int, *, stop: str | Sequence[int | str] = (), **settings) -> Iterator[str]:
        """Draw tokens as `sample` does, and yield them as pieces of text that hold whole characters.

        Args:
            n: largest number of tokens.
            stop: tokens or texts that end the text; they are not part of it. The session has read what it drew of them.
            **settings: settings of `sample`.

        Raises:
            ValueError: as in `sample`, an empty text in `stop`, or the tokens are not bytes and there is no `decode`.
            TypeError: `stop` has something other than tokens and texts.
        """
        if not self._has_text:
            raise ValueError(
                f"text needs a tokenizer's decode: the vocabulary has {self.model.config.vocab_size} tokens"
            )
        ends, texts = text.divide_stops([stop] if isinstance(stop, str) else stop)
        tokens = self.sample(n, **settings)
        return text.pieces_of_text(tokens, ends, text.TextStream(self.decode, self._recent, texts))

    def save(self, path: str | Path) -> Path:
        """Write the state and the last logits into a safetensors file, from which `load` continues.

        Raises:
            ValueError: the session has read nothing yet.
        """
        tensors = {"logits": self.next_logits, "last": torch.tensor(self._recent)}
        for i, layer in enumerate(self.state or ()):
            tensors |= {f"{i}.{name}": part for name, part in layer.items()}
        about = {"format": str(FORMAT), "model": self._fingerprint(), "position": str(self.position)}
        # Tensors of a state may share memory, but those of a safetensors file may not.
        copies = {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        write_tensors(Path(path), copies, about)
        return Path(path)

    def load(self, path: str | Path) -> Session:
        """Continue from the state that `save` wrote, and return the session. After an error it is as it was before.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged or of another format, or its state belongs to a model of another
                configuration. Weights are not compared.
        """
        tensors, about = read_tensors(Path(path), self.model.embedding.weight.device)
        if about.get("format") != str(FORMAT):
            raise ValueError(f"{path} holds a state of format {about.get('format')}; this version reads {FORMAT}")
        if about.get("model") != self._fingerprint():
            raise ValueError(f"{path} holds the state of a model of another configuration")
        layers: dict[int, dict[str, Tensor]] = {}
        try:
            position, logits, last = int(about["position"]), tensors.pop("logits"), tensors.pop("last")
            for name, part in tensors.items():
                layer, key = name.split(".", 1)
                layers.setdefault(int(layer), {})[key] = part
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path} holds no state of a session: {error!r}") from error
        if sorted(layers) != list(range(len(layers))):
            raise ValueError(f"{path} holds no state of a session: its layers are {sorted(layers)}")
        vocabulary = self.model.config.vocab_size
        known = last.ndim == 1 and len(last) > 0 and 0 <= int(last.min()) <= int(last.max()) < vocabulary
        if position < 1 or logits.shape != (vocabulary,) or not known:
            raise ValueError(f"{path} holds no state of a session: its position, logits or last tokens cannot be")
        self._check(path, layers, position)
        self.state = self._cast(tuple(layers[i] for i in range(len(layers))))
        self.position, self._results, self._recent = position, [logits], last.tolist()
        return self

    @torch.no_grad()
    def _check(self, path: str | Path, layers: dict[int, dict[str, Tensor]], position: int) -> None:
        """Raise a ValueError if the model cannot have such a state after `position` tokens."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.embedding.weight.device)
        _, one = self.model.hidden(token)
        _, two = self.model.hidden(token, one)
        expected = {f"{i}.{name}": (x, two[i][name]) for i, layer in enumerate(one) for name, x in layer.items()}
        found = {f"{i}.{name}": x for i, layer in layers.items() for name, x in layer.items()}
        if differing := sorted(expected.keys() ^ found.keys()):
            reason = "does not belong to the model" if differing[0] in found else "is missing"
            raise ValueError(f"{path} holds no state of a session: {differing[0]} {reason}")
        for name, (first, second) in expected.items():
            x, whole = found[name], name.endswith(".position")
            same = x.ndim == first.ndim and x.is_floating_point() == first.is_floating_point()
            # An axis that a second token lengthens is one of tokens.
            same &= all(n == a or a != b for n, a, b in zip(x.shape, first.shape, second.shape, strict=False))
            if not same or (whole and int(x) != position):
                value = f"position {x.tolist()}" if whole else f"{x.dtype} {list(x.shape)}"
                raise ValueError(f"{path} holds no state of a session after {position} tokens: {name} has {value}")

    def _fingerprint(self) -> str:
        config = {key: value for key, value in self.model.config.to_dict().items() if key != "name"}
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
