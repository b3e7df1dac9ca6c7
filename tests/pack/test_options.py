"""What a conversion may be asked to do, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.errors import H5PackError, OptionsError
from h5pack.pack.options import ConvertOptions, parse_bytes, parse_range, parse_size


def test_the_defaults_are_allowed() -> None:
    options = ConvertOptions()
    assert (options.channels, options.order, options.layout, options.workers) == (3, "shuffled", "nhwc", None)
    assert ConvertOptions(mode="gray").channels == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fit": "squash"}, "fit 'squash' is none of crop, pad, stretch"),
        ({"resample": "BICUBIC"}, "resample 'BICUBIC' is none of nearest"),
        ({"mode": "rgba"}, "mode 'rgba' is none of rgb, gray"),
        ({"layout": "chw"}, "layout 'chw' is none of nhwc, nchw"),
        ({"order": "random"}, "order 'random' is none of shuffled, sorted"),
        ({"io": "mmap"}, "io 'mmap' is none of auto, direct, buffered"),
        ({"start_method": "thread"}, "start_method 'thread' is none of"),
        ({"source": "zip"}, "source 'zip' is none of"),
        ({"limit": 0}, "limit is 0; it must be at least 1"),
        ({"workers": -2}, "workers is -2; it must be at least 1"),
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_rows": 1, "chunk_bytes": 1}, "the same thing twice"),
        ({"size": (0, 4)}, r"size is \(0, 4\)"),
        ({"size": (4,)}, r"size is \(4,\)"),
        ({"size": (4, 4, 3)}, "size is"),
        ({"size": (4, -1)}, "size is"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"draft": True}, "draft decodes at a reduced size, so it needs size"),
    ],
)
def test_values_that_make_no_sense(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        ConvertOptions(**settings)  # type: ignore[arg-type]
    assert isinstance(caught.value, (H5PackError, ValueError))
    assert "\n" not in str(caught.value)


def test_the_limits_themselves_are_allowed() -> None:
    ConvertOptions(seed=2**63 - 1, limit=1, workers=1, max_pixels=1, chunk_rows=1, size=(1, 1), draft=True)
    ConvertOptions(seed=0, chunk_bytes=1)


CONTENT = {
    "size": (4, 5),
    "fit": "pad",
    "resample": "box",
    "mode": "gray",
    "layout": "nchw",
    "order": "sorted",
    "seed": 3,
    "chunk_rows": 7,
    "chunk_bytes": 9,
    "max_pixels": 99,
    "compression": "zstd:7",
    "compat": True,
    "limit": 5,
    "include": ("*.png",),
    "exclude": ("x*",),
    "source": "flat",
    "path_column": "p",
    "label_columns": ("a", "b"),
    "split_column": "s",
    "field_columns": ("f",),
    "images": "data/x",
    "labels": "",
    "fields": ("age",),
    "channel_axis": "first",
    "value_range": (-1.0, 1.0),
}
ELSEWHERE = {
    "workers": 3,
    "start_method": "spawn",
    "io": "buffered",
    "overwrite": True,
    "resume": True,
    "strict": True,
    "root": "/data",
}


def test_every_option_either_changes_content_or_does_not() -> None:
    names = {field.name for field in dataclasses.fields(ConvertOptions)}
    assert names == {*CONTENT, *ELSEWHERE, "draft"}
    default = ConvertOptions().content()
    for name, value in CONTENT.items():
        sized = {"size": (4, 4)} if name in ("fit", "resample") else {}
        content = ConvertOptions(**{name: value, **sized}).content()  # type: ignore[arg-type]
        assert {key for key in content if content[key] != default.get(key)} == {name, *sized}
        assert json.loads(json.dumps(content)) == content
    assert ConvertOptions(size=(4, 4), draft=True).content()["draft"]
    for name, value in ELSEWHERE.items():
        assert ConvertOptions(**{name: value}).content() == default  # type: ignore[arg-type]


def test_the_source_is_told_its_part() -> None:
    options = ConvertOptions(**CONTENT | {"chunk_bytes": None, "root": "/data"}).source_options  # type: ignore[arg-type]
    assert (options.kind, options.limit) == ("flat", 5)
    assert (options.names.include, options.names.exclude) == (("*.png",), ("x*",))
    columns = options.columns
    assert (columns.path, columns.labels, columns.split, columns.fields) == ("p", ("a", "b"), "s", ("f",))
    assert columns.root == "/data"
    datasets = options.datasets
    assert (datasets.images, datasets.labels, datasets.fields) == ("data/x", "", ("age",))
    assert (datasets.channel_axis, datasets.value_range) == ("first", (-1.0, 1.0))


@pytest.mark.parametrize("text", ["", "1", "a:b", "0:1:2", "0-1"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(OptionsError, match="is not LOW:HIGH"):
        parse_range(text)
    assert parse_range("-0.5:1e3") == (-0.5, 1000.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("256", (256, 256)), ("218x178", (218, 178)), ("218X178", (218, 178)), (" 3×4 ", (3, 4))],
)
def test_sizes(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "3x", "x3", "3x4x5", "-3", "3.5", "3 x 4", "big", "3x-4"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionsError, match="neither HxW"):
        parse_size(text)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_written_size_is_read_back(height: int, width: int) -> None:
    assert parse_size(f"{height}x{width}") == (height, width)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("65536", 65_536),
        ("65536B", 65_536),
        ("512KiB", 524_288),
        ("4MiB", 4_194_304),
        ("4 MiB", 4_194_304),
        ("4mib", 4_194_304),
        ("4MB", 4_000_000),
        ("4M", 4_194_304),
        ("1G", 2**30),
        ("1.5MiB", 1_572_864),
        ("1GB", 10**9),
        ("2kB", 2_000),
        ("0", 0),
    ],
)
def test_numbers_of_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e6", "1T", "4 M i B", "four", "1,000", "0x10", "."])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(OptionsError, match="no number of bytes"):
        parse_bytes(text)
