"""The network to be trained: built for the data's classes, from random, published or stored weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dyno.worker.inputs.shapes import REFUSALS
from dyno.worker.nets import models
from dyno.worker.nets.checkpoint import apply, by_own_names, head_classes, read_checkpoint
from dyno.worker.sessions.torch_support import first_line, tensors
from dyno.worker.spec import Dims, ModelSpec, UserError

AUXILIARY = 0.3  # weight of the loss of an auxiliary classifier (Szegedy et al., Going deeper with convolutions, 2014)


def build(model: ModelSpec, dims: Dims, *, freeze: bool = False) -> tuple[Any, list[str]]:
    """Build the module with `model.classes` classes; return it with notes on its weights.

    It starts from the weights of a checkpoint or the library's own; if only the number of classes differs, the
    classifier is initialised at random. With `freeze` only the classifier is trained. Raises `UserError`.
    """
    module = models.build(replace(model, weights="", pretrained=False), dims)
    notes = []
    state, where = _initial_weights(model, dims)
    if state is not None:
        notes = _apply_state(module, state, where)
    _check_network(module, model, dims)
    if freeze:
        notes.append(_freeze_layers(module, model, dims))
    return module, notes


def _initial_weights(model: ModelSpec, dims: Dims) -> tuple[Mapping[str, Any] | None, str]:
    """Return the initial weights and their origin."""
    if model.weights:
        return read_checkpoint(model.weights), model.weights
    if model.pretrained:
        return models.load(replace(model, classes=None), dims).state_dict(), f"the published weights of {model.source}"
    return None, ""


def _apply_state(module: Any, state: Mapping[str, Any], where: str) -> list[str]:
    own, state = module.state_dict(), by_own_names(module, state, where)
    classes = head_classes(module, state)
    if classes is None:
        apply(module, state, where)
        return []
    head = [name for name in own if name in state and state[name].shape != own[name].shape]
    apply(module, {**state, **{name: own[name] for name in head}}, where)
    wanted = own[head[0]].shape[0]
    return [f"{where} has {classes} classes and the data {wanted}: {', '.join(head)} begin from random values"]


def _check_network(module: Any, model: ModelSpec, dims: Dims) -> None:
    """Refuse a network that doesn't take the images or return a score for each class, in training or evaluation."""
    import torch

    tried = copy.deepcopy(module)  # a pass in training mode moves the statistics of batch norm
    image = torch.zeros(2, model.channels, dims.height, dims.width)
    for training in (False, True):
        try:
            with torch.no_grad():
                out = tried.train(training)(image)
        except REFUSALS as e:
            raise UserError(f"the model refuses images of {dims.size} pixels: {first_line(e)}") from e
        main = next(iter(tensors(out)), None)
        if main is None or main.dim() != 2 or (not training and not isinstance(out, torch.Tensor)):
            raise UserError(f"{model.source} doesn't return [batch, classes]; only classifiers can be trained")
        if main.shape[1] != model.classes:
            raise UserError(
                f"{model.source} has {main.shape[1]} classes and the data has {model.classes}; "
                "let the function take num_classes"
            )


def _freeze_layers(module: Any, model: ModelSpec, dims: Dims) -> str:
    """Leave only the classifier trainable: the parameters whose shape follows the number of classes."""
    assert model.classes is not None
    larger = models.build(replace(model, weights="", pretrained=False, classes=model.classes + 1), dims).state_dict()
    head = [name for name, value in module.named_parameters() if larger[name].shape != value.shape]
    if not head:
        raise UserError(f"{model.source} has no layer whose size follows the number of classes; omit freeze")
    for name, value in module.named_parameters():
        value.requires_grad_(name in head)
    return f"only {', '.join(head)} are trained"


def loss(out: Any, labels: Any, smoothing: float) -> Any:
    """Return the cross-entropy of the scores, plus auxiliary classifiers' (GoogLeNet, Inception) at a fixed weight."""
    from torch.nn.functional import cross_entropy

    main, *others = tensors(out)
    total = cross_entropy(main, labels, label_smoothing=smoothing)
    for other in others:
        total = total + AUXILIARY * cross_entropy(other, labels, label_smoothing=smoothing)
    return total
