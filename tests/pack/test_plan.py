"""The plan: what is settled before the first pixel is written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from h5pack.errors import NoImagesError, OptionsError, RejectedImageError, SizesDifferError
from h5pack.format.schema import NO_LABEL
from h5pack.images.decode import PixelOptions
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import ConvertPlan, make_plan
from h5pack.pack.row_order import order_rows
from h5pack.pack.survey import Survey
from h5pack.sources.catalog import Catalog, NameTable, Note, Reject, unused_note
from h5pack.sources.reader import FileReader

COUNT = 20


def catalog(**changes: Any) -> Catalog:
    settings: dict[str, Any] = {
        "kind": "splits", "reader": FileReader("/data"),
        "names": NameTable.of(f"{index:02d}.jpg" for index in range(COUNT)), "split_names": ("train", "test"),
        "split_ids": np.array([0, 0, 0, 1] * 5, np.int32), "labels": np.arange(COUNT, dtype=np.int64) % 3,
        "label_names": ("x", "y", "z"),
    }  # fmt: skip
    return Catalog(**{**settings, **changes})


def survey(sizes: dict[int, tuple[int, int]] | None = None, **changes: Any) -> Survey:
    heights, widths = np.full(COUNT, 218, np.int32), np.full(COUNT, 178, np.int32)
    for index, (height, width) in (sizes or {}).items():
        heights[index], widths[index] = height, width
    reasons = changes.pop("reasons", {})
    for index in reasons:
        heights[index] = widths[index] = 0
    return Survey(heights, widths, np.zeros(COUNT, np.uint8), np.arange(COUNT, dtype=np.uint64), reasons, **changes)


def plan(of: Catalog | None = None, seen: Survey | None = None, **settings: Any) -> ConvertPlan:
    return make_plan("in", of or catalog(), seen or survey(), ConvertOptions(**settings))


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"chunk_rows": 7}, (218, 178, 3)), ({"layout": "nchw", "chunk_bytes": 400_000}, (3, 218, 178)),
        ({"mode": "gray"}, (218, 178, 1)), ({"mode": "gray", "layout": "nchw"}, (1, 218, 178)),
        ({"size": (64, 32), "fit": "pad", "resample": "box", "draft": True, "max_pixels": 10**6}, (64, 32, 3)),
    ],
)  # fmt: skip
def test_the_shape_of_a_row(settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    made = plan(**settings)
    assert (made.row_shape, made.row_bytes) == (shape, np.prod(shape))
    assert made.chunks.bytes == made.chunks.rows * made.row_bytes
    if "chunk_rows" in settings or "chunk_bytes" in settings:
        assert made.chunks.rows == settings.get("chunk_rows", 3)
    used = {name: getattr(made.options, name) for name in ("fit", "resample", "draft", "max_pixels", "layout")}
    resize = "size" in settings
    assert made.pixels == PixelOptions(made.height, made.width, made.options.channels, resize, **used)


def test_sizes_that_differ_are_an_error_that_names_the_most_frequent_one() -> None:
    seen = survey({4: (100, 50), 6: (100, 50), 9: (50, 100), 0: (0, 0)}, reasons={0: "truncated"})
    with pytest.raises(SizesDifferError, match=r"218x178 \(16, such as 01.*100x50 \(2, such as 04") as caught:
        plan(seen=seen)
    assert caught.value.parameters == ("size='218x178'", "fit")
    assert plan(seen=seen, size=(64, 64)).rows == 19


def test_rejected_images_do_not_count_and_those_of_the_tables_come_first() -> None:
    of = catalog(rejects=(Reject("gone.jpg", "file not found"),))
    made = plan(of, survey(reasons={3: "truncated", 11: "empty"}))
    assert made.split_rows() == {"train": (0, 15), "test": (15, 18)}
    assert sorted(made.row_order.origins.tolist()) == sorted({*range(COUNT)} - {3, 11})
    assert made.rejects == (*of.rejects, Reject("03.jpg", "truncated"), Reject("11.jpg", "empty"))
    with pytest.raises(RejectedImageError, match=r"gone\.jpg") as caught:
        plan(of, strict=True)
    assert caught.value.parameters == ("strict=True",)


def test_nothing_usable() -> None:
    with pytest.raises(NoImagesError, match=r"00\.jpg"):
        plan(seen=survey(reasons=dict.fromkeys(range(COUNT), "the image is empty (0 bytes)")))


@pytest.mark.parametrize(("settings", "seed"), [({"seed": 5}, 5), ({"seed": 5, "order": "sorted"}, None)])
def test_the_order_is_the_options(settings: dict[str, Any], seed: int | None) -> None:
    wanted = order_rows(np.arange(COUNT, dtype=np.int64), catalog().split_ids, 2, seed)
    assert np.array_equal(plan(**settings).row_order.origins, wanted.origins)


@pytest.mark.parametrize(("chunk_rows", "compression"), [(2**32, "none"), (2**32 - 1, "gzip")])
def test_chunks_that_hdf5_1_10_cannot_read_are_refused(chunk_rows: int, compression: str) -> None:
    settings: dict[str, Any] = {"size": (1, 1), "mode": "gray"}
    assert plan(**settings, chunk_rows=2**32 - 1).chunks.bytes == 2**32 - 1
    with pytest.raises(OptionsError) as caught:
        plan(**settings, chunk_rows=chunk_rows, compression=compression)
    assert caught.value.parameters == ("chunk_rows", "chunk_bytes", "size")


def test_chunks_of_masks_that_hdf5_1_10_cannot_read_are_refused() -> None:
    seen, settings = survey(mask_dtypes=["|u1", "<i4"]), {"size": (1, 1), "mode": "gray"}
    assert plan(seen=seen, **settings, chunk_rows=2**30 - 1).chunks.bytes == 2**30 - 1
    with pytest.raises(OptionsError):
        plan(seen=seen, **settings, chunk_rows=2**30)


def test_labels_that_only_the_survey_knows() -> None:
    unlabeled = catalog(labels=None, label_names=None)
    assert plan(unlabeled, survey(labels=np.arange(COUNT, dtype=np.int64))).label_kind() == "integers"
    table = plan(unlabeled, survey(labels=np.zeros((COUNT, 2), np.uint8)))
    assert (table.catalog.label_names, table.label_kind()) == (("label_0", "label_1"), "2 columns, uint8")
    assert (plan().label_kind(), plan(unlabeled).label_kind()) == ("3 classes", "none")
    one = catalog(labels=np.zeros(COUNT, np.int64), label_names=("cat",))
    assert plan(one).label_kind() == "1 class"


def test_the_plan_for_programs() -> None:
    of = catalog(
        fields={"identity": np.arange(COUNT, dtype=np.int64)},
        ignored={".txt files": 2},
        notes=unused_note("columns", ["a"], "give them"),
    )
    made = plan(of, survey(reasons={3: "truncated"}, file_bytes=9_000), size=(64, 32), chunk_rows=6)
    found = json.loads(json.dumps(made.to_json()))
    size, options, notes = found.pop("bytes"), found.pop("options"), found.pop("notes")
    assert min(found.pop("needed_bytes"), size) >= 4 * 6 * 64 * 32 * 3
    assert options["size"] == [64, 32]
    assert notes[0] == "not packed: columns 'a'; give them"
    assert found == {
        "source": "in", "kind": "splits", "images": 19, "shape": [19, 64, 32, 3], "labels": "3 classes",
        "classes": ["x", "y", "z"], "fields": ["identity"], "splits": {"train": [0, 15], "test": [15, 19]},
        "chunk_rows": 6, "chunk_bytes": 6 * 64 * 32 * 3, "chunks": 4, "rejects": 1, "ignored": {".txt files": 2},
        "source_bytes": 9_000, "shards": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("file_bytes", "noted"), [(0, False), (9_000, True), (10**6, False)])
def test_a_note_on_files_much_larger_than_images(file_bytes: int, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(seen=survey(file_bytes=file_bytes), size=(64, 32))
    assert made.notes() == ()
    monkeypatch.setattr("h5pack.pack.plan._LARGE_FILE_BYTES", made.file_bytes)
    assert [note.parameters for note in made.notes()] == [("keep='jpeg'", "size")] * noted
    times = made.file_bytes / file_bytes if file_bytes else 0
    assert (f" {times:,.0f} times " in made.to_text()) == noted
    assert (" 1.3 times the 977 KiB " in made.to_text()) == (file_bytes == 10**6)


@pytest.mark.parametrize(("chunk_rows", "noted"), [(20, False), (21, True)])
def test_a_chunk_of_more_rows_than_there_are_is_worth_a_note(chunk_rows: int, noted: bool) -> None:
    made = plan(size=(64, 32), chunk_rows=chunk_rows)
    assert (made.rows, [note.parameters for note in made.notes()]) == (20, [("chunk_rows",)] * noted)


@pytest.mark.parametrize("label_names", [("x", "y", "z"), None])
@pytest.mark.parametrize(("missing", "counts"), [([], []), ([7], ["test 1"]), ([3, 4, 7], ["train 1, test 1"])])
def test_images_without_a_label_are_counted_by_split(missing: list[int], counts: list[str], label_names: Any) -> None:
    labels = np.arange(COUNT, dtype=np.int64) % 3
    labels[missing] = NO_LABEL
    made = plan(catalog(labels=labels, label_names=label_names), survey(reasons={3: "truncated"}))
    assert [note.text.partition(": ")[2] for note in made.notes()] == counts


def test_the_plan_as_text() -> None:
    of = catalog(
        fields={"identity": np.arange(COUNT)}, ignored={".txt files": 2_000}, notes=(Note("left out", ("fields",)),)
    )
    text = plan(of, survey(reasons={3: "truncated"}), size=(64, 32), fit="pad").to_text()
    parts = ["left out", "19 of 64x32", "pad", "3 classes", "identity", "train 15, test 4", "2,000 .txt files"]
    assert [part for part in (*parts, "03.jpg") if part not in text] == []


def test_compressed_shards_need_room_for_one_uncompressed_shard() -> None:
    settings: dict[str, Any] = {"size": (1_024, 1_024), "chunk_rows": 1, "compression": "gzip"}
    whole, made = plan(catalog(), **settings), plan(catalog(), shard_bytes=2**24, **settings)
    sizes = [one.rows * one.row_bytes for one in made.shards()]
    assert (len(sizes), sum(sizes)) == (5, COUNT * made.row_bytes)
    assert sum(sizes) + 2 * max(sizes) < made.needed_bytes < 2 * sum(sizes) < whole.needed_bytes
    assert made.to_json()["needed_bytes"] == made.needed_bytes
