"""Fitting one model with `transformers.Trainer` and our optimiser groups, metrics, progress bar and checkpoints."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from halflife import extensions
from halflife.data.trust import SIGNATURE, sign
from halflife.files import CHECKPOINTS, RESULT_JSON, RUN_JSON, flatten, read_json_object, remove_orphans, write_json
from halflife.models import LanguageModel
from halflife.models.loss import mean_loss, token_losses
from halflife.ops.linear import fast_linears
from halflife.packing import Packing
from halflife.precision import wide
from halflife.tasks import IGNORED
from halflife.training.carried import CarriedStates, Part
from halflife.training.config import ExecutionConfig, TrainConfig, as_json, on_signals, rank
from halflife.training.schedules import BY_EPOCH

if TYPE_CHECKING:
    from halflife.parallel import ContextParallel
    from halflife.training.callbacks import Metrics
    from halflife.training.speed import Speed

# Tokens of a row that a measurement reads at once, so that its memory does not grow with the row.
READ_AT_ONCE = 1 << 14


class Objective(nn.Module):
    """The module that the Trainer trains: a model with the cross-entropy at the scored positions.

    Args:
        recompute: what the backward pass computes again, see `ExecutionConfig`.
    """

    accepts_loss_kwargs = True  # the Trainer then passes num_items_in_batch

    def __init__(self, model: LanguageModel, recompute: Sequence[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.call = None
        if recompute:
            from halflife.ops.backends.recompute import calling

            self.call = calling(recompute)
        self.carried = CarriedStates()
        self.context: ContextParallel | None = None

    def forward(
        self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | Packing | None = None,
        num_items_in_batch: Tensor | int | None = None, action_mask: Tensor | None = None, part: Part | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The mean loss in nats over the scored positions, as `{"loss": …}`.

        Args:
            input_ids: `[B, T]`.
            labels: `[B, T]`; positions with −100 are not scored.
            cu_seqlens: boundaries of packed sequences, `[N + 1]`, or their `Packing`.
            num_items_in_batch: for a micro-batch, the scored positions of the whole batch. The losses of its
                micro-batches then add up to the loss of the batch.
            action_mask: `[B, T]`, 0 at tokens that Koopman attention leaves out of its sums.
            part: in training, the micro-batch of rows that continue others, see `CarriedStates`.
        """
        if not torch.is_grad_enabled() and action_mask is None and input_ids.shape[1] > READ_AT_ONCE:
            packing = Packing.of(cu_seqlens, *input_ids.shape[:2])
            return {"loss": self._loss_of_long_rows(input_ids, labels, packing.cu_seqlens)}
        call = self.call if self.training else None
        carried = part if self.model.training else None
        state = None if carried is None else self.carried.before(carried, input_ids.device)
        self.model.context_parallel = self.context if torch.is_grad_enabled() else None
        try:
            hidden, after = self.model.hidden(input_ids, state, cu_seqlens, action_mask=action_mask, call=call)
        finally:
            self.model.context_parallel = None  # what reads the model beside the training has whole rows
        if carried is not None:
            self.carried.after(carried, after)
        head, backend = self.model.head_or_weight, self.model.pass_backend
        loss = mean_loss(hidden.flatten(0, 1), head, labels.flatten(), backend)
        if num_items_in_batch is None:
            return {"loss": loss}
        of_all = (labels != IGNORED).sum() / torch.as_tensor(num_items_in_batch).clamp_min(1)  # of none is no share
        return {"loss": loss * of_all}

    def _loss_of_long_rows(self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The mean loss, one piece of the rows after the other where the model can read pieces."""
        from halflife.parallel import InTurn, read_as_a_whole

        pieces = 1 if read_as_a_whole(self.model) else math.ceil(ids.shape[1] / READ_AT_ONCE)
        line, nats = InTurn(pieces), []
        self.model.context_parallel = line
        try:
            for piece in line.pieces():
                bounds = None if cu_seqlens is None else piece.boundaries(cu_seqlens)
                hidden, _ = self.model.hidden(piece.of(ids), cu_seqlens=bounds)
                losses = token_losses(hidden.flatten(0, 1), self.model.head_or_weight, piece.of(labels).flatten())
                nats.append(wide(losses).sum())
        finally:
            self.model.context_parallel = None
        return torch.stack(nats).sum() / (labels != IGNORED).sum()


def check_run_folder(config: TrainConfig, folder: Path) -> bool:
    """Check that `folder` can hold a run of this configuration. Returns whether the run is finished already.

    Raises:
        ValueError: the folder belongs to a run with another configuration, or `run.json` was edited after the first
            checkpoint; the message names what differs.
    """
    path = folder / RUN_JSON
    if path.exists() and (differing := _differences(read_json_object(path), config, folder)):
        raise ValueError(
            f"{folder} belongs to a run with another configuration; choose another folder. There and here: {differing}"
        )
    if (folder / RESULT_JSON).exists():
        return True
    for saved in folder.glob(f"{CHECKPOINTS}/checkpoint-*/{RUN_JSON}"):
        try:
            trained = read_json_object(saved)
        except ValueError:  # a damaged checkpoint, which is passed over later
            continue
        if differing := _differences(trained, config, folder):
            raise ValueError(
                f"{folder / RUN_JSON} was changed after {saved.parent.name} was written. A run cannot change its "
                f"settings: restore the file, or start a new run. There and here: {differing}"
            )
    return False


def claim_run_folder(config: TrainConfig, folder: Path) -> None:
    """Write `run.json`, and remove what killed processes left in the folder."""
    if rank() == 0:
        remove_orphans(folder)
        write_json(folder / RUN_JSON, sign(config.saved_in(folder)))


def _differences(saved: dict[str, Any], config: TrainConfig, folder: Path) -> str:
    """The settings that differ between a `run.json` and a configuration, with both values; "" if none differ."""
    whole = (config.portable(x, folder) for x in (saved, as_json(config.to_dict())))
    others = (extensions.IMPORTS, SIGNATURE)
    there, here = (flatten({name: x for name, x in one.items() if name not in others}) for one in whole)
    names = [name for name in {**here, **there} if name not in here or name not in there or here[name] != there[name]]
    return "; ".join(f"{name} = {there.get(name, 'missing')} and {here.get(name, 'missing')}" for name in names[:4])


def fit(
    model: LanguageModel,
    config: TrainConfig,
    data: Dataset[dict[str, Tensor]],
    folder: Path,
    *,
    validate: Callable[[nn.Module], float],
    measure: str,
    name: str,
    execution: ExecutionConfig,
    speed: Speed | None = None,
) -> tuple[str | None, Metrics]:
    """Train `model` in place, starting from the last complete checkpoint in `folder` if there is one.

    With `execution.fsdp` the parameters of `model` are shards afterwards (see `sharding.gather`).

    Args:
        model: freshly initialised.
        config: optimiser and schedule.
        data: item i is micro-batch i, which belongs to step `i // execution.num_micro_batches(config.batch_size)`.
        validate: takes the `Objective` and returns the validated quantity.
        measure: the name of that quantity, "accuracy" or "loss".
        name: label of the progress bar.
        execution: memory, processes and display.
        speed: computes tokens per second; None to leave them out.

    Returns:
        The reason of a divergence (None if the run did not diverge), and the metrics callback.

    Raises:
        StoppedBySignal: the process received a signal to end and has saved a checkpoint.
        UnreadableCheckpoint: the newest checkpoint cannot be loaded. It does not count any more: call this again with a
            fresh model, and the run continues from the checkpoint before.
        ValueError: the checkpoint is sharded and this run is not, or the other way round.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from halflife.models.compiled import compiled_blocks
    from halflife.training import sharding
    from halflife.training.callbacks import Diverged, Metrics, ProgressBar, StopOnSignal, check_weights
    from halflife.training.checkpoints import CheckpointStore, UnreadableCheckpoint
    from halflife.training.speed import keep_freed_memory
    from halflife.training.trackers import Tracking
    from halflife.training.trainer import FSDPTrainer, HalflifeTrainer

    store = CheckpointStore(folder / CHECKPOINTS)
    if store.newest is not None and (store.newest / sharding.SHARDS).is_dir() != execution.fsdp:
        raise ValueError(f"{store.newest} was written {'without' if execution.fsdp else 'with'} --fsdp; resume it so")
    recompute = execution.recompute
    objective = Objective(model, () if execution.compile else recompute)
    arguments = _arguments(config, folder, execution)
    metrics = Metrics(folder, validate, measure, config.validate_every, speed)
    if arguments.device.type == "cpu":
        keep_freed_memory()
    bar, stop = ProgressBar(name, metrics), StopOnSignal()
    during = ExitStack()
    during.enter_context(on_signals(stop.note))
    if execution.compile:
        metrics.graphs = during.enter_context(compiled_blocks(model, recompute))
    if execution.fsdp or execution.context_parallel > 1:
        shape = execution.replicas, execution.context_parallel
        mesh = init_device_mesh(arguments.device.type, shape, mesh_dim_names=("rows", "context"))
        if execution.fsdp:
            sharding.fully_shard(objective, mesh=mesh["rows"])
        if execution.context_parallel > 1:
            from halflife.parallel import Pieces, context_parallel

            objective.context, model.context_parallel = context_parallel(objective, mesh["context"]), None
            data = Pieces(data, objective.context.size)
    callbacks: list[Any] = [metrics, stop, *([bar] if execution.show and rank() == 0 else [])]
    if execution.profile:
        from halflife.training.profile import Profile

        callbacks.insert(0, Profile(objective, folder, arguments.device))  # a validation is no part of a step
    kind = FSDPTrainer if execution.fsdp else HalflifeTrainer
    trainer = kind(config, store, model=objective, args=arguments, train_dataset=data, callbacks=callbacks)
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    if execution.track:
        metrics.tracking = Tracking(trainer, config, folder, execution)
        trainer.add_callback(metrics.tracking)
    start = 0 if store.newest is None else int(store.newest.name.rpartition("-")[2])
    try:
        with (
            during,
            fast_linears(model),
            nullcontext() if metrics.tracking is None else metrics.tracking.open(start),
        ):
            trainer.train(resume_from_checkpoint=None if store.newest is None else str(store.newest))
        check_weights(model, config.steps)
    except Diverged as error:
        return str(error), metrics
    except UnreadableCheckpoint:
        assert trainer.resumed is not None
        store.discard(trainer.resumed)
        raise
    finally:
        bar.close()
    if stop.received is not None:
        raise StoppedBySignal(f"stopped after step {trainer.state.global_step} of {config.steps}", stop.received)
    return None, metrics


class StoppedBySignal(Exception):
    """A run that received the signal `number` has saved a checkpoint and stopped. It can be resumed."""

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message, number)
        self.message, self.number = message, int(number)

    def __str__(self) -> str:
        return self.message


