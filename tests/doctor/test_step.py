"""Steps made of a user's model or factory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from h5pack.doctor.device_stages import StepSetting, default_loss, error_line, make_step, name_of
from h5pack.errors import OptionsError

SETTING = StepSetting((3, 16, 12), 4, torch.device("cpu"), torch.float32)
IMAGES, LABELS = torch.rand(5, 3, 16, 12), torch.tensor([0, 1, 2, 3, -1])


class Net(nn.Module):
    """Remembers what it was called with."""

    def __init__(self, classes: int = 4, trains: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 16 * 12, classes).requires_grad_(trains)
        self.seen: list[torch.dtype] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(images.flatten(1))
        self.seen.append(result.dtype)
        return result


def test_the_built_in_step_accepts_images_of_any_size() -> None:
    for shape, classes in (((3, 16, 12), 5), ((1, 1, 1), None), ((2, 3), 5)):
        step, text = make_step(None, StepSetting(shape, classes, torch.device("cpu"), torch.float32))
        step(torch.rand(3, *shape), torch.tensor([0, 1, 9_999]))
        step(torch.rand(3, *shape), None)
        assert text.startswith("a small built-in network of ")


@pytest.mark.parametrize("as_factory", [True, False])
def test_a_step_of_a_module_leaves_its_weights_unchanged(as_factory: bool) -> None:
    net = Net()
    before = net.linear.weight.detach().clone()
    step, text = make_step((lambda: net) if as_factory else net, SETTING)
    step(IMAGES, LABELS)
    assert text.endswith("a Net of 2,308 parameters")
    assert net.training
    assert net.linear.weight.grad.abs().sum() > 0
    assert torch.equal(net.linear.weight, before)


def test_a_factory_is_called_with_the_keywords_that_it_names() -> None:
    got: dict[str, Any] = {}

    def factory(shape: Any, num_classes: int = 9, device: Any = None, other: int = 1) -> nn.Module:
        got.update(shape=shape, num_classes=num_classes, device=device, other=other)
        return Net(num_classes)

    make_step(factory, SETTING)
    assert got == {"shape": (3, 16, 12), "num_classes": 4, "device": torch.device("cpu"), "other": 1}
    make_step(factory, StepSetting((3, 16, 12), None, torch.device("cpu"), torch.float32))
    assert got["num_classes"] == 9
    # A class is a factory, too, and so is one of torchvision's, which takes any keyword.
    assert make_step(Net, SETTING)[1] == f"{__name__}:Net, a Net of 2,308 parameters"
    assert make_step(lambda *, weights=None, **settings: Net(**settings), SETTING)[1].endswith("2,308 parameters")


def test_a_pair_has_its_own_loss() -> None:
    seen: list[Any] = []

    def loss(output: torch.Tensor, labels: Any) -> torch.Tensor:
        seen.append((tuple(output.shape), labels))
        return output.sum()

    net = Net()
    step, _ = make_step(lambda: (net, loss), SETTING)
    step(IMAGES, None)
    assert seen == [((5, 4), None)]
    assert net.linear.weight.grad is not None


def test_any_other_callable_is_the_step() -> None:
    seen: list[Any] = []
    step, text = make_step(lambda: lambda images, labels: seen.append((images, labels)), SETTING)
    step(IMAGES, LABELS)
    assert seen == [(IMAGES, LABELS)]
    assert text.endswith("<lambda>, which returned a whole step")


def test_parameters_without_a_shape_yet_and_modules_that_do_not_train() -> None:
    lazy, text = make_step(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), SETTING)
    lazy(IMAGES, LABELS)
    assert text.endswith("<lambda>, a Sequential")
    frozen = Net(trains=False)
    step, _ = make_step(lambda: frozen, SETTING)
    step(IMAGES, LABELS)
    assert frozen.linear.weight.grad is None


def test_below_float32_a_step_runs_under_autocast() -> None:
    net = Net()
    step, _ = make_step(lambda: net, StepSetting((3, 16, 12), 4, torch.device("cpu"), torch.bfloat16))
    step(IMAGES.bfloat16(), LABELS)
    assert net.seen == [torch.bfloat16]
    assert net.linear.weight.dtype == torch.float32


def test_the_default_loss_fits_labels_and_output() -> None:
    output = torch.rand(5, 4)
    expected = nn.functional.cross_entropy(output[:4], LABELS[:4])
    assert torch.allclose(default_loss(output, LABELS), expected)
    # No number of a class may stop it.
    assert default_loss(output, torch.tensor([0, 1, 2, 3, 10**9])).isfinite()
    table = torch.tensor([[0, 1, 1, 0]] * 5, dtype=torch.uint8)
    assert torch.allclose(
        default_loss(output, table), nn.functional.binary_cross_entropy_with_logits(output, table.float())
    )
    mean = output.square().mean()
    for labels in (None, torch.rand(5), torch.rand(5, 2), torch.zeros(3, dtype=torch.long)):
        assert torch.allclose(default_loss(output, labels), mean)
    assert torch.allclose(default_loss({"logits": output, "aux": 1}, None), mean)
    with pytest.raises(TypeError):
        default_loss("text", None)


@pytest.mark.parametrize(
    ("factory", "word"),
    [(lambda: 3, "int"), (lambda needed: needed, "TypeError"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_factories_that_fail_say_why_in_a_line(factory: Any, word: str) -> None:
    with pytest.raises(OptionsError, match=word) as caught:
        make_step(factory, SETTING)
    assert "\n" not in str(caught.value)
    assert name_of(factory) in str(caught.value)


def test_errors_in_a_line() -> None:
    assert error_line(ValueError("first\nsecond")) == "ValueError: first"
    assert error_line(ValueError()) == "ValueError"
    assert error_line(OptionsError("no such thing")) == "no such thing"
    worker = "Caught TypeError in DataLoader worker process 0.\nOriginal Traceback (most ...):\nTypeError: no"
    assert error_line(TypeError(worker)) == "TypeError: no"
