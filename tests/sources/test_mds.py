"""MosaicML's shards as a source: the same images, labels and splits, and one error for damaged shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import SourceError
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.mds import is_mds
from tests.makers import pixels, quick
from tests.read.encoded_files import encode

COLUMNS = {"caption": "str", "image": "jpeg", "label": "int", "score": "float32"}
FIXED = {"int": 8, "float32": 4}
SAMPLES = [
    {"caption": f"text {n} é", "image": encode(pixels(n, (20 + n, 14))), "label": n % 3, "score": n / 4}
    for n in range(11)
]


def value(encoding: str, one: Any) -> bytes:
    """A value as MDS stores it."""
    if encoding in FIXED:
        return np.array(one, {"int": "<i8"}.get(encoding, "<f4")).tobytes()
    return one.encode() if isinstance(one, str) else bytes(one)


def write_mds(
    folder: Path, samples: Sequence[dict[str, Any]], columns: dict[str, str] = COLUMNS, per_shard: int = 4
) -> Path:
    """Write shards as MosaicML Streaming's MDSWriter does, with a description between the offsets and the samples."""
    folder.mkdir(parents=True)
    described = []
    for first in range(0, len(samples), per_shard):
        part, between = samples[first : first + per_shard], b"{...}"
        rows = []
        for sample in part:
            values = [value(encoding, sample[name]) for name, encoding in columns.items()]
            sizes = [len(one) for one, encoding in zip(values, columns.values(), strict=True) if encoding not in FIXED]
            rows.append(np.array(sizes, "<u4").tobytes() + b"".join(values))
        begin = 4 * (len(part) + 2) + len(between)
        offsets = np.cumsum([begin, *map(len, rows)]).astype("<u4")
        name = f"shard.{first // per_shard:05d}.mds"
        head = np.array([len(part)], "<u4").tobytes() + offsets.tobytes() + between
        (folder / name).write_bytes(head + b"".join(rows))
        described.append({
            "column_encodings": list(columns.values()), "column_names": list(columns),
            "column_sizes": [FIXED.get(encoding) for encoding in columns.values()], "compression": None,
            "format": "mds", "hashes": [], "raw_data": {"basename": name, "bytes": 0, "hashes": {}},
            "samples": len(part), "version": 2, "zip_data": None,
        })  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"shards": described, "version": 2}))
    return folder


def test_shards_become_the_same_images_labels_and_fields(tmp_path: Path) -> None:
    write_mds(tmp_path / "m" / "train", SAMPLES[:7])
    write_mds(tmp_path / "m" / "val", SAMPLES[7:])
    h5pack.convert(tmp_path / "m", tmp_path / "k.h5", **quick(keep="jpeg", order="sorted", field_columns=["score"]))
    dataset = h5pack.H5Dataset(tmp_path / "k.h5", fields=["score"])
    assert dataset.splits == {"train": range(7), "val": range(7, 11)}
    assert dataset.engine.read_bytes(dataset.names[0], np.arange(11)) == [sample["image"] for sample in SAMPLES]
    assert dataset.targets.tolist() == [sample["label"] for sample in SAMPLES]
    assert [float(sample.score) for sample in dataset[:]] == [sample["score"] for sample in SAMPLES]
    assert (dataset.filenames[6], dataset.filenames[7]) == ("train/shard.00001/00000002", "val/shard.00000/00000000")


def test_hidden_folders_of_shards_are_left_out(tmp_path: Path) -> None:
    write_mds(tmp_path / "m" / "train", SAMPLES[:3])
    write_mds(tmp_path / "m" / ".cache", SAMPLES[:4])
    assert len(open_source(tmp_path / "m", SourceOptions())) == 3


