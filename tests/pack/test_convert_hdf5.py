"""HDF5 files made by other tools become packs: the same pixels for every layout, the same bytes after every kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import h5pack
from h5pack.cli import main
from h5pack.errors import (
    NoImagesError,
    OptionsError,
    OutputExistsError,
    PackChangedError,
    PackFormatError,
    ReadError,
    RejectedImageError,
    ResumeError,
    SizesDifferError,
    SourceError,
)
from h5pack.format.checksums import row_checksums
from h5pack.pack.conversion import Conversion
from h5pack.pack.writer import join_groups
from tests.crashing import convert_in_child, leftovers, require_resumes, write_steps
from tests.exporter.folders import flip
from tests.makers import flat_folder, hdf5_file, quick, split_folders
from tests.read.encoded_files import encode, write_encoded

ROWS = 60
SHAPE = (ROWS, 24, 20, 3)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
LABELS = np.arange(ROWS) * 7 % 5
NCHW = np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2))


def compact(file: h5py.File) -> None:
    create, space = h5py.h5p.create(h5py.h5p.DATASET_CREATE), h5py.h5s.create_simple((20, *SHAPE[1:]))
    create.set_layout(h5py.h5d.COMPACT)
    h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, create))[...] = PIXELS[:20]


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(SHAPE, np.uint8)
    for number in range(3):
        rows = slice(number * 20, number * 20 + 20)
        file.create_dataset(f"parts/{number}", data=PIXELS[rows], chunks=(7, *SHAPE[1:]))
        layout[rows] = h5py.VirtualSource(".", f"parts/{number}", (20, *SHAPE[1:]))
    file.create_virtual_dataset("x", layout)


def encoded(file: h5py.File) -> None:
    dataset = file.create_dataset("x", (ROWS,), h5py.vlen_dtype(np.uint8))
    for row in range(ROWS):
        dataset[row] = np.frombuffer(encode(PIXELS[row], "PNG"), np.uint8)


def plain(data: npt.NDArray[Any], **settings: Any) -> Callable[[h5py.File], object]:
    return lambda file: file.create_dataset("x", data=data, **settings)


STORED: dict[str, Callable[[h5py.File], object]] = {
    "contiguous": plain(PIXELS),
    "channels first": plain(NCHW),
    "chunks of rows": plain(PIXELS, chunks=(8, *SHAPE[1:])),
    "CelebA recipe": plain(NCHW, chunks=(10, 3, 23, 13)),
    "chunks by h5py": plain(PIXELS, chunks=True),
    "gzip": plain(PIXELS, chunks=(9, *SHAPE[1:]), compression="gzip"),
    "shuffle and lzf": plain(PIXELS, chunks=(9, *SHAPE[1:]), compression="lzf", shuffle=True),
    "cut and gzip": plain(PIXELS, chunks=(9, 11, 20, 3), compression="gzip", fletcher32=True),
    "big-endian float": plain((PIXELS / 255).astype(">f4"), chunks=(9, *SHAPE[1:])),
    "16 bits": plain(PIXELS.astype(">u2") * 256),
    "64 bits": plain(PIXELS.astype(np.int64), chunks=True),
    "compact": compact,
    "virtual": virtual,
    "encoded": encoded,
}


def write(path: Path, make: Callable[[h5py.File], object], **settings: Any) -> Path:
    with h5py.File(path, "w", **settings) as file:
        make(file)
        file["y"] = LABELS[: len(file["x"])]
    return path


def rows_of(file: h5py.File) -> list[int]:
    """The source's row of each row of a pack."""
    return [int(name.decode().rpartition("/")[2]) for name in file["filenames"]]


