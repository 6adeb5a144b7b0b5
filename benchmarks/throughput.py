"""Training, decoding and memory of whole models: `python benchmarks/throughput.py [--write docs/benchmarks.md]`.

The models are ours and transformers', with about 10 M parameters. The script measures tokens/s of training steps
(forward, backward, AdamW) at several lengths, the growth of a fresh process in one step, and tokens/s of decoding after
several contexts. All models take turns in one process. `--bf16` trains in mixed precision, does not decode, and writes
a separate section.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife.analysis.foreign.model import cache_argument  # noqa: E402
from halflife.evaluation import throughput  # noqa: E402
from halflife.models import LanguageModel, preset  # noqa: E402
from halflife.report.tables.memory import first_ahead  # noqa: E402
from halflife.training import speed  # noqa: E402
from halflife.training.estimate import model_costs  # noqa: E402

HIDDEN, VOCABULARY = 256, 256
# Numbers of layers that give 10 M parameters, within 5 %.
DEPTHS = {
    "mamba2": 10, "mamba2+post": 10, "gated_deltanet": 11, "gated_deltanet+gate_rank": 11, "gla": 12, "simple": 11,
    "echo": 13, "llama": 12,
}  # fmt: skip
BARE, BARE_DEPTH = "mamba2 without MLPs", 21
MAMBA, LLAMA = "transformers Mamba-2", "transformers LLaMA"
SAME = {MAMBA: BARE, LLAMA: "llama"}  # our model that computes the same function
RECURRENT = [name for name in DEPTHS if name != "llama"]
DECODED = (*DEPTHS, LLAMA)
SLOW = (512, 2048)  # lengths at which transformers' Mamba-2 is timed
MEMORY_AT = 2048  # tokens of the step whose memory is measured
LENGTHS = (512, 2048, 8192)
CONTEXTS = (512, 4096, 16384)
DECODED_TOKENS = 32  # timed after each context

GEMM, SIDE = "GEMM", 2048  # a product of square matrices, timed in turn with the models

Speeds = dict[int, dict[str, float]]  # tokens/s by length and model; of GEMM FLOP/s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the tables here")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 mixed precision")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, or one sequence if that is longer")
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure for, each length; two rounds at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round of one length, to see that all runs")
    parser.add_argument("--memory", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--no-kernels", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    speed.keep_freed_memory()  # as `halflife train` does
    if arguments.memory:
        with timing.without_kernels() if arguments.no_kernels else contextlib.nullcontext():
            print(_grown(arguments.memory, _batch(arguments.lengths[0], arguments.tokens), arguments.bf16))
        return
    arguments.contexts = sorted(arguments.contexts)
    if any(after - before < 2 * DECODED_TOKENS for before, after in pairwise([0, *arguments.contexts])):
        parser.error(f"contexts are at least {2 * DECODED_TOKENS} tokens, and lie as many apart")
    if arguments.quick and arguments.write:
        parser.error("--quick only sees that all runs; its numbers are not to be written")
    if arguments.quick:
        arguments.lengths, arguments.contexts, arguments.tokens, arguments.seconds = [512], [512, 1024], 512, 0.0
    text = "\n".join(report(arguments))
    print(text)
    if arguments.write:
        mark = f"<!-- throughput {'bf16' if arguments.bf16 else 'float32'} -->"
        timing.write_section(arguments.write, mark, text)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the Markdown lines of the tables."""
    import transformers

    yield f"## Whole models{' in bfloat16' if arguments.bf16 else ''}"
    yield ""
    yield timing.command()
    yield ""
    yield f"{'bfloat16 mixed precision' if arguments.bf16 else 'float32'}, {arguments.threads} threads, torch"
    yield f"{torch.__version__}, transformers {transformers.__version__}; {time.strftime('%Y-%m-%d')}. Hidden size"
    yield f"{HIDDEN}, vocabulary {VOCABULARY}, tied; a step is {arguments.tokens:,} tokens, or one sequence if longer."
    yield ""
    models = {name: build(name) for name in (*DEPTHS, *SAME.values(), *SAME)}
    speeds = train(models, sorted(arguments.lengths), arguments)
    yield from training_table(models, speeds, arguments)
    yield ""
    yield from ratio_table(speeds)
    del models
    if not arguments.bf16:
        yield ""
        yield from decoding_table(arguments.contexts, rounds=3 if arguments.quick else DECODED_TOKENS)


