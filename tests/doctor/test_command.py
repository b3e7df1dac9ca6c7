"""`h5pack doctor` on the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import h5py
import pytest

import h5pack
from h5pack import cli
from h5pack.commands import doctor
from h5pack.commands.doctor import load_named
from h5pack.doctor.loaders import DTYPES, DiagnoseSettings
from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.monitor.advice import Advice, Remedy
from tests.doctor import users

USUAL = ("--batch-size", 16, "--window", 2, "--threads", 2, "--seconds", 60, "--device", "cpu")
CHEAP = ("--model", f"{users.__name__}:cheap")
pytestmark = pytest.mark.usefixtures("hasty")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_a_figure_and_json(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"parameter": "num_threads", "number": 16, "units": "threads", "parallel": 4, "cpus": "16 CPUs"}
    advice = Advice(Remedy.TRY_MORE_READS, True, figures)
    monkeypatch.setattr("h5pack.doctor.diagnose.advise", lambda verdict, evidence: [advice])
    code, out, err = run(capsys, path, *USUAL, *CHEAP, "--plot", tmp_path / "a.png")
    assert (code, err) == (0, "")
    assert f"\n{path}: all rows, 200 images of 16x12x3 uint8\n" in out
    assert f"{users.__name__}:cheap" in out
    assert "\neverything together  " in out
    # Parameters are written as options in text, and not in JSON.
    assert "--threads 16" in out
    assert (tmp_path / "a.png").stat().st_size > 10_000
    _, out, _ = run(capsys, path, *USUAL, *CHEAP, "--json")
    found = json.loads(out)
    assert found["facts"]["num_threads"] == 2
    assert found["advice"] == [advice.text]
    assert "num_threads=16" in advice.text


def test_each_failure_of_user_code_is_a_line_and_exit_status_1(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--model", f"{users.__name__}:failing_factory", "--transform", f"{users.__name__}:failing_transform")
    code, out, err = run(capsys, path, *USUAL, *names)
    assert code == 1
    transform, model = err.splitlines()
    assert "no such color" in transform
    assert "weights.pt" in model
    assert "\nloader only  " in out


@pytest.mark.parametrize("status", [0, 3])
def test_a_module_that_exits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    (tmp_path / f"exits_{status}.py").write_text(f"raise SystemExit({status})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionsError):
        load_named("--model", f"exits_{status}:f")


def test_names_are_loaded_before_the_file_is_opened_and_torch_imported(tmp_path: Path) -> None:
    names = [["--model", "no_such_module:f"], ["--transform", "json:nothing"]]
    commands = [["doctor", str(tmp_path / "missing.h5"), *name] for name in names]
    code = f"import sys; from h5pack.cli import main; print(*map(main, {commands}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "2", "False"]
    assert all(" ".join(name) in done.stderr for name in names)


def test_errors_are_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(path.with_name("unfinished.h5"), "w") as unfinished:
        unfinished.attrs[schema.FORMAT] = schema.FORMAT_VERSION
    for file, arguments, code, message in (
        ("missing.h5", CHEAP, 1, "missing.h5"),
        # That command is `h5pack convert`.
        ("unfinished.h5", CHEAP, 1, "again with --resume"),
        ("x.h5", ("--model", "words"), 2, "--model words"),
        ("x.h5", (*CHEAP, "--threads", "1", "--workers", "1"), 2, "--threads"),
        ("x.h5", (*CHEAP, "--seconds", "0.001"), 2, "--seconds"),
        ("x.h5", (*CHEAP, "--seconds", "nan"), 2, "--seconds nan is invalid; give the total time, finite"),
        ("x.h5", (*CHEAP, "--split", "none"), 1, ": no split 'none'; "),
        ("x.h5", (*CHEAP, "--device", "cpu", "--pin"), 2, "--pin"),
        # Refused before anything is measured.
        ("x.h5", (*CHEAP, "--plot", "a.docx"), 2, "a.docx"),
    ):
        found, out, err = run(capsys, path.with_name(file), *arguments)
        assert (found, out, err.count("\n")) == (code, "", 1)
        assert message in err


def test_ctrl_c_prints_what_was_measured(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, path, *USUAL, "--model", f"{users.__name__}:interrupting_step")
    assert code == 130
    assert "Interrupted" in out
    assert err.count("\n") == 1


def test_options_have_the_defaults_of_diagnose() -> None:
    defaults = {field.name: field.default for field in fields(DiagnoseSettings) if field.name != "path"}
    parameters = inspect.signature(h5pack.diagnose).parameters
    assert defaults == {name: parameters[name].default for name in defaults}
    commands = argparse.ArgumentParser().add_subparsers()
    doctor.add(commands)
    text = commands.choices["doctor"].format_help()
    assert all(dtype in text for dtype in DTYPES)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, which is not on the path."""
    (tmp_path / "named_by_user.py").write_text("class Nets:\n    small = staticmethod(lambda: 7)\nnumber = 3\n")
    (tmp_path / "broken_by_user.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return "named_by_user"


@pytest.mark.parametrize(
    ("text", "word"),
    [("{}:Nets.large", "'Nets.large'"), ("{}:number", "int"), ("broken_by_user:f", "nothing_of_that_name")],
)
def test_named_callables_are_found_and_other_names_refused(module: str, text: str, word: str) -> None:
    assert load_named("--model", f"{module}:Nets.small")() == 7
    with pytest.raises(OptionsError, match=word) as caught:
        load_named("--model", text.format(module))
    assert str(caught.value).startswith(f"--model {text.format(module)}: ")
    assert "\n" not in str(caught.value)
