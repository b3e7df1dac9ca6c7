"""Settings of a loader in a TOML file: what is written is read, what makes no sense is refused, and H5Loader obeys."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import h5pack
from h5pack.errors import OptionsError
from h5pack.feed import profile as module
from h5pack.feed.profile import LoaderProfile, choose_settings
from tests.feed import packs

WHOLE = st.integers(1, 2**63 - 1)
TEXT = st.text(max_size=30)
PROFILES = st.builds(
    LoaderProfile,
    batch_size=st.none() | WHOLE,
    window=st.none() | WHOLE,
    threads=st.none() | WHOLE,
    chunk_rows=st.none() | WHOLE,
    compression=st.none() | TEXT,
    workers=st.none() | st.integers(0, 2**63 - 1),
    rdcc_nbytes=st.none() | st.integers(0, 2**63 - 1),
    rdcc_nslots=st.none() | WHOLE,
    rdcc_w0=st.none() | st.floats(0, 1),
    images_per_s=st.none() | st.floats(0, allow_infinity=False),
    judged_by=st.none() | st.sampled_from(("hot", "cold")),
    sure=st.none() | st.booleans(),
    date=st.none() | TEXT,
    processor=st.none() | TEXT,
    cpus=st.none() | WHOLE,
    h5pack=st.none() | TEXT,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))


def written(folder: Path, text: str) -> Path:
    path = folder / "profile.toml"
    path.write_text(text, encoding="utf-8")
    return path


# The file.


@given(profile=PROFILES, notes=st.lists(st.text(max_size=300), max_size=3))
def test_what_is_written_is_read(folder: Path, profile: LoaderProfile, notes: list[str]) -> None:
    assert LoaderProfile.load(written(folder, profile.dumps(notes))) == profile


def test_every_field_has_its_place_in_the_file() -> None:
    assert list(module._KEYS) == [field.name for field in dataclasses.fields(LoaderProfile)]
    assert {key.table for key in module._KEYS.values()} == set(module._ABOUT)
    places = [(key.table, key.name) for key in module._KEYS.values()]
    assert len(places) == len(set(places))


def test_half_a_sign_of_utf_16_does_not_spoil_the_file(folder: Path) -> None:
    text = LoaderProfile(processor="a\udc80b").dumps(["n\udc80"])
    assert LoaderProfile.load(written(folder, text)).processor == "a\ufffdb"


def test_the_file_says_what_it_is_and_how_to_use_it() -> None:
    text = LoaderProfile(batch_size=8).dumps(["Of photos:\nall of them"])
    assert text.startswith("# Settings that `h5pack bench` found.")
    assert 'H5Loader(dataset, profile="profile.toml")' in text
    assert "# Of photos: all of them\n" in text
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == ["[loader]", "batch_size = 8"]


def test_a_file_of_another_hand(folder: Path) -> None:
    path = folder / "hand.toml"
    lines = ("\ufeff[loader]", "window = 1_6", "[h5py]", "rdcc_w0 = 1", "future = [1]", "[other]", "x = 1", "")
    path.write_bytes("\r\n".join(lines).encode())
    assert LoaderProfile.load(path) == LoaderProfile(window=16, rdcc_w0=1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has no table [loader]; give a file that 'h5pack bench --save' wrote"),
        ("loader = 3", "it has no table [loader]"),
        ("[loader]\nwindows = 3", "[loader] has no setting 'windows'; did you mean window?"),
        ("[loader]\nlanes = 3", "[loader] has no setting 'lanes'; give some of batch_size, window, threads"),
        ("[loader]\nwindow = 0", "[loader] window is 0; it must be a number of at least 1"),
        ("[loader]\nwindow = true", "[loader] window is True; it must be a whole number"),
        ("[loader]\nbatch_size = 8.0", "[loader] batch_size is 8.0; it must be a whole number"),
        ("[loader]\nthreads = '2'", "[loader] threads is '2'; it must be a whole number"),
        ("[loader]\nthreads = 9223372036854775808", "[loader] threads is 9223372036854775808; it must be a number"),
        ("[loader]\n[dataloader]\nnum_workers = -1", "[dataloader] num_workers is -1; it must be a number of at least"),
        ("[loader]\n[h5py]\nrdcc_w0 = 1.5", "[h5py] rdcc_w0 is 1.5; it must be a number from 0 to 1"),
        ("[loader]\n[h5py]\nrdcc_w0 = nan", "[h5py] rdcc_w0 is nan; it must be a number from 0 to 1"),
        ("[loader]\n[measured]\nimages_per_s = inf", "[measured] images_per_s is inf; it must be a number"),
        ("[loader]\n[measured]\njudged_by = 'warm'", "judged_by is 'warm'; it must be one of 'hot', 'cold'"),
        ("[loader]\n[measured]\nsure = 1", "[measured] sure is 1; it must be true or false"),
        ("[loader]\n[file]\ncompression = 4", "[file] compression is 4; it must be a text"),
        ("file = 3\n[loader]", "'file' is 3; it must be a table [file]"),
        ("[loader\n", "it is no TOML"),
        ("x = " + "[" * 100_000, "it is no TOML"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(folder: Path, text: str, problem: str) -> None:
    path = written(folder, text)
    with pytest.raises(OptionsError) as caught:
        LoaderProfile.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"none\.toml: No such file"):
        LoaderProfile.load(tmp_path / "none.toml")
    with pytest.raises(OptionsError, match="Is a directory"):
        LoaderProfile.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe4\n[loader]\n")
    with pytest.raises(OptionsError, match="no text in UTF-8"):
        LoaderProfile.load(tmp_path / "latin.toml")


def test_values_are_checked_in_python_too() -> None:
    with pytest.raises(OptionsError, match=r"profile: \[loader\] window is 0"):
        LoaderProfile(window=0)
    with pytest.raises(OptionsError, match=r"profile: \[measured\] cpus is 'two'"):
        LoaderProfile(cpus="two")  # type: ignore[arg-type]


def test_before_python_3_11_tomli_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module
    path = written(folder, "[loader]\nwindow = 3\n")
    asked: list[str] = []

    def older(name: str) -> Any:
        asked.append(name)
        if name == "tomllib" or len(asked) > 2:
            raise ImportError(name)
        return found("tomllib" if sys.version_info >= (3, 11) else "tomli")

    monkeypatch.setattr(module.importlib, "import_module", older)
    assert LoaderProfile.load(path).window == 3
    assert asked == ["tomllib", "tomli"]
    with pytest.raises(OptionsError, match=r"pip install tomli$"):
        LoaderProfile.load(path)


def test_a_profile_needs_no_torch() -> None:
    code = "import sys, h5pack.feed.profile; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# H5Loader.


def test_a_loader_takes_what_it_is_not_given(dataset: h5pack.H5Dataset, folder: Path) -> None:
    profile = LoaderProfile(batch_size=9, window=2, threads=1, chunk_rows=10)
    path = written(folder, profile.dumps())
    for given_as in (profile, path, str(path)):
        loader = h5pack.H5Loader(dataset, profile=given_as)
        assert (loader.batch_size, loader.plan.window, loader.threads) == (9, 2, 1)
    loader = h5pack.H5Loader(dataset, 7, window=3, threads=5, profile=profile)
    assert (loader.batch_size, loader.plan.window, loader.threads) == (7, 3, 5)


def test_a_profile_changes_nothing_but_these_settings(dataset: h5pack.H5Dataset) -> None:
    profile = LoaderProfile(batch_size=9, window=2, threads=1)
    ours, theirs = h5pack.H5Loader(dataset, seed=5, profile=profile), h5pack.H5Loader(dataset, 9, window=2, seed=5)
    assert ours.plan.identity() == theirs.plan.identity()
    assert packs.all_same(list(ours), list(theirs))


def test_an_empty_profile_leaves_the_defaults(dataset: h5pack.H5Dataset) -> None:
    loader, plain = h5pack.H5Loader(dataset, 9, profile=LoaderProfile()), h5pack.H5Loader(dataset, 9)
    assert loader.plan.window == plain.plan.window == 16
    assert loader.threads == plain.threads


def test_somebody_must_say_the_batch_size(dataset: h5pack.H5Dataset) -> None:
    with pytest.raises(OptionsError, match=r"^batch_size is not given; give rows a batch$"):
        h5pack.H5Loader(dataset)
    with pytest.raises(OptionsError, match=r"^batch_size is not given, nor in the profile; give rows a batch$"):
        h5pack.H5Loader(dataset, profile=LoaderProfile(window=3))
    with pytest.raises(OptionsError, match="profile is a dict; give a path, or a LoaderProfile"):
        h5pack.H5Loader(dataset, profile={"batch_size": 3})  # type: ignore[arg-type]


def test_chunks_of_another_size_are_told(dataset: h5pack.H5Dataset) -> None:
    with pytest.warns(UserWarning, match=r"chunks of 1,536 rows, and this dataset has chunks of 10\b") as caught:
        h5pack.H5Loader(dataset, 9, profile=LoaderProfile(chunk_rows=1536))
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h5pack.H5Loader(dataset, 9, profile=LoaderProfile(chunk_rows=10))
        h5pack.H5Loader(dataset, 9, profile=LoaderProfile())


def test_a_profile_starts_no_more_threads_than_there_are_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_cpus", lambda: 3)
    profile = LoaderProfile(batch_size=1, threads=64)
    assert choose_settings(profile, 1, None, None, None).threads == 3
    assert choose_settings(profile, 1, None, None, 64).threads == 64
    assert choose_settings(LoaderProfile(batch_size=1, threads=2), 1, None, None, None).threads == 2
    assert choose_settings(None, 1, 1, None, None).threads is None