@pytest.mark.parametrize("number", range(len(STORED)), ids=STORED)
def test_pixels_and_labels_are_the_sources(tmp_path: Path, number: int) -> None:
    """Storages take turns with 1 or 2 workers, and with the order and layout; those of all rows give the same bytes."""
    stored = [*STORED][number]
    source = write(tmp_path / "f.h5", STORED[stored], libver="earliest" if stored == "gzip" else None)
    order, layout = ("sorted", "nchw") if number // 2 % 2 else ("shuffled", "nhwc")
    options = quick(order=order, num_workers=1 + number % 2, layout=layout, chunk_rows=11, images="x")
    report = h5pack.convert(source, tmp_path / "o.h5", **options)
    with h5py.File(tmp_path / "o.h5") as file:
        rows = rows_of(file)
        assert report.images == len(rows) == (20 if stored == "compact" else ROWS)
        assert sorted(rows) == list(range(len(rows)))
        assert (rows == sorted(rows)) == (order == "sorted")
        assert np.array_equal(file["images"][()], (NCHW if layout == "nchw" else PIXELS)[rows])
        assert np.array_equal(file["labels"][()], LABELS[rows])
        assert file["images"].chunks[0] == 11
    assert h5pack.verify(tmp_path / "o.h5").ok
    assert leftovers(tmp_path) == {"f.h5", "o.h5"}
    if stored != "compact":
        write(tmp_path / "f.h5", STORED["contiguous"])
        h5pack.convert(tmp_path / "f.h5", tmp_path / "same.h5", **options)
        assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "same.h5").read_bytes()


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_large_rows_that_lie_apart(tmp_path: Path, io: str) -> None:
    """Rows of many pages, written past the page cache wherever they go."""
    pixels = np.random.default_rng(1).integers(0, 256, (50, 150, 171, 3), np.uint8)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=pixels, chunks=(20, 150, 171, 3), compression="lzf")
    h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick(io=io, chunk_rows=7))
    with h5py.File(tmp_path / "o.h5") as file:
        assert np.array_equal(file["images"][()], pixels[rows_of(file)])
    assert h5pack.verify(tmp_path / "o.h5").ok


def test_a_pack_becomes_another_pack(tmp_path: Path) -> None:
    root = split_folders(tmp_path / "source", {"train": {"x": 30, "y": 20}, "val": {"x": 9, "y": 8}}, (30, 28))
    a, b, c, d = (tmp_path / f"{name}.h5" for name in "abcd")
    h5pack.convert(root, a, **quick(compression="gzip"))
    with h5py.File(a, "a") as file:
        file["fields/weight"] = np.arange(67) / 3
        file["checksums/fields/weight"] = row_checksums(file["fields/weight"][()])
    settings = quick(layout="nchw", seed=3, chunk_rows=5, size=(15, 14))
    h5pack.convert(a, b, **settings)
    h5pack.convert(a, c, **quick(mode="gray", order="sorted"))
    h5pack.convert(root, d, **settings)

    def by_name(path: Path, *datasets: str) -> list[Any]:
        with h5py.File(path) as file:
            names = file["filenames"][()].tolist()
            columns = [dict(zip(names, file[name][()].tolist(), strict=True)) for name in datasets]
            tables = ("splits/name", "splits/rows")
            return [*columns, *(file[name][()].tolist() for name in tables), file["labels"].attrs["classes"].tolist()]

    assert by_name(b, "images", "labels") == by_name(d, "images", "labels")
    weight = "fields/weight"
    assert by_name(b, weight) == by_name(c, weight) == by_name(a, weight)
    with h5py.File(a) as file, h5py.File(c) as other:
        assert np.array_equal(other["filenames"][()], file["filenames"][()]), "sorted is the source's order"
        assert other["images"].shape[1:] == (30, 28, 1)


def test_a_field_of_a_pack_that_is_named_like_labels_stays_a_field(tmp_path: Path) -> None:
    flat_folder(tmp_path, 4)
    (tmp_path / "m.csv").write_text("path,label\n" + "".join(f"{number:05d}.jpg,{number / 2}\n" for number in range(4)))
    h5pack.convert(tmp_path / "m.csv", tmp_path / "a.h5", **quick(field_columns="label", order="sorted"))
    h5pack.convert(tmp_path / "a.h5", tmp_path / "b.h5", **quick(order="sorted"))
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name) as file:
            assert "labels" not in file
            assert file["fields/label"][()].tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize(
    ("scale", "given", "options"),
    [(1, {}, {"layout": "nchw"}), (1, {}, {"mode": "gray"}), (1 / 255, {}, {}),
     (np.full(1, 4, np.int16), {"value_range": (0, 1020)}, {"size": 16})],
)  # fmt: skip
def test_fields_may_hold_images(tmp_path: Path, scale: Any, given: dict[str, Any], options: dict[str, Any]) -> None:
    path = hdf5_file(tmp_path / "f.h5", left=NCHW[:9] * scale, right=NCHW[8::-1] * scale, other=NCHW[:9] // 2)
    keywords = quick(images="left", fields=("right", "other"), order="sorted", **given, **options)
    h5pack.convert(path, tmp_path / "o.h5", **keywords)
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["right", "other"])
    assert dataset.kinds == {"right": "image", "other": "image" if scale == 1 else "array"}
    for row in range(9):
        assert np.array_equal(dataset[row].right, dataset[8 - row].image)
    h5pack.convert(tmp_path / "o.h5", tmp_path / "again.h5", **quick(order="sorted", **options))
    assert h5pack.H5Dataset(tmp_path / "again.h5", fields=["right"])[3].right.equal(dataset[3].right)


