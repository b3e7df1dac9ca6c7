"""MODULE:NAME, and errors in a line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from h5pack.doctor.named_object import load_named, one_line
from h5pack.errors import OptionsError


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, which is not on the path."""
    (tmp_path / "named_by_user.py").write_text("class Nets:\n    small = staticmethod(lambda: 7)\nnumber = 3\n")
    (tmp_path / "broken_by_user.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return "named_by_user"


def test_what_is_named_is_found(module: str) -> None:
    assert load_named("--model", f"{module}:Nets.small")() == 7
    assert load_named("--model", "json:dumps")([1]) == "[1]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}:large", "--model named_by_user:large: 'named_by_user' has no 'large'"),
        ("{}:Nets.large", "has no 'Nets.large'"),
        ("{}:number", "that is a int, and cannot be called"),
        ("no_such_module_at_all:f", r"'no_such_module_at_all' cannot be imported \(ModuleNotFoundError: No module"),
        ("broken_by_user:f", r"'broken_by_user' cannot be imported \(ModuleNotFoundError: No module named 'nothing_of"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(module: str, text: str, message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        load_named("--model", text.format(module))
    assert "\n" not in str(caught.value)


def test_errors_in_a_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(ValueError()) == "ValueError"
    worker = "Caught TypeError in DataLoader worker process 0.\nOriginal Traceback (most ...):\nTypeError: no"
    assert one_line(TypeError(worker)) == "TypeError: no"
