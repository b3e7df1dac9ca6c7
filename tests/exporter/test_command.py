"""`h5pack export` end to end: what is printed, exit codes, one line an error."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import h5pack
from h5pack import cli
from h5pack.exporter.exporter import ExportReport
from tests.crashing import leftovers
from tests.exporter.folders import flip
from tests.makers import hdf5_file, quick, split_folders


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    source = split_folders(tmp_path / "in", {"train": {"cat": 5, "dog": 4}, "val": {"cat": 2, "dog": 1}})
    h5pack.convert(source, tmp_path / "a.h5", **quick(chunk_rows=4))
    return tmp_path / "a.h5"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["export", *map(str, arguments), "--workers", "1"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_summary_and_its_options(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, text, err = run(capsys, pack, out)
    assert (code, err) == (0, "")
    lines = dict(line.split(None, 1) for line in text.splitlines())
    assert lines["source"] == f"{pack} (images 'images', labels 'labels')"
    assert lines["splits"] == "train 9, val 3; 2 classes"
    assert lines["done"].startswith(f"{out}: 12 png images, ")
    assert lines["done"].endswith("images/s)")
    assert lines["repack"] == f"h5pack convert {out}/manifest.csv again.h5 --order sorted"
    assert run(capsys, pack, out, "--resume")[1] == f"{out}: already complete\n"
    code, text, err = run(capsys, pack, f"{out}/", "--overwrite", "--format", "jpeg", "--quality", "80", "--quiet")
    assert (code, text, err) == (0, "", "")
    assert len(list(out.rglob("*.jpg"))) == 12
    assert not list(out.rglob("*.png"))


def test_damaged_rows_are_listed_in_all_outputs(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(pack) as file:
        place, name = file["images"].id.get_chunk_info(0).byte_offset, file["filenames"][1].decode()
    flip(pack, place + 20 * 14 * 3)
    code, text, err = run(capsys, pack, tmp_path / "out", "--json", "--split", "train")
    assert (code, err) == (1, "")
    report = json.loads(text)
    assert set(report) == {field.name for field in fields(ExportReport)} | {"ok"}
    assert (report["rows"], report["files"], report["splits"], report["ok"]) == (9, 8, {"train": 8}, False)
    (row,) = report["damaged"]
    assert (row["row"], row["name"]) == (1, name)
    code, text, err = run(capsys, pack, tmp_path / "out", "--quiet", "--overwrite")
    assert (code, text) == (1, "")
    assert f"row 1 ({name})" in err
    hdf5_file(tmp_path / "f.h5", images=np.full((30, 9, 9), 7.0) * (np.arange(30) > 4)[:, None, None])
    code, _, err = run(capsys, tmp_path / "f.h5", tmp_path / "many")
    assert (code, err.count("\n")) == (1, 22)
    assert "5 more" in err.splitlines()[-1]


def test_options_reach_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = {"a/pictures": np.random.default_rng(0).random((10, 3, 9, 3)) * 2 - 1, "b": np.zeros((10, 9, 9), np.uint8)}
    hdf5_file(tmp_path / "f.h5", **images, kind=np.arange(10) % 3, weight=np.arange(10) / 4)
    arguments = ["--images", "a/pictures", "--labels", "kind", "--channel-axis", "first", "--value-range", "-1:1"]
    code, text, _ = run(capsys, tmp_path / "f.h5", tmp_path / "out", *arguments, "--fields", "weight", "--limit", 5)
    assert code == 0
    assert "loses    the exact float64 values, which were converted to 8 bits" in text.splitlines()
    lines = (tmp_path / "out" / "manifest.csv").read_text().splitlines()
    assert lines[:3] == ["path,split,label,weight,row", "0/000000.png,all,0,0.0,0", "2/000002.png,all,2,0.5,2"]
    assert len(lines) == 6
    run(capsys, tmp_path / "f.h5", tmp_path / "bare", "--images", "b", "--no-labels", "--split", "all")
    assert (tmp_path / "bare" / "000009.png").exists()


def test_errors_are_one_line(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    for arguments, code, message in (
        ((tmp_path / "none.h5", out), 1, "none.h5"),
        ((source, out), 1, "in"),
        ((pack, source), 1, "--overwrite"),
        ((pack, source, "--overwrite"), 1, "manifest.csv"),
        ((pack, out, "--format", "bmp"), 2, "--format bmp"),
        ((pack, out, "--split", "dev"), 2, "'train', 'val'"),
        ((pack, out, "--images", "picture"), 1, "'picture'"),
        ((pack, out, "--value-range", "7"), 2, "--value-range 7"),
    ):
        found, text, err = run(capsys, *arguments)
        assert (found, text, err.count("\n")) == (code, "", 1)
        assert message in err
    assert leftovers(tmp_path) == {"a.h5", "in"}


def test_an_interrupted_command_can_be_resumed(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.exporter.exporter.ExportFolder.publish", Mock(side_effect=KeyboardInterrupt))
        code, _, err = run(capsys, pack, f"{tmp_path / 'out'}/")
    assert code == 130
    assert f"{tmp_path / 'out'}.partial" in err
    assert "--resume" in err
    assert "resumed  12 images of an earlier run" in run(capsys, pack, tmp_path / "out", "--resume")[1].splitlines()
