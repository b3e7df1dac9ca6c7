"""A survey that is killed or interrupted continues with the images that it has not read, and the pack is the same."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

import h5pack
from h5pack import cli
from h5pack.errors import H5PackError, NoSpaceError, SizesDifferError, SourceError
from h5pack.images.headers import DecodePath
from h5pack.pack import journal
from h5pack.pack.conversion import Conversion
from h5pack.pack.journal import SurveyJournal
from h5pack.pack.survey import Survey, SurveyOptions
from h5pack.sources.reader import FileReader
from h5pack.sources.tables import TableReader
from tests.crashing import convert_in_child, effective_steps, files_of, interrupt, leftovers, wait_for
from tests.makers import expected, flat_folder, pair_folders, quick, save, truncate

IMAGES, REJECTS = 80, 4
TASK, IN_FLIGHT = 5, 10
"""Images of a task, a sixteenth of the source, and of the tasks whose results one process yields together."""
SETTINGS = [quick(chunk_rows=8), quick(keep="jpeg")]
REJECTED = {None: [30], "jpeg": [3, 30, 50, 69]}
"""The images that the survey rejects; without `keep`, it does not find out that a file is cut short."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every survey takes long."""
    monkeypatch.setattr(journal, "_SURVEY_SECONDS", 0.0)


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return getattr(request, "param", quick(chunk_rows=8))


