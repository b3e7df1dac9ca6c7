"""What a conversion may be asked to do, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack.errors import OptionsError
from h5pack.pack.options import ConvertOptions, parse_bytes, parse_part, parse_range, parse_size
from h5pack.sources.catalog import NameFilter
from h5pack.sources.detect import SourceOptions
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.sources.manifest import ManifestColumns


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("fit", "squash"), ("resample", "BICUBIC"), ("mode", "rgba"), ("layout", "chw"), ("order", "random")),
        *(("io", "mmap"), ("start_method", "thread"), ("source_kind", "zip"), ("limit", 0), ("limit", True)),
        *(("num_workers", -2), ("max_pixels", 0), ("chunk_rows", 0), ("chunk_rows", 2.0), ("chunk_bytes", 0)),
        *(("limit", np.array([3, 4])), ("mode", np.array([3, 4])), ("root", 5), ("max_pixels", None)),
        *(("compat", None), ("overwrite", None), ("resume", 1), ("strict", np.array([True, False]))),
        *((field.name, "no") for field in dataclasses.fields(ConvertOptions) if field.type == "bool"),
        *(("size", (0, 4)), ("size", (4,)), ("size", (4, 4, 3)), ("size", (4, -1)), ("size", 0), ("size", 4.5)),
        *(("include", 5), ("fields", [3]), ("label_columns", b"a")),
        *(("seed", -1), ("seed", 2**63), ("num_workers", 10**6), ("shard_bytes", 2**63), ("value_range", (1, 2, 3))),
        *((name, "") for name in ("root", "path_column", "split_column", "val_groups", "images")),
        *(("compression", None), ("compression", np.array(["gzip", "none"]))),
        *(("val", value) for value in (0, 1, 1.0, -0.1, 5, True, np.True_, "0.1", float("nan"))),
    ],
)
def test_an_invalid_value_is_refused_with_its_parameter(name: str, value: object) -> None:
    with pytest.raises(OptionsError) as caught:
        ConvertOptions.from_keywords({name: value})
    assert [one.partition("=")[0] for one in caught.value.parameters] == [name]
    assert f"{value!r}" in str(caught.value)


def test_a_range_beyond_floating_point_is_refused() -> None:
    with pytest.raises(OptionsError):
        parse_range((0, 10**400))


@pytest.mark.parametrize(
    ("keywords", "parameters"),
    [
        ({"chunk_rows": 1, "chunk_bytes": 1}, {"chunk_rows", "chunk_bytes"}),
        ({"draft": True}, {"draft", "size"}),
        ({"fit": "pad"}, {"fit", "size"}),
    ],
)
def test_values_that_exclude_each_other_are_refused(keywords: dict[str, object], parameters: set[str]) -> None:
    with pytest.raises(OptionsError) as caught:
        ConvertOptions.from_keywords(keywords)
    assert set(caught.value.parameters) == parameters


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    for name, found in (("workers", "'num_workers'"), ("qqq", "'qqq'")):
        with pytest.raises(TypeError, match=found):
            ConvertOptions.from_keywords({name: 2})


def test_a_size_is_a_number_a_pair_or_a_text() -> None:
    square = [64, np.int64(64), (64, 64), [64, 64], "64", "64x64"]
    for pair, sizes in (([64, 64], square), ([218, 178], ["218x178", "218X178"]), ([3, 4], [" 3×4 "])):
        for size in sizes:
            assert ConvertOptions.from_keywords({"size": size}).content()["size"] == pair


def test_texts_are_parsed_and_single_names_become_tuples() -> None:
    options = ConvertOptions.from_keywords(
        {"chunk_bytes": "4MiB", "value_range": "0:200", "include": "*.png", "fields": ["age"], "root": Path("/data")}
    )
    assert options == ConvertOptions(
        chunk_bytes=4_194_304, value_range=(0.0, 200.0), include=("*.png",), fields=("age",), root="/data"
    )


def test_convert_has_a_keyword_for_every_option_with_its_default() -> None:
    signature = inspect.signature(h5pack.convert).parameters
    keywords = {name: parameter.default for name, parameter in signature.items()}
    del keywords["source"], keywords["out"], keywords["client"], keywords["progress"]
    assert keywords == {field.name: field.default for field in dataclasses.fields(ConvertOptions)}


CONTENT = {
    "size": (4, 5), "fit": "pad", "resample": "box", "mode": "gray", "layout": "nchw", "order": "sorted", "seed": 3,
    "chunk_rows": 7, "chunk_bytes": 9, "max_pixels": 99, "compression": "zstd:7", "compat": True, "limit": 5,
    "shard_bytes": 9,
    "include": ("*.png",), "exclude": ("x*",), "source_kind": "flat", "path_column": "p", "label_columns": ("a", "b"),
    "split_column": "s", "field_columns": ("f",), "images": "data/x", "labels": "", "fields": ("age",),
    "channel_axis": "first", "value_range": (-1.0, 1.0), "val": 0.25, "keep": "jpeg", "max_side": 7, "quality": 50,
    "mask_columns": ("m",), "image_columns": ("i",), "text_columns": ("t",), "box_columns": ("b",),
    "keypoint_columns": ("k",), "box_format": "xywh", "val_groups": "f",
}  # fmt: skip
ELSEWHERE = {
    "num_workers": 3, "start_method": "spawn", "io": "buffered", "overwrite": True, "resume": True, "strict": True,
    "root": "/data", "part": (3, 16), "finish": True,
}  # fmt: skip


def test_every_option_either_changes_content_or_does_not() -> None:
    names = {field.name for field in dataclasses.fields(ConvertOptions)}
    assert names == {*CONTENT, *ELSEWHERE, "draft"}
    default = ConvertOptions().content()
    for name, value in CONTENT.items():
        sized = {"size": (4, 4)} if name in ("fit", "resample") else {}
        sized |= {"keep": "jpeg"} if name in ("max_side", "quality") else {}
        sized |= {"val": 0.5} if name == "val_groups" else {}
        content = ConvertOptions(**{name: value, **sized}).content()  # type: ignore[arg-type]
        changed = {key for key in content if content[key] != default.get(key)}
        assert changed == {"source" if name == "source_kind" else name, *sized}
        assert json.loads(json.dumps(content)) == content
    least = dict.fromkeys(("limit", "num_workers", "max_pixels", "chunk_rows"), 1)
    assert ConvertOptions(**least, seed=2**63 - 1, size=(1, 1), draft=True).content()["draft"]
    for name, value in ELSEWHERE.items():
        assert ConvertOptions(**{name: value}).content() == default  # type: ignore[arg-type]


def test_the_stored_text_of_the_defaults_is_that_of_version_0_1() -> None:
    assert json.dumps(ConvertOptions().content()) == (
        '{"source": null, "include": [], "exclude": [], "limit": null, "path_column": null, "label_columns": [], '
        '"split_column": null, "field_columns": [], "size": null, "fit": "crop", "resample": "bicubic", '
        '"draft": false, "mode": "rgb", "layout": "nhwc", "order": "shuffled", "seed": 0, "chunk_rows": null, '
        '"chunk_bytes": null, "max_pixels": 178956970, "compat": false}'
    )


def test_values_of_numpy_become_those_of_python() -> None:
    val = ConvertOptions(val=np.float32(0.25)).val  # type: ignore[arg-type]
    assert (type(val), val) == (float, 0.25)
    flags = ConvertOptions.from_keywords({"compat": np.True_, "overwrite": np.False_})
    assert (flags.compat, flags.overwrite, json.loads(json.dumps(flags.content()))["compat"]) == (True, False, True)
    numbers = {"seed": 3, "limit": 5, "chunk_rows": 7, "max_pixels": 99, "shard_bytes": 9, "num_workers": 2}
    options = ConvertOptions.from_keywords(
        {name: np.int64(value) for name, value in numbers.items()} | {"value_range": np.float32([0, 1])}
    )
    assert {name: getattr(options, name) for name in numbers} == numbers
    assert {type(getattr(options, name)) for name in numbers} == {int}
    assert json.loads(json.dumps(options.content()))["value_range"] == [0.0, 1.0]
    for changes in ({"chunk_bytes": np.int32(9)}, {"keep": "jpeg", "quality": np.uint8(50), "max_side": np.int64(7)}):
        content = ConvertOptions.from_keywords(changes).content()
        assert json.loads(json.dumps(content)) == content == content | changes


@pytest.mark.parametrize("part", ["3", "0/2", "3/2", "a/b", "1.5/2", (1.5, 2), (1,), 7])
def test_parts_that_do_not_exist_are_refused(part: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_part(part)
    assert caught.value.parameters[0].startswith("part=")


def test_the_source_gets_its_options() -> None:
    unset = dict.fromkeys(("chunk_bytes", "keep", "max_side", "shard_bytes"))
    given = CONTENT | unset | {"root": "/data", "quality": 90}
    options = ConvertOptions(**given).source_options  # type: ignore[arg-type]
    assert options == SourceOptions(
        kind="flat",
        wanted=NameFilter(include=("*.png",), exclude=("x*",)),
        columns=ManifestColumns(
            path="p", labels=("a", "b"), split="s", fields=("f",), root="/data", texts=("t",), boxes=("b",),
            keypoints=("k",), box_format="xywh", masks=("m",), images=("i",),
        ),
        datasets=HDF5Datasets(
            images="data/x", labels="", fields=("age",), channel_axis="first", value_range=(-1.0, 1.0)
        ),
        limit=5,
    )  # fmt: skip


def test_numbers_of_bytes() -> None:
    counts = {"65536": 65_536, "65536B": 65_536, "512KiB": 524_288, "4MiB": 4_194_304, "4 MiB": 4_194_304}
    counts |= {"4mib": 4_194_304, "4MB": 4_000_000, "4M": 4_194_304, "1G": 2**30, "1.5MiB": 1_572_864}
    counts |= {"1GB": 10**9, "2kB": 2_000, "0": 0, "9" * 400: 10**400 - 1}
    assert {text: parse_bytes(text) for text in counts} == counts


@pytest.mark.parametrize(
    ("parse", "name", "texts"),
    [
        (parse_range, "value_range", ["", "1", "a:b", "0:1:2", "0-1"]),
        (parse_size, "size", ["", "x", "3x", "x3", "3x4x5", "-3", "3.5", "3 x 4", "big", "3x-4"]),
        (parse_bytes, "chunk_bytes", ["", "MiB", "-1", "1e6", "1T", "4 M i B", "5i", "four", "1,000", "0x10", "."]),
    ],
)
def test_invalid_text_is_refused(parse: Callable[[str], object], name: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(OptionsError) as caught:
            parse(text)
        assert caught.value.parameters == (f"{name}={text!r}",)
    assert parse_range("-0.5:1e3") == (-0.5, 1000.0)
