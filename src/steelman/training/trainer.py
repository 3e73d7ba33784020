"""The training loop. A resume at any step ends with the same weights, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor, nn

from steelman.data.augment import Augmentation, NoAugment
from steelman.data.source import Source, batches, stream
from steelman.errors import TrainingInterruptedError, UserError, resume_command
from steelman.models.batchnorm import routed
from steelman.models.classifier import load_weights
from steelman.models.features import parallel
from steelman.objectives.base import Objective
from steelman.objectives.criterion import Criterion
from steelman.rng import Key
from steelman.schedules import value_at
from steelman.threat import ThreatModel
from steelman.training.averaging import Average
from steelman.training.checkpoint import checkpoint_path, checkpoints, load_newest, prune, save_checkpoint
from steelman.training.described import check_processes, checkpoint_state, restore_optimizer, same_shapes
from steelman.training.guard import StopRequest, collapse, poisoned, stagnation, stop_on_signals
from steelman.training.keeping import keep, steps_to_keep
from steelman.training.processes import agree, gathered, share_buffers, sums
from steelman.training.progress import Recorder
from steelman.training.records import Progress, Trained
from steelman.training.settings import RunSettings
from steelman.training.validation import score


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """Trains `net` on `train`, measures it on `validation` after each epoch, and keeps everything in `folder`.

    `fingerprint` identifies the recipe: a checkpoint of another recipe is refused. `helper` is the other model that
    some objectives learn from.
    """

    net: nn.Module
    train: Source
    validation: Source
    objective: Objective
    threat: ThreatModel
    settings: RunSettings
    fabric: Fabric
    folder: Path
    console: Console
    augment: Augmentation = dataclasses.field(default_factory=NoAugment)
    fingerprint: str = ""
    helper: nn.Module | None = None

    def __post_init__(self) -> None:
        self.training, self.around, self.compute = self.settings.training, self.settings.around, self.settings.compute
        self.key = Key(self.training.seed)
        n, size = len(self.train), self.training.batch_size
        if size % self.fabric.world_size:
            raise UserError(
                f"batch_size: expected a multiple of the number of processes, {self.fabric.world_size}, got {size}"
            )
        # A last batch with one image for each process is dropped: batch norm has no statistics for one image.
        batches_an_epoch = max(1, math.ceil(n / size) - (0 < n % size < 2 * self.fabric.world_size))
        self.per_epoch = self.objective.repeats * batches_an_epoch
        self.total = self.per_epoch * self.training.epochs
        self.progress = Progress()
        # Layers that are in eval mode in a model in train mode, such as frozen batch norm, stay so.
        self.still = [module for module in self.net.modules() if not module.training] if self.net.training else []
        if self.compute.channels_last:
            self.net = self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.manual_seed(self.key.fold("global", self.fabric.global_rank).integer() & (2**63 - 1))
        optimizer = self.training.optimizer(self.net.parameters())
        # Attacks run on the module without wrappers: they need no exchange of gradients between processes.
        attacked: nn.Module = torch.compile(self.net) if self.compute.compile else self.net  # type: ignore[assignment]
        self.model, self.optimizer = self.fabric.setup(attacked, optimizer)
        if self.helper is not None:
            self.helper = self.helper.to(self.fabric.device)
        self.criterion = Criterion(
            self.objective,
            self.model,
            self.threat,
            seed=self.training.seed,
            label_smoothing=self.around.label_smoothing,
            steps=self.total,
            awp=self.around.awp,
            optimizer=optimizer,
            helper=self.helper,
            net=attacked,
        )
        self.criterion.project()
        self.criterion.advise = False  # `_advise` warns, so that the warning appears once
        self.average = None if self.training.ema is None else Average(self.net, self.training.ema)

    def fit(self, resume: bool = False) -> Trained:
        """Train until the end, or until the first reason to stop."""
        if resume:
            self.restore()
        progress, stopped = self.progress, self._reason_to_stop()
        restored = progress.step if resume and self.criterion.carry else -1
        self.recorder = self._recorder()
        self._advise()
        saved = time.monotonic()
        try:
            with stop_on_signals() as request:
                while progress.epoch < self.training.epochs and not stopped:
                    started = time.monotonic() - progress.seconds
                    for x, y, index in self.batches_left(request):
                        loss = self._step_after(restored, x, y, index)
                        progress.seconds = time.monotonic() - started
                        if not math.isfinite(loss):
                            stopped = self._diverged(loss)
                            break
                        if progress.batch < self.per_epoch:  # after the last batch, the end of the epoch saves
                            if self._asked_to_stop(request):
                                self.save()
                                raise TrainingInterruptedError(request.number or signal.SIGTERM, self.folder)
                            if agree(self.fabric, time.monotonic() - saved > 60 * self.training.save_minutes):
                                self.save()
                                saved = time.monotonic()
                    stopped = stopped or poisoned(self.net, progress.epoch + 1)
                    if not stopped:
                        self.finish_epoch(time.monotonic() - started)
                        self.save()
                        saved = time.monotonic()
                        stopped = self._reason_to_stop()
                        if self._asked_to_stop(request):
                            raise TrainingInterruptedError(request.number or signal.SIGTERM, self.folder)
        finally:
            if self.recorder is not None:
                self.recorder.close()
        return keep(
            self.folder,
            progress,
            self.training,
            stopped=stopped,
            rollback=self.settings.guard.on_collapse == "rollback",
            console=self.console,
        )

    def batches_left(self, request: StopRequest) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The rest of the current epoch's batches, and of each the share of this process."""
        epoch, world = self.progress.epoch, self.fabric.world_size
        order = batches(len(self.train), self.training.batch_size, self.key.fold("order", epoch))
        order = [
            index for index in order for _ in range(self.objective.repeats)
        ]  # FreeAT trains several times in a row on each batch
        order = [index[: len(index) - len(index) % world] for index in order[: self.per_epoch]][self.progress.batch :]
        shares = [index[self.fabric.global_rank :: world] for index in order]
        try:
            yield from stream(self.train, shares, self.key.fold("decode", epoch), self.compute.workers)
        except UserError:
            if not request.number:
                raise
            # A stop signal to all processes also ends those that read images. All steps until then are complete.
            self.save()
            raise TrainingInterruptedError(request.number, self.folder) from None

    def _step_after(self, restored: int, x: Tensor, y: Tensor, index: Tensor) -> float:
        """A step. The first one after a resume may show that what the objective carries is damaged."""
        if self.progress.step != restored:
            return self.step(x, y, index)
        try:
            return self.step(x, y, index)
        except UserError:
            raise
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            raise UserError(
                f"the checkpoint in {self.folder} is damaged: the objective cannot go on with what it carried "
                f"({str(error).splitlines()[0]})"
            ) from error

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> float:
        """Make one step of the optimiser, and return the batch's loss."""
        progress, device = self.progress, self.fabric.device
        share = progress.step / self.total
        lr = value_at(self.training.lr, share)
        at = share if self.training.eps_per == "step" else progress.epoch / self.training.epochs
        eps = self.threat.eps if self.training.eps is None else value_at(self.training.eps, at)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        x, y, index = x.to(device), y.to(device), index.to(device)
        x = self.augment(x, index, self.key.fold("augment", progress.epoch))
        if self.compute.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.model.train()
        for module in self.still:
            module.training = False
        with self.fabric.autocast():
            loss_of_batch = self.criterion(x, y, index=index, progress=share, eps=eps)
        loss = sums(self.fabric, float(loss_of_batch.detach()))[0] / self.fabric.world_size
        progress.step += 1
        progress.batch += 1
        if not math.isfinite(loss):
            self.criterion.finish()  # without a backward pass: it only moves perturbed weights back
            return loss
        self.optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(loss_of_batch)
        if self.around.clip is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.around.clip)
        self.optimizer.step()
        self.criterion.finish()
        share_buffers(self.fabric, self.net)
        if self.average is not None:
            self.average.update(self.net)
        progress.loss_sum += loss * len(y)
        progress.correct += int((self.criterion.outcome.logits.argmax(dim=1) == y).sum())
        progress.count += len(y)
        self.used = {"lr": lr, "eps": eps}
        if self.recorder is not None:
            self.recorder.step(progress.epoch + 1, loss)
        return loss

    def finish_epoch(self, seconds: float) -> None:
        """Validate, record the epoch, and begin the next one."""
        progress = self.progress
        loss_sum, correct, count = sums(self.fabric, progress.loss_sum, progress.correct, progress.count)
        clean, robust = self.validate()
        metrics = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": loss_sum / count,
            "train_accuracy": correct / count,
            "validation_clean": clean,
            "validation_robust": robust,
            **self.used,
            "seconds": seconds,
        }
        if progress.best_step is None or robust > max(epoch["validation_robust"] for epoch in progress.history):
            progress.best_step = progress.step
        progress.history.append(metrics)
        progress.epoch += 1
        progress.batch, progress.loss_sum, progress.correct, progress.count, progress.seconds = 0, 0.0, 0, 0, 0.0
        if self.recorder is not None:
            self.recorder.epoch(metrics)

    def validate(self) -> tuple[float, float]:
        """Clean and robust accuracy of the weights that would be kept, on the held-out images at the target radius."""
        net = self.net
        if self.average is not None:
            net = copy.deepcopy(self.net)
            net.load_state_dict(self.average.values)
        with routed(net, self.around.auxiliary_norm or "clean"):
            return score(
                net,
                self.validation,
                self.settings.validation,
                self.threat,
                self.key.fold("validation"),
                self.fabric,
                self.compute,
            )

    def save(self) -> None:
        """Write a checkpoint of the current step. A failure stops the run, and the error says what is safe."""
        on_cuda, done = self.fabric.device.type == "cuda", self.progress
        loss_sum, correct, count = sums(self.fabric, done.loss_sum, done.correct, done.count)
        state = {
            "fingerprint": self.fingerprint,
            "progress": {**dataclasses.asdict(self.progress), "loss_sum": loss_sum, "correct": correct, "count": count},
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state(),
            "carry": {name: gathered(self.fabric, value) for name, value in self.criterion.carry.items()},
            "rng": gathered(self.fabric, torch.get_rng_state()),
            "cuda": gathered(self.fabric, torch.cuda.get_rng_state()) if on_cuda else None,
            "precision": self.fabric.strategy.precision.state_dict(),
        }
        failure = ""
        if self.fabric.is_global_zero:
            try:
                save_checkpoint(checkpoint_path(self.folder, self.progress.step), state)
                prune(self.folder, steps_to_keep(self.progress, self.training))
            except OSError as error:
                failure = error.strerror or str(error)
        if agree(self.fabric, bool(failure)):  # the other processes wait for the first one, and stop if it failed
            raise UserError(
                f"could not save a checkpoint in {self.folder}: {failure or 'the first process failed'}. Earlier "
                f"checkpoints are safe; remove the cause, then go on with: {resume_command(self.folder)}"
            )

    def restore(self) -> None:
        """Continue from the newest undamaged checkpoint. A run without any checkpoint starts from the beginning."""
        if not checkpoints(self.folder) and not any((self.folder / "checkpoints").glob("damaged-*")):
            self.console.print("no checkpoint was saved yet; starting from the beginning", highlight=False)
            return
        state, damaged = load_newest(self.folder, self.fabric.is_global_zero)
        state = checkpoint_state(state, self.folder)
        for sentence in damaged:
            self.console.print(f"{sentence}; going on from the one before", style="yellow", highlight=False)
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"the checkpoint in {self.folder} belongs to another recipe ({state['fingerprint']}) than the run's "
                f"recipe.yaml ({self.fingerprint}): restore the old recipe.yaml, or start a new run in another folder"
            )
        load_weights(self.net, state["model"], f"the checkpoint in {self.folder}")
        what = f"the checkpoint in {self.folder} is damaged"
        restore_optimizer(self.optimizer.optimizer, state["optimizer"], what)
        if self.average is not None:
            if state["average"] is None or not same_shapes(state["average"]["values"], self.average.values):
                raise UserError(f"{what}: its average of the weights is missing, or is that of another model")
            self.average.restore(state["average"])
        self.progress = Progress(**state["progress"])
        if not self.fabric.is_global_zero:  # the saved numbers are sums over all processes; the first one keeps them
            self.progress.loss_sum, self.progress.correct, self.progress.count = 0.0, 0, 0
        check_processes(state, what)
        saved_by, rank = len(state["rng"]), self.fabric.global_rank
        if saved_by != self.fabric.world_size:
            raise UserError(f"expected {saved_by} processes, as when the run was saved, got {self.fabric.world_size}")
        carry = {name: value[rank] for name, value in state["carry"].items()}
        self.criterion.load_state_dict(
            {**self.criterion.state_dict(), "step": self.progress.step, "seen": 0, "carry": carry}
        )
        try:
            torch.set_rng_state(state["rng"][rank].clone())  # torch crashes on a view of a larger tensor
            if state["cuda"] is not None and self.fabric.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"][rank])
            self.fabric.strategy.precision.load_state_dict(state["precision"])
        except (RuntimeError, TypeError, KeyError) as error:
            raise UserError(f"{what}: {str(error).splitlines()[0]}") from None

    def _advise(self) -> None:
        """Before the first step, warn if training will be slow."""
        if self.progress.step == 0:
            few = self.train.images(torch.arange(min(32, len(self.train))))
            if said := parallel(self.net, few.to(self.fabric.device)):
                self.console.print(f"warning: {said}", style="yellow", highlight=False, soft_wrap=True)

    def _recorder(self) -> Recorder | None:
        if not self.fabric.is_global_zero:
            return None
        return Recorder(self.folder, self.console, self.progress.history, self.total, self.progress.step)

    def _reason_to_stop(self) -> str | None:
        history = self.progress.history
        collapsed = collapse(history, self.settings.guard) if self.objective.adversarial else None
        return collapsed or stagnation(history, self.around.patience)

    def _diverged(self, loss: float) -> str:
        progress = self.progress
        return (
            f"the loss became {loss} in epoch {progress.epoch + 1}, batch {progress.batch} of {self.per_epoch}, at "
            f"learning rate {self.optimizer.param_groups[0]['lr']:.3g}; try a smaller one or a longer warm-up"
        )

    def _asked_to_stop(self, request: StopRequest) -> bool:
        return agree(self.fabric, request.number > 0)
