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
from h5pack.system.parameters import flags, invalid, real_number, texts, whole_number
from tests.makers import flat_folder, quick

ARGUMENTS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "convert": lambda source, pack: [source, pack.with_name("o.h5")],
    "append": lambda source, pack: [pack, source],
    "subset": lambda source, pack: [pack, pack.with_name("o.h5")],
    "join": lambda source, pack: [[pack, pack], pack.with_name("o.h5")],
    "export": lambda source, pack: [pack, pack.with_name("o")],
    "preview": lambda source, pack: [pack, pack.with_name("o.png")],
    **dict.fromkeys(("info", "verify", "diagnose", "H5Dataset"), lambda source, pack: [pack]),
    "bench": lambda source, pack: [source],
    "H5Loader": lambda source, pack: [h5pack.H5Dataset(pack), 2],
    "FeedMonitor": lambda source, pack: [[]],
    "ConcatPack": lambda source, pack: [],
}
"""The positional arguments of functions and classes, given a source and a pack."""
PATHS = [
    (name, position)
    for name in [*(name for name in h5pack.__all__ if name[0].islower()), "H5Dataset"]
    for position in range(len(ARGUMENTS[name](Path("s"), Path("p.h5"))))
]
"""Names of all functions and of a class, and positions of their arguments, which are paths."""


def call_with_path(name: str, position: int, path: Any, source_and_pack: tuple[Path, Path]) -> None:
    arguments = ARGUMENTS[name](*source_and_pack)
    arguments[position] = [source_and_pack[1], path] if isinstance(arguments[position], list) else path
    getattr(h5pack, name)(*arguments)


@pytest.fixture(scope="module")
def source_and_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("nul")
    source, pack = flat_folder(folder / "s", 8), folder / "p.h5"
    h5pack.convert(source, pack, **quick())
    return source, pack


@pytest.mark.parametrize("bad", ["", "a\0b", "\ud800", 3], ids=repr)
@pytest.mark.parametrize(("name", "position"), PATHS)
def test_a_path_that_is_empty_or_no_name_of_a_file_is_refused(
    name: str, position: int, bad: Any, source_and_pack: tuple[Path, Path]
) -> None:
    """An empty path is not the working directory. A source of another type may be no map-style dataset."""
    with pytest.raises(H5PackError if bad == 3 else OptionsError):
        call_with_path(name, position, bad, source_and_pack)
    assert {path.name for path in source_and_pack[0].parent.iterdir()} == {"s", "p.h5"}


@pytest.mark.parametrize("bad", ["", "a\0b", "\ud800"], ids=repr)
def test_a_path_among_several_files_or_for_scratch_is_refused(bad: Any, source_and_pack: tuple[Path, Path]) -> None:
    with pytest.raises(OptionsError):
        h5pack.H5Dataset([source_and_pack[1], bad])
    with pytest.raises(OptionsError):
        h5pack.bench(source_and_pack[0], scratch=bad)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("subset", options) for options in ({"splits": 3}, {"classes": True}, {"classes": {"a", "b"}})),
        *(("export", options) for options in ({"splits": 3}, {"fields": 3}, {"images": 0}, {"num_workers": 10**6})),
        ("export", {"overwrite": "False"}),
        *(("append", options) for options in ({"split": 3}, {"split": ""}, {"split": "a\0b"}, {"only_new": 1})),
        *(("verify", options) for options in ({"start_method": "thread"}, {"num_workers": 2**31})),
        *(("preview", options) for options in ({"splits": [3]}, {"max_classes": None}, {"channel_axis": np.zeros(2)})),
        *(("convert", options) for options in ({"split_column": [3]}, {"num_workers": 10**6})),
        *(("bench", {"batch_size": value}) for value in ("many", np.array(0))),
        *(("bench", options) for options in ({"seconds": "1"}, {"chunk_rows": [None]}, {"rows": {}}, {"orders": [3]})),
        *(("bench", options) for options in ({"plot": 3}, {"contiguous": "no"})),
        *(("diagnose", {"seconds": value}) for value in (None, True)),
        *(("diagnose", options) for options in ({"batch_size": None}, {"images": None}, {"pin_memory": "no"})),
        ("join", {"virtual": "no"}),
        *(("H5Dataset", options) for options in ({"with_rows": "no"}, {"check": None}, {"fields": torch.tensor(1)})),
        *(("H5Loader", options) for options in ({"drop_last": "False"}, {"shuffle": np.zeros(2)})),
        ("H5Loader", {"pin_memory": np.zeros(2, bool)}),
        *((name, {"exact": "no"}) for name in ("H5Dataset", "H5Loader")),
        *(("ConcatPack", {"datasets": value}) for value in (3, torch.tensor(3))),
        ("preview", {"images": ""}),
        *((name, {"progress": "no"}) for name in ("convert", "append", "subset", "join", "export", "verify", "bench")),
        *(("FeedMonitor", {name: "no"}) for name in ("progress", "warn_once", "profiler_ranges")),
    ],
)
def test_a_parameter_of_another_type_is_refused(
    name: str, options: dict[str, Any], source_and_pack: tuple[Path, Path]
) -> None:
    with pytest.raises(OptionsError) as error:
        getattr(h5pack, name)(*ARGUMENTS[name](*source_and_pack), **options)
    assert error.value.parameters
    assert {path.name for path in source_and_pack[0].parent.iterdir()} == {"s", "p.h5"}


@pytest.mark.parametrize("name", ["export", "subset", "join", "convert"])
def test_names_that_are_too_long_are_refused(name: str, source_and_pack: tuple[Path, Path]) -> None:
    with pytest.raises(H5PackError):
        call_with_path(name, 1, source_and_pack[1].with_name("x" * 300), source_and_pack)


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


@pytest.mark.parametrize("error", [invalid("a", np.zeros((99, 9)), "give one"), invalid("a", "x" * 5_000, "give one")])
def test_long_values_are_cut_in_messages_of_one_line(error: OptionsError) -> None:
    assert len(str(error)) < 100
    assert "\n" not in str(error)
    assert error.parameters[0] in str(error)
