"""Random weights in place of trained ones: every part of the network contributes, and activations stay in range.

Many networks begin to train with branches that add nothing: the last batch norm of a block has weight 0 (timm's
ResNets), a layer scale is 1e-6 (ConvNeXt), a head is all zeros (MLP-Mixer, torchvision's vision transformers). With
such weights an error of an engine there never reaches the outputs: a wrong graph would pass every comparison. So they
are given values (`undo_zero_init`).

Initial batch norm subtracts nothing and divides by one, as if every layer's results had unit variance. They don't:
through the 33 blocks of a ResNet-101 they grow beyond the range of float16. A trained network's statistics keep them
in range, so a random network gets statistics of noise (`init_batch_norm`).

That alone would make a deep network chaotic: each block of a ResNet-152 adds as much as it is given, and a small error
of the input is two thousand times as large in the output. So residual branches are damped, as by training that begins
without them (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1): then it is twenty times as large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

from dyno.worker.inputs.specs import INPUT_ERRORS
from dyno.worker.sessions.torch_support import one_thread

# Few images' statistics fit other images worse, by a factor per layer that a hundred layers raise to its power.
IMAGE_COUNT, IMAGE_SIZES, SEED = 16, ((64, 64), (96, 96)), 0
GRAIN_SIZES = 1, 4, 16  # pixels per grain: photographs have detail and broad areas
MIN_DEVIATION_SHARE = 0.5  # of its layer's mean deviation: an image amplifies channels that noise hardly changes
BRANCH_SCALE = 0.25  # last batch norm of a branch; a power of two doesn't round
SUM_OPERATORS = ("add", "iadd", "radd")
WEIGHT_SPREAD = 0.02  # standard deviation in place of zeros, as in initial weights of vision transformers
MAX_INITIAL_SCALE = 0.1  # smaller scales are initial values, not trained ones
SCALE_NAMES = ("weight", "gain")
# Of a batch norm that began at 0. Noise says little of what an attention's result is for a photograph (LeViT: 40 times
# as much): with 1, an error of the input would be 42,000 times as large in the outputs.
QUIET_SHARE = 0.1


class _AllMeasured(Exception):
    """Every batch norm has its statistics; layers after the last one need not run."""


def undo_zero_init(torch: Any, module: Any) -> None:
    """Replace parameters that suppress a branch, in place.

    Zero matrices become noise, and zero or tiny scales `BRANCH_SCALE`. The weight of a batch norm becomes
    `QUIET_SHARE`, and `init_batch_norm` damps it where it ends a branch. Biases stay 0.
    """
    draw = torch.Generator().manual_seed(SEED)
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    with torch.no_grad():
        for owner in module.modules():
            for name, value in owner.named_parameters(recurse=False):
                if not value.is_floating_point() or not value.numel() or value.min() != value.max():
                    continue
                start = float(value.flatten()[0])
                if value.numel() != max(value.shape, default=1):
                    if start == 0:
                        value.copy_(torch.randn(value.shape, generator=draw) * WEIGHT_SPREAD)
                elif 0 < start <= MAX_INITIAL_SCALE or (start == 0 and name in SCALE_NAMES):
                    value.fill_(QUIET_SHARE if isinstance(owner, batch_norm) else BRANCH_SCALE)


def init_batch_norm(torch: Any, module: Any, channels: int, size: tuple[int, int]) -> None:
    """Damp residual branches, then set mean and variance of every batch norm to those of noise; in place.

    `size` is the network's own, tried where it refuses small images, which are enough for this. A network that takes
    neither keeps its initial weights. So that threads, processor and version of torch make no difference, statistics
    are computed in float64 by one thread and rounded to eight bits.
    """
    kind = torch.nn.modules.batchnorm._BatchNorm
    norms = [m for m in module.modules() if isinstance(m, kind) and m.running_mean is not None]
    initial = [{name: value.clone() for name, value in norm.state_dict().items()} for norm in norms]
    for height, width in dict.fromkeys((*IMAGE_SIZES, size)) if norms else ():
        images = make_noise(torch, channels, height, width)
        try:
            _damp_branches(torch, module.eval(), norms, images[:1].float())
            with one_thread(torch), _in_float64(module), _without_borders(torch, module), _measure_statistics(norms):
                module(images)
        except INPUT_ERRORS:
            for norm, state in zip(norms, initial, strict=True):
                norm.load_state_dict(state)
        else:
            for norm in norms:
                _round_statistics(norm)
            # Some keep values of this run's type until they are put into training (timm's attention biases).
            module.train()
            module.eval()
            return


def _damp_branches(torch: Any, module: Any, norms: list[Any], image: Any) -> None:
    """Scale down what each residual branch adds to its shortcut.

    Of two tensors of one shape that are added, the one that has passed more batch norms is a branch. A tensor carries
    their number, and the last of them, through every function of PyTorch.
    """
    ends: set[Any] = set()

    class BranchFinder(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [t for a in args for t in _make_tuple(a) if isinstance(t, torch.Tensor)]
            passed = [getattr(t, "passed", (0, None)) for t in tensors]
            most = max(passed, key=lambda one: one[0], default=(0, None))
            if getattr(func, "__name__", "").strip("_") in SUM_OPERATORS and len(tensors) == 2:
                (a, _), (b, _) = passed
                if a != b and tensors[0].shape == tensors[1].shape:
                    ends.add(most[1])
            out = func(*args, **(kwargs or {}))
            for tensor in _make_tuple(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.passed = most
            return out

    def count_norm(norm: Any, args: tuple[Any, ...], out: Any) -> None:
        out.passed = getattr(args[0], "passed", (0, None))[0] + 1, norm

    # A head that refuses so small an image comes after the branches.
    with contextlib.ExitStack() as hooks, torch.no_grad(), BranchFinder(), contextlib.suppress(*INPUT_ERRORS):
        for norm in norms:
            hooks.enter_context(norm.register_forward_hook(count_norm))
        module(image)
    for norm in ends:
        if norm.weight is not None:
            norm.weight.data.mul_(BRANCH_SCALE)


def _make_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _round_statistics(norm: Any) -> None:
    """Round to what every machine computes alike: means in 256ths of the deviation, so that rounding noise is zero."""
    measured = norm.running_var.double()
    variance = measured.lerp(measured.mean(), MIN_DEVIATION_SHARE).bfloat16().double()
    step = (variance.sqrt() / 256).clamp(min=1e-30)
    norm.running_var.copy_(variance)
    norm.running_mean.copy_((norm.running_mean.double() / step).round() * step + 0.0)


def make_noise(torch: Any, channels: int, height: int, width: int) -> Any:
    """Return images of unit variance, [IMAGES, channels, height, width] in float64."""
    draw = torch.Generator().manual_seed(SEED)
    total = torch.zeros(IMAGE_COUNT, channels, height, width, dtype=torch.float64)
    for grain in GRAIN_SIZES:
        shape = IMAGE_COUNT, channels, -(-height // grain), -(-width // grain)
        coarse = torch.randn(shape, generator=draw, dtype=torch.float64)
        total += coarse.repeat_interleave(grain, 2).repeat_interleave(grain, 3)[..., :height, :width]
    return total / len(GRAIN_SIZES) ** 0.5


@contextlib.contextmanager
def _without_borders(torch: Any, module: Any) -> Iterator[None]:
    """Pad with the opposite side's pixels: zeros at the border would weigh more here than in a larger image."""
    kinds = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
    with contextlib.ExitStack() as undo:
        for layer in (each for each in module.modules() if isinstance(each, kinds)):
            undo.callback(setattr, layer, "padding_mode", layer.padding_mode)
            layer.padding_mode = "circular"
        yield


