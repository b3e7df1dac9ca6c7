"""The sample holds the images in every variant; scratch folders are removed, those of killed runs too."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.benchmark import sample as sample_module
from h5pack.benchmark.cases import BenchSettings
from h5pack.benchmark.sample import BenchSample, _Packer, find_input, make_sample, scratch_folder, usual_sizes
from h5pack.errors import H5PackError, NoImagesError, NoSpaceError, OptionsError, SourceError, WorkerError
from h5pack.pack import conversion
from h5pack.pack.conversion import Conversion
from h5pack.sources.detect import open_source
from tests.benchmark.files import ROW_BYTES, SIZE, input_of, sample_of
from tests.makers import flat_folder, hdf5_file, save
from tests.monitor.fake_clock import FakeClock


def labels(sample: BenchSample) -> list[str]:
    return [one.label for one in sample.variants]


def test_every_variant_holds_the_same_images(folder: Path, scratch: Path) -> None:
    sample = sample_of(folder, scratch, chunk_rows=(4, 10), compression=("none", "gzip"))
    assert (sample.rows, sample.row_bytes, sample.row_shape) == (40, ROW_BYTES, (*SIZE, 3))
    rows = []
    for one in sample.variants:
        with h5py.File(one.path) as file:
            rows.append(file["images"][()])
            assert file["images"].chunks == (None if one.chunk_rows is None else (one.chunk_rows, *SIZE, 3))
            assert file["images"].compression == (None if one.compression == "none" else "gzip")
    assert labels(sample) == ["4 rows", "10 rows", "4 rows gzip", "10 rows gzip", "contiguous"]
    assert all(np.array_equal(found, rows[0]) for found in rows)
    assert len(np.unique(rows[0].reshape(40, -1), axis=0)) == 40
    assert sample.notes == []


def test_a_larger_input_file_is_read_in_whole_chunks(cut: Path, scratch: Path) -> None:
    source = input_of(cut)
    assert (source.kind, source.num_images, len(source.faults)) == ("file", 200, 2)
    assert source.options == {"images": "images", "labels": "labels", "layout": "nchw"}
    assert source.fix is not None
    assert source.variant.overhead == pytest.approx(2 * 63 / 64, rel=0.01)
    sample = sample_of(cut, scratch, rows=60, chunk_rows=(8,), contiguous=False)
    found = [(one.label, one.rows, one.is_input) for one in sample.variants]
    assert found == [("as it is", 100, True), ("8 rows", 60, False)]


def test_chunks_larger_than_half_the_sample_are_left_out(folder: Path, scratch: Path) -> None:
    sample = sample_of(folder, scratch, chunk_rows=(4, 30), contiguous=False)
    assert (labels(sample), len(sample.notes)) == (["4 rows"], 1)


def test_sizes_near_the_default_are_not_compared_with_it() -> None:
    assert usual_sizes(148, 96 * 96 * 3) == {2, 8, 36, 148, 604}
    assert usual_sizes(120, 96 * 96 * 3) == {2, 8, 36, 120, 148, 604}
    assert usual_sizes(1, 20 * 2**20) == {1}


def test_variants_that_come_late_are_left_out(folder: Path, scratch: Path) -> None:
    settings = BenchSettings(seconds=1.0, chunk_rows=(4, 16))
    sample = make_sample(input_of(folder), settings, scratch, FakeClock(tick=10.0), settings.seconds)
    assert labels(sample) == ["4 rows"]
    assert "16 rows, contiguous" in sample.notes[0]


@pytest.mark.parametrize(("seconds", "rows"), [(1_000.0, 200), (0.001, 64)])
def test_the_sample_grows_if_packing_is_faster_than_the_first_images_suggest(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, rows: int
) -> None:
    folder = flat_folder(tmp_path / "photos", 200, SIZE)
    monkeypatch.setattr(_Packer, "probe", lambda packer: (ROW_BYTES, 0.001))
    sample = make_sample(input_of(folder), BenchSettings(), scratch, time.monotonic, seconds)
    assert sample.rows == rows
    assert {one.rows for one in sample.variants} == {rows}


@pytest.mark.parametrize("number", [4, 5])
def test_several_sizes_become_one(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    # Of 16 images, every other one is converted first.
    monkeypatch.setattr("h5pack.benchmark.sample._PROBE_IMAGES", (8,))
    source = flat_folder(tmp_path / "photos", 16)
    save(source / f"{number:05d}.jpg", 5, (40, 60))
    sample = sample_of(source, scratch, chunk_rows=(2,), contiguous=False)
    assert not (scratch / "first.h5").exists()
    assert (sample.row_shape, sample.options["size"], len(sample.notes)) == ((224, 224, 3), (224, 224), 1)


def test_one_process_packs_if_others_cannot_start(folder: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def unguarded(*given: Any, **options: Any) -> Any:
        asked.append(options.get("num_workers"))
        if asked[-1] != 1:
            raise WorkerError("put it under if __name__", parameters=("num_workers=1",))
        return Conversion(*given, **options)

    monkeypatch.setattr("h5pack.benchmark.sample.Conversion", unguarded)
    sample = sample_of(folder, scratch, chunk_rows=(4, 8), contiguous=False)
    assert (labels(sample), len(sample.notes)) == (["4 rows", "8 rows"], 1)
    assert asked.count(None) == 1
    monkeypatch.setattr("h5pack.benchmark.sample.Conversion", lambda *_, **__: raises(WorkerError("a worker died")))
    with pytest.raises(WorkerError, match="a worker died"):
        sample_of(folder, scratch, chunk_rows=(4, 8), contiguous=False)


@pytest.mark.parametrize("kind", ["folder", "cut"])
def test_the_images_are_listed_once_for_all_conversions(
    request: pytest.FixtureRequest, scratch: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    found, settings = input_of(request.getfixturevalue(kind)), BenchSettings(chunk_rows=(4, 8))
    listed: list[Any] = []

    def counted(source: Any, *given: Any) -> Any:
        listed.append(source)
        return open_source(source, *given)

    for module in (sample_module, conversion):
        monkeypatch.setattr(module, "open_source", counted)
    make_sample(found, settings, scratch, time.monotonic, settings.seconds)
    assert listed.count(found.source) == 1


def raises(error: Exception) -> None:
    raise error


def test_an_input_behind_links_is_found(cut: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["outer"] = h5py.ExternalLink(cut, "/images")
        file["images"] = h5py.SoftLink("/outer")
    source = input_of(tmp_path / "links.h5")
    assert (source.num_images, len(source.faults)) == (200, 2)


def test_another_name_that_is_not_utf8_does_not_stop_a_benchmark(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"] = np.zeros((40, 8, 8, 3), np.uint8)
        file[b"\xff"] = 1
    assert find_input(tmp_path / "f.h5", tmp_path, BenchSettings(images="x")).num_images == 40


@pytest.mark.parametrize("given", [{}, {"labels": "y"}])
def test_names_of_classes_as_labels_do_not_stop_a_benchmark(tmp_path: Path, given: dict[str, str]) -> None:
    path = hdf5_file(tmp_path / "f.h5", x=np.zeros((40, 8, 8, 3), np.uint8), y=["cat", "dog"] * 20)
    found = find_input(path, tmp_path, BenchSettings(**given))
    assert (found.num_images, found.options["labels"], "fields" in found.options) == (40, "y", False)


def test_the_fix_and_the_code_suit_the_labels_and_fields(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((300, 64, 64, 3), np.uint8), chunks=(1, 64, 64, 3), compression="gzip")
        file["age"], file["grade"], file["name"] = np.zeros(300), np.arange(300), ["p1", "p2"] * 150
    for given, fields in (({}, ["age", "grade", "name"]), ({"labels": "grade"}, ["age", "name"])):
        found = find_input(tmp_path / "f.h5", tmp_path, BenchSettings(**given))
        # Texts can be packed, but not read.
        assert found.fields == tuple(fields[:-1])
        words = found.fix.split()
        assert words[words.index("--fields") + 1] == ",".join(fields)
        assert ("--labels grade" in found.fix) == bool(given)
    found = find_input(tmp_path / "f.h5", tmp_path, BenchSettings(labels=""))
    assert "--labels '' --fields age,grade,name" in found.fix


@pytest.mark.parametrize("shape", [(300, 64), (300, 8, 8, 3)], ids=["no images", "normalized images"])
def test_rows_that_cannot_be_converted_are_only_read_as_they_are(
    tmp_path: Path, scratch: Path, shape: tuple[int, ...]
) -> None:
    path = tmp_path / "features.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=np.random.default_rng(0).normal(size=shape), chunks=(30, *shape[1:]))
    sample = sample_of(path, scratch)
    assert (labels(sample), len(sample.notes)) == (["as it is"], 1)


def test_the_scratch_folder_is_removed_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch_folder(tmp_path) as scratch:
            (scratch / "folder").mkdir()
            (scratch / "folder" / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_runs_are_removed_and_those_of_running_ones_kept(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as running:
        # The system releases the lock of a killed process; locks of one process exclude each other, too.
        killed = tmp_path / f"{running.name}-killed"
        killed.mkdir()
        (killed / "lock").touch()
        (killed / "pack.h5").write_text("x")
        with scratch_folder(tmp_path):
            assert not killed.exists()
            assert (running / "lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_scratch_needs_a_folder_and_space(folder: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionsError) as caught, scratch_folder(scratch / "nowhere"):
        pass
    assert caught.value.parameters == ("scratch=FOLDER",)
    monkeypatch.setattr("h5pack.benchmark.sample.free_bytes", lambda folder: 8 * ROW_BYTES)
    with pytest.raises(NoSpaceError):
        sample_of(folder, scratch)
    # Refused before the disk is filled.
    assert not (scratch / "base.h5").exists()


def test_a_scratch_folder_on_a_failing_disk_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "fails; run again with resume=True"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(H5PackError) as caught, scratch_folder(".") as scratch:
        # Errors of `convert` have absolute paths.
        raise H5PackError.at(os.path.abspath(scratch / "first.h5.partial"), problem, "resume=True")
    assert (caught.value.path, caught.value.parameters) == (str(tmp_path), ("scratch=FOLDER",))
    with pytest.raises(H5PackError, match="resume") as caught, scratch_folder(tmp_path):
        raise H5PackError.at(tmp_path / "other.h5", problem, "resume=True")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "parameters"), [("manifest", ("path_column",)), ("webdataset", ("include", "exclude"))]
)
def test_parameters_that_only_convert_has_come_with_advice(
    tmp_path: Path, kind: str, parameters: tuple[str, ...]
) -> None:
    path = tmp_path / "in.csv"
    if kind == "manifest":
        path.write_text("foo,bar\na.png,b.png\n")
    else:
        path.mkdir()
    with pytest.raises(SourceError, match="bench has no") as caught, scratch_folder(tmp_path) as scratch:
        find_input(path, scratch, BenchSettings(source_kind=kind))
    assert (caught.value.path, caught.value.parameters) == (str(path), parameters)
    assert type(caught.value) is type(caught.value.__cause__)


def test_that_advice_keeps_the_kind_and_the_rows_of_an_error(tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "f.h5", images=np.full((4, 8, 8, 3), np.nan, np.float32))
    with pytest.raises(NoImagesError, match="bench has no value_range") as caught, scratch_folder(tmp_path) as scratch:
        h5pack.convert(path, scratch / "o.h5", num_workers=1)
    assert caught.value.parameters == ("value_range",)
    with pytest.raises(SourceError) as found, scratch_folder(tmp_path):
        raise SourceError.at(path, "needs root", "root", dataset="images", rows=(3,))
    assert (found.value.dataset, found.value.rows) == ("images", (3,))


def test_parameters_that_bench_has_come_without_it(tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "f.h5", a=np.zeros((9, 8, 8, 3), np.uint8), b=np.zeros((9, 8, 8, 3), np.uint8))
    with pytest.raises(SourceError) as caught, scratch_folder(tmp_path) as scratch:
        find_input(path, scratch, BenchSettings())
    assert caught.value.parameters[0].startswith("images")
    assert caught.value.__cause__ is None


def test_the_lock_is_closed_before_the_scratch_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS and FUSE, a removed file gets another name while it is open, so its folder cannot be removed."""
    opened = []
    rmtree = shutil.rmtree

    def removing(path: Path, **keywords: bool) -> None:
        opened.extend(os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        rmtree(path, **keywords)

    monkeypatch.setattr(shutil, "rmtree", removing)
    with scratch_folder(tmp_path) as scratch:
        pass
    assert opened
    assert not [path for path in opened if path.startswith(str(scratch))]


def test_an_input_in_a_closed_folder_is_an_error(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", Mock(side_effect=PermissionError(errno.EACCES, "denied")))
    with pytest.raises(SourceError, match="denied"):
        find_input(scratch / "closed" / "a.h5", scratch, BenchSettings())
    monkeypatch.undo()


def test_no_other_temporary_folder_is_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", Mock(side_effect=FileNotFoundError(2, "No usable temporary directory")))
    with tarfile.open(tmp_path / "photos.tar.gz", "w:gz") as archive:
        archive.add(folder, "photos")
    with scratch_folder(tmp_path) as scratch:
        for path in (tmp_path / "photos.tar.gz", hdf5_file(tmp_path / "f.h5", x=np.zeros((40, 8, 8, 3), np.uint8))):
            assert find_input(path, scratch, BenchSettings()).num_images == 40
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OptionsError) as caught, scratch_folder():
        pass
    assert caught.value.parameters == ("scratch=FOLDER",)


@pytest.mark.parametrize(("num_images", "rows"), [(None, 44), (40, 24), (10_000, 156), (10**6, 1_364)])
def test_the_default_chunks_are_those_of_the_judged_dataset(
    tmp_path: Path, scratch: Path, num_images: int | None, rows: int
) -> None:
    path = hdf5_file(tmp_path / "f.h5", x=np.zeros((3_000, 32, 32, 3), np.uint8))
    sample = sample_of(path, scratch, num_images=num_images, rows=64, chunk_rows=(8,), contiguous=False)
    assert (sample.rows, sample.default_chunk_rows) == (64, rows)
