"""A training step to measure: the user's model, or a small one of our own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from h5pack.doctor.named_object import load_named, one_line
from h5pack.errors import OptionsError
from h5pack.feed.batch_parts import tensors_of

Loss = Callable[[Any, Any], torch.Tensor]
Step = Callable[[torch.Tensor, "torch.Tensor | None"], Any]
_OUTPUTS = 10


@dataclass(frozen=True)
class StepSetting:
    """What a step is made for.

    Attributes
    ----------
    shape : tuple of int
        Of an image as the step gets it: (C, H, W), or whatever the rows of other files are.
    classes : int or None
        None: not known.
    device : torch.device
    dtype : torch.dtype
        Of the images.
    """

    shape: tuple[int, ...]
    classes: int | None
    device: torch.device
    dtype: torch.dtype


def builtin_step(setting: StepSetting) -> tuple[Step, str]:
    """A step of a small network, and what it is in words."""
    outputs = setting.classes or _OUTPUTS
    network = _small_network(setting.shape, outputs)
    return ModuleStep(network, None, setting), f"built in, a small network{_size(network)}"


def load_step(text: str, setting: StepSetting) -> tuple[Step, str]:
    """The step that MODULE:FACTORY makes, and what it is in words.

    FACTORY may be a module of torch's already. Else it is called, with those of the keywords ``shape``, ``classes``,
    ``num_classes`` and ``device`` that its signature names, and gives one of

    - a module: trained by SGD on a loss of ours, as `ModuleStep` says;
    - a pair of a module and a loss, which is called with the module's output and the labels;
    - any other callable: it is the whole step, and is called with the images and the labels (None without labels).

    Parameters
    ----------
    text : str
    setting : StepSetting

    Raises
    ------
    OptionsError
        If it cannot be imported, fails, or gives nothing of these.
    """
    factory = load_named("--model", text)
    made = factory
    if not isinstance(factory, nn.Module):
        try:
            made = factory(**_wanted(factory, setting))
        except Exception as error:
            # The user's code may fail with anything.
            raise OptionsError(f"--model {text} failed ({one_line(error)})") from error
    loss: Loss | None = None
    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        made, loss = made
    if isinstance(made, nn.Module):
        try:
            return ModuleStep(made, loss, setting), f"{text}, a {type(made).__name__}{_size(made)}"
        except Exception as error:
            # A device without the memory, say.
            raise OptionsError(f"--model {text} cannot be put on {setting.device} ({one_line(error)})") from error
    if callable(made):
        return made, f"{text}, a step of its own"
    raise OptionsError(
        f"--model {text} gave a {type(made).__name__}; it must give a torch module, a pair of a module and a loss, or "
        "a function of images and labels"
    )


def _wanted(factory: Any, setting: StepSetting) -> dict[str, Any]:
    try:
        named = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    known = {
        "shape": setting.shape,
        "classes": setting.classes,
        "num_classes": setting.classes,
        "device": setting.device,
    }
    # Where the number of classes is not known, a factory's own default is.
    return {name: value for name, value in known.items() if name in named and value is not None}


class ModuleStep:
    """Forward, loss, backward, and a step of SGD with momentum whose learning rate is 0: all of the work, but the
    weights stay as they are.

    Without a loss of the user's: cross-entropy for one whole-number label an image and outputs (N, K); binary
    cross-entropy for a table of labels as wide as the outputs; else the mean of the squared outputs.

    Parameters
    ----------
    module : Module
    loss : callable, optional
    setting : StepSetting
    """

    def __init__(self, module: nn.Module, loss: Loss | None, setting: StepSetting) -> None:
        self._module = module.to(setting.device).train()
        self._loss = loss
        self._setting = setting
        self._trains = any(parameter.requires_grad for parameter in module.parameters())
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor | None) -> None:
        """One step."""
        setting = self._setting
        mixed = setting.dtype != torch.float32
        with torch.autocast(setting.device.type, setting.dtype, enabled=mixed):
            output = self._module(images)
            loss = self._loss(output, labels) if self._loss is not None else plain_loss(output, labels)
        if not self._trains:
            return
        if self._optimizer is None:
            # Modules may have parameters that get their shapes from the first batch.
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def plain_loss(output: Any, labels: torch.Tensor | None) -> torch.Tensor:
    """A loss that fits: see `ModuleStep`.

    Parameters
    ----------
    output : Tensor, or anything that holds one
        The first tensor counts.
    labels : Tensor or None
    """
    found = next(tensors_of(output), None)
    if found is None:
        raise TypeError(f"the module gave a {type(output).__name__} without a tensor")
    found = found.float()
    if labels is not None and labels.device == found.device and len(labels) == len(found):
        whole = not labels.dtype.is_floating_point
        if whole and labels.dim() == 1 and found.dim() == 2:
            # Numbers that are no class of this module's must not stop it; -1 is an image without a label.
            return F.cross_entropy(found, labels.long().clamp(-1, found.shape[1] - 1), ignore_index=-1)
        if labels.shape == found.shape and whole:
            return F.binary_cross_entropy_with_logits(found, labels.clamp(0, 1).float())
    return found.square().mean()


def _size(module: nn.Module) -> str:
    """How many parameters, in words; nothing where some have no shape yet."""
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        return ""
    return f" of {sum(parameter.numel() for parameter in parameters):,} parameters"


def _small_network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    if len(shape) != 3:
        width = 1
        for size in shape:
            width *= size
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, outputs))
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