@pytest.fixture(scope="module")
def whole(source: Path, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "o.h5"
    h5pack.convert(source, out, **settings)
    return out.read_bytes()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The images whose headers this process reads."""
    names: list[str] = []
    survey = FileReader.survey

    def counting(self: FileReader, index: int, name: str, max_pixels: int) -> Any:
        names.append(name)
        return survey(self, index, name, max_pixels)

    monkeypatch.setattr(FileReader, "survey", counting)
    return names


def to_read(done: int, settings: dict[str, Any]) -> int:
    """How many headers a run reads after one whose results of the first `done` images were kept."""
    return IMAGES - done + sum(index < done for index in REJECTED[settings.get("keep")])


def stop_after(images: int, stop: Callable[[], object], work: Callable[[], object]) -> None:
    """Work until this process has read as many headers, then call `stop`."""
    survey, done = FileReader.survey, 0

    def stopping(self: FileReader, index: int, name: str, max_pixels: int) -> Any:
        nonlocal done
        if done == images:
            stop()
        done += 1
        return survey(self, index, name, max_pixels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileReader, "survey", stopping)
        work()


def killed_after(images: int, source: Path, out: Path, settings: dict[str, Any]) -> None:
    child = os.fork()
    if child == 0:
        try:
            stop = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            stop_after(images, stop, lambda: h5pack.convert(source, out, **settings))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("images", [0, 9, 10, 37, 79])
@pytest.mark.parametrize("settings", SETTINGS, indirect=True)
def test_killed_in_the_survey(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, reads: list[str], images: int
) -> None:
    out = tmp_path / "o.h5"
    killed_after(images, source, out, settings)
    assert leftovers(tmp_path) == ({"o.h5.partial.survey"} if images >= IN_FLIGHT else set())
    report = h5pack.convert(source, out, **settings, resume=True)
    assert len(reads) == to_read(images // IN_FLIGHT * IN_FLIGHT, settings)
    assert (report.images, out.read_bytes() == whole) == (IMAGES - REJECTS, True)
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


@pytest.mark.parametrize("settings", SETTINGS, indirect=True)
def test_killed_at_every_change_to_a_file_until_rows_are_written(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, reads: list[str]
) -> None:
    """In the middle of each record, too; the results are kept until there is a journal of rows."""
    out = tmp_path / "o.h5"
    changes = convert_in_child(source, out, settings, kill_at=None)
    records = [step for step, change in enumerate(changes) if change == "write o.h5.partial.survey"]
    begun = changes.index("unlink o.h5.partial.survey")
    assert len(records) == IMAGES // TASK
    assert any(change.startswith("replace plan.json") for change in changes[:begun])
    later = [step for step in effective_steps(changes) if records[-1] < step <= begun]
    for step in (*records[::5], *later[:: 1 + 2 * ("keep" in settings)]):
        changes[step].leave_files(files_of(out))
        reads.clear()
        h5pack.convert(source, out, **settings, resume=True)
        written = sum(record < step for record in records)
        has_plan = any(change.startswith("replace plan.json") for change in changes[:step])
        assert has_plan or len(reads) == to_read(TASK * written, settings), changes[step]
        assert out.read_bytes() == whole
        assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


def test_killed_again_and_again(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, reads: list[str]
) -> None:
    out = tmp_path / "o.h5"
    for _ in range(5):
        killed_after(12, source, out, {**settings, "resume": True})
    h5pack.convert(source, out, **settings, resume=True)
    assert (len(reads), out.read_bytes() == whole) == (to_read(5 * IN_FLIGHT, settings), True)


def test_resumed_with_workers(source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path) -> None:
    out, resumed = tmp_path / "o.h5", {**settings, "resume": True}
    with pytest.raises(KeyboardInterrupt):
        stop_after(33, interrupt, lambda: h5pack.convert(source, out, **settings))
    assert leftovers(tmp_path) == {"o.h5.partial.survey"}
    h5pack.convert(source, out, **{**resumed, "num_workers": 2, "start_method": "fork"})
    assert out.read_bytes() == whole


def test_the_damaged_rest_is_surveyed_again(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, reads: list[str]
) -> None:
    out, file = tmp_path / "o.h5", tmp_path / "o.h5.partial.survey"
    killed_after(60, source, out, settings)
    good = file.read_bytes()
    for damage, least in ((0, 80), (15, 80), (len(good) // 2, 40), (len(good) - 1, 20)):
        file.write_bytes(good[:damage] + bytes([good[damage] ^ 1]) + good[damage + 1 :])
        reads.clear()
        h5pack.convert(source, out, **settings, resume=True, overwrite=True)
        assert least <= len(reads) <= 80
        assert out.read_bytes() == whole


OTHER_OPTIONS = {"max_pixels": {"max_pixels": 10_000}, "keep": {"keep": "jpeg"}, "resize": {"size": 8}}


@pytest.mark.parametrize("changed", ["name", "package", *(one.name for one in fields(SurveyOptions))])
def test_another_survey_begins_again(
    source: Path, tmp_path: Path, reads: list[str], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out, settings = tmp_path / "in", tmp_path / "o.h5", quick()
    shutil.copytree(source, root)
    killed_after(60, root, out, settings)
    if changed == "name":
        os.rename(root / "train" / "x" / "00001.jpg", root / "train" / "x" / "a.jpg")
    elif changed == "package":
        monkeypatch.setattr("h5pack.pack.survey.decoder_versions", lambda: {"Pillow": "0.1"})
    else:
        settings |= OTHER_OPTIONS[changed]
    h5pack.convert(root, out, **settings, resume=True)
    assert len(reads) == IMAGES
    h5pack.convert(root, tmp_path / "again.h5", **settings)
    assert out.read_bytes() == (tmp_path / "again.h5").read_bytes()


@pytest.mark.parametrize("settings", SETTINGS)
def test_rejected_images_are_surveyed_again(tmp_path: Path, reads: list[str], settings: dict[str, Any]) -> None:
    """Each of four runs keeps the results of 8 images, and finds one more file repaired."""
    source, out = flat_folder(tmp_path / "in", 40), tmp_path / "o.h5"
    manifest = source / "m.csv"
    manifest.write_text("path\n" + "".join(f"{number:05d}.jpg\n" for number in range(40)))
    good = {path: path.read_bytes() for path in sorted(source.glob("0000[2-5].jpg"))}
    missing, empty, other, cut = good
    missing.unlink()
    empty.write_bytes(b"")
    other.write_bytes(b"no image")
    truncate(cut, 0.4)
    for path, data in good.items():
        killed_after(9, manifest, out, {**settings, "resume": True})
        path.write_bytes(data)
    report = h5pack.convert(manifest, out, **settings, resume=True)
    assert (report.images, report.rejects, len(reads)) == (40, 0, 40 - 4 * 8 + 4)
    h5pack.convert(manifest, tmp_path / "whole.h5", **settings)
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_images_of_rejected_masks_are_surveyed_again(tmp_path: Path) -> None:
    root, out, settings = pair_folders(tmp_path / "in", 48), tmp_path / "o.h5", quick(source_kind="pairs")
    mask = root / "masks" / "003.png"
    good = mask.read_bytes()
    truncate(mask, 0.1)
    killed_after(30, root, out, settings)
    mask.write_bytes(good)
    assert h5pack.convert(root, out, **settings, resume=True).images == 48
    h5pack.convert(root, tmp_path / "whole.h5", **settings)
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_another_root_begins_the_survey_again(tmp_path: Path, reads: list[str]) -> None:
    roots = [flat_folder(tmp_path / name, 20) for name in ("a", "b")]
    (roots[0] / "00002.jpg").unlink()
    manifest = tmp_path / "m.csv"
    manifest.write_text("path\n" + "".join(f"{number:05d}.jpg\n" for number in range(20)))
    out, settings = tmp_path / "o.h5", quick(chunk_rows=8)
    killed_after(10, manifest, out, {**settings, "root": roots[0]})
    report = h5pack.convert(manifest, out, **settings, root=roots[1], resume=True)
    assert (report.images, report.rejects, len(reads)) == (20, 0, 20)


@pytest.mark.parametrize("replaces", [False, True])
def test_another_column_or_file_of_images_begins_the_survey_again(tmp_path: Path, replaces: bool) -> None:
    """Both columns have the same names and sizes, but Exif turns the images of one of them."""
    turned = Image.Exif()
    turned[0x0112] = 3
    images = {"a": save(tmp_path / "a.jpg", 1, (16, 16)), "b": save(tmp_path / "b.jpg", 2, (16, 16), exif=turned)}
    columns = {name: [path.read_bytes()] * 20 for name, path in images.items()}
    source, out, survey, calls = tmp_path / "in", tmp_path / "o.h5", TableReader.survey, itertools.count()
    source.mkdir()
    parquet.write_table(pyarrow.table(columns), source / "t.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableReader, "survey", lambda *parts: survey(*parts) if next(calls) < 10 else interrupt())
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, **quick(path_column="a"))
    assert leftovers(tmp_path) == {"a.jpg", "b.jpg", "in", "o.h5.partial.survey"}
    if replaces:
        parquet.write_table(pyarrow.table({"a": columns["b"]}), source / "t.parquet")
    h5pack.convert(source, out, **quick(path_column="a" if replaces else "b", resume=True))
    assert all(np.array_equal(sample.image, expected(images["b"])) for sample in h5pack.H5Dataset(out))


@pytest.mark.parametrize("overwrite", [False, True])
def test_without_resume_the_survey_begins_again(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, reads: list[str], overwrite: bool
) -> None:
    out = tmp_path / "o.h5"
    killed_after(60, source, out, settings)
    h5pack.convert(source, out, **settings, overwrite=overwrite)
    assert (len(reads), out.read_bytes() == whole) == (IMAGES, True)
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


def test_a_short_survey_writes_no_file_and_removes_an_earlier_one(
    source: Path, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.h5"
    killed_after(60, source, out, settings)
    monkeypatch.setattr(journal, "_SURVEY_SECONDS", 3600.0)
    changes = convert_in_child(source, out, settings, kill_at=None)
    assert {change for change in changes if change.endswith(".survey")} == {"unlink o.h5.partial.survey"}
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}
    killed_after(60, source, tmp_path / "p.h5", settings)
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


def test_results_of_before_the_file_was_created_are_in_it(
    source: Path, settings: dict[str, Any], tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(journal, "_SURVEY_SECONDS", 6.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal.time, "monotonic", lambda: next(seconds))
        killed_after(31, source, tmp_path / "o.h5", settings)
        assert leftovers(tmp_path) == set()
        killed_after(77, source, tmp_path / "o.h5", settings)
    h5pack.convert(source, tmp_path / "o.h5", **settings, resume=True)
    assert len(reads) == to_read(70, quick())


def test_looking_at_the_plan_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Conversion(source, tmp_path / "o.h5", **quick()) as conversion:
        conversion.plan()
        assert leftovers(tmp_path) == set()
    killed_after(60, source, tmp_path / "o.h5", quick())
    before = (tmp_path / "o.h5.partial.survey").read_bytes()
    assert cli.main(["convert", str(source), str(tmp_path / "o.h5"), "--dry-run", "--workers", "1"]) == 0
    assert (tmp_path / "o.h5.partial.survey").read_bytes() == before
    assert leftovers(tmp_path) == {"o.h5.partial.survey"}


def test_an_earlier_file_goes_if_the_plan_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(60, source, tmp_path / "o.h5", quick())
    monkeypatch.setattr(journal, "_SURVEY_SECONDS", 3600.0)
    with pytest.raises(H5PackError):
        h5pack.convert(source, tmp_path / "o.h5", **quick(strict=True))
    assert leftovers(tmp_path) == set()


@pytest.mark.parametrize("error", ["sizes", "space"])
def test_an_error_after_the_survey(source: Path, tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are kept only if the error advises to resume."""
    root, out = tmp_path / "in", tmp_path / "out" / "o.h5"
    shutil.copytree(source, root)
    out.parent.mkdir()
    if error == "sizes":
        save(root / "train" / "x" / "other.jpg", 1, (9, 9))
    else:
        monkeypatch.setattr("h5pack.pack.output.free_bytes", lambda _: 1000)
    expected: type[H5PackError] = SizesDifferError if error == "sizes" else NoSpaceError
    with pytest.raises(expected):
        h5pack.convert(root, out, **quick())
    assert leftovers(out.parent) == (set() if error == "sizes" else {"o.h5.partial.survey"})


def test_a_survey_that_failing_storage_stopped_is_continued(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, reads: list[str]
) -> None:
    out, head, steps = tmp_path / "o.h5", FileReader.head, itertools.count()

    def failing(self: FileReader, *arguments: Any) -> tuple[bytes, int, int]:
        if next(steps) == 37:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return head(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileReader, "head", failing)
        with pytest.raises(SourceError) as caught:
            h5pack.convert(source, out, **settings)
    assert caught.value.parameters == ("resume=True",)
    reads.clear()
    h5pack.convert(source, out, **settings, resume=True)
    assert (len(reads) <= IMAGES - 30, out.read_bytes() == whole) == (True, True)


def test_masks_are_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    root, out, settings = pair_folders(tmp_path / "in", 48), tmp_path / "o.h5", quick(source_kind="pairs")
    h5pack.convert(root, tmp_path / "whole.h5", **settings)
    killed_after(30, root, out, settings)
    reads.clear()
    h5pack.convert(root, out, **settings, resume=True)
    assert len(reads) == 48 - 30
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_second_conversion_leaves_the_first_ones_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.system.files._LOCK_WAIT_SECONDS", 0.1)
    path = tmp_path / "o.h5.partial.survey"
    with SurveyJournal(path, {"one": 1}, resume=False) as first:
        first.append(b"result")
        before = path.read_bytes()
        for resume in (False, True):
            with SurveyJournal(path, {"one": 1}, resume=resume) as second:
                assert list(second.payloads()) == []
                second.append(b"other")
        assert path.read_bytes() == before
    assert not path.exists()


def test_a_disk_that_is_full_does_not_stop_the_survey(
    source: Path, settings: dict[str, Any], whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, steps = tmp_path / "o.h5", os.write, iter(range(1000))

    def partly(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".survey") and next(steps) >= 3:
            return write(descriptor, data[:7])
        return write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", partly)
        killed_after(70, source, out, settings)
    h5pack.convert(source, out, **settings, resume=True)
    assert out.read_bytes() == whole


def test_results_are_read_one_by_one(tmp_path: Path) -> None:
    path, payloads = tmp_path / "o.h5.partial.survey", [bytes([number]) * 2**20 for number in range(24)]
    first = SurveyJournal(path, {}, resume=False)
    for payload in payloads:
        first.append(payload)
    first.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    tracemalloc.start()
    try:
        with SurveyJournal(path, {}, resume=True) as second:
            found = [(payload[0], len(payload)) for payload in second.payloads()]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [(number, 2**20) for number in range(24)]
    assert peak < 6 * 2**20


def test_a_part_is_read_back_as_it_was() -> None:
    random = np.random.default_rng(1)
    part = Survey(
        random.integers(0, 2**31, 7).astype(np.int32), random.integers(0, 2**31, 7).astype(np.int32),
        np.full(7, DecodePath.JPEG_420, np.uint8), random.integers(0, 2**64, 7, np.uint64),
        {103: "größer als \udcff erlaubt\0"}, None, {"b", "a"}, 2**40, random.integers(0, 2**62, 7),
        ["|u1", "<u2"], random.integers(1, 9, 7).astype(np.uint8),
    )  # fmt: skip
    columns = ("heights", "widths", "decode_paths", "fingerprints", "orientations", "kept_bytes")
    start, found = Survey.decode(part.encode(100, columns), columns)
    assert start == 100
    for name in columns:
        np.testing.assert_array_equal(getattr(found, name), getattr(part, name), strict=True)
    for name in ("reasons", "unused", "mask_dtypes", "file_bytes"):
        assert getattr(found, name) == getattr(part, name)


COMMAND = """
import os, sys, time
from h5pack import cli
from h5pack.pack import journal
from h5pack.sources.reader import FileReader
journal._SURVEY_SECONDS = 0.0
survey = FileReader.survey
def slow(self, index, name, max_pixels):
    time.sleep(0.02)
    return survey(self, index, name, max_pixels)
FileReader.survey = slow
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_on_the_command_line(source: Path, tmp_path: Path, reads: list[str], number: int) -> None:
    out = tmp_path / "o.h5"
    arguments = ["convert", str(source), str(out), "--chunk-rows", "8", "--quiet"]
    command = [sys.executable, "-c", COMMAND, *arguments, "--workers", "2", "--start-method", "fork"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    kept = tmp_path / "o.h5.partial.survey"
    wait_for(lambda: (kept.exists() and kept.stat().st_size > 1500) or process.poll() is not None)
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), errors
    assert number == signal.SIGKILL or str(kept) in errors.splitlines()[-1]
    assert leftovers(tmp_path) == {kept.name}
    assert cli.main([*arguments, "--workers", "1", "--resume"]) == 0
    assert 0 < len(reads) < IMAGES
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=8))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()