# ------------------------------------------------------------------------------------------------ models


class Transformers(nn.Module):
    """A causal language model of transformers with our interface, `logits, state = model(ids, state)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.cache = model, cache_argument(model)

    def forward(self, ids: Tensor, state: object = None) -> tuple[Tensor, object]:
        output = self.model(ids, use_cache=not self.training, **{self.cache: state})
        return output.logits, getattr(output, self.cache)


def build(name: str) -> nn.Module:
    """Build a model of the tables."""
    torch.manual_seed(0)
    own = SAME.get(name, name)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    if own == BARE:
        config = preset("mamba2", num_layers=BARE_DEPTH, mlp="none", **sizes)
    else:
        config = preset(own, num_layers=DEPTHS[own], **sizes)
    model = LanguageModel(config)
    return {MAMBA: _transformers_mamba, LLAMA: _transformers_llama}.get(name, lambda model: model)(model)


def _transformers_mamba(model: LanguageModel) -> Transformers:
    """transformers' model with the same function and weights; its chunks are 256 tokens, its default."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from halflife.models.convert import back_to

    config, tensors = back_to("transformers", model)
    theirs = Mamba2ForCausalLM(Mamba2Config.from_dict(config))
    theirs.load_state_dict(tensors, strict=False)  # a tied head has no tensor
    return Transformers(theirs)


