"""Checks of parameters: paths, texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import h5pack
from h5pack.errors import H5PackError, OptionsError
from h5pack.system.parameters import flags, invalid, real_number, texts, unfit, whole_number
from tests.makers import flat_folder, quick

CALLS: dict[str, Callable[[Path, Path, Any], Any]] = {
    "convert": lambda source, pack, bad: h5pack.convert(bad, pack.with_name("o.h5")),
    "convert to": lambda source, pack, bad: h5pack.convert(source, bad),
    "append to": lambda source, pack, bad: h5pack.append(bad, source),
    "append": lambda source, pack, bad: h5pack.append(pack, bad),
    "subset": lambda source, pack, bad: h5pack.subset(bad, pack.with_name("o.h5")),
    "subset to": lambda source, pack, bad: h5pack.subset(pack, bad),
    "join": lambda source, pack, bad: h5pack.join([pack, bad], pack.with_name("o.h5")),
    "join to": lambda source, pack, bad: h5pack.join([pack, pack], bad),
    "export": lambda source, pack, bad: h5pack.export(bad, pack.with_name("o")),
    "export to": lambda source, pack, bad: h5pack.export(pack, bad),
    "preview": lambda source, pack, bad: h5pack.preview(bad),
    "preview to": lambda source, pack, bad: h5pack.preview(pack, bad),
    "info": lambda source, pack, bad: h5pack.info(bad),
    "verify": lambda source, pack, bad: h5pack.verify(bad),
    "bench": lambda source, pack, bad: h5pack.bench(bad),
    "bench in": lambda source, pack, bad: h5pack.bench(source, scratch=bad),
    "diagnose": lambda source, pack, bad: h5pack.diagnose(bad),
    "H5Dataset": lambda source, pack, bad: h5pack.H5Dataset(bad),
    "several files": lambda source, pack, bad: h5pack.H5Dataset([pack, bad]),
}


@pytest.fixture(scope="module")
def source_and_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("nul")
    source, pack = flat_folder(folder / "s", 8), folder / "p.h5"
    h5pack.convert(source, pack, **quick())
    return source, pack


@pytest.mark.parametrize("bad", ["", "a\0b", "\ud800"], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_is_empty_or_no_name_of_a_file_is_refused(
    name: str, bad: Any, source_and_pack: tuple[Path, Path]
) -> None:
    """An empty path is not the working directory."""
    with pytest.raises(OptionsError):
        CALLS[name](*source_and_pack, bad)
    assert {path.name for path in source_and_pack[0].parent.iterdir()} == {"s", "p.h5"}


@pytest.mark.parametrize(
    "call",
    [
        lambda source, pack: h5pack.subset(pack, pack.with_name("o.h5"), splits=3),
        lambda source, pack: h5pack.subset(pack, pack.with_name("o.h5"), classes=True),
        lambda source, pack: h5pack.export(pack, pack.with_name("o"), splits=3),
        lambda source, pack: h5pack.export(pack, pack.with_name("o"), fields=3),
        lambda source, pack: h5pack.export(3, pack.with_name("o")),
        lambda source, pack: h5pack.export(pack, None),
        *(lambda source, pack, split=split: h5pack.append(pack, source, split=split) for split in (3, "", "a\0b")),
        lambda source, pack: h5pack.verify(pack, start_method="thread"),
        lambda source, pack: h5pack.verify(pack, num_workers=2**31),
        lambda source, pack: h5pack.preview(pack, splits=[3]),
        lambda source, pack: h5pack.preview(pack, max_classes=None),
        lambda source, pack: h5pack.preview(pack, 3),
        lambda source, pack: h5pack.convert(source, pack.with_name("o.h5"), split_column=[3]),
        lambda source, pack: h5pack.bench(3),
        lambda source, pack: h5pack.bench(source, seconds="1"),
        lambda source, pack: h5pack.bench(source, batch_size="many"),
        lambda source, pack: h5pack.bench(source, chunk_rows=[None]),
        lambda source, pack: h5pack.bench(source, rows={}),
        lambda source, pack: h5pack.bench(source, orders=[3]),
        lambda source, pack: h5pack.bench(source, batch_size=np.array(0)),
        lambda source, pack: h5pack.bench(source, plot=3),
        lambda source, pack: h5pack.export(pack, pack.with_name("o"), images=0),
        lambda source, pack: h5pack.export(pack, pack.with_name("o"), num_workers=10**6),
        lambda source, pack: h5pack.preview(pack, channel_axis=np.zeros(2)),
        lambda source, pack: h5pack.convert(source, pack.with_name("o.h5"), num_workers=10**6),
        lambda source, pack: h5pack.subset(pack, pack.with_name("o.h5"), classes={"a", "b"}),
        lambda source, pack: h5pack.bench(source, contiguous="no"),
        lambda source, pack: h5pack.diagnose(pack, seconds=None),
        lambda source, pack: h5pack.diagnose(pack, seconds=True),
        lambda source, pack: h5pack.diagnose(pack, batch_size=None),
        lambda source, pack: h5pack.diagnose(pack, images=None),
        lambda source, pack: h5pack.diagnose(pack, pin_memory="no"),
        lambda source, pack: h5pack.append(pack, source, only_new=1),
        lambda source, pack: h5pack.join([pack, pack], pack.with_name("o.h5"), virtual="no"),
        lambda source, pack: h5pack.export(pack, pack.with_name("o"), overwrite="False"),
        lambda source, pack: h5pack.H5Dataset(pack, with_rows="no"),
        lambda source, pack: h5pack.H5Dataset(pack, check=None),
        lambda source, pack: h5pack.H5Dataset(pack, fields=torch.tensor(1)),
        lambda source, pack: h5pack.H5Loader(h5pack.H5Dataset(pack), 2, drop_last="False"),
        lambda source, pack: h5pack.H5Loader(h5pack.H5Dataset(pack), 2, pin_memory=np.zeros(2, bool)),
        lambda source, pack: h5pack.H5Loader(h5pack.H5Dataset(pack), 2, shuffle=np.zeros(2)),
        lambda source, pack: h5pack.FeedMonitor([], progress="no"),
        lambda source, pack: h5pack.FeedMonitor([], warn_once="no"),
        lambda source, pack: h5pack.FeedMonitor([], profiler_ranges="no"),
        lambda source, pack: h5pack.ConcatPack(3),
    ],
)
def test_a_parameter_of_another_type_is_refused(
    call: Callable[[Path, Path], Any], source_and_pack: tuple[Path, Path]
) -> None:
    with pytest.raises(OptionsError) as error:
        call(*source_and_pack)
    assert error.value.parameters
    assert {path.name for path in source_and_pack[0].parent.iterdir()} == {"s", "p.h5"}


def test_names_that_are_too_long_are_refused(source_and_pack: tuple[Path, Path]) -> None:
    pack, name = source_and_pack[1], source_and_pack[1].with_name("x" * 300)
    calls: list[Callable[[], Any]] = [
        *(lambda: h5pack.export(pack, name), lambda: h5pack.subset(pack, name)),
        *(lambda: h5pack.join([pack, pack], name), lambda: h5pack.convert(pack, name)),
    ]
    for call in calls:
        with pytest.raises(H5PackError):
            call()


def test_paths_may_be_bytes(source_and_pack: tuple[Path, Path], tmp_path: Path) -> None:
    pack = bytes(source_and_pack[1])
    assert h5pack.export(pack, bytes(tmp_path / "o"), num_workers=1).files == 8
    assert h5pack.preview(pack, bytes(tmp_path / "o.png")).rows == 8
    assert h5pack.append(pack, bytes(source_and_pack[0]), num_workers=1, only_new=True).added == 0


def test_texts_are_one_or_several() -> None:
    assert texts("names", "a") == ("a",)
    assert texts("names", iter(["a", "b"])) == ("a", "b")
    assert texts("names", ()) == ()
    for value in (3, None, {}, {"a": 1}, [3], b"a", np.int64(3), torch.tensor(3)):
        with pytest.raises(OptionsError):
            texts("names", value)


def test_flags_are_bools_of_any_library() -> None:
    assert flags(a=True, b=np.False_, c=torch.tensor(True)) == (True, False, True)
    for value in (None, 0, 1, 1.0, "True", "", [True], np.array([True]), torch.tensor([True]), bool):
        with pytest.raises(OptionsError) as error:
            flags(a=True, b=value)
        assert error.value.parameters[0].startswith("b=")


def test_real_numbers_are_floats_but_no_bools_and_no_texts() -> None:
    for value in (2, 2.0, Fraction(2), Decimal(2), np.int8(2), np.float16(2), np.array(2.0), torch.tensor(2)):
        assert real_number(value) == 2
    for value in (None, True, np.True_, torch.tensor(True), "2", b"2", [2], np.array([2]), torch.tensor([2])):
        assert math.isnan(real_number(value))
    assert math.isnan(real_number(10**400))


def test_no_bool_is_a_whole_number() -> None:
    assert whole_number("n", torch.tensor(1), 1) == whole_number("n", np.uint8(1), 1) == 1
    for value in (True, np.True_, torch.tensor(True)):
        with pytest.raises(OptionsError):
            whole_number("n", value, 1)


@pytest.mark.parametrize("error", [invalid("a", np.zeros((99, 9)), " is wrong"), unfit("a", "x" * 5_000, "give one")])
def test_long_values_are_cut_in_messages_of_one_line(error: OptionsError) -> None:
    assert len(str(error)) < 100
    assert "\n" not in str(error)
    assert error.parameters[0] in str(error)
