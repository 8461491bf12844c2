"""The training loop: cross-entropy on a decoded data set, evaluated and stored after every epoch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.worker.facts.job import TrainingFacts
from dyno.worker.nets import local_code, models
from dyno.worker.sessions.torch_support import device_named, import_torch, memory_errors
from dyno.worker.spec import DataSpec, Dims, ModelSpec, UserError, digest
from dyno.worker.training import network
from dyno.worker.training.network import State
from dyno.worker.training.options import TrainOptions

LOSS_EVERY = 20  # batches between two readings of the loss, as a reading synchronises with the GPU
ONE_CYCLE_UP = 0.3  # share of the training with a rising learning rate, as in torch's OneCycleLR


class Loop:
    """A network in training, with its optimiser, schedule and gradient scaler."""

    def __init__(self, module: Any, options: TrainOptions, steps: int) -> None:
        """Prepare the training of `module` in epochs of `steps` batches."""
        import torch

        self.options = options
        self.module = module
        self.device = torch.device(options.device)
        self.optimizer = make_optimizer(module, options)
        self.schedule = make_schedule(self.optimizer, options, steps)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=options.mixed_precision == "fp16")

    def parts(self) -> dict[str, Any]:
        """Return all parts with a state dict, by name."""
        return {name: getattr(self, name) for name in ("module", "optimizer", "schedule", "scaler")}

    def autocast(self) -> Any:
        """Return the context of the requested mixed precision."""
        import torch

        kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.options.mixed_precision)
        return torch.autocast(self.device.type, kind) if kind else contextlib.nullcontext()

    def step(self, x: Any, y: Any) -> Any:
        """Run one batch forwards and backwards; return the loss, still on the device."""
        with self.autocast():
            loss = network.compute_loss(self.module(x), y, self.options.label_smoothing)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()


def make_optimizer(module: Any, options: TrainOptions) -> Any:
    """Return torch's optimiser of the trainable parameters; sgd uses Nesterov's momentum unless the momentum is 0."""
    from torch import optim

    parameters = [p for p in module.parameters() if p.requires_grad]
    lr, decay, momentum = options.peak, options.decay, options.momentum
    if options.optimizer == "sgd":
        return optim.SGD(parameters, lr, momentum=momentum, weight_decay=decay, nesterov=momentum > 0)
    if options.optimizer == "rmsprop":
        return optim.RMSprop(parameters, lr, momentum=momentum, weight_decay=decay)
    return {"adamw": optim.AdamW, "adam": optim.Adam}[options.optimizer](parameters, lr, weight_decay=decay)


def make_schedule(optimizer: Any, options: TrainOptions, steps: int) -> Any:
    """Return torch's learning-rate schedule over all batches of the training, stepped once per batch."""
    from torch.optim import lr_scheduler

    total, warm_steps = options.epochs * steps, round(options.warmup_epochs * steps)
    if options.schedule == "onecycle":
        rise_share = options.warmup_epochs / options.epochs or ONE_CYCLE_UP
        # The momentum stays as requested.
        return lr_scheduler.OneCycleLR(optimizer, options.peak, total + 1, pct_start=rise_share, cycle_momentum=False)
    if options.schedule == "cosine":
        main = lr_scheduler.CosineAnnealingLR(optimizer, max(1, total - warm_steps))
    elif options.schedule == "step":
        main = lr_scheduler.StepLR(optimizer, max(1, math.ceil((total - warm_steps) / 3)))
    else:
        main = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if not warm_steps:
        return main
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warm_steps + 1), total_iters=warm_steps)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, main], milestones=[warm_steps])


