"""The plan: what is settled before the first pixel is written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from h5pack.errors import NoImagesError, OptionsError, RejectedImageError, SizesDifferError
from h5pack.images.decode import PixelOptions
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import ConvertPlan, make_plan
from h5pack.pack.split_order import order_rows
from h5pack.pack.survey import Survey
from h5pack.sources.catalog import Catalog, FileReader, NameTable, Reject

COUNT = 20


def catalog(**changes: Any) -> Catalog:
    settings: dict[str, Any] = {
        "kind": "splits",
        "reader": FileReader("/data"),
        "names": NameTable.of(f"{index:02d}.jpg" for index in range(COUNT)),
        "split_names": ("train", "test"),
        "split_ids": np.array([0, 0, 0, 1] * 5, np.int32),
        "labels": np.arange(COUNT, dtype=np.int64) % 3,
        "label_names": ("x", "y", "z"),
    }
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


def test_images_of_one_size_keep_it() -> None:
    made = plan()
    assert (made.height, made.width, made.rows) == (218, 178, 20)
    assert made.row_shape == (218, 178, 3)
    assert made.row_bytes == 218 * 178 * 3
    assert not made.pixels.resize
    assert made.split_rows() == {"train": (0, 15), "test": (15, 20)}


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"layout": "nchw"}, (3, 218, 178)),
        ({"mode": "gray"}, (218, 178, 1)),
        ({"mode": "gray", "layout": "nchw"}, (1, 218, 178)),
        ({"size": (64, 32)}, (64, 32, 3)),
    ],
)
def test_the_shape_of_a_row(settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    made = plan(**settings)
    assert made.row_shape == shape
    assert made.row_bytes == np.prod(shape)
    assert made.chunks.bytes == made.chunks.rows * made.row_bytes


def test_the_pixel_options_are_those_of_the_plan() -> None:
    settings: dict[str, Any] = {"fit": "pad", "resample": "box", "draft": True, "max_pixels": 10**6}
    assert plan(size=(64, 32), mode="gray", **settings).pixels == PixelOptions(64, 32, 1, True, **settings)


def test_sizes_that_differ_are_an_error_that_names_the_most_frequent_one() -> None:
    seen = survey({4: (100, 50), 6: (100, 50), 9: (50, 100), 0: (0, 0)}, reasons={0: "truncated"})
    with pytest.raises(SizesDifferError, match=r"218x178 \(16, such as 01.*100x50 \(2, such as 04") as caught:
        plan(seen=seen)
    assert caught.value.parameters == ("size='218x178'",)
    assert plan(seen=seen, size=(64, 64)).rows == 19


def test_the_size_of_a_rejected_image_does_not_count() -> None:
    made = plan(seen=survey(reasons={3: "truncated", 11: "zero bytes"}))
    assert (made.rows, made.height) == (18, 218)
    assert made.split_rows() == {"train": (0, 15), "test": (15, 18)}
    assert [(reject.name, reject.reason) for reject in made.rejects] == [
        ("03.jpg", "truncated"),
        ("11.jpg", "zero bytes"),
    ]
    assert not {3, 11} & set(made.row_order.origins.tolist())


def test_rejects_of_the_tables_come_first() -> None:
    of = catalog(rejects=(Reject("gone.jpg", "file not found"),))
    made = plan(of, survey(reasons={3: "truncated"}))
    assert [reject.name for reject in made.rejects] == ["gone.jpg", "03.jpg"]
    with pytest.raises(RejectedImageError, match=r"gone\.jpg") as caught:
        plan(of, strict=True)
    assert caught.value.parameters == ("strict=True",)


def test_nothing_usable() -> None:
    with pytest.raises(NoImagesError, match=r"00\.jpg"):
        plan(seen=survey(reasons=dict.fromkeys(range(COUNT), "zero bytes")))


def test_the_order_is_the_options() -> None:
    everything = np.arange(COUNT, dtype=np.int64)
    ids = catalog().split_ids
    for seed in (0, 5):
        assert np.array_equal(plan(seed=seed).row_order.origins, order_rows(everything, ids, 2, seed).origins)
    assert np.array_equal(plan(order="sorted").row_order.origins, order_rows(everything, ids, 2, None).origins)
    assert plan(seed=0).row_order.origins.tolist() != plan(seed=5).row_order.origins.tolist()


def test_chunks_have_the_rows_or_bytes_that_were_asked_for() -> None:
    assert plan(chunk_rows=7).chunks.rows == 7
    assert plan(chunk_rows=7).chunks.count == 3
    assert plan(chunk_bytes=400_000).chunks.rows == 3


@pytest.mark.parametrize(("chunk_rows", "compression"), [(2**32, "none"), (2**32 - 1, "gzip")])
def test_chunks_that_hdf5_1_10_cannot_read_are_refused(chunk_rows: int, compression: str) -> None:
    settings: dict[str, Any] = {"size": (1, 1), "mode": "gray"}
    assert plan(**settings, chunk_rows=2**32 - 1).chunks.bytes == 2**32 - 1
    with pytest.raises(OptionsError) as caught:
        plan(**settings, chunk_rows=chunk_rows, compression=compression)
    assert caught.value.parameters == ("chunk_rows", "chunk_bytes", "size")


def test_labels_that_only_the_survey_knows() -> None:
    numbers = plan(catalog(labels=None, label_names=None), survey(labels=np.arange(COUNT, dtype=np.int64)))
    assert numbers.catalog.labels is not None
    assert numbers.label_kind() == "integers"
    table = plan(catalog(labels=None, label_names=None), survey(labels=np.zeros((COUNT, 2), np.uint8)))
    assert table.catalog.label_names == ("label_0", "label_1")
    assert table.label_kind() == "2 columns, uint8"
    assert plan().label_kind() == "3 classes"
    assert plan(catalog(labels=None, label_names=None)).label_kind() == "none"


def test_the_plan_for_programs() -> None:
    of = catalog(fields={"identity": np.arange(COUNT, dtype=np.int64)}, ignored={".txt files": 2})
    made = plan(of, survey(reasons={3: "truncated"}), size=(64, 32), chunk_rows=6)
    found = json.loads(json.dumps(made.to_json()))
    assert set(found) >= {
        *("source", "kind", "images", "shape", "labels", "classes", "fields", "splits", "chunk_rows"),
        *("chunk_bytes", "chunks", "bytes", "rejects", "ignored", "options"),
    }
    assert (found["source"], found["kind"], found["images"]) == ("in", "splits", 19)
    assert found["shape"] == [19, 64, 32, 3]
    assert (found["classes"], found["fields"]) == (["x", "y", "z"], ["identity"])
    assert found["splits"] == {"train": [0, 15], "test": [15, 19]}
    assert (found["chunk_rows"], found["chunk_bytes"], found["chunks"]) == (6, 6 * 64 * 32 * 3, 4)
    assert (found["rejects"], found["ignored"]) == (1, {".txt files": 2})
    assert found["options"]["size"] == [64, 32]
    assert found["bytes"] >= 4 * 6 * 64 * 32 * 3


def test_the_plan_as_text() -> None:
    of = catalog(fields={"identity": np.arange(COUNT)}, ignored={".txt files": 2_000})
    text = plan(of, survey(reasons={3: "truncated"}), size=(64, 32), fit="pad").to_text()
    for words in ("19 of 64x32", "pad", "3 classes", "identity", "train 15, test 4", "2,000 .txt files", "03.jpg"):
        assert words in text
