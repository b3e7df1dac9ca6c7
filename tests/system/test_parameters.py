"""Checks of parameters: paths, texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import h5pack
from h5pack.errors import OptionsError
from h5pack.system.parameters import texts
from tests.makers import flat_folder, quick

NUL = "a\0b"
CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda source, pack: h5pack.convert(NUL, pack.with_name("o.h5")),
    "convert to": lambda source, pack: h5pack.convert(source, NUL),
    "append to": lambda source, pack: h5pack.append(NUL, source),
    "append": lambda source, pack: h5pack.append(pack, NUL),
    "subset": lambda source, pack: h5pack.subset(NUL, pack.with_name("o.h5")),
    "subset to": lambda source, pack: h5pack.subset(pack, NUL),
    "join": lambda source, pack: h5pack.join([pack, NUL], pack.with_name("o.h5")),
    "join to": lambda source, pack: h5pack.join([pack, pack], NUL),
    "export": lambda source, pack: h5pack.export(NUL, pack.with_name("o")),
    "export to": lambda source, pack: h5pack.export(pack, NUL),
    "preview": lambda source, pack: h5pack.preview(NUL),
    "preview to": lambda source, pack: h5pack.preview(pack, NUL),
    "info": lambda source, pack: h5pack.info(NUL),
    "verify": lambda source, pack: h5pack.verify(NUL),
    "bench": lambda source, pack: h5pack.bench(NUL),
    "bench in": lambda source, pack: h5pack.bench(source, scratch=NUL),
    "diagnose": lambda source, pack: h5pack.diagnose(NUL),
    "H5Dataset": lambda source, pack: h5pack.H5Dataset(NUL),
    "a lone surrogate": lambda source, pack: h5pack.info("\ud800"),
    "to a lone surrogate": lambda source, pack: h5pack.subset(pack, "\ud800"),
    "several files": lambda source, pack: h5pack.H5Dataset([pack, NUL]),
}


@pytest.fixture(scope="module")
def source_and_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("nul")
    source, pack = flat_folder(folder / "s", 8), folder / "p.h5"
    h5pack.convert(source, pack, **quick())
    return source, pack


def test_an_empty_path_is_not_the_working_directory(source_and_pack: tuple[Path, Path]) -> None:
    source, pack = source_and_pack
    calls: list[Callable[[], Any]] = [
        *(lambda: h5pack.convert("", pack.with_name("o.h5")), lambda: h5pack.convert(source, "")),
        *(lambda: h5pack.append(pack, ""), lambda: h5pack.join([pack, ""], pack.with_name("o.h5"))),
        *(lambda: h5pack.subset(pack, ""), lambda: h5pack.export(pack, ""), lambda: h5pack.preview(pack, "")),
        *(lambda: h5pack.info(""), lambda: h5pack.verify(b""), lambda: h5pack.H5Dataset(""), lambda: h5pack.bench("")),
    ]
    for call in calls:
        with pytest.raises(OptionsError):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_a_path_with_a_nul_character_is_refused(name: str, source_and_pack: tuple[Path, Path]) -> None:
    with pytest.raises(OptionsError):
        CALLS[name](*source_and_pack)
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
        lambda source, pack: h5pack.ConcatPack(3),
    ],
)
def test_a_parameter_of_another_type_is_refused(
    call: Callable[[Path, Path], Any], source_and_pack: tuple[Path, Path]
) -> None:
    with pytest.raises(OptionsError) as error:
        call(*source_and_pack)
    assert error.value.parameters


def test_paths_may_be_bytes(source_and_pack: tuple[Path, Path], tmp_path: Path) -> None:
    pack = bytes(source_and_pack[1])
    assert h5pack.export(pack, bytes(tmp_path / "o"), num_workers=1).files == 8
    assert h5pack.preview(pack, bytes(tmp_path / "o.png")).rows == 8
    assert h5pack.append(pack, source_and_pack[0], num_workers=1, only_new=True).added == 0


def test_texts_are_one_or_several() -> None:
    assert texts("names", "a") == ("a",)
    assert texts("names", iter(["a", "b"])) == ("a", "b")
    assert texts("names", ()) == ()
    for value in (3, None, {}, {"a": 1}, [3], b"a", np.int64(3), torch.tensor(3)):
        with pytest.raises(OptionsError):
            texts("names", value)
