"""`h5pack doctor` on the command line."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from h5pack import cli
from h5pack.commands import doctor
from h5pack.doctor.options import DTYPES, DoctorOptions
from h5pack.feed.order import DEFAULT_WINDOW
from tests.doctor import users
from tests.feed.packs import labelled

USUAL = ("--batch-size", 16, "--window", 2, "--threads", 2, "--seconds", 60, "--device", "cpu")
CHEAP = ("--model", f"{users.__name__}:cheap")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return labelled(tmp_path / "x.h5")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.usefixtures("hasty")
def test_stages_a_verdict_and_a_picture(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, path, *USUAL, *CHEAP, "--plot", tmp_path / "a.png")
    assert (code, err) == (0, "")
    assert out.startswith(
        f"{path}: all rows, 103 images of 16x12x3 uint8\nfed by H5Loader with 2 threads in batches of 16"
    )
    for name in ("storage hot", "loader only", "normalize", "step alone", "everything together"):
        assert f"\n{name}  " in out
    assert "host-to-device copy" in out
    assert "not measured: " in out
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.usefixtures("hasty")
def test_a_failure_of_the_user_s_is_a_line_and_exit_status_1(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, path, *USUAL, "--model", f"{users.__name__}:failing_factory")
    assert code == 1
    assert (
        err
        == "h5pack: --model tests.doctor.users:failing_factory failed (FileNotFoundError: weights.pt is not there)\n"
    )
    assert "step alone                    not measured: --model failed" in out
    assert "\nloader only  " in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{missing}",), 1, "no such file"),
        (("{path}", "--split", "val"), 1, "no split 'val'"),
        (("{path}", "--images", "pictures"), 1, "pictures"),
        (("{path}", "--model", "words"), 2, "model is 'words'; give MODULE:NAME"),
        (("{path}", "--threads", "1", "--workers", "1"), 2, "give one of the two"),
        (("{path}", "--seconds", "0.001", *CHEAP), 2, "seconds is 0.001, too little"),
        (("{path}", "--dtype", "int4"), 2, "dtype is 'int4'"),
        (("{path}", "--plot", "{tmp}/no/a.png"), 2, "there is no folder"),
        (("{path}", "--device", "cpu", "--pin"), 2, "leave --pin out"),
    ],
)
def test_errors_are_one_line(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    names = {"path": path, "missing": tmp_path / "missing.h5", "tmp": tmp_path}
    found, out, err = run(
        capsys, *[argument.format(**names) for argument in arguments], *CHEAP[: 0 if "--model" in arguments else 2]
    )
    assert (found, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_matplotlib_nothing_is_measured(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("h5pack.doctor.examination.Examination", None)
    code, out, err = run(capsys, path, *USUAL, "--plot", "a.png")
    assert (code, out) == (2, "")
    assert "pip install 'h5pack[plot]'" in err


@pytest.mark.usefixtures("hasty")
def test_ctrl_c_prints_what_was_measured(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, path, *USUAL, "--model", f"{users.__name__}:interrupting_step")
    assert code == 130
    assert "It was interrupted, so there is no verdict" in out
    assert err == "h5pack: interrupted; nothing was written\n"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset")
def test_the_cpu_advice_under_taskset(path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    command = [
        *("taskset", "-c", str(cpu), sys.executable, "-m", "h5pack", "doctor", str(path), "--json"),
        *("--model", f"{users.__name__}:slow_step", "--threads", "4", "--batch-size", "16", "--window", "2"),
        *("--device", "cpu", "--seconds", "2.5"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert result.stderr == ""
    assert result.returncode == 0
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["facts"]["cpus"], found["facts"]["threads"], found["machine"]["cpus"]) == (1, 4, 1)
    assert found["bottleneck"] == ["step"]
    words = "Too many threads: 4 take turns on 1 CPU that this process may use; lower --threads to 1"
    assert any(text.startswith(words) for text in found["advice"])


def test_defaults_are_those_of_the_options() -> None:
    import argparse

    commands = argparse.ArgumentParser().add_subparsers()
    doctor.add(commands, argparse.ArgumentParser(add_help=False))
    parsed = vars(commands.choices["doctor"].parse_args(["x.h5"]))
    for name, parameter in inspect.signature(DoctorOptions).parameters.items():
        if name != "path":
            assert parsed[name] == parameter.default, name
    assert parsed["window"] == DEFAULT_WINDOW
    text = commands.choices["doctor"].format_help()
    assert all(dtype in text for dtype in DTYPES)
