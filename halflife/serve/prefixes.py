"""States of prompts that were read before, so that a prompt with the same beginning is read from there on.

A state stands for every token before it and has a fixed size. It cannot be cut back, so the cache must decide where to
take one. It takes a state at the end of each prompt and each answer, which a chat continues, and at the place where a
prompt leaves an earlier one, as after a system prompt that clients share. The second client with a system prompt makes
its state, and the third one starts from it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from halflife.models.lm import ModelState
from halflife.models.states import size

BLOCK_TOKENS = 16  # tokens; prompts are compared at multiples of it
SHORTEST_PREFIX = 2 * BLOCK_TOKENS  # tokens; shorter prefixes are not stored
REMEMBERED = 1 << 14  # blocks of earlier prompts whose hashes are stored: 3 MB


@dataclass(frozen=True)
class Prefix:
    """What the model has after `length` tokens: its state of one row, and the last hidden state `[D]`.

    `recent` are the last tokens, as far as the text of later ones depends on them, where a session needs them.
    """

    length: int
    state: ModelState
    hidden: Tensor
    recent: tuple[int, ...] = ()


class PrefixCache:
    """The states of prefixes by the hash of their tokens. The state used longest ago leaves first.

    All states have at most `capacity` bytes; 0 turns the cache off.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int]) -> tuple[Prefix | None, int]:
        """Return the longest stored prefix of `tokens`, and the length up to which an earlier prompt agrees with it."""
        if not self.capacity:
            return None, 0
        lengths = sorted(length for length in self._lengths if length <= len(tokens))
        found, shared = None, 0
        marks = sorted({*lengths, *range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)})
        for length, key in zip(marks, _keys(tokens, marks), strict=True):
            if length % BLOCK_TOKENS == 0:
                shared = length if key in self._blocks and shared == length - BLOCK_TOKENS else shared
                self._blocks[key] = None
                self._blocks.move_to_end(key)
            if key in self._entries:
                found = key
        while len(self._blocks) > REMEMBERED:
            self._blocks.popitem(last=False)
        if found is None:
            return None, shared
        self._entries.move_to_end(found)
        return self._entries[found], shared

    def add(self, tokens: Sequence[int], state: ModelState, hidden: Tensor) -> None:
        """Store the state after `tokens`, and the last hidden state `[D]`."""
        if len(tokens) < SHORTEST_PREFIX or not self.capacity:
            return
        (key,) = _keys(tokens, [len(tokens)])
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        prefix = Prefix(len(tokens), state, hidden.clone())
        if _bytes(prefix) > self.capacity:  # all others would leave for nothing
            return
        self._entries[key] = prefix
        self._lengths[prefix.length] += 1
        self.bytes += _bytes(prefix)
        while self.bytes > self.capacity:
            _, old = self._entries.popitem(last=False)
            self.bytes -= _bytes(old)
            self._lengths[old.length] -= 1
            if not self._lengths[old.length]:
                del self._lengths[old.length]


def _keys(tokens: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Return the hash of the first n tokens for each n of `lengths`, which rise."""
    digest, keys, done = hashlib.blake2b(digest_size=16), [], 0
    for length in lengths:
        digest.update(array("q", tokens[done:length]).tobytes())
        keys.append(digest.digest())
        done = length
    return keys


def _bytes(prefix: Prefix) -> int:
    return size(prefix.state) + prefix.hidden.nbytes
