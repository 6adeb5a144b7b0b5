"""What training on N GPUs needs of each: memory, bytes on the wire, time. Formulas from counted costs; nothing runs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from halflife.models.lm import on_meta
from halflife.models.loss import tokens_at_once
from halflife.training.config import TrainConfig
from halflife.training.estimate import BYTES_PER_PARAMETER, Costs, Line, model_costs, peak_memory

WORD = 4  # bytes of a weight and of a gradient, in float32


@dataclass(frozen=True)
class Card:
    """A GPU."""

    memory: float  # bytes
    product: float  # floating-point operations a second of bfloat16 matrix products
    wire: float  # bytes a second to another GPU of the same machine, in one direction


# The product is measured (benchmarks/results/nvidia-h100-80gb-hbm3-20261126.md); the wire is NVLink's as it is sold.
H100 = Card(80e9, 716e12, 450e9)


@dataclass(frozen=True)
class Plan:
    """What each of `gpus` GPUs needs, where groups of `context` share each row."""

    gpus: int
    context: int
    weights: float  # bytes of weights, gradients and moments
    activations: float  # bytes of a forward and a backward pass
    states: float  # bytes of the states that a piece receives and sends
    # sent_weights, sent_states: bytes that it sends in a step
    sent_weights: float
    sent_states: float
    step_seconds: float  # the least time of a step
    hours: float  # the least time of the training
    longest: int  # tokens of the longest row that fits into memory, 0 if the weights alone do not fit


@dataclass(frozen=True)
class Needs:
    """The counted costs of a run, from which plans are made. A GPU has one row, or a piece of one, at a time."""

    parameters: int  # of the model
    # block, outside: of its largest block, and outside its blocks
    block: int
    outside: int
    # layers, width, vocabulary: of the model
    layers: int
    width: int
    vocabulary: int
    # costs, peak: see `model_costs` and `peak_memory`
    costs: Costs
    peak: Line
    # rows, length, steps: rows of a batch, their tokens, and steps of the run
    rows: int
    length: int
    steps: int
    recompute: bool = False  # whether activations inside blocks are computed again in the backward pass
    fsdp: bool = False  # whether weights, gradients and moments are sharded over the groups

    @classmethod
    def of(cls, config: TrainConfig, length: int, recompute: bool = False, fsdp: bool = False) -> Needs:
        model = on_meta(config.model)
        blocks, total = [sum(x.numel() for x in one.parameters()) for one in model.blocks], model.num_parameters()
        return cls(
            total, max(blocks), total - sum(blocks), len(blocks), config.model.hidden_size, config.model.vocab_size,
            model_costs(config.model, config.bf16), peak_memory(config.model, config.bf16),
            config.batch_size, length, config.steps, recompute, fsdp,
        )  # fmt: skip

    def weights(self, groups: int) -> float:
        """Bytes of weights, gradients and AdamW's moments.

        Of `groups` with shards, each GPU has its share, and whole, with their gradients, two blocks (one runs while the
        next is gathered) and what is outside the blocks.
        """
        if not self.fsdp or groups == 1:
            return BYTES_PER_PARAMETER * self.parameters
        whole = 2 * self.block + self.outside
        return BYTES_PER_PARAMETER * self.parameters / groups + 2 * WORD * whole

    def activations(self, tokens: float) -> float:
        """Bytes that a piece holds at most, in the backward pass of the blocks or in the loss.

        The loss has what the blocks have saved, its gradient, and as many logits as it holds at once.
        With `recompute`, the inputs of the blocks and one block are held.
        """
        saved, inputs = self.costs.saved.at(tokens), self.width * WORD * tokens
        logits = WORD * self.vocabulary * min(tokens, tokens_at_once(self.vocabulary, "cuda", WORD))
        if not self.recompute:
            return max(self.peak.at(tokens), saved + inputs + logits)
        others = (self.layers - 1) / self.layers * saved
        return self.layers * inputs + max(self.peak.at(tokens) - others, inputs + logits)

    def of_a_layer(self, tokens: float) -> float:
        """Bytes that a layer keeps of a piece until its backward pass."""
        return self.width * WORD * tokens if self.recompute else self.costs.saved.at(tokens) / self.layers

    def states(self, context: int, length: float) -> float:
        """Bytes of the states that a piece receives and sends, which its backward pass needs."""
        return 2 * self.costs.state.at(length) if context > 1 else 0

    def memory(self, gpus: int, context: int, length: float) -> float:
        """Bytes of a GPU that has a piece of a row."""
        return self.weights(gpus // context) + self.activations(length / context) + self.states(context, length)

    def sent_weights(self, gpus: int, context: int) -> float:
        """Bytes of weights and gradients that a GPU sends in a step.

        Rings add gradients: each of n sends 2 (n - 1) / n of them. Shards are gathered twice, forward and backward
        (once outside the blocks), and their gradients scattered, with (n - 1) / n each; a ring over a line adds them.
        """
        size, groups = WORD * self.parameters, gpus // context
        if not self.fsdp or groups == 1:
            return 2 * (gpus - 1) / gpus * size
        gathered = 3 * size - WORD * self.outside
        return (groups - 1) / groups * gathered + 2 * (context - 1) / context * size / groups

    def sent_states(self, gpus: int, context: int) -> float:
        """Bytes of states that a GPU inside a line sends in a step: forward, and their gradients back."""
        rows = self.rows * context / gpus
        return 2 * rows * self.costs.state.at(self.length) if context > 1 else 0

    def step_seconds(self, gpus: int, context: int, card: Card) -> float:
        """The least time of a step: its products, while the GPUs of a line start a block apart, then the wire.

        A row at a time is read and goes back, so that a line waits `context - 1` blocks for each. In a third of the
        work with `recompute` the blocks are computed again.
        """
        operations = self.costs.training_operations(self.length) * self.rows * self.length
        operations *= 4 / 3 if self.recompute else 1
        wait = (self.layers + context - 1) / self.layers
        sent = self.sent_weights(gpus, context) + self.sent_states(gpus, context)
        return operations / (gpus * card.product) * wait + sent / card.wire

    def longest(self, gpus: int, context: int, card: Card) -> int:
        """Tokens of the longest row whose pieces fit into memory, which rises with the length; 0 if none does."""
        lengths = range(1 << 50)
        return max(0, bisect_right(lengths, card.memory, key=lambda n: self.memory(gpus, context, n)) - 1)

    def plan(self, gpus: int, card: Card) -> Plan:
        """The plan with the fewest GPUs a row whose piece fits into memory, and a row for each group of them."""
        choices = [c for c in range(1, gpus + 1) if gpus % c == 0 and gpus // c <= self.rows]
        fitting = [c for c in choices if self.memory(gpus, c, self.length) <= card.memory]
        context = min(fitting, default=max(choices))
        seconds = self.step_seconds(gpus, context, card)
        return Plan(
            gpus, context, self.weights(gpus // context), self.activations(self.length / context),
            self.states(context, self.length), self.sent_weights(gpus, context), self.sent_states(gpus, context),
            seconds, seconds * self.steps / 3600, self.longest(gpus, gpus, card),
        )  # fmt: skip