@contextlib.contextmanager
def _in_float64(module: Any) -> Iterator[None]:
    """Hold each layer in float64 only while it runs, until the block ends.

    A copy of the whole network would count towards the process's peak memory.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(module.float)
        for owner in module.modules():
            if next(chain(owner.parameters(recurse=False), owner.buffers(recurse=False)), None) is not None:
                undo.enter_context(owner.register_forward_pre_hook(lambda layer, _: layer.double() and None))
                undo.enter_context(owner.register_forward_hook(lambda layer, _, out: layer.float() and None))
        yield


@contextlib.contextmanager
def _measure_statistics(norms: list[Any]) -> Iterator[None]:
    """Hold batch norm in training mode while the block runs, so that its statistics become this batch's.

    `_AllMeasured` is raised after the last one.
    """
    pending = set(norms)

    def mark_measured(norm: Any, _: Any, out: Any) -> None:
        pending.discard(norm)
        if not pending:
            raise _AllMeasured

    def restore_norm(norm: Any, momentum: float | None) -> None:
        norm.eval().momentum = momentum
        norm.num_batches_tracked.zero_()

    with contextlib.ExitStack() as undo, contextlib.suppress(_AllMeasured):
        for norm in norms:
            undo.enter_context(norm.register_forward_hook(mark_measured))
            undo.callback(restore_norm, norm, norm.momentum)
            norm.train().momentum = 1.0
        yield
