"""The survey: headers, rejects, fingerprints, and a storage that fails."""

from __future__ import annotations

import errno
import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from h5pack.errors import SourceError
from h5pack.images.headers import DecodePath
from h5pack.pack.options import MAX_PIXELS, ConvertOptions
from h5pack.pack.survey import Survey, survey
from h5pack.sources.catalog import Catalog, NameTable, one_split
from h5pack.sources.map_style import map_style_catalog
from h5pack.sources.reader import FileReader
from h5pack.system.processes import open_executor
from tests.makers import flat_folder, pixels, save


def catalog_of(folder: Path, names: list[str] | None = None, reader: FileReader | None = None) -> Catalog:
    names = sorted(os.listdir(folder)) if names is None else names
    return Catalog("flat", reader or FileReader(str(folder)), NameTable.of(names), *one_split(len(names)))


def surveyed(catalog: Catalog, workers: int = 1, max_pixels: int = MAX_PIXELS, method: str | None = "fork") -> Survey:
    done: list[int] = []
    with open_executor(workers, method, catalog.reader) as executor:
        result = survey(catalog, executor, 4, ConvertOptions(max_pixels=max_pixels), done.append)
    assert sum(done) == len(catalog)
    return result


def mixed_folder(root: Path) -> list[str]:
    flat_folder(root, 40)
    save(root / "wide.jpg", 1, (30, 70), subsampling=0)
    save(root / "b.png", 2, (5, 6))
    exif = Image.Exif()
    exif[0x0112] = 6
    save(root / "turned.jpg", 3, (10, 12), exif=exif)
    (root / "zero.jpg").write_bytes(b"")
    (root / "text.jpg").write_text("no image")
    (root / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(root / "pipe.jpg")
    (root / "folder.jpg").mkdir()
    os.rename(save(root / "x.jpg"), os.fsencode(root) + b"/bad\xff.jpg")
    return [*sorted(os.listdir(root)), "missing.jpg", "folder.jpg/x.jpg", "b.png/x.jpg", "n" * 300 + ".jpg"]


@pytest.mark.parametrize("workers", [1, 2])
def test_sizes_kinds_and_reasons(tmp_path: Path, workers: int) -> None:
    names = mixed_folder(tmp_path)
    result = surveyed(catalog_of(tmp_path, names), workers)
    assert {names[index]: reason for index, reason in result.reasons.items()} == {
        "zero.jpg": "the image is empty (0 bytes)",
        "text.jpg": "not an image, or of an unknown format",
        "loop.jpg": "a loop of symbolic links",
        "pipe.jpg": "not a regular file",
        "folder.jpg": "not a regular file",
        "missing.jpg": "file not found",
        "folder.jpg/x.jpg": "file not found",
        "b.png/x.jpg": "file not found",
        "n" * 300 + ".jpg": "its name is too long",
    }
    headers = np.stack([result.heights, result.widths, result.decode_paths], 1)
    found = {name: tuple(header) for name, header in zip(names, headers.tolist(), strict=True)}
    assert found["00007.jpg"] == found["bad\udcff.jpg"] == (20, 14, DecodePath.JPEG_420)
    assert found["wide.jpg"] == (30, 70, DecodePath.JPEG_444)
    assert found["b.png"] == (5, 6, DecodePath.PILLOW)
    assert found["turned.jpg"] == (12, 10, DecodePath.PILLOW)
    assert all(found[names[index]] == (0, 0, 0) for index in result.reasons)
    assert result.labels is None


def test_bombs_are_rejected_before_they_are_decoded(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg", 0, (20, 20))
    save(tmp_path / "b.png", 0, (20, 21))
    save(tmp_path / "c.bmp", 0, (21, 20))
    bomb = "decompression bomb: {} is more than 400 pixels"
    result = surveyed(catalog_of(tmp_path), max_pixels=400)
    assert result.reasons == {1: bomb.format("20x21"), 2: bomb.format("21x20")}


@dataclass(frozen=True)
class FailingReader(FileReader):
    """A storage that fails for one file, at its first or at a later read."""

    number: int = errno.EIO
    late: bool = False

    def head(self, name: str, head_bytes: int = 2_048) -> tuple[bytes, int, int]:
        if name == "00003.jpg" and not self.late:
            raise OSError(self.number, os.strerror(self.number), name)
        data, size, modified = super().head(name, head_bytes)
        return (b"\0" if name == "00003.jpg" else data), size, modified

    def open(self, name: str) -> Any:
        raise OSError(self.number, os.strerror(self.number), name)


@pytest.mark.parametrize(
    ("number", "late"),
    [
        *((errno.EIO, False), (errno.EIO, True), (errno.ESTALE, False), (errno.EMFILE, True)),
        *((errno.ENOENT, False), (errno.ENOENT, True), (errno.EPERM, True)),
    ],
)
def test_failing_storage_stops_the_survey_but_not_an_unreadable_file(tmp_path: Path, number: int, late: bool) -> None:
    catalog = catalog_of(flat_folder(tmp_path, 6), reader=FailingReader(str(tmp_path), number, late))
    if number in (errno.ENOENT, errno.EPERM):
        reason = "file not found" if number == errno.ENOENT else "no permission to read it"
        assert surveyed(catalog).reasons == {3: reason}
    else:
        with pytest.raises(SourceError) as caught:
            surveyed(catalog, workers=2 if number == errno.EIO else 1)
        assert caught.value.path == "00003.jpg"


def test_a_file_without_permission_is_rejected() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "a.jpg")
        os.chmod(folder, 0o755)
        path.chmod(0)

        def unprivileged() -> None:
            # Root may read everything.
            if not os.geteuid():
                os.setuid(65534)
            reasons = surveyed(catalog_of(Path(folder))).reasons
            os._exit(42 if reasons == {0: "no permission to read it"} else 1)

        child = multiprocessing.get_context("fork").Process(target=unprivileged)
        child.start()
        child.join()
    assert child.exitcode == 42


def test_fingerprints_show_a_change(tmp_path: Path) -> None:
    flat_folder(tmp_path, 5)
    assert len(surveyed(catalog_of(tmp_path, [])).heights) == 0
    catalog = catalog_of(tmp_path)
    before = surveyed(catalog).fingerprints
    assert len(set(before.tolist())) == 5
    assert np.array_equal(surveyed(catalog, workers=2).fingerprints, before)
    os.utime(tmp_path / "00000.jpg", ns=(0, 1))
    kept = (tmp_path / "00001.jpg").stat()
    (tmp_path / "00001.jpg").write_bytes((tmp_path / "00001.jpg").read_bytes() + b"\0")
    os.utime(tmp_path / "00001.jpg", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    os.replace(tmp_path / "00002.jpg", tmp_path / "moved")
    (tmp_path / "00002.jpg").symlink_to("moved")
    after = surveyed(catalog).fingerprints
    assert (after != before).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(("profile_bytes", "kind"), [(40_000, DecodePath.JPEG_420), (150_000, DecodePath.PILLOW)])
def test_a_header_that_lies_far_behind_the_start(tmp_path: Path, profile_bytes: int, kind: DecodePath) -> None:
    save(tmp_path / "a.jpg", 0, (9, 8), icc_profile=bytes(profile_bytes))
    result = surveyed(catalog_of(tmp_path))
    assert (result.heights[0], result.widths[0], result.decode_paths[0]) == (9, 8, kind)


class Samples:
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.samples[index] is None:
            raise LookupError("no such sample")
        return self.samples[index]


IMAGE = pixels(0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_is_asked_for_its_labels(workers: int) -> None:
    samples = Samples((IMAGE, 3), None, (Image.fromarray(IMAGE), np.int32(-1)), (IMAGE[:, :, 0], True), (IMAGE, 2**40))
    result = surveyed(map_style_catalog(samples), workers)
    assert result.reasons == {1: "the dataset raised LookupError: no such sample"}
    np.testing.assert_array_equal(result.labels, np.array([3, 0, -1, 1, 2**40]), strict=True)
    assert result.heights.tolist() == [20, 0, 20, 20, 20]


def test_a_dataset_with_tables_of_labels_and_one_without_any() -> None:
    tables = surveyed(map_style_catalog(Samples(None, (IMAGE, [0, 255]), (IMAGE, np.array([1, 2])))))
    np.testing.assert_array_equal(tables.labels, np.array([[0, 0], [0, 255], [1, 2]], np.uint8), strict=True)
    assert surveyed(map_style_catalog(Samples(IMAGE, IMAGE))).labels is None
    assert surveyed(map_style_catalog(Samples(None, None))).labels is None


@pytest.mark.parametrize(
    ("samples", "wrong"),
    [
        (((IMAGE, 1), IMAGE), 1), ((IMAGE, (IMAGE, 1)), 0), (((IMAGE, [1, 2]), (IMAGE, [1, 2, 3])), 1),
        (((IMAGE, 1), (IMAGE, [1])), 1),
    ],
)  # fmt: skip
def test_labels_that_differ_in_shape_are_an_error(samples: tuple[Any, ...], wrong: int) -> None:
    with pytest.raises(SourceError) as caught:
        surveyed(map_style_catalog(Samples(*samples)))
    assert caught.value.rows == (wrong,)
