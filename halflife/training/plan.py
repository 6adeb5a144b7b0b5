"""What training on N GPUs needs of each: memory, bytes on the wire, time. Formulas from counted costs; nothing runs."""

from __future__ import annotations

from dataclasses import dataclass

from halflife.models import LanguageModel
from halflife.registry import Registry
from halflife.training.config import TrainConfig
from halflife.training.estimate import BYTES_PER_PARAMETER, Costs, model_costs

WORD = 4  # bytes of a weight and of a gradient, in float32


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        memory: bytes.
        product: floating-point operations a second of bfloat16 matrix products.
        wire: bytes a second to another GPU of the same machine, in one direction.
    """

    memory: float
    product: float
    wire: float


GPUS: Registry[Card] = Registry("GPU")
# The product is measured (benchmarks/results/nvidia-h100-80gb-hbm3-20261126.md); the wire is NVLink's as it is sold.
GPUS.add("h100")(Card(80e9, 716e12, 450e9))


@dataclass(frozen=True)
class Plan:
    """What each of `gpus` GPUs needs, where groups of `context` share each row.

    Attributes:
        memory: bytes of weights, gradients, moments and activations.
        sent: bytes that it sends in a step.
        step_seconds: the least time of a step.
        hours: the least time of the training.
        longest: tokens of the longest row that fits into memory, 0 if the weights alone do not fit.
    """

    gpus: int
    context: int
    memory: float
    sent: float
    step_seconds: float
    hours: float
    longest: int


@dataclass(frozen=True)
class Needs:
    """The counted costs of a run, from which plans are made.

    Attributes:
        parameters, layers: of the model.
        width: channels between its blocks.
        costs: see `model_costs`.
        rows, length, steps: rows of a batch, their tokens, and steps of the run.
        recompute: whether activations inside blocks are computed again in the backward pass.
    """

    parameters: int
    layers: int
    width: int
    costs: Costs
    rows: int
    length: int
    steps: int
    recompute: bool = False

    @classmethod
    def of(cls, config: TrainConfig, length: int, recompute: bool) -> Needs:
        import torch

        with torch.device("meta"):
            model = LanguageModel(config.model)
        sizes = model.num_parameters(), config.model.num_layers, config.model.hidden_size
        return cls(*sizes, model_costs(config.model, config.bf16), config.batch_size, length, config.steps, recompute)

    def activations(self, tokens: float) -> float:
        """Bytes that a piece of a row saves: all, or with `recompute` the inputs of the blocks and one block."""
        saved = self.costs.saved.at(tokens)
        return self.layers * self.width * WORD * tokens + saved / self.layers if self.recompute else saved

    def memory(self, context: int, length: float) -> float:
        """Bytes a GPU that has a piece of a row at a time, all weights, and the states that it receives and sends."""
        return (
            BYTES_PER_PARAMETER * self.parameters + self.activations(length / context)
            + (2 * self.costs.state.at(length) if context > 1 else 0)
        )  # fmt: skip

    def sent(self, gpus: int, context: int) -> float:
        """Bytes that a GPU inside a line sends in a step: the ring's sum of gradients, and each row's states twice.

        A state goes forward and its gradient back.
        """
        rows = self.rows * context / gpus
        ring = 2 * (gpus - 1) / gpus * WORD * self.parameters
        return ring + (2 * rows * self.costs.state.at(self.length) if context > 1 else 0)

    def step_seconds(self, gpus: int, context: int, card: Card) -> float:
        """The least time of a step: its products, while the GPUs of a line start a block apart, then the wire.

        A row at a time is read and goes back, so that a line waits `context - 1` blocks for each. In a third of the
        work with `recompute` the blocks are computed again.
        """
        operations = self.costs.training_operations(self.length) * self.rows * self.length
        operations *= 4 / 3 if self.recompute else 1
        wait = (self.layers + context - 1) / self.layers
        return operations / (gpus * card.product) * wait + self.sent(gpus, context) / card.wire

    def longest(self, context: int, card: Card) -> int:
        """Tokens of the longest row whose pieces fit into memory; memory is linear in the length."""
        least, more = self.memory(context, 0), self.memory(context, 1 << 20)
        return max(0, int((card.memory - least) / (more - least) * (1 << 20)))

    def plan(self, gpus: int, card: Card) -> Plan:
        """The plan with the fewest GPUs a row whose piece fits into memory, and a row for each group of them."""
        choices = [c for c in range(1, gpus + 1) if gpus % c == 0 and gpus // c <= self.rows]
        fitting = [c for c in choices if self.memory(c, self.length) <= card.memory]
        context = min(fitting, default=max(choices))
        seconds = self.step_seconds(gpus, context, card)
        return Plan(
            gpus, context, self.memory(context, self.length), self.sent(gpus, context), seconds,
            seconds * self.steps / 3600, self.longest(gpus, card),
        )  # fmt: skip