def test_texts_become_classes_and_other_columns_are_named(tmp_path: Path) -> None:
    columns = {"img": "bytes", "kind": "str", "meta": "json", "object": "pkl"}
    samples = [{"img": SAMPLES[n]["image"], "kind": "ab"[n % 2], "meta": "{}", "object": "no"} for n in range(4)]
    catalog = open_source(write_mds(tmp_path / "m", samples, columns), SourceOptions())
    assert (catalog.kind, len(catalog), catalog.split_names) == ("mds", 4, ("all",))
    assert any("meta" in note.text and "object" in note.text for note in catalog.notes)
    named = {"img": "bytes", "label": "json", "split": "pkl"}
    samples = [{"img": SAMPLES[n]["image"], "label": "{}", "split": "no"} for n in range(4)]
    unlabeled = open_source(write_mds(tmp_path / "n", samples, named), SourceOptions())
    assert (unlabeled.labels, unlabeled.split_names) == (None, ("all",))
    h5pack.convert(tmp_path / "m", tmp_path / "k.h5", **quick(keep="jpeg", label_columns=["kind"]))
    assert h5pack.H5Dataset(tmp_path / "k.h5").classes == ("a", "b")
    with pytest.raises(SourceError):
        h5pack.convert(tmp_path / "m", tmp_path / "o.h5", **quick(label_columns=["object"]))
    assert not (tmp_path / "o.h5").exists()


def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the index."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index["shards"][1])
        (folder / "index.json").write_text(json.dumps(index))

    return edit


def overwritten(offset: int, data: bytes) -> Callable[[Path], None]:
    """Change the second shard."""

    def edit(folder: Path) -> None:
        with (folder / "shard.00001.mds").open("r+b") as stream:
            stream.seek(offset)
            stream.write(data)

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "shard.00001.mds").unlink(),
        lambda folder: (folder / "shard.00001.mds").write_bytes((folder / "shard.00001.mds").read_bytes()[:-9]),
        lambda folder: (folder / "shard.00001.mds").write_bytes(b"\4\0"),
        lambda folder: ((folder / "shard.00001.mds").unlink(), os.mkfifo(folder / "shard.00001.mds")),
        overwritten(0, b"\5"),
        overwritten(4, b"\xff\xff\xff\xff"),
        overwritten(8, b"\0\0\0\0"),
        overwritten(29, b"\xff\xff"),  # the size of the first text
        lambda folder: (folder / "index.json").write_text('{"shards": "mds"}'),
        lambda folder: (folder / "index.json").write_text('"mds" [' * 20_000),
        edited(lambda shard: shard.update(version=3)),
        edited(lambda shard: shard["raw_data"].update(basename="../x.mds")),
        lambda folder: edited(
            lambda shard: shard["raw_data"].update(basename=os.path.abspath(folder / "shard.00001.mds"))
        )(folder),
        *(edited(lambda shard, number=number: shard.update(samples=number)) for number in (3, -2, 2**32)),
        edited(lambda shard: shard.update(column_sizes=[-1, None, 8, 4])),
        edited(lambda shard: shard.update(column_sizes=[None])),
        edited(lambda shard: shard["column_names"].reverse()),
        edited(lambda shard: (shard.update(zip_data={"basename": "s.zstd"}), shard["raw_data"].update(basename="no"))),
        edited(lambda shard: shard.pop("format")),
    ],
)
def test_damaged_shards_are_one_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = write_mds(tmp_path / "m", SAMPLES)
    damage(folder)
    with pytest.raises(SourceError) as caught:
        open_source(folder, SourceOptions(kind="mds"))
    assert caught.value.path is not None
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"image": "pil", "label": "int"}, {}),
        ({"left": "jpeg", "right": "png"}, {}),
        ({"image": "jpeg"}, {"path_column": "label"}),
    ],
)
def test_unclear_image_columns_are_refused(tmp_path: Path, columns: dict[str, str], options: dict[str, Any]) -> None:
    sample = {name: 1 if encoding == "int" else b"x" for name, encoding in columns.items()}
    write_mds(tmp_path / "m", [sample], columns)
    with pytest.raises(SourceError):
        h5pack.convert(tmp_path / "m", tmp_path / "k.h5", **quick(**options))


def test_a_link_that_cannot_be_followed_holds_no_shards(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("x" * 256)
    assert not is_mds(tmp_path)


def test_a_damaged_image_is_rejected(tmp_path: Path) -> None:
    samples = [*SAMPLES[:2], {**SAMPLES[2], "image": b"no image"}, *SAMPLES[3:6]]
    write_mds(tmp_path / "m", samples)
    report = h5pack.convert(tmp_path / "m", tmp_path / "k.h5", **quick(keep="jpeg"))
    assert (report.images, report.rejects) == (5, 1)
    with h5py.File(tmp_path / "k.h5") as file:
        assert file["rejects/filenames"].asstr()[()].tolist() == ["shard.00000/00000002"]