def _transformers_llama(model: LanguageModel) -> Transformers:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    block: Any = model.blocks[0]
    theirs = LlamaConfig(
        hidden_size=config.hidden_size, num_hidden_layers=config.num_layers, vocab_size=config.vocab_size,
        num_attention_heads=block.mixer.num_heads, intermediate_size=block.mlp.gate.out_features,
        rms_norm_eps=config.norm_eps, tie_word_embeddings=True,
    )  # fmt: skip
    theirs._attn_implementation = "sdpa"
    return Transformers(LlamaForCausalLM(theirs))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _batch(length: int, tokens: int) -> Tensor:
    return torch.randint(VOCABULARY, (max(1, tokens // length), length))


# ---------------------------------------------------------------------------------------------- training


def train(models: dict[str, Any], lengths: list[int], arguments: argparse.Namespace) -> Speeds:
    """Measure tokens/s of training steps, and FLOP/s of a matrix product."""
    steps = {name: throughput.train_step(model, bf16=arguments.bf16) for name, model in models.items()}
    for step in steps.values():
        step(_batch(64, 64))  # allocates AdamW's moments, loads libraries
    a, b = torch.randn(2, SIDE, SIDE).to(torch.bfloat16 if arguments.bf16 else torch.float32)
    torch.mm(a, b)
    speeds: Speeds = {}
    for length in lengths:
        ids = _batch(length, arguments.tokens)
        timed: dict[str, Any] = {GEMM: functools.partial(torch.mm, a, b)}
        timed |= {n: functools.partial(s, ids) for n, s in steps.items() if length in SLOW or n not in (BARE, MAMBA)}
        seconds = throughput.interleaved(timed, rounds=1 if arguments.quick else 2, seconds=arguments.seconds)
        work = dict.fromkeys(timed, ids.numel()) | {GEMM: 2 * SIDE**3}
        speeds[length] = {name: work[name] / each for name, each in seconds.items()}
    return speeds


def training_table(models: dict[str, Any], speeds: Speeds, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield one row a model: tokens/s and the share of the GEMM rate at each length, and the memory of a step."""
    at = max((length for length in speeds if length <= MEMORY_AT), default=min(speeds))
    if arguments.bf16:
        yield "Tokens/s of training; columns as in float32."
    else:
        yield "Tokens/s of training. The MFU in brackets is 3 × the matrix products of a forward pass (with all of"
        yield "softmax attention's), divided by the rate of one product of 2048³ in the same rounds. Memory is the"
        yield "growth of a fresh process in its first step, with gradients and AdamW's moments, and in brackets without"
        yield "the kernels."
    yield ""
    sized = "" if arguments.bf16 else "layers | parameters | "  # the same in both sections
    yield f"| model | {sized}{' | '.join(f'T {length:,}' for length in speeds)} | MB (T {at:,}) |"
    yield "|---|" + "---:|" * (len(speeds) + 1 + sized.count("|"))
    for name, model in models.items():
        own = models[SAME.get(name, name)]
        cells = []
        for length, found in speeds.items():
            needed = found.get(name, 0.0) * model_costs(own.config).training_operations(length)
            cells.append(f"{found[name]:,.0f} ({needed / found[GEMM]:.0%})" if name in found else "")
        memory, without = (_memory(name, at, arguments, *flag) / 1e6 for flag in ((), ("--no-kernels",)))
        cells.append(f"{memory:,.0f} ({without:,.0f})")
        own_size = f"{len(own.blocks)} | {_size(model) / 1e6:.2f} M | " if sized else ""
        yield f"| {name} | {own_size}{' | '.join(cells)} |"
    rates = " | ".join(f"{found[GEMM] / 1e9:,.0f}" for found in speeds.values())
    yield f"| {GEMM}, GFLOP/s | {'| | ' if sized else ''}{rates} | |"


def ratio_table(speeds: Speeds) -> Iterator[str]:
    """Yield our speeds divided by LLaMA's, and the targets."""
    yield f"| training, × the faster of llama and {LLAMA} | {' | '.join(f'T {n:,}' for n in speeds)} | faster from |"
    yield "|---|" + "---:|" * (len(speeds) + 1)
    for name in RECURRENT:
        ratios = {n: found[name] / max(found["llama"], found[LLAMA]) for n, found in speeds.items()}
        yield f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios.values())} | {faster_from(ratios)} |"
    yield ""
    yield "The targets are 1.0 at T 512, 1.5 at T 2,048 and 4.0 at T 8,192."
    measured = [f"{found[BARE] / found[MAMBA]:.1f} × at T {n:,}" for n, found in speeds.items() if MAMBA in found]
    if measured:
        ours = ", ".join(measured)
        yield f"The target is ≥ 6 × {MAMBA} with the same function ({BARE}). We measured {ours}."


def faster_from(ratios: dict[int, float]) -> str:
    """Return the first length from which on every ratio is above 1, or "never" if the last one is not."""
    return first_ahead({length: ratio > 1 for length, ratio in ratios.items()})


def _memory(name: str, length: int, arguments: argparse.Namespace, *flags: str) -> float:
    """Return the bytes by which a fresh process grows in a step."""
    command = [sys.executable, __file__, "--memory", name, "--lengths", length, "--tokens", arguments.tokens]
    command += ["--threads", arguments.threads, *(["--bf16"] if arguments.bf16 else []), *flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {name} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _grown(name: str, ids: Tensor, bf16: bool) -> int:
    model = build(name)
    with torch.no_grad():
        model(ids[:1, :64])  # a first product loads libraries
    step = throughput.train_step(model, bf16=bf16)
    return timing.peak_memory(lambda: step(ids))


# ---------------------------------------------------------------------------------------------- decoding


def decoding_table(contexts: list[int], rounds: int) -> Iterator[str]:
    """Yield one row a model: tokens/s and the bytes of the state after each context."""
    decoders = {name: throughput.Decoder(build(name)) for name in DECODED}
    speeds: Speeds = {}
    sizes: dict[int, dict[str, int]] = {}
    for context in contexts:
        for decoder in decoders.values():
            decoder.read(torch.randint(VOCABULARY, (1, context - decoder.position)))()
        seconds = throughput.interleaved(decoders, rounds=rounds)
        speeds[context] = {name: 1 / each for name, each in seconds.items()}
        sizes[context] = {name: _state_bytes(decoder.state) for name, decoder in decoders.items()}
    yield "Tokens/s of decoding one sequence, a token at a time, after a context (kB of the state or KV cache)."
    yield ""
    yield f"| model | {' | '.join(f'after {context:,}' for context in contexts)} | slowest ÷ fastest |"
    yield "|---|" + "---:|" * (len(contexts) + 1)
    for name in decoders:
        own = [speeds[context][name] for context in contexts]
        cells = [f"{speeds[context][name]:,.0f} ({sizes[context][name] / 1e3:,.0f})" for context in contexts]
        yield f"| {name} | {' | '.join(cells)} | {min(own) / max(own):.2f} |"


def _state_bytes(state) -> int:
    """Return the bytes of a state without counters (integer tensors)."""
    tensors = (x for layer in _layers(state) for x in layer.values() if isinstance(x, Tensor))
    return sum(x.nbytes for x in tensors if x.is_floating_point())


def _layers(state) -> list[dict]:
    """Return a state as one dict a layer; transformers' caches have one object a layer."""
    return list(state) if isinstance(state, tuple) else [vars(layer) for layer in state.layers]


if __name__ == "__main__":
    main()
