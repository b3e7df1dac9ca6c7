"""Steps out of what a user's factory gives."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from h5pack.doctor.training_step import StepSetting, builtin_step, load_step, plain_loss
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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose `factory` tests set."""
    module = types.ModuleType("made_by_user")
    monkeypatch.setitem(sys.modules, "made_by_user", module)
    return module


def load(made: Any, factory: Any) -> tuple[Any, str]:
    made.factory = factory
    return load_step("made_by_user:factory", SETTING)


def test_the_built_in_step_takes_images_of_any_size() -> None:
    for shape in ((3, 16, 12), (1, 1, 1), (4, 300, 20), (7,), (2, 3)):
        for classes in (None, 5):
            setting = StepSetting(shape, classes, torch.device("cpu"), torch.float32)
            step, text = builtin_step(setting)
            step(torch.rand(3, *shape), torch.tensor([0, 1, 9_999]))
            step(torch.rand(3, *shape), None)
            assert text.startswith("built in, a small network of ")


def test_a_module_does_all_of_the_work_and_stays_as_it_is(made: Any) -> None:
    net = Net()
    before = net.linear.weight.detach().clone()
    step, text = load(made, lambda: net)
    step(IMAGES, LABELS)
    assert text == "made_by_user:factory, a Net of 2,308 parameters"
    assert net.training
    assert net.linear.weight.grad is not None
    assert net.linear.weight.grad.abs().sum() > 0
    assert torch.equal(net.linear.weight, before)


def test_a_factory_gets_the_keywords_that_it_names(made: Any) -> None:
    got: dict[str, Any] = {}

    def factory(shape: Any, num_classes: int = 9, device: Any = None, other: int = 1) -> nn.Module:
        got.update(shape=shape, num_classes=num_classes, device=device, other=other)
        return Net(num_classes)

    load(made, factory)
    assert got == {"shape": (3, 16, 12), "num_classes": 4, "device": torch.device("cpu"), "other": 1}
    made.factory = factory
    load_step("made_by_user:factory", StepSetting((3, 16, 12), None, torch.device("cpu"), torch.float32))
    assert got["num_classes"] == 9
    # A class is a factory, too, and so is one of torchvision's, which takes any keyword.
    assert load(made, Net)[1].startswith("made_by_user:factory, a Net")
    assert load(made, lambda *, weights=None, **settings: Net(**settings))[1].endswith("2,308 parameters")


def test_a_module_instead_of_a_factory(made: Any) -> None:
    step, _ = load(made, Net())
    step(IMAGES, LABELS)


def test_a_pair_brings_its_own_loss(made: Any) -> None:
    seen: list[Any] = []

    def loss(output: torch.Tensor, labels: Any) -> torch.Tensor:
        seen.append((tuple(output.shape), labels))
        return output.sum()

    net = Net()
    step, _ = load(made, lambda: (net, loss))
    step(IMAGES, None)
    assert seen == [((5, 4), None)]
    assert net.linear.weight.grad is not None


def test_any_other_callable_is_the_step(made: Any) -> None:
    seen: list[Any] = []
    step, text = load(made, lambda: lambda images, labels: seen.append((images, labels)))
    step(IMAGES, LABELS)
    assert seen == [(IMAGES, LABELS)]
    assert text == "made_by_user:factory, a step of its own"


def test_parameters_without_a_shape_yet_and_modules_that_do_not_train(made: Any) -> None:
    lazy, text = load(made, lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)))
    lazy(IMAGES, LABELS)
    assert text == "made_by_user:factory, a Sequential"
    frozen = Net(trains=False)
    step, _ = load(made, lambda: frozen)
    step(IMAGES, LABELS)
    assert frozen.linear.weight.grad is None


def test_a_lower_dtype_means_autocast(made: Any) -> None:
    net = Net()
    made.factory = lambda: net
    step, _ = load_step("made_by_user:factory", StepSetting((3, 16, 12), 4, torch.device("cpu"), torch.bfloat16))
    step(IMAGES.bfloat16(), LABELS)
    assert net.seen == [torch.bfloat16]
    assert net.linear.weight.dtype == torch.float32


def test_losses_that_fit() -> None:
    output = torch.rand(5, 4)
    expected = nn.functional.cross_entropy(output[:4], LABELS[:4])
    assert torch.allclose(plain_loss(output, LABELS), expected)
    # No number of a class may stop it.
    assert plain_loss(output, torch.tensor([0, 1, 2, 3, 10**9])).isfinite()
    table = torch.tensor([[0, 1, 1, 0]] * 5, dtype=torch.uint8)
    assert torch.allclose(
        plain_loss(output, table), nn.functional.binary_cross_entropy_with_logits(output, table.float())
    )
    mean = output.square().mean()
    for labels in (None, torch.rand(5), torch.rand(5, 2), torch.zeros(3, dtype=torch.long)):
        assert torch.allclose(plain_loss(output, labels), mean)
    assert torch.allclose(plain_loss({"logits": output, "aux": 1}, None), mean)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 3, "gave a int; it must give a torch module"),
        (lambda needed: needed, r"made_by_user:factory failed \(TypeError: .*needed"),
        (lambda: 1 / 0, r"failed \(ZeroDivisionError: division by zero\)"),
    ],
)
def test_factories_that_fail(made: Any, factory: Any, message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        load(made, factory)
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="gave a str without a tensor"):
        plain_loss("text", None)
