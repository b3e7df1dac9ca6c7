"""The bench from end to end, on tiny images and a clock of its own."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.benchmark.bench import BenchRun, make_settings
from h5pack.benchmark.cases import MIN_TURNS, BenchSettings, ceiling_threads
from h5pack.benchmark.report import BenchReport
from h5pack.benchmark.sample import find_input
from h5pack.benchmark.sweep import Sweep
from h5pack.cli import main
from h5pack.errors import H5PackError, NoSpaceError, OptionsError
from tests.benchmark.files import ROW_BYTES, SIZE
from tests.makers import flat_folder, hdf5_file, save, split_folders
from tests.monitor.fake_clock import FakeClock
from tests.read.encoded_files import write_encoded


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the run-off compare one thread and one worker, whatever the machine."""
    monkeypatch.setattr("h5pack.benchmark.bench.available_cpus", lambda: 1)


@pytest.fixture(autouse=True)
def short_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No repeat lasts longer than a few batches do. How many there are depends on the clock of the test."""
    monkeypatch.setattr("h5pack.benchmark.sweep._MAX_RUN_SECONDS", {"hot": 0.002, "cold": 0.002})
    for name in ("sweep._MIN_RUN_SECONDS", "ceilings._MIN_COPY_SECONDS"):
        monkeypatch.setattr(f"h5pack.benchmark.{name}", 0.002)


@pytest.fixture
def large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the bench compare variants, however few images there are."""
    monkeypatch.setattr("h5pack.benchmark.bench.is_small", lambda *_: False)
    monkeypatch.setattr("h5pack.benchmark.recommend.is_small", lambda *_: False)
    for name in ("MIN_EPOCH_SECONDS", "SHORT_EPOCH_SECONDS"):
        monkeypatch.setattr(f"h5pack.benchmark.recommend.{name}", 0.0)


# The cases that decide the recommendation, in small batches.
DECISIVE: dict[str, Any] = {"batch_size": 8, "caches": "hot", "orders": "window", "engines": "direct"}


def bench(source: Path, scratch: Path, **settings: Any) -> BenchReport:
    """A bench of 12 s on a clock whose every reading takes 40 ms, so that each case is measured."""
    made = make_settings(**{"seconds": 12.0, "scratch": os.fspath(scratch), **settings})
    return BenchRun(source, made, clock=FakeClock(tick=0.04)).run()


def speeds(report: BenchReport, order: str, engine: str, cache: str) -> dict[str, tuple[float, ...]]:
    """The speeds of an order, engine and page-cache state by variant."""
    found = [one for one in report.measurements if one.case.num_workers is None]
    return {
        one.case.variant: one.speeds
        for one in found
        if (one.case.order, one.case.engine, one.case.cache) == (order, engine, cache)
    }


def test_a_folder_is_packed_measured_and_answered(folder: Path, tmp_path: Path, large_enough: None) -> None:
    settings = {"chunk_rows": (4, 16), "batch_size": 8, "caches": "hot"}
    report = bench(folder, tmp_path, orders=("window", "single"), engines=("direct", "default"), **settings)
    assert report.complete
    assert report.seconds["all"] <= 1.05 * report.budget_seconds
    assert list(tmp_path.iterdir()) == []
    assert (report.kind, report.num_images, report.sample_rows, report.row_bytes) == ("folder", 40, 40, ROW_BYTES)
    assert report.source_images == 40
    labels = [one.label for one in report.variants]
    assert labels == ["4 rows", "16 rows", "contiguous"]
    for names in (("window", "direct", "hot"), ("single", "default", "hot")):
        assert [label for label, found in speeds(report, *names).items() if min(found) > 0] == labels
    # Each repeat that decides has a ceiling beside it, with as many threads.
    assert {(one.name, one.num_threads) for one in report.ceilings} == {("memory copy", 1)}
    decisive = [one for one in (*report.measurements, *report.run_off) if one.case.order == "window"]
    direct = [one for one in decisive if one.case.engine == "direct" and not one.case.num_workers]
    assert all(len(one.of_ceiling) == len(one.speeds) for one in direct)
    chosen = report.recommendation
    assert chosen.chunk_rows in (4, 16)
    assert chosen.compared
    assert chosen.command.split()[2] == os.fspath(folder)
    assert len(chosen.of_ceiling) == 3
    # The run-off compares numbers of threads and workers, too.
    assert {one.case.num_workers for one in report.run_off} == {None, 1}
    text = json.dumps(report.to_json())
    assert BenchReport.from_json(json.loads(text)).recommendation == chosen
    assert os.fspath(tmp_path) not in text