@dataclass(frozen=True)
class Training:
    """A training: its options, training and test images, model, image size and folder.

    `report` is called with the current stage.
    """

    options: TrainOptions
    training: DataSpec
    test: DataSpec
    model: ModelSpec
    dims: Dims
    folder: Path
    report: Callable[[str], None] = lambda text: None

    def run(self, threads: int = 0) -> TrainingFacts:
        """Train on images that may be larger than `dims`, and evaluate on the test images after each epoch.

        Write the files of `store_state` into the folder after each epoch, and resume from existing ones. The result is
        that of the best weights as stored, in fp32. Raise a `UserError` for data, options or a model that don't fit
        together.
        """
        torch, options, dims = import_torch(), self.options, self.dims
        torch.backends.cudnn.benchmark = device_named(torch, options.device).type == "cuda"
        if threads:
            torch.set_num_threads(threads)
        splits = network.Split.open(self.training), network.Split.open(self.test)
        model = _with_classes(self.model, dims, *splits)
        self.report("build the model")
        module, notes = network.build_network(model, dims, freeze=options.freeze)
        transform = network.make_augmentation(options.augment, (dims.height, dims.width))
        reader = network.BatchReader(splits[0], model.preprocess, options, transform)
        test_reader = network.BatchReader(splits[1], model.preprocess, replace(options, workers=0))
        with memory_errors():
            module = module.to(options.device, memory_format=torch.channels_last)
            loop = Loop(module, options, len(network.load_batches(splits[0], options, 1)))
            state = network.restore_state(self.folder, self._collect_settings(model), loop.parts())
            for epoch in range(state.epoch + 1, options.epochs + 1):
                self.report(f"epoch {epoch}/{options.epochs}")
                row = self._train_epoch(loop, epoch, reader, state)
                self.report(f"epoch {epoch}/{options.epochs}, test")
                with loop.autocast():
                    row |= _evaluate_split(module, test_reader)[0]
                state.add({name: row[name] for name in network.HISTORY_COLUMNS})
                network.store_state(self.folder, state, loop.parts())
            self.report("evaluate the best weights")
            facts = self._evaluate_best(state, test_reader, model, len(splits[0].index))
            return replace(facts, notes=tuple(notes))

    def _collect_settings(self, model: ModelSpec) -> dict[str, Any]:
        """Return the settings that determine the result, by their user-visible names."""
        weights = model.weights_sha256 or ("pretrained" if model.pretrained else "random")
        return {
            **self.options.settings(),
            "device": self.options.device.partition(":")[0],
            "model": model.source.rpartition("/")[2],
            "code": model.source_sha256,
            "weights": weights,
            "size": self.dims.size,
            "preprocess": digest(model.preprocess),
            "training images": self.training.sha256,
            "test images": self.test.sha256,
        }

    def _train_epoch(self, loop: Loop, epoch: int, reader: network.BatchReader, state: State) -> dict[str, float]:
        """Train for one epoch; return its number, last learning rate, mean loss, seconds and images per second."""
        import torch

        options = self.options
        torch.manual_seed(network.epoch_seed(options.seed, epoch))  # dropout and other random layers
        keys = network.load_batches(reader.split, options, epoch)
        loop.module.train(not options.freeze)  # a frozen network keeps its statistics, too
        total, images = torch.zeros((), device=loop.device), 0
        start = time.perf_counter()
        for batch_number, (x, y) in enumerate(reader(keys), 1):
            total += loop.step(x, y).float() * len(y)
            images += len(y)
            if batch_number % LOSS_EVERY == 0 or batch_number == len(keys):
                mean = float(total) / images
                self.report(f"epoch {epoch}/{options.epochs}, batch {batch_number}/{len(keys)}, loss {mean:.4f}")
                if not math.isfinite(mean):
                    raise UserError(self._explain_divergence(epoch, mean, state))
        seconds = time.perf_counter() - start
        lr, rate = loop.schedule.get_last_lr()[0], images / seconds
        return {"epoch": epoch, "lr": lr, "train_loss": mean, "seconds": seconds, "images_per_s": rate}

    def _explain_divergence(self, epoch: int, loss: float, state: State) -> str:
        location = "no weights were stored yet"
        if state.best:
            top1 = state.history[state.best - 1]["top1"]
            location = f"the best weights, of epoch {state.best} with top-1 {top1:.2f} %, are in {self.folder.name}"
        return f"training diverged in epoch {epoch} (loss {loss}); lower lr, now {self.options.peak:g}; {location}"

    def _evaluate_best(self, state: State, reader: network.BatchReader, model: ModelSpec, images: int) -> TrainingFacts:
        """Return the results of the best weights, read back from disk into a new module and evaluated in IEEE FP32."""
        import torch

        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        path = self.folder / network.BEST_FILE
        best_model = replace(model, weights=str(path), weights_sha256="", pretrained=False)
        module = models.load(best_model, self.dims).to(reader.options.device, memory_format=torch.channels_last)
        row, counts = _evaluate_split(module, reader)
        return TrainingFacts(
            **row, **counts, epochs=state.epoch, best_epoch=state.best, images=images, weights=path.name,
            seconds=math.fsum(row["seconds"] for row in state.history), sha256=local_code.hash_file(path),
        )  # fmt: skip


def _with_classes(model: ModelSpec, dims: Dims, training: network.Split, test: network.Split) -> ModelSpec:
    """Return the model with the data's number of classes; raise a `UserError` if images and model don't fit."""
    channels, *size = test.pixels.shape[1:]
    if channels != model.channels:
        raise UserError(f"the images have {channels} channels and the model takes {model.channels}; set --channels")
    if size != [dims.height, dims.width]:
        raise UserError(f"the test images are {size[0]}x{size[1]} and the model is trained at {dims.size}")
    if training.classes != test.classes:
        raise UserError("the images to train on and those to test on have different classes; use the same for both")
    if len(test.classes) < 2:
        raise UserError("the data set has a single class; a classifier takes two or more")
    return replace(model, classes=len(test.classes))


def _evaluate_split(module: Any, reader: network.BatchReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return loss and top-1 in percent; separately, top-5 and the counts."""
    import torch

    module.eval()
    loss, ranks = torch.zeros((), device=reader.options.device), []
    with torch.inference_mode():
        for x, y in reader(network.plain_batches(reader.split, max(reader.options.batch, network.EVALUATION_BATCH))):
            scores = module(x).float()
            loss += torch.nn.functional.cross_entropy(scores, y, reduction="sum")
            top_classes = scores.topk(min(5, scores.shape[1])).indices
            ranks.append((top_classes == y[:, None]).cpu())
    is_hit = torch.cat(ranks)
    count = len(is_hit)
    hits, top5_hits = int(is_hit[:, 0].sum()), int(is_hit.any(1).sum())
    row = {"test_loss": float(loss) / count, "top1": 100 * hits / count}
    return row, {"top5": 100 * top5_hits / count, "hits": hits, "count": count}
