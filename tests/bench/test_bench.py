"""The bench from end to end, on tiny images: all ways give rows, time is kept, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.bench.bench import Bench
from h5pack.bench.cell import Cell, Measurement
from h5pack.bench.cell_way import open_way
from h5pack.bench.library_file import LibraryFile
from h5pack.bench.opened import Opened
from h5pack.bench.report import BenchReport
from h5pack.bench.sample import make_sample
from h5pack.bench.scratch import Scratch
from h5pack.bench.settings import BenchSettings
from h5pack.bench.subject import find_subject
from h5pack.bench.sweep import Sweep
from h5pack.bench.ways import LoaderWay, Timing
from h5pack.cli import main
from h5pack.errors import NoImagesError, OptionsError
from h5pack.measure.page_state import PageState
from h5pack.pack.options import ConvertOptions
from tests.makers import class_folders, flat_folder, save

SIZE = (64, 48)
ROW_BYTES = 64 * 48 * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("source") / "photos", {"a": 60, "b": 60}, SIZE)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chunks that are one line short, as in a well-known recipe."""
    path = tmp_path_factory.mktemp("source") / "theirs.h5"
    values = np.random.default_rng(0).integers(0, 256, (200, 3, *SIZE), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=values, chunks=(50, 3, SIZE[0] - 1, SIZE[1]))
        file["labels"] = np.arange(200) % 10
    return path


def by_cell(report: BenchReport) -> dict[tuple[str, str, str, str], Measurement]:
    return {
        (one.cell.stored, one.cell.order, one.cell.engine, one.cell.cache): one
        for one in report.measurements
        if one.cell.workers is None
    }


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    settings = BenchSettings(
        seconds=8, chunk_rows=(4, 16), compressions=("none", "gzip"), batch_sizes=(8,), scratch=os.fspath(tmp_path)
    )
    begin = time.monotonic()
    report = Bench(folder, settings).run()
    assert time.monotonic() - begin < 1.3 * settings.seconds
    assert report.complete
    assert list(tmp_path.iterdir()) == []
    assert (report.kind, report.images, report.sample_rows, report.row_bytes) == ("folder", 120, 120, ROW_BYTES)
    assert [one.label for one in report.files] == ["4 rows", "16 rows", "4 rows gzip", "16 rows gzip", "contiguous"]
    found = by_cell(report)
    for label in ("4 rows", "16 rows", "16 rows gzip", "contiguous"):
        assert found[label, "window", "direct", "hot"].median > 0
    direct = found["4 rows", "window", "direct", "hot"]
    # Exactly what was wanted is asked for, and the labels' few bytes.
    assert direct.amplification == pytest.approx(1.0, abs=0.01)
    assert direct.hit_rate == pytest.approx(0.75)
    assert {one.name for one in report.ceilings} >= {"memory copy"}
    chosen = report.recommendation
    assert chosen is not None
    assert chosen.chunk_rows in (4, 16)
    assert not chosen.sure, "120 rows are few"
    assert report.trials
    assert {one.cell.workers for one in report.trials} > {None}
    text = json.dumps(report.to_json())
    again = BenchReport.from_json(json.loads(text))
    assert again.recommendation == chosen
    assert [one.cell for one in again.measurements] == [one.cell for one in report.measurements]
    for one, other in zip(again.trials, report.trials, strict=True):
        assert one.speeds == pytest.approx(other.speeds, abs=0.06)
    assert BenchReport.from_json(again.to_json()).to_json() == again.to_json()
    assert os.fspath(tmp_path) not in text, "temporary paths tell nobody anything"


def test_a_foreign_file_its_fault_and_its_gain(foreign: Path, tmp_path: Path) -> None:
    settings = BenchSettings(
        seconds=6, chunk_rows=(8,), contiguous=False, batch_sizes=(16,), caches=("hot",), scratch=os.fspath(tmp_path)
    )
    report = Bench(foreign, settings).run()
    assert [one.label for one in report.files] == ["as it is", "8 rows"]
    own = report.files[0]
    assert own.own
    assert own.overhead == pytest.approx(2 * 63 / 64, rel=0.01)
    assert any("cut every row into 2 pieces" in fault for fault in report.faults)
    assert report.cure is not None
    assert report.cure.startswith("h5pack convert")
    found = by_cell(report)
    assert found["as it is", "single", "default", "hot"].median > 0
    assert found["as it is", "window", "direct", "hot"].median > 0
    chosen = report.recommendation
    assert chosen is not None
    assert chosen.stored in ("8 rows", "as it is")
    if chosen.convert:
        assert "--layout nchw" in chosen.command
        assert chosen.gain is not None


