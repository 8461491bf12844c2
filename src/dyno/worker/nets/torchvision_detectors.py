"""torchvision's detectors: they normalise, resize and suppress inside; the number of boxes differs per image."""

from __future__ import annotations

from typing import Any

from dyno.worker.nets import random_weights
from dyno.worker.sessions.torch_support import one_thread
from dyno.worker.spec import Dims

ONE_IMAGE = "torchvision's detectors give each image boxes of its own number, so they run on one image at a time"
SMALL = 320, 320  # pixels, where no size is asked for
SPREAD = 1.0  # standard deviation of random scores before the sigmoid or softmax: most are low, and some are sure


def names(torchvision: Any) -> list[str]:
    """Return the detectors' names for `torchvision.models.get_model`."""
    listed: list[str] = torchvision.models.list_models(torchvision.models.detection)
    return listed


def resizing(name: str, dims: Dims | None) -> dict[str, int]:
    """Return the builder's options for a network at the size of `dims`; {} for networks of a fixed size (SSD).

    Without them it works at 800 pixels, whatever its input.
    """
    if dims is None or name.startswith("ssd"):
        return {}
    return {"min_size": min(dims.height, dims.width), "max_size": max(dims.height, dims.width)}


def size(torchvision: Any, name: str) -> tuple[int, int]:
    """Return the height and width at which the network works by itself, for square images."""
    with torchvision.torch.device("meta"):
        transform = torchvision.models.get_model(name, weights=None, weights_backbone=None).transform
    width, height = transform.fixed_size or (transform.min_size[-1],) * 2
    return height, width


def init(torch: Any, module: Any, height: int, width: int) -> None:
    """Set random weights that find objects, in place: with a library's initial ones no score is above its threshold.

    The backbone gets statistics of noise, and each layer that scores is scaled by the power of two that brings its
    results for noise nearest to a standard deviation of 1.
    """
    random_weights.undo_zero_init(torch, module)
    random_weights.init_batch_norm(torch, module.backbone, 3, (height, width))
    measured: dict[Any, float] = {}

    def measure_deviation(
        layer: Any, _: Any, out: Any
    ) -> None:  # a head that serves several scales is held to the widest
        measured[layer] = max(measured.get(layer, 0.0), float(out.double().std()))

    hooks = [layer.register_forward_hook(measure_deviation) for layer in _find_scoring_layers(torch, module)]
    image = (0.5 + random_weights.noise(torch, 3, height, width)[:1].float() / 4).clamp(0, 1)
    try:
        with torch.no_grad(), one_thread(torch):
            module.eval()(image)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        for layer, deviation in measured.items():
            layer.weight.mul_(2.0 ** round(torch.tensor(SPREAD / max(deviation, 1e-9)).log2().item()))


def _find_scoring_layers(torch: Any, module: Any) -> list[Any]:
    """Return the layers whose results are the scores of classes."""
    if hasattr(module, "roi_heads"):
        return [module.roi_heads.box_predictor.cls_score]
    head = module.head.classification_head
    if hasattr(head, "cls_logits"):
        return [head.cls_logits]
    return [part[-1] if isinstance(part, torch.nn.Sequential) else part for part in head.module_list]