def _arguments(config: TrainConfig, folder: Path, execution: ExecutionConfig) -> Any:
    from transformers import TrainingArguments

    from halflife.training.trackers import PROJECT, run_name

    by_epoch = config.schedule == BY_EPOCH  # `HalflifeTrainer.create_scheduler` makes it
    cuda = torch.cuda.is_available()
    log_every = math.gcd(config.save_every, 20)  # divides save_every, so that a resumed run logs the same averages
    arguments = TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=config.steps,
        per_device_train_batch_size=1,  # an item of the data set is a whole micro-batch
        gradient_accumulation_steps=execution.num_micro_batches(config.batch_size) // execution.replicas,
        train_sampling_strategy="sequential",
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant" if by_epoch else config.schedule,
        lr_scheduler_kwargs={} if by_epoch else config.schedule_options,
        warmup_steps=round(config.warmup * config.steps),
        max_grad_norm=config.clip,
        bf16=config.bf16,
        use_cpu=not torch.accelerator.is_available(),  # otherwise transformers refuses bf16 without a GPU
        seed=config.seed,
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=None,  # the `CheckpointStore` removes old ones
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        accelerator_config={"non_blocking": cuda},
        ddp_find_unused_parameters=False,
        report_to=list(execution.track),
        run_name=run_name(folder, execution),
        project=PROJECT,
        disable_tqdm=True,
    )
    if arguments.n_gpu > 1:  # without torchrun the Trainer would split batches over all GPUs, by DataParallel
        arguments._n_gpu = 1
    return arguments