@pytest.mark.parametrize("engine", ["direct", "tuned", "default"])
@pytest.mark.parametrize("order", ["sequential", "window", "full", "single"])
def test_every_way_reads_the_rows_it_says(foreign: Path, order: str, engine: str) -> None:
    with Scratch(foreign.parent) as scratch:
        subject = find_subject(foreign, ConvertOptions(), scratch.path)
        assert subject.stored is not None
        batch = 1 if order == "single" else 16
        way = open_way(Cell("as it is", order, engine, "hot", batch, 2, 1), subject.stored, 0, Opened())
        timing = way.run(10.0, once=True)
        way.close()
    assert timing.rows == 200
    assert timing.seconds < 10
    assert timing.bytes_a_row is not None
    assert timing.bytes_a_row >= 0.9 * ROW_BYTES


def test_workers_read_every_row(foreign: Path, tmp_path: Path) -> None:
    subject = find_subject(foreign, ConvertOptions(), tmp_path)
    assert subject.stored is not None
    way = open_way(Cell("as it is", "window", "direct", "hot", 16, 2, 1, 2), subject.stored, 0, Opened())
    assert way.run(0.0).rows == 200
    way.close()


def test_a_row_by_the_library_is_that_of_the_dataset(foreign: Path) -> None:
    with h5py.File(foreign) as file:
        expected = file["images"][()]
    for tuned in (False, True):
        library = LibraryFile(os.fspath(foreign), "images", tuned=tuned)
        assert np.array_equal(library.row(7), expected[7])
        parts = [pixels.copy() for _, pixels in library.batch([5, 199, 0], consecutive=False)]
        assert np.array_equal(np.stack(parts), expected[[5, 199, 0]])
        ((count, slice_),) = library.batch(range(40, 60), consecutive=True)
        assert (count, len(slice_)) == (20, 20)
        assert np.array_equal(slice_, expected[40:60])
        library.close()


def test_the_first_rows_of_a_larger_file_are_whole_chunks(foreign: Path, tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(rows=60, chunk_rows=(8,), contiguous=False)
        sample = make_sample(find_subject(foreign, ConvertOptions(), scratch.path), settings, scratch)
        assert [(one.label, one.rows) for one in sample.files] == [("as it is", 100), ("8 rows", 60)]
        way = open_way(Cell("as it is", "full", "direct", "hot", 16, 2, 1), sample.files[0], 0, Opened())
        assert way.run(10.0, once=True).rows == 100
        way.close()


def test_the_sample_holds_the_images_in_every_form(folder: Path, tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4, 10), compressions=("none", "gzip"))
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        rows = []
        for one in sample.files:
            with h5py.File(one.path) as file:
                rows.append(file["images"][()])
                assert file["images"].chunks == (None if one.chunk_rows is None else (one.chunk_rows, *SIZE, 3))
                assert file["images"].compression == (None if one.compression == "none" else "gzip")
        assert len(rows) == 5
        assert all(np.array_equal(found, rows[0]) for found in rows)
        assert len(np.unique(rows[0].reshape(120, -1), axis=0)) == 120


def test_chunks_larger_than_half_the_sample_are_left_out_and_said(folder: Path, tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4, 100), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
    assert [one.label for one in sample.files] == ["4 rows"]
    assert any("Chunks of 100 rows were left out" in note for note in sample.notes)


def test_images_of_several_sizes_get_one_and_that_is_said(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "photos", 10)
    save(source / "large.jpg", 5, (40, 60))
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(2,), contiguous=False)
        sample = make_sample(find_subject(source, ConvertOptions(), scratch.path), settings, scratch)
    assert sample.row_shape == (224, 224, 3)
    assert any("--size 224 was taken" in note for note in sample.notes)


def test_one_odd_image_among_many_is_found_late_and_still_gets_a_size(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "photos", 100)
    save(source / "00051.jpg", 5, (40, 60))
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(2,), contiguous=False)
        subject = find_subject(source, ConvertOptions(), scratch.path)
        sample = make_sample(subject, settings, scratch)
        assert not (scratch.path / "first.h5").exists()
    assert sample.row_shape == (224, 224, 3)
    assert sample.row_bytes == 224 * 224 * 3
    assert len([note for note in sample.notes if "--size 224 was taken" in note]) == 1


def test_rows_that_are_no_images_are_measured_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "features.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.random.default_rng(0).normal(size=(300, 64)), chunks=(30, 64))
    settings = BenchSettings(seconds=3, images="x", batch_sizes=(16,), caches=("hot",), scratch=os.fspath(tmp_path))
    report = Bench(path, settings).run()
    assert [one.label for one in report.files] == ["as it is"]
    assert any("not compared with other chunks" in note for note in report.notes)
    assert report.recommendation is not None
    assert not report.recommendation.sure


