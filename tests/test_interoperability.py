"""Readers that share no code with h5pack find the same pixels, labels and names in a pack."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.format.checksums import row_checksums
from h5pack.pack.file_structure import FileStructure, PackTables, write_structure
from tests.makers import class_folders, expected, quick, split_folders, truncate

INTEROP = Path(__file__).parent / "interop"
FORMAT_PAGE = Path(__file__).parents[1] / "docs" / "format.md"
SIZE = (80, 70)
CLASSES = {"café": 9, "bee": 5, "雪": 8}

PACKS: dict[str, dict[str, Any]] = {
    "rgb": {},
    "nchw-gray": {"layout": "nchw", "mode": "gray"},
    "nchw-compat": {"layout": "nchw", "compat": True},
    "sorted-compat": {"order": "sorted", "chunk_rows": 4, "compat": True},
    "gray-compat": {"mode": "gray", "compat": True},
}


class Found(NamedTuple):
    """What a reader found in a pack."""

    images_shape: tuple[int, ...]
    images_sha256: str
    labels: list[int]
    classes: list[str]
    filenames: list[str]


def pyfive() -> Any:
    return pytest.importorskip("pyfive", minversion="1.1", reason="pyfive is not installed: scripts/install dev")


def text_of(names: Any) -> list[str]:
    return [bytes(name).rstrip(b"\0").decode() for name in names]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("source"), CLASSES, SIZE)


@pytest.fixture(scope="module", params=list(PACKS))
def pack(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / f"{request.param}.h5"
    h5pack.convert(source, path, **quick(**PACKS[request.param]))
    return path


def require(command: str, install: str) -> str:
    found = shutil.which(command)
    if found is None:
        pytest.skip(f"{command} is not installed: {install}")
    return found


def found_in(file: Any) -> Found:
    """What h5py or pyfive finds in a file that it opened."""
    images, labels = file["images"], file["labels"]
    pixels = np.ascontiguousarray(images[:])
    assert pixels.dtype == np.uint8
    return Found(
        tuple(images.shape),
        hashlib.sha256(pixels.tobytes()).hexdigest(),
        labels[:].tolist(),
        text_of(labels.attrs["classes"]),
        text_of(file["filenames"][:]),
    )


def with_h5py(path: Path) -> Found:
    with h5py.File(path) as file:
        return found_in(file)


def with_pyfive(path: Path) -> Found:
    with pyfive().File(str(path)) as file:
        return found_in(file)


def with_h5dump(path: Path) -> Found:
    """Numbers by h5dump's binary output, strings by its text output (1.10 writes no strings in binary)."""
    shape = tuple(map(int, re.search(r"SIMPLE \{ \( ([\d, ]+) \)", h5dump("-H", "-d", "/images", path))[1].split(",")))
    return Found(
        shape,
        hashlib.sha256(h5dump_bytes(path, "/images")).hexdigest(),
        np.frombuffer(h5dump_bytes(path, "/labels"), "<i8").tolist(),
        h5dump_names(h5dump("-a", "/labels/classes", path)),
        h5dump_names(h5dump("-d", "/filenames", path)),
    )


def h5dump(*arguments: str | Path) -> str:
    command = require("h5dump", "sudo apt-get install hdf5-tools")
    done = subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def h5dump_bytes(path: Path, dataset: str) -> bytes:
    out = path.with_suffix(".bin")
    out.unlink(missing_ok=True)
    h5dump("-d", dataset, "-b", "LE", "-o", out, path)
    return out.read_bytes()


def h5dump_names(text: str) -> list[str]:
    """The strings of a text dump; h5dump writes a byte above 127 as the octal digits of its sign-extended value."""
    data = text[text.index("DATA {") :]
    plain = re.sub(rb"\\(\d{11}|\d{3})", lambda match: bytes([int(match[1], 8) & 255]), data.encode())
    return text_of(re.findall(rb'"([^"]*)"', plain))


def with_h5wasm(path: Path) -> Found:
    found = h5wasm(path)
    assert (found["format"], found["complete"]) == (1, 1)
    assert found["images_dtype"] in ("<B", "|B", "B")
    assert found["images_class"] == "IMAGE"
    return Found(tuple(found["images_shape"]), *(found[name] for name in Found._fields[1:]))