def test_encoded_images_of_any_size(tmp_path: Path) -> None:
    """Rows of a variable length are as good as files: sizes, rejects, and --size."""
    folder = flat_folder(tmp_path / "source", 9, (40, 30))
    # The first row is bad, too: it cannot say what size the others have.
    (folder / "!.jpg").write_bytes(b"not an image either")
    Image.new("RGB", (50, 20), "red").save(folder / "00009.jpg")
    (folder / "00010.jpg").write_bytes((folder / "00000.jpg").read_bytes()[:700])
    (folder / "00011.jpg").write_bytes(b"")
    (folder / "00012.jpg").write_bytes(b"no image")
    write_encoded(tmp_path / "f.h5", [path.read_bytes() for path in sorted(folder.iterdir())], "jpegs", chunks=(4,))
    with pytest.raises(SizesDifferError, match=r"20x50 .*jpegs/00000010"):
        h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick())
    for source, out in ((tmp_path / "f.h5", "o.h5"), (folder, "p.h5")):
        report = h5pack.convert(source, tmp_path / out, **quick(size=(16, 16), order="sorted", num_workers=2))
        assert (report.images, report.rejects) == (10, 4)
    with h5py.File(tmp_path / "o.h5") as one, h5py.File(tmp_path / "p.h5") as other:
        assert np.array_equal(one["images"][()], other["images"][()])
        assert one["rejects/reasons"][()].tolist() == other["rejects/reasons"][()].tolist()
    with pytest.raises(OptionsError, match="encoded"):
        h5pack.convert(tmp_path / "f.h5", tmp_path / "q.h5", **quick(value_range=(0, 1)))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"keep": "jpeg"}])