def test_pages_that_stay_make_a_cell_unmeasured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.measure.page_state.drop_cache", lambda path: 3)
    monkeypatch.setattr("h5pack.measure.page_state.PageState._seems_cached", lambda self: True)
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4,), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        found: list[Measurement] = []
        cells = [Cell("4 rows", "window", "direct", cache, 8, 2, 1) for cache in ("cold", "hot")]
        Sweep(sample.files, 0, lambda seconds: None).measure(cells, 1.0, found)
    assert found[0].speeds == ()
    assert found[0].reason == "its pages stay in the page cache, which this file system does not let go"
    assert found[1].speeds


@pytest.mark.parametrize(("answer", "loads"), [(None, 1), ("its pages stay", 0)])
def test_files_are_loaded_anew_before_each_repeat_of_a_run_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, loads: int
) -> None:
    done: list[str] = []

    def drop(self: PageState) -> str | None:
        done.append("drop")
        return answer

    class Noted(LoaderWay):
        def run(self, seconds: float, *, once: bool = False) -> Timing:
            done.append("load" if once else "run")
            return super().run(seconds, once=once)

    monkeypatch.setattr("h5pack.bench.sweep.PageState.drop", drop)
    monkeypatch.setattr("h5pack.bench.cell_way.LoaderWay", Noted)
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4,), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        cells = [Cell("4 rows", "window", "direct", "hot", 8, 2, 1)]
        for anew in (False, True):
            found: list[Measurement] = []
            done.clear()
            Sweep(sample.files, 0, lambda seconds: None).measure(cells, 1.0, found, anew=anew)
            repeats = len(found[0].speeds)
            assert repeats > 1
            turn = ["drop", *["load"] * loads, "run", "run"] if anew else ["run", "run"]
            assert done == turn * repeats


def test_files_that_are_slow_to_load_are_loaded_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops: list[int] = []

    def slow(self: PageState) -> None:
        drops.append(1)
        time.sleep(0.6)

    monkeypatch.setattr("h5pack.bench.sweep.PageState.drop", slow)
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4,), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        found: list[Measurement] = []
        cells = [Cell("4 rows", "window", "direct", "hot", 8, 2, 1)]
        Sweep(sample.files, 0, lambda seconds: None).measure(cells, 1.6, found, anew=True)
    assert len(drops) == 1
    assert len(found[0].speeds) > 1


def test_cold_cells_read_the_disk_though_hdf5_and_the_engine_keep_chunks(tmp_path: Path) -> None:
    """A file that fits into everybody's own caches, compressed, so that those matter."""
    path = tmp_path / "small.h5"
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), np.uint8)
        file.create_dataset("images", data=values, chunks=(10, 32, 32, 3), compression="gzip")
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(10,), contiguous=False)
        sample = make_sample(find_subject(path, ConvertOptions(), scratch.path), settings, scratch)
        found: list[Measurement] = []
        cells = [Cell("as it is", order, engine, "cold", 1 if order == "single" else 10, 2, 1)
                 for order in ("window", "full", "single") for engine in ("direct", "tuned", "default")]  # fmt: skip
        Sweep(sample.files, 0, lambda seconds: None).measure(cells, 3.0, found)
    for one in found:
        if one.reason is not None:
            assert one.reason.startswith("its pages stay"), one
        else:
            assert one.amplification is not None
            assert one.amplification > 0.9, one.cell


def test_a_time_that_is_over_leaves_the_rest_and_says_so(folder: Path, tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4,), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        found: list[Measurement] = []
        cells = [Cell("4 rows", order, "direct", "hot", 8, 2, 1) for order in ("window", "full", "sequential")]
        Sweep(sample.files, 0, lambda seconds: None).measure(cells, 0.0, found)
    assert [one.speeds for one in found] == [(), (), ()]
    assert {one.reason for one in found} == {"the time was over before"}


def test_a_dead_worker_is_a_reason_and_not_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.")

    monkeypatch.setattr("h5pack.bench.sweep.open_way", die)
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4,), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        found: list[Measurement] = []
        Sweep(sample.files, 0, lambda seconds: None).measure(
            [Cell("4 rows", "window", "direct", "hot", 8, 2, 1, 2)], 1, found
        )
    assert found[0].reason == "DataLoader worker (pid 7) is killed by signal: Bus error."


