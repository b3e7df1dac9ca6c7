"""The training step to measure, with the user's model or a small built-in network."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from h5pack.device.batch import tensors_of
from h5pack.errors import H5PackError, OptionsError

Loss = Callable[[Any, Any], torch.Tensor]
Step = Callable[[torch.Tensor, "torch.Tensor | None"], Any]
_DEFAULT_OUTPUTS = 10


def error_line(error: BaseException) -> str:
    """Return an error's type and the line of its message that states the cause; no type if it is h5pack's own error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if len(lines) == 1 and isinstance(error, H5PackError):
        return lines[0]
    # An error from a DataLoader worker begins with the whole traceback, so the last line states the cause.
    text = lines[-1] if lines[0].startswith("Caught ") else lines[0]
    return text if text != lines[0] else f"{type(error).__name__}: {text}"


def name_of(function: Any) -> str:
    """Return MODULE:NAME for a function or class, and the name of the type for any other object."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else type(function).__name__


@dataclass(frozen=True)
class StepSetting:
    """The images and the device that a step is made for."""

    shape: tuple[int, ...]  # of an image as the step receives it: (C, H, W), or another shape if rows are not images
    classes: int | None  # number of classes; None if unknown
    device: torch.device
    dtype: torch.dtype  # of the images; with bfloat16 or float16, the step runs under autocast


def make_step(model: Any, setting: StepSetting) -> tuple[Step, str]:
    """Return a step that runs the user's model, and a description of it. Raise OptionsError if no step can be made.

    If `model` is None, the step uses a small built-in network. A module is used directly. Any other callable is a
    factory. It is called with those of the keywords ``shape``, ``classes``, ``num_classes`` and ``device`` that its
    signature names, and returns

    - a module, which is trained by SGD with a default loss (see `ModuleStep`);
    - a pair of a module and a loss, which is called with the module's output and the labels; or
    - any other callable, which runs the whole step when called with the images and the labels (None without labels).
    """
    if model is None:
        network = _small_network(setting.shape, setting.classes or _DEFAULT_OUTPUTS)
        return ModuleStep(network, None, setting), f"a small built-in network{_size_text(network)}"
    name, made = "" if isinstance(model, nn.Module) else name_of(model), model
    if name:
        try:
            made = model(**_named_keywords(model, setting))
        except H5PackError:
            raise
        except Exception as error:
            # The user's code may raise any exception.
            raise OptionsError(f"the model {name} failed ({error_line(error)})") from error
    loss: Loss | None = None
    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        made, loss = made
    if isinstance(made, nn.Module):
        text = f"a {type(made).__name__}{_size_text(made)}"
        try:
            return ModuleStep(made, loss, setting), f"{name}, {text}" if name else text
        except Exception as error:
            # For example, the device may have too little memory.
            raise OptionsError(f"the model cannot be moved to {setting.device} ({error_line(error)})") from error
    if callable(made):
        return made, f"{name}, which returned a whole step"
    raise OptionsError(
        f"the model {name} returned a {type(made).__name__}; it must return a torch module, a pair of a module and a "
        "loss, or a function of images and labels"
    )


def _named_keywords(factory: Any, setting: StepSetting) -> dict[str, Any]:
    try:
        named = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    # If the number of classes is unknown, it is not passed, so that the factory's default applies.
    classes = setting.classes
    known = {"shape": setting.shape, "classes": classes, "num_classes": classes, "device": setting.device}
    return {name: value for name, value in known.items() if name in named and value is not None}


class ModuleStep:
    """A training step of a module: forward, loss, backward, and SGD with momentum.

    The learning rate is 0, so that the step does all of the work but leaves the weights unchanged. The default loss is
    cross-entropy for one integer label per image and outputs of shape (N, K), binary cross-entropy for integer labels
    of the same shape as the outputs, and otherwise the mean of the squared outputs.
    """

    def __init__(self, module: nn.Module, loss: Loss | None, setting: StepSetting) -> None:
        self._module = module.to(setting.device).train()
        self._loss = loss
        self._setting = setting
        self._trains = any(parameter.requires_grad for parameter in module.parameters())
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Run one step."""
        setting = self._setting
        mixed = setting.dtype != torch.float32
        with torch.autocast(setting.device.type, setting.dtype, enabled=mixed):
            output = self._module(images)
            loss = self._loss(output, labels) if self._loss is not None else default_loss(output, labels)
        if not self._trains:
            return
        if self._optimizer is None:
            # Make the optimizer after the first forward pass, in which lazy modules get the shapes of their parameters.
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def default_loss(output: Any, labels: torch.Tensor | None) -> torch.Tensor:
    """Return the default loss of `ModuleStep`, computed from the first tensor of `output`."""
    found = next(tensors_of(output), None)
    if found is None:
        raise TypeError(f"the module returned a {type(output).__name__} without a tensor; return a tensor")
    found = found.float()
    if labels is not None and labels.device == found.device and len(labels) == len(found):
        whole = not labels.dtype.is_floating_point
        if whole and labels.dim() == 1 and found.dim() == 2:
            # Clamp labels beyond the module's number of classes, so that they do not fail. -1 means no label.
            return F.cross_entropy(found, labels.long().clamp(-1, found.shape[1] - 1), ignore_index=-1)
        if labels.shape == found.shape and whole:
            return F.binary_cross_entropy_with_logits(found, labels.clamp(0, 1).float())
    return found.square().mean()


def _size_text(module: nn.Module) -> str:
    """Return the number of parameters in words; empty if a lazy module has parameters without a shape."""
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        return ""
    return f" of {sum(parameter.numel() for parameter in parameters):,} parameters"


def _small_network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    if len(shape) != 3:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, outputs))
    network = nn.Sequential(
        nn.Conv2d(shape[0], 16, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, outputs),
    )
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