def test_each_number_of_threads_has_a_ceiling_with_as_many(
    folder: Path, tmp_path: Path, large_enough: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h5pack.benchmark.bench.available_cpus", lambda: 8)
    report = bench(folder, tmp_path, chunk_rows=4, contiguous=False, seconds=20.0, num_workers=0, **DECISIVE)
    read = [one.case for one in (*report.measurements, *report.run_off) if one.speeds and one.case.num_workers is None]
    assert {case.num_threads for case in read} == {1, 2, 4, 8}
    assert {one.num_threads for one in report.ceilings} == {ceiling_threads(case, 8) for case in read}


@pytest.mark.parametrize(
    ("size", "given", "count"),
    [
        ((32, 32), {}, 32_768), ((512, 1100), {}, 317), ((32, 32), {"rows": 50}, 50),
        ((32, 32), {"num_images": 50}, 50), ((32, 32), {"num_images": 10**6}, 32_768),
        ((32, 32), {"num_images": 10**6, "rows": 50}, 50),
    ],
)  # fmt: skip
def test_so_many_images_are_generated_that_they_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], given: dict[str, int], count: int
) -> None:
    made: list[Any] = []

    def make(folder: Path, *arguments: Any) -> None:
        made.append(arguments)
        for name in "ab":
            (folder / name).mkdir(parents=True)
            (folder / name / "0.jpg").touch()

    monkeypatch.setattr("h5pack.benchmark.sample.make_folder", make)
    source = find_input(None, tmp_path, BenchSettings(size=size, source_kind="classes", **given))
    assert (source.num_images, source.options) == (count, {"size": size})
    assert made == [(min(count, 2_000), (size[0], min(size[1], 1024)))]
    # Files are repeated, so that many images do not need many files.
    lines = Path(source.source).read_text().splitlines()[1:]
    assert Counter(lines) == {"a/0.jpg,a": -(-count // 2), "b/0.jpg,b": count // 2}


def test_of_few_images_only_the_default_is_measured_and_not_for_long(folder: Path, tmp_path: Path) -> None:
    report = bench(folder, tmp_path, seconds=40.0)
    assert report.complete
    assert [(one.label, one.chunk_rows) for one in report.variants] == [("8 rows", 8)]
    assert report.seconds["all"] < 20
    assert (report.recommendation.is_default, report.recommendation.busy) == (True, False)
    assert not report.recommendation.compared
    # More seconds would not help.
    assert report.notes == []


def test_without_other_cases_the_run_off_gets_the_rest(folder: Path, tmp_path: Path, large_enough: None) -> None:
    sizes = {"chunk_rows": (4, 16), "contiguous": False, "num_images": 400}
    report = bench(folder, tmp_path, seconds=20.0, **sizes, **DECISIVE)
    assert report.complete
    # The folder is only a part of the images, so the command must not name it.
    assert (report.num_images, report.source_images) == (400, 40)
    assert report.recommendation.command.split()[2] == "ALL_IMAGES"
    assert 0.75 * report.budget_seconds <= report.seconds["all"] <= 1.05 * report.budget_seconds
    again = [one for one in report.run_off if not one.case.num_workers]
    assert max(len(one.speeds) for one in again) >= MIN_TURNS
    assert all(len(one.of_ceiling) == len(one.speeds) for one in again)


def test_a_compressed_first_epoch_is_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that the short repeats of a busy machine do not decide.
    monkeypatch.setattr("h5pack.benchmark.recommend._Compared.is_faster", lambda *_: False)
    file = tmp_path / "z.h5"
    h5pack.convert(folder, file, compression="gzip", num_workers=1)
    monkeypatch.setattr("h5pack.benchmark.cases._DECODE_BUDGET_BYTES", 1_000)
    report = bench(file, tmp_path, chunk_rows=4, **DECISIVE)
    assert not any("full shuffle" in note for note in report.notes), "that order was not asked for"
    assert (report.recommendation.variant, report.recommendation.convert) == (report.variants[0].label, False)
    assert sum("first epoch" in reason for reason in report.recommendation.reasons) == 1


def test_a_compressed_file_of_another_program_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.benchmark.cases._DECODE_BUDGET_BYTES", 1_000)
    with h5py.File(tmp_path / "lab.h5", "w") as file:
        images = np.random.default_rng(0).integers(0, 256, (400, 32, 32, 3), np.uint8)
        file.create_dataset("images", data=images, chunks=(1, 32, 32, 3), compression="gzip")
    report = bench(tmp_path / "lab.h5", tmp_path, chunk_rows=8, **{**DECISIVE, "orders": ("window", "full")})
    assert (report.recommendation.variant, report.recommendation.convert) == ("8 rows", True)
    assert sum("full shuffle" in note for note in report.notes) == 1


def test_an_input_file_is_compared_with_packs_of_it(cut: Path, tmp_path: Path) -> None:
    settings = {"chunk_rows": 8, "contiguous": False, "batch_size": 16, "num_workers": 0}
    report = bench(cut, tmp_path, caches="hot", orders=("window", "single"), engines=("direct", "default"), **settings)
    assert [one.label for one in report.variants] == ["as it is", "8 rows"]
    assert speeds(report, "single", "default", "hot")["as it is"]
    assert speeds(report, "window", "direct", "hot")["as it is"]
    assert report.faults
    assert report.fix is not None
    chosen = report.recommendation
    assert chosen.variant in ("8 rows", "as it is")
    if chosen.convert:
        assert "--layout nchw" in chosen.command
        assert chosen.gain is not None


@pytest.mark.parametrize("padded", [False, True])
def test_encoded_images_of_several_sizes_are_compared(tmp_path: Path, padded: bool) -> None:
    images = [save(tmp_path / "one.jpg", row, (32 + row % 3, 40)).read_bytes() for row in range(20)]
    path = tmp_path / "encoded.h5"
    if padded:
        hdf5_file(path, images=np.array(images))
    else:
        write_encoded(path, images)
    settings = {"orders": ("window", "single"), "engines": ("direct", "default"), "num_workers": 0}
    report = bench(path, tmp_path, chunk_rows=2, size=32, contiguous=False, caches="hot", **settings)
    assert [one.label for one in report.variants] == ["as it is", "2 rows"]
    assert speeds(report, "single", "default", "hot")["as it is"]
    # Images of several sizes make no batch.
    assert speeds(report, "window", "direct", "hot")["as it is"] == ()


def test_too_little_time_is_an_error_that_names_enough(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        bench(folder, tmp_path, seconds=0.5, chunk_rows=4)
    assert [name.partition("=")[0] for name in caught.value.parameters] == ["seconds", "seconds"]
    assert list(tmp_path.iterdir()) == []


def test_one_value_or_several_make_the_same_settings() -> None:
    one = make_settings(chunk_rows=4, orders="window", compression="gzip", size=64)
    several = make_settings(chunk_rows=[4], orders=["window"], compression=["gzip", "gzip"], size=(64, 64))
    assert one == several


def test_invalid_keywords_are_refused_before_packing(folder: Path, tmp_path: Path) -> None:
    nested: dict[str, Any] = {"batch_size": [[1]]}
    for keywords in ({"plot": tmp_path / "none" / "a.png"}, {"seconds": -1}, nested):
        with pytest.raises(OptionsError):
            h5pack.bench(folder, scratch=tmp_path, **keywords)
    assert os.listdir(tmp_path) == []


def test_a_full_scratch_folder_is_one_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.pack.output.free_bytes", lambda _: 1000)
    monkeypatch.setattr("h5pack.benchmark.sample.make_folder", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    for source in (folder, None):
        with pytest.raises(NoSpaceError) as caught:
            h5pack.bench(source, scratch=tmp_path)
        assert (caught.value.path, caught.value.parameters) == (os.fspath(tmp_path), ("scratch=FOLDER",))
    assert os.listdir(tmp_path) == []


def test_bad_input_is_one_line_on_the_command(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat_folder(tmp_path / "few", 3)
    (tmp_path / "empty").mkdir()
    for arguments, code, message in (
        (f"{tmp_path}/few", 2, "3 images"), (f"{tmp_path}/empty", 1, "empty"), (f"{tmp_path}/nothing", 1, "nothing"),
        (f"{folder} --seconds 0.2 --chunk-rows 4 --no-contiguous", 2, "--seconds 0.2"),
        (f"{folder} --orders random", 2, "--orders random"), (f"{folder} --threads two", 2, "--threads two"),
        (f"{folder} --plot {tmp_path}/no/b.png", 2, "b.png"), (f"{folder} --mixing", 2, "--scratch"),
        (f"{folder} --split train", 2, "--mixing"), (f"{folder} --epochs 8", 2, "--mixing"),
    ):  # fmt: skip
        assert main(["bench", *arguments.split(), "--scratch", os.fspath(tmp_path), "--quiet"]) == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "few"]


def test_the_command_prints_an_answer_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = split_folders(tmp_path / "in", {"training": {"a": 15, "b": 15}, "test": {"a": 5, "b": 5}}, SIZE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        BenchRun.__init__, "__kwdefaults__", {**BenchRun.__init__.__kwdefaults__, "clock": FakeClock(tick=0.04)}
    )
    options = "--seconds 6 --chunk-rows 4,16 --batch-size 8 --orders window --engines direct --cache hot --workers 0"
    assert main(["bench", os.fspath(folder), *options.split(), "--plot", "b.png"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 26
    assert Path("b.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(os.listdir(tmp_path)) == ["b.png", "in"]
    assert "--full" in out
    (command,) = (line.split() for line in out.splitlines() if line.startswith("    h5pack convert"))
    assert main([*command[1:], "--workers", "1", "--quiet"]) == 0
    code = "".join(line[4:] + "\n" for line in out.splitlines() if "= h5pack." in line)
    found: dict[str, Any] = {"h5pack": h5pack}
    exec(code, found)
    assert (found["dataset"].split, len(found["dataset"].splits)) == ("training", 2)
    assert sum(len(batch[0]) for batch in found["loader"]) == 30


def test_every_option_reaches_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def stop(**settings: Any) -> None:
        given.update(settings)
        raise H5PackError("stop")

    monkeypatch.setattr("h5pack.benchmark.bench.make_settings", stop)
    numbers = "seconds chunk-rows chunk-bytes batch-size window threads workers rows num-images seed"
    words = "orders engines cache compression size source images labels scratch"
    options = [f"--{name}=7" for name in numbers.split()] + [f"--{name}=x" for name in words.split()]
    assert main(["bench", *options, "--no-contiguous"]) == 1
    assert given.keys() == {field.name for field in fields(BenchSettings)}
    assert all(value in (7, "x", False, (7,), ("x",)) for value in given.values())


def test_mixing_is_reported(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch-size", "10", "--window", "2,4", "--epochs", "2", "--json"]
    assert main(["bench", os.fspath(cut), "--mixing", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["window"], report["batch_size"], report["epochs"]) == (200, 2, 10, 2)
    assert [order["window"] for order in report["orders"]] == [2, 4, None, None]
    assert main(["bench", os.fspath(cut), "--mixing", "--batch-size", "10"]) == 0
    assert "window=1" in capsys.readouterr().out
    # Images and labels of other names are detected.
    with h5py.File(cut) as file, h5py.File(tmp_path / "other.h5", "w") as other:
        for name, values in {"data/x": file["images"][()], "data/y": np.arange(200) % 3}.items():
            other.create_dataset(name, data=values, chunks=(10, *values.shape[1:]))
    assert main(["bench", os.fspath(tmp_path / "other.h5"), "--mixing", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["expected_distance"] is None) == (200, False)
    for wrong, option in ((["--mixing"], "SOURCE"), (["x.h5", "--mixing", "--seconds", "9"], "--seconds")):
        assert main(["bench", *wrong]) == 2
        assert option in capsys.readouterr().err


def test_ctrl_c_prints_the_results_so_far_and_cleans_up(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Sweep._run

    def interrupted(*arguments: Any) -> None:
        measure(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "_run", interrupted)
    options = ["--seconds", "3600", "--chunk-rows", "4", "--no-contiguous", "--batch-size", "8", "--json"]
    assert main(["bench", os.fspath(folder), *options, "--scratch", os.fspath(tmp_path)]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["complete"] is False
    assert report["recommendation"] is None
    assert any(one["images_per_s"] for one in report["measurements"])
    assert list(tmp_path.iterdir()) == []
