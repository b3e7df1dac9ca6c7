"""`info` judges any HDF5 file: what its chunks cost, and a fix that works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import h5pack
from h5pack.benchmark.cases import BenchSettings
from h5pack.benchmark.sample import find_input
from h5pack.cli import main
from h5pack.errors import OptionsError, PackFormatError
from h5pack.inspect import info as info_module
from h5pack.inspect.info import DatasetReport
from h5pack.inspect.pack_metadata import pack_lines
from h5pack.pack.options import convert_command
from h5pack.read import virtual
from tests.makers import class_folders, hdf5_file, pair_folders, quick, split_folders
from tests.read.encoded_files import decoded, jpegs, write_encoded


def foreign(path: Path, shape: tuple[int, ...], **settings: Any) -> Path:
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("images", shape, "u1", **settings)
        dataset[...] = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        file["labels"] = np.arange(shape[0]) % 3
    return path


def report_of(path: Path) -> DatasetReport:
    return next(dataset for dataset in h5pack.info(path).datasets if dataset.name == "images")


def test_classes_are_counted_in_each_split(tmp_path: Path) -> None:
    split_folders(tmp_path / "in", {"train": {"a": 5, "b": 3}, "test": {"a": 4}})
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **quick())
    report = h5pack.info(os.fsencode(tmp_path / "o.h5"), stats=True)  # type: ignore[arg-type]
    assert json.loads(json.dumps(report.to_json()))["path"] == str(tmp_path / "o.h5")
    assert report.stats["labels"] == {"a": 9, "b": 3}
    assert report.stats["split_labels"] == {"train": {"a": 5, "b": 3}, "test": {"a": 4}}
    assert all(part in report.to_text() for part in ("a: 9 (train 5, test 4)", "b: 3 (train 3, test 0)"))


def test_the_split_of_the_statistics_is_named(tmp_path: Path) -> None:
    split_folders(tmp_path / "in", {"test": {"a": 5}})
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **quick())
    assert ", of 5 rows)" in h5pack.info(tmp_path / "o.h5").to_text()
    # The statistics of "train" are used as soon as there is one, although its rows follow those of the first split.
    h5pack.append(tmp_path / "o.h5", class_folders(tmp_path / "more", {"a": 3}), split="train", num_workers=1)
    assert ", of 3 rows of train)" in h5pack.info(tmp_path / "o.h5").to_text()
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file["statistics"].attrs["split"] = "test"
    report = h5pack.info(tmp_path / "o.h5")
    assert report.pack["statistics_split"] == "test"
    assert ", of a sample of 3 rows of test)" in report.to_text()


def test_a_pack_has_no_faults(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "in", {"a": 9, "b": 6}, (60, 70))
    h5pack.convert(source, tmp_path / "o.h5", **quick())
    report = h5pack.info(tmp_path / "o.h5", stats=True)
    found = report.to_json()
    assert {"complete": True, "splits": {"all": [[0, 15]]}, "classes": ["a", "b"]}.items() <= found["pack"].items()
    assert (found["stats"]["labels"], found["stats"]["channels"]["rows"]) == ({"a": 9, "b": 6}, 15)
    assert all(dataset.faults == () for dataset in report.datasets)
    images = report_of(tmp_path / "o.h5")
    assert (images.index, images.cache.nbytes) == ("extensible array", 0)
    assert (found["pack"]["labels"], found["pack"]["statistics_rows"]) == ("2 classes", 15)
    assert all(part in report.to_text() for part in ("a pack, format 1", "a: 9", "of 15 rows"))
    json.dumps(report.to_json(), allow_nan=False)


def test_faults_of_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module, "_DEFAULT_CACHE_BYTES", 2**20)
    for shape, settings, faults in (
        # The chunks of a widespread CelebA recipe split images.
        ((200, 3, 58, 48), {"chunks": (100, 3, 57, 48)}, ["2 parts", "1.97"]),
        ((200, 3, 218, 178), {"chunks": True, "maxshape": (None, 3, 218, 178)}, ["48 parts"]),
        ((100, 3, 100, 80), {"chunks": (50, 3, 100, 80), "compression": "gzip"}, ["1.1 MiB"]),
        ((100, 3, 100, 80), {"chunks": (1, 3, 100, 80), "compression": "gzip"}, ["of 1 row are compressed with gzip"]),
        ((99, 3, 90, 80), {"chunks": (9, 3, 90, 80)}, []),
        ((800, 3, 100, 80), {"chunks": (1, 3, 100, 80)}, ["chunks of 1 row (23.4 KiB) are read more slowly"]),
        ((800, 3, 100, 80), {"chunks": (10, 3, 100, 80)}, []),
        ((99, 3, 90, 80), {}, []),
    ):
        report = report_of(foreign(tmp_path / "f.h5", shape, **settings))
        assert len(report.faults) == len(faults)
        assert all(part in fault for part, fault in zip(faults, report.faults, strict=True))
        assert report.overhead == pytest.approx(1.966 if faults[1:] == ["1.97"] else report.overhead, abs=0.001)
        assert report.layout == ("chunked" if settings else "contiguous")
        if "compression" in settings:
            assert report.filters == ("gzip",)
            assert report.cache.nbytes >= 50 * 3 * 100 * 80


def test_a_fix_never_writes_over_its_source(tmp_path: Path) -> None:
    for name, copied in (("packed.h5", "repacked.h5"), ("f.h5", "packed.h5")):
        report = report_of(foreign(tmp_path / name, (200, 3, 58, 48), chunks=(100, 3, 57, 48)))
        assert copied in (report.fix or ())[-1:] + (report.fix or ())[3:4]


def require_fixed(report: DatasetReport, rows: npt.NDArray[np.uint8]) -> None:
    """That the fix, run in the working directory, gives a file without faults that holds these rows."""
    program, *arguments = report.fix or ()
    assert program == "h5pack"
    assert main([*arguments, "--workers", "1", "--quiet", "--order", "sorted"]) == 0
    assert report_of(Path("packed.h5")).faults == ()
    with h5py.File("packed.h5") as after:
        assert np.array_equal(rows.reshape(after["images"].shape), after["images"][()])


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((200, 3, 58, 48), (100, 3, 57, 48)), ((150, 58, 48, 3), (20, 29, 48, 3)), ((400, 64, 64), (99, 32, 64))],
)
def test_the_fix_removes_the_faults(tmp_path: Path, shape: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = foreign(tmp_path / "f.h5", shape, chunks=chunks)
    monkeypatch.chdir(tmp_path)
    with h5py.File(path) as before:
        require_fixed(report_of(path), before["images"][()])


def test_the_fix_of_other_numbers_removes_the_faults(tmp_path: Path) -> None:
    if shutil.which("h5repack") is None:
        pytest.skip("apt-get install hdf5-tools")
    values = np.random.default_rng(0).random((400, 700))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", data=values, chunks=(100, 99))
    fix = report_of(tmp_path / "f.h5").fix or ()
    subprocess.run([*fix[:-1], str(tmp_path / "repacked.h5")], check=True)
    assert report_of(tmp_path / "repacked.h5").faults == ()
    with h5py.File(tmp_path / "repacked.h5") as after:
        assert np.array_equal(after["images"][()], values)


def test_kept_bytes_say_whether_the_loader_decodes_each_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, capacity, fixed in (
        ({"chunks": (120, 3, 16, 16), "compression": "gzip"}, 2**22, True),
        ({"chunks": (50, 3, 64, 63)}, 2**24, True),  # joined and rounded up: 150 rows in three chunks
        ({"chunks": (120, 3, 16, 16), "compression": "gzip"}, 2**20, False),
        ({"chunks": (120, 3, 16, 16), "scaleoffset": 8}, 2**22, False),  # h5pack has no codec for it
        ({"chunks": (9, 3, 64, 64)}, 2**24, None),  # no fault
    ):
        path = foreign(tmp_path / "f.h5", (120, 3, 64, 64), **settings)
        monkeypatch.setattr(info_module, "DECODED_BYTES", capacity)
        report, dataset = report_of(path), h5pack.H5Dataset(path)
        assert (len(report.faults) > 0) == (fixed is not None)
        dataset.engine.chunks.cache.capacity = capacity
        if fixed is not None:
            assert h5pack.H5Loader(dataset, 16).decodes_once == fixed
        assert report.kept_bytes == (dataset.engine.decoded_bytes() if fixed else 0)
        assert ("\n  H5Loader: " in report.to_text(str(path))) == bool(fixed)
        dataset.close()


def test_masks_beside_kept_images_are_described(tmp_path: Path) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 3), tmp_path / "o.h5", **quick(source_kind="pairs", keep="jpeg"))
    report = h5pack.info(tmp_path / "o.h5")
    assert report.pack["fields"] == {"masks": {"kind": "mask", "dtype": "uint8", "shape": [None, None]}}
    assert "masks: mask, uint8" in report.to_text()


def test_statistics_of_a_foreign_file_are_measured(tmp_path: Path) -> None:
    path = foreign(tmp_path / "f.h5", (40, 3, 9, 8))
    stats = h5pack.info(path, stats=True).stats
    with h5py.File(path) as file:
        values = file["images"][()] / 255
    assert np.allclose(stats["channels"]["mean"], values.mean((0, 2, 3)))
    assert np.allclose(stats["channels"]["std"], values.std((0, 2, 3)))
    assert stats["labels"] == {"0": 14, "1": 13, "2": 13}


@pytest.mark.parametrize(
    "images",
    [5, h5py.Empty("u1"), *(np.zeros((count, 0, 3, 3), np.uint8) for count in (0, 4)), np.full((2, 4, 4, 3), np.nan)],
)
def test_images_without_rows_or_pixels_or_with_nan_have_no_statistics(tmp_path: Path, images: Any) -> None:
    report = h5pack.info(hdf5_file(tmp_path / "f.h5", images=images), stats=True)
    assert report.stats["channels"] is None
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize("labels", [5, h5py.Empty("i8")])
def test_labels_without_rows_are_not_counted(tmp_path: Path, labels: Any) -> None:
    path = hdf5_file(tmp_path / "f.h5", images=np.zeros((2, 4, 4, 3), np.uint8), labels=labels)
    assert "labels" not in h5pack.info(path, labels="labels", stats=True).stats


def test_all_kinds_of_datasets_are_described(tmp_path: Path) -> None:
    kinds = {"scalar": 3, "text": "hello", "empty": h5py.Empty("f4"), "strings": ["a", "bc"]}
    with h5py.File(hdf5_file(tmp_path / "f.h5", **kinds), "a") as file:
        file.create_dataset("none", (0, 4), "f4", maxshape=(None, 4))
        layout = h5py.VirtualLayout((2,), "i8")
        layout[:] = h5py.VirtualSource("elsewhere.h5", "x", (2,))
        file.create_virtual_dataset("virtual", layout)
    report = h5pack.info(tmp_path / "f.h5")
    assert {dataset.name: dataset.layout for dataset in report.datasets}["virtual"] == "virtual"
    assert len(report.to_text().splitlines()) > 6
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize("source", [".", "elsewhere.h5", "pipe"])
def test_statistics_of_virtual_images_need_their_sources(tmp_path: Path, source: str) -> None:
    """HDF5 crashes if a dataset refers to itself, waits for a pipe, and reads zeros in place of a missing file."""
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        layout = h5py.VirtualLayout((2, 8, 8, 3), "u1")
        layout[:] = h5py.VirtualSource(source, "images", (2, 8, 8, 3))
        file.create_virtual_dataset("images", layout)
    assert h5pack.info(tmp_path / "f.h5").datasets[0].layout == "virtual"
    with pytest.raises(PackFormatError):
        h5pack.info(tmp_path / "f.h5", stats=True)


def test_a_missing_source_of_a_virtual_dataset_is_a_fault(tmp_path: Path) -> None:
    for day in ("one", "two"):
        h5pack.convert(class_folders(tmp_path / day, {"a": 3}), tmp_path / f"{day}.h5", **quick())
    path = tmp_path / "both.h5"
    h5pack.join([tmp_path / "one.h5", tmp_path / "two.h5"], path, virtual=True)
    assert report_of(path).faults == ()
    (tmp_path / "two.h5").rename(tmp_path / "elsewhere.h5")
    report = report_of(path)
    assert (len(report.faults), report.fix, report.label_fix) == (1, None, None)
    assert "two.h5" in report.faults[0]


def test_statistics_of_images_in_a_pipe_are_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        external = [(str(tmp_path / "pipe"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("images", (2, 8, 8, 3), "u1", external=external)
    for call in (lambda path: h5pack.info(path, stats=True), h5pack.H5Dataset):
        with pytest.raises(PackFormatError) as caught:
            call(tmp_path / "f.h5")
        assert caught.value.dataset == "images"


def test_labels_of_a_pack_are_described(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8)
    kinds = {"none": None, "integers": range(6), "6 columns, uint8": np.eye(6, dtype=np.uint8)}
    for kind, labels in kinds.items():
        path = hdf5_file(tmp_path / "f.h5", images=images, **({} if labels is None else {"labels": labels}))
        h5pack.convert(path, tmp_path / "o.h5", overwrite=True, **quick())
        report = h5pack.info(tmp_path / "o.h5")
        assert report.pack["labels"] == kind
        assert (f"labels   {kind}" in report.to_text().splitlines()) == ("columns" not in report.pack)


@pytest.mark.parametrize(("count", "length", "shown", "lines"), [(10, 10, 10, 2), (1000, 10, 15, 2), (2, 300, 0, 2)])
def test_names_of_classes_take_two_lines(count: int, length: int, shown: int, lines: int) -> None:
    names = [f"{number:0{length}}" for number in range(count)]
    pack: dict[str, Any] = {"complete": True, "format": 1, "version": "0.1", "splits": {}, "classes": names}
    pack |= {"fields": {}, "mean": [], "std": [], "statistics_rows": None, "statistics_split": None, "rejects": 0}
    found = pack_lines(pack)[2:-2]
    text = " ".join(line.strip() for line in found)
    assert (len(found), sum(name in text for name in names)) == (lines, shown)
    assert max(map(len, found)) <= 110
    assert text.endswith(", ...") == (shown < count)


@pytest.mark.parametrize("options", ['{"size": 1e999}', '{"size": NaN}', "[" * 60_000])
def test_stored_options_that_are_not_valid_json_are_text(tmp_path: Path, options: str) -> None:
    h5pack.convert(class_folders(tmp_path / "in", {"x": 2}), tmp_path / "o.h5", **quick())
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file.attrs["h5pack_options"] = options
    report = h5pack.info(tmp_path / "o.h5").to_json()
    assert json.loads(json.dumps(report, allow_nan=False))["pack"]["options"] == options


def test_damaged_metadata_is_one_error(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "in", {"a": 4})
    h5pack.convert(source, tmp_path / "o.h5", **quick())
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        del file["splits"]
        del file["statistics/std"]
        file.attrs["h5pack_format"] = "one"
    with pytest.raises(PackFormatError):
        h5pack.info(tmp_path / "o.h5")
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file.attrs["h5pack_format"] = 2
    assert "format 2 (this h5pack is too old" in h5pack.info(tmp_path / "o.h5").to_text()


@pytest.mark.parametrize("rows", [h5py.Empty("i8"), "0 to 4", [[0, 4, 1]]], ids=["null", "text", "3 columns"])
def test_splits_of_another_form_are_one_error(tmp_path: Path, rows: Any) -> None:
    h5pack.convert(class_folders(tmp_path / "in", {"a": 4}), tmp_path / "o.h5", **quick())
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        del file["splits/rows"]
        file["splits/rows"] = rows
    with pytest.raises(PackFormatError):
        h5pack.info(tmp_path / "o.h5").to_text()
    assert [problem.partition(":")[0] for problem in h5pack.verify(tmp_path / "o.h5").problems] == ["splits/rows"]


def test_a_damaged_field_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "in", {"a": 3}, (20, 20))
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **quick())
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file["fields/x/data"], file["fields/x/offsets"] = np.arange(4), np.array([0, 1, 9, 4])
    with pytest.raises(PackFormatError) as caught:
        h5pack.info(tmp_path / "o.h5")
    assert (caught.value.dataset, tuple(caught.value.rows)) == ("fields/x/offsets", (1,))


@pytest.mark.parametrize(("chunk_rows", "faults"), [(6, 1), (7, 0), (None, 0)])
def test_a_pack_with_much_smaller_chunks_than_by_default_has_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int | None, faults: int
) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (1_500, 64, 64, 3), np.uint8)
    h5pack.convert([(image, 0) for image in images], "pack.h5", num_workers=1, chunk_rows=chunk_rows, order="sorted")
    report = report_of(tmp_path / "pack.h5")
    assert len(report.faults) == faults
    if faults:
        require_fixed(report, images)


def test_a_pack_that_was_compressed_on_purpose_has_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module, "_DEFAULT_CACHE_BYTES", 2**20)
    images = np.random.default_rng(0).integers(0, 8, (9, 256, 256, 3), np.uint8)
    source = [(image, 0) for image in images]
    h5pack.convert(source, tmp_path / "pack.h5", num_workers=1, compression="gzip:1", chunk_rows=8)
    found = report_of(tmp_path / "pack.h5")
    assert (found.filters, found.faults) == (("gzip",), ())
    foreign(tmp_path / "theirs.h5", images.shape, chunks=(8, 256, 256, 3), compression="gzip")
    assert len(report_of(tmp_path / "theirs.h5").faults) == 1


@pytest.mark.parametrize("settings", [{}, {"chunks": (10,), "compression": "gzip"}])
def test_encoded_rows_of_any_length(tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = jpegs(30)
    path = write_encoded(tmp_path / "f.h5", rows, **settings)
    whole = h5pack.info(path, stats=True)
    report = report_of(path)
    assert (report.dtype, report.shape, report.chunks) == ("variable-length uint8", (30,), settings.get("chunks"))
    assert (len(report.faults), report.bytes, report.overhead) == (1, 0, 1.0)
    assert report.stored_bytes > 0
    assert "compression" not in settings or report.cache.nbytes >= 30 * 16
    assert all(part in whole.to_text() for part in ("/images: variable-length uint8 30, ", "  fix: h5pack convert "))
    json.dumps(whole.to_json(), allow_nan=False)
    monkeypatch.chdir(tmp_path)
    require_fixed(report, np.stack([decoded(row) for row in rows]))


def test_other_rows_of_variable_length_have_no_fault(tmp_path: Path) -> None:
    path = write_encoded(tmp_path / "f.h5", [b"some words", b"", b"others"], "captions")
    write_encoded(path, [], "none")
    with h5py.File(path, "r+") as file:
        file.create_dataset("signals", (3,), h5py.vlen_dtype(np.float32))
        file.create_dataset("words", data=["a", "b", "c"])
        file["nothing"] = h5py.Empty("f4")
    found = {dataset.name: dataset for dataset in h5pack.info(path).datasets}
    dtypes = [found[name].dtype for name in ("captions", "signals", "words")]
    assert dtypes == ["variable-length uint8", "variable-length float32", "variable-length str"]
    assert all((dataset.faults, dataset.fix) == ((), None) for dataset in found.values())
    assert "variable-length float32" in h5pack.info(path).to_text()


def test_files_that_open_with_many_ranges_get_a_command(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        images = file.create_dataset("x", (300, 128, 128, 3), "u1", chunks=(1, 128, 128, 3))
        for row in range(300):
            images.id.write_direct_chunk((row, 0, 0, 0), bytes(128 * 128 * 3))
    report = h5pack.info(tmp_path / "a.h5")
    assert len(report.opening) > 2
    assert report.opening_fix[0] == "h5repack"
    assert report.to_json()["opening"] == report.opening
    assert [" ".join(report.opening_fix) in report.to_text(full) for full in (False, True)] == [False, True]
    if shutil.which("h5repack") is None:
        pytest.skip("needs h5repack: apt-get install hdf5-tools")
    subprocess.run([*report.opening_fix[:-1], tmp_path / "b.h5"], check=True)
    assert len(h5pack.info(tmp_path / "b.h5").opening) == 1
    assert h5pack.info(tmp_path / "b.h5").opening_fix is None


@pytest.mark.parametrize("settings", [{"mode": "gray", "layout": "nchw"}, {"keep": "jpeg"}], ids=str)
def test_a_pack_that_opens_with_many_ranges_is_copied_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    h5pack.convert(class_folders(tmp_path / "in", {"x": 5, "y": 6}), "a.h5", **quick(**settings))
    with h5py.File("a.h5", "r+") as file:
        file["other/large"] = np.zeros(2**18)
        for number in range(20):
            file[f"other/{number}"] = number
    fix = h5pack.info("a.h5").opening_fix
    assert main([*fix[1:], "--quiet"]) == 0
    old, new = h5pack.H5Dataset("a.h5"), h5pack.H5Dataset(fix[-1])
    assert (new.filenames, new.targets.tolist()) == (old.filenames, old.targets.tolist())
    assert all(np.array_equal(one.image, other.image) for one, other in zip(old, new, strict=True))
    assert h5pack.info(fix[-1]).opening_fix is None
    with h5py.File("a.h5") as file, h5py.File(fix[-1]) as copy:
        assert {*file} - {*copy} == {"other"}


def test_datasets_behind_links_to_other_files_are_described(tmp_path: Path) -> None:
    foreign(tmp_path / "target.h5", (40, 96, 96, 3), chunks=(40, 8, 8, 3))
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["far/pictures"], file["group"] = (h5py.ExternalLink("target.h5", name) for name in ("images", "/"))
        file["soft"], file["y"] = h5py.SoftLink("/far/pictures"), np.arange(40)
    with h5py.File(tmp_path / "loop.h5", "w") as file:
        file["x"] = h5py.SoftLink("/x")
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file["file"], file["name"] = h5py.ExternalLink("none.h5", "x"), h5py.ExternalLink("target.h5", "none")
        file["loop"] = h5py.ExternalLink("loop.h5", "x")
    report, (target, _) = h5pack.info(tmp_path / "good.h5", labels="y"), h5pack.info(tmp_path / "target.h5").datasets
    assert [one.name for one in report.datasets] == ["y", "far/pictures", "group/images", "group/labels"]
    assert [(one.faults, one.fix) for one in report.datasets[1:3]] == [(target.faults, target.fix)] * 2
    assert {(one.name, one.target, one.found) for one in report.links} == {
        ("far/pictures", "target.h5:images", True), ("group", "target.h5:/", True),
    }  # fmt: skip
    broken = h5pack.info(tmp_path / "bad.h5")
    assert (broken.datasets, [one.found for one in broken.links]) == ((), [False] * 3)
    assert "faults   none" not in broken.to_text()


def test_datasets_in_deep_groups_are_not_opened_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hdf5_file(tmp_path / "f.h5", **{f"{'g/' * depth}x": np.zeros(3) for depth in range(20)})
    names: list[bytes] = []
    original = h5py.h5o.open
    monkeypatch.setattr(h5py.h5o, "visit", None)
    monkeypatch.setattr(h5py.h5o, "open", lambda group, name, **kw: names.append(name) or original(group, name, **kw))
    assert len(h5pack.info(tmp_path / "f.h5").datasets) == 20
    assert b"x" in names
    assert not any(b"g/" in name for name in names)


def test_the_file_of_plain_datasets_is_looked_up_equally_often_for_any_number_of_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = h5py.File.__init__
    monkeypatch.setattr(h5py.File, "__init__", lambda *args, **kw: calls.append(1) or original(*args, **kw))
    for count in (2, 50):
        hdf5_file(tmp_path / f"{count}.h5", **{f"x{number}": np.zeros((3, 4)) for number in range(count)})
    counts = []
    for count in (2, 50):
        calls.clear()
        h5pack.info(tmp_path / f"{count}.h5")
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_datasets_are_opened_equally_often_for_any_number_of_faulty_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = h5py.Dataset.__init__
    monkeypatch.setattr(h5py.Dataset, "__init__", lambda *args, **kw: calls.append(1) or original(*args, **kw))
    counts = []
    for count in (2, 4, 6):
        with h5py.File(tmp_path / f"{count}.h5", "w") as file:
            for number in range(count):
                file.create_dataset(f"g{number}/x", (400, 32, 32, 3), "u1", chunks=(10, 32, 32, 3), compression="gzip")
                file[f"g{number}/n"] = np.arange(400)
        calls.clear()
        report = h5pack.info(tmp_path / f"{count}.h5")
        counts.append(len(calls))
        assert [one.name for one in report.datasets if one.label_fix] == [f"g{number}/x" for number in range(count)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


def test_each_source_of_several_virtual_datasets_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, files = ("a", "b", "c"), [tmp_path / f"{number}.h5" for number in range(4)]
    for file in files:
        hdf5_file(file, **dict.fromkeys(names, np.zeros(2)))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        for name, order in zip(names, ((0, 1, 2), (2, 1, 3), (3, 1)), strict=True):
            layout = h5py.VirtualLayout((2 * len(order),), "f8")
            for place, number in enumerate(order):
                layout[2 * place : 2 * place + 2] = h5py.VirtualSource(files[number].name, name, (2,))
            file.create_virtual_dataset(name, layout)
    opened: list[str] = []
    original = virtual.open_file
    monkeypatch.setattr(virtual, "open_file", lambda path: opened.append(Path(path).name) or original(path))
    assert not any(dataset.faults for dataset in h5pack.info(tmp_path / "v.h5").datasets)
    assert sorted(opened) == ["0.h5", "1.h5", "2.h5", "3.h5"]
    # Each dataset reports its own first missing source.
    for file in files[1:]:
        file.unlink()
    faults = [dataset.faults for dataset in h5pack.info(tmp_path / "v.h5").datasets]
    assert [next(name for name in "0123" if f"source file {name}.h5" in fault) for (fault,) in faults] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize(
    ("parameter", "value"),
    [*(("stats", value) for value in ("no", 1, None, np.ones(1, bool)))]
    + [("labels", value) for value in (0, b"y", ["y"], np.ones(2))],
)
def test_parameters_of_wrong_types_are_refused(tmp_path: Path, parameter: str, value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        h5pack.info(hdf5_file(tmp_path / "f.h5", images=np.zeros((2, 8, 8), np.uint8)), **{parameter: value})
    assert caught.value.parameters[0].startswith(f"{parameter}=")


def test_a_missing_target_of_a_link_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"] = h5py.ExternalLink("none.h5", "x")
    get, tried = h5py.Group.get, []

    def counting(group: h5py.Group, name: str | bytes, *rest: Any, **keywords: Any) -> Any:
        tried.extend([name] if name in ("x", b"x") and not keywords else [])
        return get(group, name, *rest, **keywords)

    monkeypatch.setattr(h5py.Group, "get", counting)
    assert not h5pack.info(tmp_path / "f.h5").links[0].found
    assert tried == [b"x"]


def test_a_second_fix_packs_the_only_field_of_integers_as_labels(tmp_path: Path) -> None:
    path = tmp_path / "lab.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("scans", data=np.zeros((40, 96, 96, 3), np.uint8), chunks=(40, 8, 8, 3))
        file["age"], file["grade"], file["boxes"] = np.zeros(40), np.arange(40) % 3, np.zeros((40, 4), np.int64)
    (one,) = [dataset for dataset in h5pack.info(path).datasets if dataset.fix is not None]
    assert one.fix[6:] == ("--fields", "age,boxes,grade")
    assert one.label_fix[6:] == ("--labels", "grade", "--fields", "age,boxes")
    assert f"{' '.join(one.label_fix)}\n" in one.to_text(str(path))
    for labels in ("age", ""):
        assert [dataset.label_fix for dataset in h5pack.info(path, labels=labels).datasets] == [None] * 4
    with h5py.File(path, "a") as file:
        file["person"] = np.arange(40)
    assert [dataset.label_fix for dataset in h5pack.info(path).datasets] == [None] * 5
    with h5py.File(path, "a") as file:
        file["label"] = np.linspace(0, 1, 40)
    (one,) = [dataset for dataset in h5pack.info(path).datasets if dataset.fix is not None]
    assert one.fix[6:] == ("--fields", "age,boxes,grade,label,person")
    with h5py.File(path, "a") as file:
        file["label"][:] = np.arange(40)
    assert [dataset.label_fix for dataset in h5pack.info(path).datasets] == [None] * 6


def test_the_fix_keeps_labels_and_fields_and_statistics_find_the_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 96, 96), np.uint8)
    path = tmp_path / "lab.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("run")
        group.create_dataset("pictures", data=images, chunks=(40, 3, 8, 8))
        group["category"], group["stage"] = np.arange(40) % 7, np.arange(40) % 3
        group["temperature"] = temperatures = np.linspace(0, 1, 40)
        file["names"], file["short"] = [f"x{row}" for row in range(40)], np.arange(5)
    report = h5pack.info(path, stats=True)
    (fix,) = [dataset.fix for dataset in report.datasets if dataset.fix is not None]
    assert fix[4:] == (
        *("--images", "run/pictures", "--labels", "run/category", "--fields", "names,run/stage,run/temperature"),
        *("--layout", "nchw"),
    )
    # That of `bench` is the same.
    assert convert_command(str(path), find_input(path, tmp_path, BenchSettings()).options) == fix
    given = find_input(path, tmp_path, BenchSettings(labels="run/stage")).options
    assert (given["labels"], given["fields"]) == ("run/stage", "names,run/category,run/temperature")
    assert sum(report.stats["labels"].values()) == 40
    other = h5pack.info(path, labels="run/stage", stats=True)
    (fixed,) = [dataset.fix for dataset in other.datasets if dataset.fix is not None]
    assert fixed[6:10] == ("--labels", "run/stage", "--fields", "names,run/category,run/temperature")
    assert "--labels run/stage\n" in other.to_text()
    assert other.stats["labels"] == {"0": 14, "1": 13, "2": 13}
    for wrong in ("stage", "\udcff"):
        with pytest.raises(PackFormatError) as caught:
            h5pack.info(path, labels=wrong)  # type: ignore[arg-type]
        assert caught.value.parameters == ("labels=NAME",)
    np.testing.assert_allclose(report.stats["channels"]["mean"], images.mean((0, 2, 3)) / 255)
    assert main([*fix[1:2], str(path), str(tmp_path / "p.h5"), *fix[4:], "--quiet", "--workers", "1"]) == 0
    packed = h5pack.H5Dataset(tmp_path / "p.h5", fields=["temperature", "names"])
    rows = [int(name.split("/")[-1]) for name in packed.filenames or ()]
    assert [sample.label for sample in packed] == [row % 7 for row in rows]
    assert [sample.temperature.item() for sample in packed] == temperatures[rows].tolist()
    assert [sample.names for sample in packed] == [f"x{row}" for row in rows]


def test_very_many_datasets_are_listed_in_full_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hdf5_file(tmp_path / "f.h5", **{f"x{number}": np.zeros(3) for number in range(250)})
    report = h5pack.info(path)
    assert [report.to_text(full=full).count("\n/x") for full in (False, True)] == [200, 250]
    assert len(report.datasets) == 250
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    assert "200" in capsys.readouterr().out.rpartition("--full")[2]
