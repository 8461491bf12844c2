"""Random weights in place of trained ones: every part of the network contributes, and activations stay in range.

Many networks begin training with branches that add nothing: the last batch norm of a block has weight 0 (timm's
ResNets), a layer scale is 1e-6 (ConvNeXt), a head is all zeros (MLP-Mixer, torchvision's vision transformers). An
engine's error there never reaches the outputs, so a wrong graph would pass every comparison. Such weights get other
values (`undo_zero_init`).

Initial batch norm assumes that every layer's results have zero mean and unit variance. They don't: through the 33
blocks of a ResNet-101 they grow beyond the range of float16. A trained network's statistics keep them in range, so a
random network gets statistics of noise (`init_batch_norm`).

That alone would make a deep network chaotic: each block of a ResNet-152 adds as much as its input, and a small input
error is amplified two thousand times. So residual branches are damped, as by training that begins without them (Goyal
et al. 2017, "Accurate, Large Minibatch SGD", section 5.1): the factor is then twenty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

from dyno.worker.inputs.specs import INPUT_ERRORS
from dyno.worker.sessions.torch_support import one_thread

# Fewer images' statistics fit other images worse, by a factor per layer that a hundred layers multiply.
IMAGE_COUNT, IMAGE_SIZES, SEED = 16, ((64, 64), (96, 96)), 0
GRAIN_SIZES = 1, 4, 16  # pixels per grain: photographs have detail and broad areas
MIN_DEVIATION_SHARE = 0.5  # weight of the layer's mean variance: images excite channels that noise hardly changes
BRANCH_SCALE = 0.25  # factor of a branch's last batch norm; a power of two, exact
SUM_OPERATORS = ("add", "iadd", "radd")
WEIGHT_SPREAD = 0.02  # standard deviation in place of zeros, as in vision transformers' initial weights
MAX_INITIAL_SCALE = 0.1  # smaller scales are initial values
SCALE_NAMES = ("weight", "gain")
# Weight of a batch norm that began at 0. An attention's result is larger for a photograph than for noise (LeViT: 40
# times): with 1, an input error would be amplified 42,000 times.
QUIET_SHARE = 0.1


class _AllMeasured(Exception):
    """Every batch norm has its statistics; layers after the last one need not run."""


def undo_zero_init(torch: Any, module: Any) -> None:
    """Replace parameters that suppress a branch, in place.

    Zero matrices become noise, and zero or tiny scales `BRANCH_SCALE`. Batch norm weights become `QUIET_SHARE`, and
    `init_batch_norm` damps them at the end of a branch. Biases stay 0.
    """
    generator = torch.Generator().manual_seed(SEED)
    norm_class = torch.nn.modules.batchnorm._BatchNorm
    with torch.no_grad():
        for owner in module.modules():
            for name, value in owner.named_parameters(recurse=False):
                if not value.is_floating_point() or not value.numel() or value.min() != value.max():
                    continue
                constant = float(value.flatten()[0])
                if value.numel() != max(value.shape, default=1):
                    if constant == 0:
                        value.copy_(torch.randn(value.shape, generator=generator) * WEIGHT_SPREAD)
                elif 0 < constant <= MAX_INITIAL_SCALE or (constant == 0 and name in SCALE_NAMES):
                    value.fill_(QUIET_SHARE if isinstance(owner, norm_class) else BRANCH_SCALE)


def init_batch_norm(torch: Any, module: Any, channels: int, size: tuple[int, int]) -> None:
    """Damp residual branches, then set mean and variance of every batch norm to those of noise; in place.

    Small images suffice; `size`, the network's own, is tried if it refuses them. A network that refuses both keeps its
    initial weights. Statistics are computed in float64 by one thread and rounded to eight bits, so that threads,
    processor and torch version make no difference.
    """
    norm_class = torch.nn.modules.batchnorm._BatchNorm
    norms = [m for m in module.modules() if isinstance(m, norm_class) and m.running_mean is not None]
    initial_states = [{name: value.clone() for name, value in norm.state_dict().items()} for norm in norms]
    for height, width in dict.fromkeys((*IMAGE_SIZES, size)) if norms else ():
        images = make_noise(torch, channels, height, width)
        try:
            _damp_branches(torch, module.eval(), norms, images[:1].float())
            with one_thread(torch), _in_float64(module), _without_borders(torch, module), _measure_statistics(norms):
                module(images)
        except INPUT_ERRORS:
            for norm, state in zip(norms, initial_states, strict=True):
                norm.load_state_dict(state)
        else:
            for norm in norms:
                _round_statistics(norm)
            # Some modules cache values of this run's type until a training mode (timm's attention biases).
            module.train()
            module.eval()
            return


def _damp_branches(torch: Any, module: Any, norms: list[Any], image: Any) -> None:
    """Scale down each residual branch's addition to its shortcut.

    When two tensors of equal shape are added, the branch is the tensor that has passed more batch norms. A tensor
    carries their number, and the last of them, through every function of PyTorch.
    """
    last_norms: set[Any] = set()

    class BranchFinder(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [t for a in args for t in _make_tuple(a) if isinstance(t, torch.Tensor)]
            counts = [getattr(t, "passed", (0, None)) for t in tensors]
            branch_end = max(counts, key=lambda item: item[0], default=(0, None))
            if getattr(func, "__name__", "").strip("_") in SUM_OPERATORS and len(tensors) == 2:
                (a, _), (b, _) = counts
                if a != b and tensors[0].shape == tensors[1].shape:
                    last_norms.add(branch_end[1])
            out = func(*args, **(kwargs or {}))
            for tensor in _make_tuple(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.passed = branch_end
            return out

    def count_norm(norm: Any, args: tuple[Any, ...], out: Any) -> None:
        out.passed = getattr(args[0], "passed", (0, None))[0] + 1, norm

    # A head that refuses a small image comes after the branches.
    with contextlib.ExitStack() as hooks, torch.no_grad(), BranchFinder(), contextlib.suppress(*INPUT_ERRORS):
        for norm in norms:
            hooks.enter_context(norm.register_forward_hook(count_norm))
        module(image)
    for norm in last_norms:
        if norm.weight is not None:
            norm.weight.data.mul_(BRANCH_SCALE)


def _make_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _round_statistics(norm: Any) -> None:
    """Round for equal results on every machine: means in 256ths of the deviation, so that rounding noise is zero."""
    sample_variance = norm.running_var.double()
    variance = sample_variance.lerp(sample_variance.mean(), MIN_DEVIATION_SHARE).bfloat16().double()
    step = (variance.sqrt() / 256).clamp(min=1e-30)
    norm.running_var.copy_(variance)
    norm.running_mean.copy_((norm.running_mean.double() / step).round() * step + 0.0)


def make_noise(torch: Any, channels: int, height: int, width: int) -> Any:
    """Return images of unit variance, [IMAGE_COUNT, channels, height, width] in float64."""
    generator = torch.Generator().manual_seed(SEED)
    total = torch.zeros(IMAGE_COUNT, channels, height, width, dtype=torch.float64)
    for grain in GRAIN_SIZES:
        shape = IMAGE_COUNT, channels, -(-height // grain), -(-width // grain)
        grains = torch.randn(shape, generator=generator, dtype=torch.float64)
        total += grains.repeat_interleave(grain, 2).repeat_interleave(grain, 3)[..., :height, :width]
    return total / len(GRAIN_SIZES) ** 0.5


@contextlib.contextmanager
def _without_borders(torch: Any, module: Any) -> Iterator[None]:
    """Pad with the opposite side's pixels: zeros at the border would weigh more than in a larger image."""
    kinds = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
    with contextlib.ExitStack() as undo:
        for layer in (each for each in module.modules() if isinstance(each, kinds)):
            undo.callback(setattr, layer, "padding_mode", layer.padding_mode)
            layer.padding_mode = "circular"
        yield


@contextlib.contextmanager
def _in_float64(module: Any) -> Iterator[None]:
    """Convert each layer to float64 only while it runs, until the block ends.

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
    """Keep batch norm in training mode during the block, so that its statistics become this batch's.

    `_AllMeasured` ends the run after the last one.
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