def test_encoded_images_of_several_sizes(tmp_path: Path) -> None:
    path = tmp_path / "encoded.h5"
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (20,), h5py.vlen_dtype(np.uint8))
        for row in range(20):
            jpeg = save(tmp_path / "one.jpg", row, (32 + row % 3, 40)).read_bytes()
            images[row] = np.frombuffer(jpeg, np.uint8)
    settings = BenchSettings(seconds=6, chunk_rows=(2,), contiguous=False, caches=("hot",), scratch=os.fspath(tmp_path))
    report = Bench(path, settings).run()
    assert [one.label for one in report.files] == ["as it is", "2 rows"]
    found = by_cell(report)
    assert found["as it is", "single", "default", "hot"].speeds
    assert "make no batch" in (found["as it is", "window", "direct", "hot"].reason or "")


def test_a_slow_cell_gets_fewer_repeats_and_all_get_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from h5pack.bench import sweep

    real = sweep.open_way

    def slow(cell: Cell, *others: object) -> object:
        if cell.order == "full":
            time.sleep(0.4)
        return real(cell, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "open_way", slow)
    with Scratch(tmp_path) as scratch:
        settings = BenchSettings(chunk_rows=(4,), contiguous=False)
        sample = make_sample(find_subject(folder, ConvertOptions(), scratch.path), settings, scratch)
        found: list[Measurement] = []
        cells = [Cell("4 rows", order, "direct", "hot", 8, 2, 1) for order in ("full", "sequential", "window")]
        begin = time.monotonic()
        Sweep(sample.files, 0, lambda seconds: None).measure(cells, 1.5, found)
        assert time.monotonic() - begin < 3
    counts = {one.cell.order: len(one.speeds) for one in found}
    assert counts["full"] >= 1
    assert counts["sequential"] > counts["full"]


def test_bad_input_is_one_line(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = flat_folder(tmp_path / "few", 3)
    (tmp_path / "empty").mkdir()
    scratch = ["--scratch", os.fspath(tmp_path), "--quiet"]
    for arguments, code, message in (
        ([os.fspath(few)], 2, "3 images, too few to measure anything"),
        ([os.fspath(tmp_path / "empty")], 1, "no images"),
        ([os.fspath(tmp_path / "nothing")], 1, "nothing"),
        ([os.fspath(folder), "--seconds", "0.2"], 2, "a budget of 0.2 s is too small: packing the sample took"),
        ([os.fspath(folder), "--orders", "random"], 2, "orders random: give some of"),
        ([os.fspath(folder), "--threads", "two"], 2, "--threads 'two' is no whole number"),
        ([os.fspath(folder), "--plot", os.fspath(tmp_path / "no" / "b.png")], 2, "its folder is not there"),
        ([os.fspath(folder), "--plot", os.fspath(tmp_path / "b.xyz")], 2, "b.xyz"),
    ):
        assert main(["bench", *arguments, *scratch]) == code
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert message in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "few"]


def test_the_errors_of_the_python_way(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoImagesError):
        Bench(tmp_path / "empty", BenchSettings(scratch=os.fspath(tmp_path))).run()
    with pytest.raises(OptionsError):
        Bench(flat_folder(tmp_path / "few", 2), BenchSettings(scratch=os.fspath(tmp_path))).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "few"]


def test_the_command_writes_what_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    plot, page, profile = (tmp_path / name for name in ("b.png", "b.html", "p.toml"))
    command = [sys.executable, "-m", "h5pack", "bench", os.fspath(folder), "--seconds", "6", "--chunk-rows", "4,16",
               "--batch-size", "8", "--orders", "window,single", "--engines", "direct,default", "--cache", "hot",
               "--plot", os.fspath(plot), "--report", os.fspath(page), "--save", os.fspath(profile)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    assert "h5pack convert" in result.stdout
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert page.read_text().lower().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.html", "b.png", "p.toml"]
    match = re.search(r"chunk_rows = (\d+)", profile.read_text())
    assert match is not None
    pack = tmp_path / "packed.h5"
    h5pack.convert(folder, pack, ConvertOptions(chunk_rows=int(match[1]), workers=1))
    loader = h5pack.H5Loader(h5pack.H5Dataset(pack), profile=profile)
    assert sum(len(images) for images, _ in loader) == 120


def test_ctrl_c_prints_what_is_known_and_cleans_up(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "h5pack", "bench", os.fspath(folder), "--seconds", "60", "--chunk-rows", "4",
               "--batch-size", "8", "--json"]  # fmt: skip
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 60
    # Measuring has begun once the contiguous form, the last one, is there and closed.
    while not any(tmp_path.glob(".h5pack-bench-*/contiguous.h5")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    run.send_signal(signal.SIGINT)
    out, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert error.strip().splitlines() == ["h5pack: interrupted; nothing was written"]
    report = json.loads(out)
    assert report["complete"] is False
    assert report["recommendation"] is None
    assert any(one["images_per_s"] for one in report["measurements"])
    assert list(tmp_path.iterdir()) == []