def test_if_all_values_are_out_of_range_the_error_names_value_range(tmp_path: Path, options: dict[str, Any]) -> None:
    source = hdf5_file(tmp_path / "f.h5", x=np.full((3, 9, 9), -2.0))
    with pytest.raises(NoImagesError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", **quick(**options))
    assert caught.value.parameters == ("value_range",)


def test_killed_at_every_step_and_resumed(tmp_path: Path) -> None:
    source = write(tmp_path / "f.h5", STORED["cut and gzip"])
    require_resumes(source, tmp_path / "o.h5", quick(chunk_rows=11), write_steps)
    assert leftovers(tmp_path) == {"f.h5", "o.h5"}


def interrupted(source: Path, out: Path) -> None:
    """Kill a conversion just before its journal says that all rows are written."""
    changes = convert_in_child(source, out, quick(overwrite=True), kill_at=None)
    out.unlink()
    convert_in_child(source, out, quick(), kill_at=changes.index("fsync written.bin.tmp"))
    assert not out.exists()


def test_another_source_is_not_resumed(tmp_path: Path) -> None:
    source, out = write(tmp_path / "f.h5", STORED["gzip"]), tmp_path / "o.h5"
    interrupted(source, out)
    with pytest.raises(ResumeError) as caught:
        h5pack.convert(source, out, **quick(resume=True, value_range=(0, 200)))
    assert "value_range='0.0:200.0'" in caught.value.parameters
    write(tmp_path / "f.h5", STORED["gzip"])
    with pytest.raises(ResumeError, match=r"f\.h5"):
        h5pack.convert(source, out, **quick(resume=True))


def test_another_file_under_a_virtual_source_is_not_resumed(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout(SHAPE, np.uint8)
    for number in range(2):
        rows = slice(number * 30, number * 30 + 30)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = PIXELS[rows]
        layout[rows] = h5py.VirtualSource(f"{number}.h5", "x", (30, *SHAPE[1:]))
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout)
    interrupted(tmp_path / "v.h5", tmp_path / "o.h5")
    with h5py.File(tmp_path / "1.h5", "a") as file:
        file["x"][3] = 0
    with pytest.raises(ResumeError, match=r"v\.h5"):
        h5pack.convert(tmp_path / "v.h5", tmp_path / "o.h5", **quick(resume=True))


def test_the_source_is_no_output(tmp_path: Path) -> None:
    source = write(tmp_path / "f.h5", STORED["gzip"])
    (tmp_path / "link.h5").symlink_to(source)
    for out in ("f.h5", "link.h5"):
        with pytest.raises(OptionsError):
            h5pack.convert(source, tmp_path / out, **quick(overwrite=True))
    h5pack.convert(source, tmp_path / "o.h5", **quick())
    assert h5pack.convert(source, tmp_path / "o.h5", **quick(resume=True)).already_complete
    with pytest.raises(OutputExistsError):
        h5pack.convert(source, tmp_path / "o.h5", **quick(resume=True, labels=""))


def partial_rows(path: str) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout((ROWS, 12, 20, 3), np.uint8)
    layout[:] = h5py.VirtualSource(path, "x", SHAPE)[:, :12]
    return layout


def whole_rows(path: str) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout(SHAPE, np.uint8)
    layout[:30] = h5py.VirtualSource(path, "x", SHAPE)[30:]
    return layout


OTHER_FILES: dict[str, Callable[[h5py.File], object]] = {
    "virtual": lambda file: file.create_virtual_dataset("images", whole_rows("other.h5")),
    "parts of rows": lambda file: file.create_virtual_dataset("images", partial_rows("other.h5")),
    "link": lambda file: file.update({"images": h5py.ExternalLink("other.h5", "x")}),
    "link to encoded images": lambda file: file.update({"images": h5py.ExternalLink("other.h5", "png")}),
    "external storage": lambda file: file.create_dataset(
        "images", SHAPE, np.uint8, external=[(file.filename.replace("f.h5", "other.h5"), 4096, PIXELS.nbytes)]
    ),
    "labels": lambda file: file.update({"images": PIXELS, "labels": h5py.ExternalLink("other.h5", "y")}),
    "a field": lambda file: file.update({"images": PIXELS, "z": h5py.ExternalLink("other.h5", "y")}),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_with_values_of_the_source_is_no_output(tmp_path: Path, kind: str) -> None:
    other = write(tmp_path / "other.h5", plain(PIXELS))
    with h5py.File(other, "a") as file:
        file["y"][...] = np.arange(ROWS)
        dataset = file.create_dataset("png", (ROWS,), h5py.vlen_dtype(np.uint8))
        for row in range(ROWS):
            dataset[row] = np.frombuffer(encode(PIXELS[row], "PNG"), np.uint8)
    before = other.read_bytes()
    with h5py.File(tmp_path / "f.h5", "w") as file:
        OTHER_FILES[kind](file)
    fields = "z" if kind == "a field" else ()
    with pytest.raises(OptionsError) as error:
        h5pack.convert(tmp_path / "f.h5", other, **quick(overwrite=True, fields=fields))
    assert error.value.path == str(other)
    assert leftovers(tmp_path) == {"f.h5", "other.h5"}
    assert other.read_bytes() == before
    h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick(fields=fields))


def test_damaged_rows_are_rejects(tmp_path: Path) -> None:
    source = write(tmp_path / "f.h5", STORED["gzip"])
    with h5py.File(source) as file, source.open("r+b") as stream:
        stream.seek(file["x"].id.get_chunk_info(2).byte_offset + 30)
        stream.write(bytes(60))
    h5pack.convert(source, tmp_path / "o.h5", **quick(num_workers=2, order="sorted"))
    with h5py.File(tmp_path / "o.h5") as file:
        assert np.array_equal(file["images"][()], np.delete(PIXELS, range(18, 27), 0))
        assert {name.decode() for name in file["rejects/filenames"]} == {f"x/{row:08d}" for row in range(18, 27)}
        assert len(set(file["rejects/reasons"][()].tolist())) == 1
    with pytest.raises(RejectedImageError, match=r"x/000000\d\d"):
        h5pack.convert(source, tmp_path / "p.h5", **quick(strict=True))


def test_rows_of_a_pack_that_differ_from_their_checksums_are_rejects(tmp_path: Path) -> None:
    h5pack.convert(flat_folder(tmp_path / "source", 30), tmp_path / "b.h5", **quick())
    with h5py.File(tmp_path / "b.h5") as file:
        place = file["images"].id.get_chunk_info(0).byte_offset
        name = file["filenames"][0].decode()
    flip(tmp_path / "b.h5", place + 5)
    report = h5pack.convert(tmp_path / "b.h5", tmp_path / "c.h5", **quick())
    assert (report.images, report.rejects) == (29, 1)
    assert (tmp_path / "c.h5.rejects.csv").read_text().splitlines()[1].startswith(name)


def test_each_chunk_is_read_once(tmp_path: Path) -> None:
    source = write(tmp_path / "f.h5", STORED["cut and gzip"])
    with Conversion(source, tmp_path / "o.h5", **quick(num_workers=1)) as conversion:
        conversion.run()
        read = conversion.plan().catalog.reader.engine.snapshot().bytes_read  # type: ignore[attr-defined]
    with h5py.File(source) as file:
        stored = file["x"].id.get_storage_size()
    assert read == stored


@pytest.mark.parametrize("most", [1, 4, 10, 100])
def test_shares_are_whole_groups(most: int) -> None:
    random = np.random.default_rng(most)
    rows = np.sort(random.choice(1_000, 200, replace=False))
    groups = random.integers(0, 40, 200)
    group_of = dict(zip(rows.tolist(), groups.tolist(), strict=True))
    shares = [share.tolist() for share in join_groups(rows, groups, most)]
    assert sorted(row for share in shares for row in share) == rows.tolist()
    seen: set[int] = set()
    for share in shares:
        own = {group_of[row] for row in share}
        assert share == sorted(share)
        assert not own & seen
        assert len(share) <= most or len(own) == 1
        seen |= own
    assert [*join_groups(rows[:0], groups[:0], most)] == []


def test_the_options_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "f.h5", STORED["CelebA recipe"])
    arguments = ["convert", str(source), str(tmp_path / "o.h5"), "--dry-run"]
    assert main(arguments) == 0
    assert "images 'x', labels 'y'" in capsys.readouterr().out
    assert main([*arguments, "--json", "--no-labels", "--channel-axis", "first", "--value-range", "-1:200"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["kind"], plan["labels"], plan["shape"]) == ("hdf5", "none", [60, 24, 20, 3])
    assert plan["options"]["value_range"] == [-1.0, 200.0]
    for option, value, code in (("--include", "*.png", 1), ("--value-range", "7", 2)):
        assert main([*arguments, option, value]) == code
        assert option in capsys.readouterr().err


@pytest.mark.parametrize("stored", ["contiguous", "encoded"])
@pytest.mark.parametrize(
    ("failure", "parameters"),
    [
        (ReadError.at("f.h5", "no disk", dataset="x", rows=[3]), ("resume=True",)),
        (PackFormatError.at("f.h5", "no file", dataset="x", rows=[3]), ("resume=True",)),
        (PackChangedError.at("f.h5", "replaced", dataset="x", rows=[3]), ("overwrite=True",)),
    ],
)
def test_a_failing_file_stops_the_conversion_with_advice_on_how_to_continue(
    stored: str, failure: Exception, parameters: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        STORED[stored](file)
    for reading in ("Engine.read", "Engine.read_bytes"):
        monkeypatch.setattr(f"h5pack.read.engine.{reading}", Mock(side_effect=failure))
    monkeypatch.setattr("h5pack.read.hdf5_reader.H5Reader.open", Mock(side_effect=failure))
    with pytest.raises(SourceError) as caught:
        h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick())
    error = caught.value
    assert (error.path, error.dataset, error.rows, error.parameters) == ("f.h5", "x", (3,), parameters)