def h5wasm(path: Path) -> dict[str, Any]:
    node = require("node", "sudo apt-get install nodejs npm")
    if not (INTEROP / "node_modules" / "h5wasm").is_dir():
        pytest.skip("h5wasm is not installed: npm install --prefix tests/interop --no-package-lock")
    done = subprocess.run([node, INTEROP / "read_pack.mjs", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


READERS = {"h5py": with_h5py, "h5dump": with_h5dump, "h5wasm": with_h5wasm, "pyfive": with_pyfive}

# Of chunked datasets pyfive 1.3 reads only those in files written for HDF5 1.8, which --compat makes.
PACKS_AND_READERS = [
    (pack, reader) for pack in PACKS for reader in READERS if reader != "pyfive" or "compat" in PACKS[pack]
]


@pytest.mark.parametrize(("pack", "reader"), PACKS_AND_READERS, indirect=["pack"])
def test_every_reader_finds_the_pixels_and_labels_of_the_images(pack: Path, source: Path, reader: str) -> None:
    found, options = READERS[reader](pack), PACKS[pack.stem]
    names = [path.relative_to(source).as_posix() for path in source.rglob("*.jpg")]
    assert sorted(found.filenames) == sorted(names)
    assert found.classes == sorted(CLASSES)
    assert [found.classes[label] for label in found.labels] == [name.split("/")[0] for name in found.filenames]
    mode = "L" if "mode" in options else "RGB"
    rows = np.stack([expected(source / name, mode=mode) for name in found.filenames])
    if "layout" in options:
        rows = np.ascontiguousarray(rows.transpose(0, 3, 1, 2))
    assert found.images_shape == rows.shape
    assert found.images_sha256 == hashlib.sha256(rows.tobytes()).hexdigest()


BIG_CLASSES = tuple(f"class-{number:034d}" for number in range(3_000))


@pytest.fixture(scope="module", params=[False, True], ids=["v110", "compat"])
def big_names(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose class names take 120,000 bytes, more than a plain HDF5 attribute may hold."""
    assert {len(name) for name in BIG_CLASSES} == {40}
    path = tmp_path_factory.mktemp("big") / f"{'compat' if request.param else 'v110'}.h5"
    rows = np.zeros((6, 8, 8, 3), np.uint8)
    tables = PackTables(
        labels=np.array([0, 2_999, 1, 2_998, 2, 1_500], np.int64),
        label_names=BIG_CLASSES,
        fields={},
        filenames=[f"{number}.jpg" for number in range(6)],
        splits=[("all", 0, 6)],
        checksums=row_checksums(rows),
        statistics={"mean": [0.0] * 3, "std": [0.0] * 3, "rows": 6, "step": 1, "split": "all"},
    )
    attributes = {"h5pack_version": "0", "h5pack_options": "{}"}
    structure = FileStructure((8, 8, 3), 4, "nhwc", request.param, attributes)
    write_structure(path, structure, 6, tables)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_finds_3000_class_names_of_40_bytes(big_names: Path, reader: str) -> None:
    if reader == "pyfive" and big_names.stem == "v110":
        with pyfive().File(str(big_names)) as file:
            assert tuple(text_of(file["labels"].attrs["classes"])) == BIG_CLASSES
        return
    found = READERS[reader](big_names)
    assert tuple(found.classes) == BIG_CLASSES
    assert found.labels == [0, 2_999, 1, 2_998, 2, 1_500]
    assert found.images_sha256 == hashlib.sha256(bytes(6 * 8 * 8 * 3)).hexdigest()


@pytest.mark.parametrize("split", ["train", "lauf-ü"])
def test_splits_and_rejects_are_read_everywhere(tmp_path: Path, split: str) -> None:
    source = split_folders(tmp_path / "in", {split: {"x": 6, "y": 3}, "zz": {"x": 4}})
    truncate(source / split / "y" / "00001.jpg")
    path = tmp_path / "o.h5"
    h5pack.convert(source, path, **quick(source_kind="splits"))
    with h5py.File(path) as file:
        assert text_of(file["splits/name"][()]) == [split, "zz"]
    assert np.frombuffer(h5dump_bytes(path, "/splits/rows"), "<i8").tolist() == [0, 8, 8, 12]
    assert h5dump_names(h5dump("-d", "/splits/name", path)) == [split, "zz"]
    assert h5dump_names(h5dump("-d", "/rejects/filenames", path)) == [f"{split}/y/00001.jpg"]
    found = h5wasm(path)
    assert (found["split_names"], found["split_rows"]) == ([split, "zz"], [0, 8, 8, 12])


# What follows is written from docs/format.md alone: h5py serves to look the chunks' offsets up, nothing more.


def rules_of_the_format_page(*titles: str) -> dict[str, Any]:
    """The functions in the blocks of code under headings of docs/format.md."""
    rules: dict[str, Any] = {}
    for title in titles:
        section = FORMAT_PAGE.read_text(encoding="utf-8").split(f"\n### {title}\n")[1].split("\n#")[0]
        exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.S)), rules)
    return rules


def column(path: Path, dataset: h5py.Dataset, width: int) -> list[int]:
    """A contiguous dataset of integers, by its offset in the file."""
    data = path.read_bytes()[dataset.id.get_offset() :]
    cells = (data[width * row : width * (row + 1)] for row in range(dataset.shape[0]))
    return [int.from_bytes(cell, "little", signed=width == 8) for cell in cells]


class MinimalReader:
    """Rows by pread, after checking what a reader must check."""

    def __init__(self, path: Path) -> None:
        with h5py.File(path) as file:
            if int(file.attrs["h5pack_format"]) != 1 or int(file.attrs["h5pack_complete"]) != 1:
                raise ValueError("not a finished pack of format 1")
            images = file["images"]
            self.shape, self.chunk_rows = images.shape, images.chunks[0]
            assert images.chunks[1:] == images.shape[1:]
            assert images.dtype == np.uint8
            self.offsets = [0] * -(-self.shape[0] // self.chunk_rows)
            for number in range(images.id.get_num_chunks()):
                chunk = images.id.get_chunk_info(number)
                self.offsets[chunk.chunk_offset[0] // self.chunk_rows] = chunk.byte_offset
            self.checksums = column(path, file["checksums/images"], 4)
            self.labels = column(path, file["labels"], 8)
            self.label_checksums = column(path, file["checksums/labels"], 4)
        self.row_bytes = self.shape[1] * self.shape[2] * self.shape[3]
        self.descriptor = os.open(path, os.O_RDONLY)

    def row(self, row: int) -> bytes:
        chunk, place = divmod(row, self.chunk_rows)
        data = os.pread(self.descriptor, self.row_bytes, self.offsets[chunk] + place * self.row_bytes)
        if zlib.crc32(data) != self.checksums[row]:
            raise ValueError(f"row {row}: checksum differs")
        return data

    def close(self) -> None:
        os.close(self.descriptor)


def test_a_reader_made_from_the_format_page_finds_the_same(pack: Path) -> None:
    found = with_h5py(pack)
    with contextlib.closing(MinimalReader(pack)) as reading:
        rows = b"".join(map(reading.row, range(reading.shape[0])))
        over = -reading.shape[0] % reading.chunk_rows
        used = (reading.chunk_rows - over) * reading.row_bytes
        tail = os.pread(reading.descriptor, over * reading.row_bytes, reading.offsets[-1] + used)
    assert hashlib.sha256(rows).hexdigest() == found.images_sha256
    assert reading.labels == found.labels
    assert [zlib.crc32(label.to_bytes(8, "little", signed=True)) for label in reading.labels] == reading.label_checksums
    assert reading.chunk_rows * reading.row_bytes < 65_536 or not any(offset % 4_096 for offset in reading.offsets)
    assert tail == bytes(over * reading.row_bytes), "rows past N are zero"


@pytest.mark.parametrize(
    ("order", "seed"), [("shuffled", 0), ("shuffled", 12345), ("shuffled", 2**63 - 1), ("sorted", 0)]
)
def test_the_order_of_the_format_page_is_the_order_of_the_rows(tmp_path: Path, order: str, seed: int) -> None:
    counts = {"train": {"x": 31, "y": 22}, "val": {"x": 13, "y": 2}, "test": {"x": 1, "y": 17}}
    source = split_folders(tmp_path / "in", counts, (60, 50))
    for name in ("train/x/00000a.jpg", "test/x/00009.jpg"):
        # Rejected by the first look at its header, so it takes no row.
        (source / name).write_bytes(b"")
    broken = {"train/x/00003.jpg", "train/y/00021.jpg", "train/y/00007.jpg", "val/x/00000.jpg", "test/y/00013.jpg"}
    for name in broken:
        truncate(source / name, 0.9)
    report = h5pack.convert(source, tmp_path / "o.h5", **quick(order=order, seed=seed))
    assert (report.images, report.rejects) == (81, 7)

    rules = rules_of_the_format_page("The shuffle", "Holes")
    names: list[str] = []
    ends = [0]
    for stream, split in enumerate(counts):
        files = [path for path in (source / split).rglob("*.jpg") if path.stat().st_size]
        images = sorted(path.relative_to(source).as_posix() for path in files)
        if order == "shuffled":
            images = [images[position] for position in rules["shuffled"](len(images), seed, stream)]
        packed = [name not in broken for name in images]
        names += [images[position] for position in rules["close_up"](packed, order == "sorted")]
        ends.append(len(names))
    with h5py.File(tmp_path / "o.h5") as file:
        assert text_of(file["filenames"][()]) == names
        assert file["splits/rows"][()].tolist() == [list(pair) for pair in itertools.pairwise(ends)]


@pytest.mark.parametrize("mode", ["rgb", "gray"])
def test_the_statistics_of_the_format_page_are_those_stored(tmp_path: Path, mode: str) -> None:
    source = split_folders(tmp_path / "in", {"train": {"x": 5, "y": 6}, "val": {"x": 3}})
    h5pack.convert(source, tmp_path / "o.h5", **quick(mode=mode))
    rules = rules_of_the_format_page("The formula")
    with h5py.File(tmp_path / "o.h5") as file:
        start, stop = file["splits/rows"][0]
        step = rules["statistics_step"](stop - start)
        assert file["statistics"].attrs["step"] == step
        images = file["images"][start:stop:step]
        assert file["statistics"].attrs["rows"] == len(images)
        stored = np.stack([file["statistics/mean"], file["statistics/std"]], 1).tolist()
        channels = np.moveaxis(images, 3, 0).reshape(images.shape[3], -1).tolist()
        assert stored == [[*rules["mean_and_std"](channel)] for channel in channels]
