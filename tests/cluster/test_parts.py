"""Array jobs: parts in any order, at the same time, twice, killed, late; two processes that finish."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pkgutil
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack.cluster.parts import PartsFolder, SharedResults
from h5pack.errors import (
    H5PackError,
    IncompletePackError,
    NoImagesError,
    NoSpaceError,
    OptionsError,
    OutputBusyError,
    OutputExistsError,
    PackChangedError,
    ReadError,
    RejectedImageError,
    ResumeError,
    SourceError,
    WorkerError,
)
from h5pack.pack import conversion, finish, writer
from h5pack.pack.encode import encode_images
from h5pack.pack.journal import Journal
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock, OwnerFile, PartFile, _process_identity
from h5pack.pack.survey import survey
from h5pack.pack.writer import SampleDecoder
from h5pack.sources.archives import ArchiveReader
from h5pack.sources.map_style import MapStyleReader
from h5pack.sources.reader import FileReader
from h5pack.system.processes import SerialExecutor, run
from tests.cluster.datasets import Pictures
from tests.cluster.test_dask_client import archive, compressed, folder, hdf5, kept_files, masks
from tests.crashing import convert_in_child, convert_until, distinct_steps, interrupt, leftovers, wait_for
from tests.makers import flat_folder, save, tar_file

pytestmark = pytest.mark.usefixtures("impatient")
FORK = multiprocessing.get_context("fork")
MAKERS = {"folder": folder, "kept_files": kept_files, "compressed": compressed, "hdf5": hdf5, "masks": masks}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that do not wait long for tasks which a killed one has claimed."""
    monkeypatch.setattr("h5pack.cluster.parts._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("h5pack.system.processes._WAIT_SECONDS", 0.02)


def local(source: Path, out: Path, options: dict[str, Any]) -> bytes:
    h5pack.convert(source, out, **{**options, "num_workers": 1})
    return out.read_bytes()


def write(source: Path, out: Path, options: dict[str, Any], *parts: str) -> None:
    for part in parts:
        h5pack.convert(source, out, **{"num_workers": 1, **options, "part": part})


def require_finish(source: Path, out: Path, options: dict[str, Any]) -> None:
    """Finish an array job; the file must be that of a conversion without parts."""
    h5pack.convert(source, out, **{"num_workers": 1, **options, "finish": True})
    assert out.read_bytes() == local(source, out.with_name("local.h5"), options | {"overwrite": True})
    assert not list(out.parent.glob(f"{out.name}.partial*"))


@pytest.mark.parametrize("name", MAKERS)
def test_parts_at_the_same_time_and_again_give_the_same_file(name: str, tmp_path: Path) -> None:
    source, options = MAKERS[name](tmp_path)
    out = tmp_path / "o.h5"
    processes = [FORK.Process(target=write, args=(source, out, options, f"{part}/3")) for part in (3, 1, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    with pytest.raises(IncompletePackError, match="part 2 of 3") as caught:
        h5pack.convert(source, out, num_workers=1, finish=True, **options)
    assert caught.value.parameters[0] == "part='2/3'"
    report = h5pack.convert(source, out, num_workers=2, part=(2, 3), **options)
    assert (report.part, report.resumed_rows) == ("2/3", 0)
    again = h5pack.convert(source, out, num_workers=1, part=(2, 3), **options)
    assert (again.images, again.resumed_rows) == (report.images, report.images)
    assert not list(tmp_path.glob("*.structure-*")), "a part removes its private files"
    require_finish(source, out, options)
    for settings in ({"part": "1/3"}, {"finish": True}):
        assert h5pack.convert(source, out, num_workers=1, **options, **settings).already_complete


def test_the_rest_of_an_array_job_can_be_written_by_one_process(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    out = tmp_path / "o.h5"
    h5pack.convert(source, out, num_workers=1, part="2/3", **options)
    # Rows are recorded once, after they are flushed.
    assert sum(len(record.rows) for record in Journal(Output(out).journal).records()) == 20
    for settings in ({}, {"finish": True}):
        with pytest.raises(OutputExistsError if not settings else IncompletePackError):
            h5pack.convert(source, out, num_workers=1, **options, **settings)
    assert h5pack.convert(source, out, num_workers=1, resume=True, **options).resumed_rows == 20
    assert out.read_bytes() == local(source, tmp_path / "local.h5", options)
    assert not list(tmp_path.glob("o.h5.partial*"))


def test_rows_that_a_resumed_run_did_not_flush_are_checked_when_an_array_job_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = flat_folder(tmp_path / "in", 20), {"num_workers": 1, "chunk_rows": 2}
    out = tmp_path / "o.h5"
    expected = local(source, tmp_path / "local.h5", options)
    write(source, out, options, "1/2")
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.pack.journal.Journal.save_written", interrupt)
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, resume=True, **options)
    # A power cut loses a row of the second part.
    with h5py.File(tmp_path / "local.h5") as file:
        offset = file["images"].id.get_chunk_info(8).byte_offset
    with (tmp_path / "o.h5.partial").open("r+b") as partial:
        partial.seek(offset)
        partial.write(bytes(100))
    with pytest.raises(IncompletePackError, match="part 2 of 2"):
        h5pack.convert(source, out, finish=True, **options)
    write(source, out, options, "2/2")
    h5pack.convert(source, out, finish=True, **options)
    assert out.read_bytes() == expected


@pytest.mark.parametrize("name", ["folder", "kept_files"])
def test_a_killed_part_is_run_again(name: str, tmp_path: Path) -> None:
    source, options = MAKERS[name](tmp_path)
    options |= {"num_workers": 1}
    h5pack.convert(source, tmp_path / "local.h5", **options)
    expected = (tmp_path / "local.h5").read_bytes()
    first, finish = {**options, "part": "1/2"}, {**options, "finish": True}
    out = tmp_path / "whole.h5"
    parts_steps = distinct_steps(convert_in_child(source, out, first, None), first=True)
    h5pack.convert(source, out, part="2/2", **options)
    finish_steps = distinct_steps(convert_in_child(source, out, finish, None), first=True)
    assert min(len(parts_steps), len(finish_steps)) > 12
    for number in range(4):
        step = parts_steps[(2 * number + 1) * len(parts_steps) // 8]
        out = tmp_path / f"{number}.h5"
        convert_in_child(source, out, first, step)
        h5pack.convert(source, out, part="2/2", **options)
        h5pack.convert(source, out, **first)
        convert_in_child(source, out, finish, finish_steps[(2 * number + 1) * len(finish_steps) // 8])
        h5pack.convert(source, out, **finish)
        assert out.read_bytes() == expected, (step, number)
        assert not list(tmp_path.glob(f"{number}.h5.partial*"))


def die(task: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_several_workers_compress_the_rows_of_the_parts(tmp_path: Path) -> None:
    source, options = compressed(tmp_path)
    options |= {"num_workers": 2}
    write(source, tmp_path / "o.h5", options, "1/2", "2/2")
    require_finish(source, tmp_path / "o.h5", options)


def test_a_part_whose_worker_died_is_not_advised_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = folder(tmp_path)
    monkeypatch.setattr(writer, "write_rows", die)
    for settings, advised in (({"part": "1/2"}, ("num_workers",)), ({}, ("num_workers", "resume=True"))):
        with pytest.raises(WorkerError) as caught:
            h5pack.convert(source, tmp_path / f"{len(advised)}.h5", num_workers=2, **options, **settings)
        assert caught.value.parameters == advised


@pytest.mark.parametrize("settings", [{}, {"part": "1/2"}])
@pytest.mark.parametrize("name", ["survey", "lock", "UnfinishedPack"])
def test_a_part_on_a_full_disk_is_not_advised_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    source, options = folder(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    for one in ("OutputLock", "PartFile") if name == "lock" else (name,):
        monkeypatch.setattr(f"h5pack.pack.conversion.{one}", Mock(side_effect=full))
    with pytest.raises(NoSpaceError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", num_workers=1, **options, **settings)
    assert caught.value.parameters == (() if settings else ("resume=True",))


def test_a_part_that_cannot_record_the_job_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, full = flat_folder(tmp_path / "in", 6), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("h5pack.cluster.parts.write_atomically", Mock(side_effect=full))
    with pytest.raises(NoSpaceError):
        write(source, tmp_path / "o.h5", {}, "1/2")
    assert leftovers(tmp_path) == {"in"}


def test_a_part_whose_output_another_run_finishes_during_the_survey_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"

    def finish_first(*arguments: Any) -> Any:
        monkeypatch.undo()
        h5pack.convert(source, out, num_workers=1, resume=True)
        return survey(*arguments)

    monkeypatch.setattr("h5pack.pack.conversion.survey", finish_first)
    with pytest.raises(H5PackError):
        write(source, out, {}, "1/2")
    write(source, out, {}, "1/2")
    require_finish(source, out, {})


@pytest.mark.parametrize("name", ["pack.conversion.PartsFolder.agree", "pack.resume.write_structure"])
def test_a_part_that_begins_files_of_a_finished_output_removes_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"
    function = pkgutil.resolve_name(f"h5pack.{name}")

    def finish_first(*arguments: Any) -> Any:
        monkeypatch.undo()
        write(source, out, {}, "1/2", "2/2")
        h5pack.convert(source, out, num_workers=1, finish=True)
        return function(*arguments)

    monkeypatch.setattr(f"h5pack.{name}", finish_first)
    with pytest.raises(IncompletePackError):
        write(source, out, {}, "1/2")
    assert not list(tmp_path.glob("o.h5.partial*"))
    assert h5pack.convert(source, out, num_workers=1, part="1/2").already_complete


@pytest.mark.parametrize("others_come_first", [True, False])
def test_a_part_that_comes_too_late_keeps_the_file_of_a_new_job(
    others_come_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(tmp_path / "o.h5")

    def link(file: Path, name: Path) -> None:
        # Another job finishes the output, and a third one, which replaces it, links its own file.
        if not others_come_first:
            os.link(file, name)
            name.unlink()
        output.final.write_bytes(b"finished")
        name.write_bytes(b"new")
        raise FileExistsError

    monkeypatch.setattr("h5pack.pack.output.link_file", link)
    with pytest.raises(IncompletePackError):
        PartFile(output).place(lambda descriptor: None, overwrite=False)
    assert output.partial.read_bytes() == b"new"
    assert not output.new.exists()


def test_parts_must_agree(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    out = tmp_path / "o.h5"
    with pytest.raises(IncompletePackError):
        h5pack.convert(source, out, num_workers=1, finish=True, **options)
    h5pack.convert(source, out, num_workers=1, part="1/3", **options)
    for settings, parameters in (
        ({"part": "2/4"}, ()),
        ({"seed": 5}, ("seed=0", "seed=5")),
        ({"chunk_rows": 5}, (f"chunk_rows={options['chunk_rows']}", "chunk_rows=5")),
        ({"source_kind": "flat"}, ("source_kind", "source_kind='flat'")),
    ):
        with pytest.raises(ResumeError) as caught:
            h5pack.convert(source, out, **{"num_workers": 1, "part": "2/3", **options, **settings})
        assert caught.value.parameters == parameters
    save(source / "a/later.jpg")
    for settings in ({"part": "2/3"}, {"finish": True}):
        with pytest.raises(ResumeError):
            h5pack.convert(source, out, **{"num_workers": 1, **options, **settings})
    (source / "a/later.jpg").unlink()
    image = min((source / "a").iterdir())
    for renamed in (image.with_name("zzz.jpg"), source / "c" / image.name):
        renamed.parent.mkdir(exist_ok=True)
        image.rename(renamed)
        with pytest.raises(ResumeError, match="the names") as caught:
            h5pack.convert(source, out, num_workers=1, part="2/3", **options)
        assert not re.search(r"\d{5}", str(caught.value).replace(str(tmp_path), "")), "checksums say nothing to a user"
        renamed.rename(image)
    (source / "c").rmdir()
    for settings in ({"resume": True}, {"finish": True}):
        with pytest.raises(OptionsError):
            h5pack.convert(source, out, **{"num_workers": 1, "part": "1/3", **options, **settings})
    h5pack.convert(source, tmp_path / "p.h5", num_workers=1, **options)
    (tmp_path / "p.h5").rename(tmp_path / "p.h5.partial")
    with pytest.raises(OutputExistsError) as caught:
        h5pack.convert(source, tmp_path / "p.h5", num_workers=1, part="1/3", **options)
    assert caught.value.parameters == ("resume=True", "part='1/3'")  # A part never discards an unfinished file.


def test_a_part_starts_over_in_the_same_process_after_its_journal_was_deleted(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    out = tmp_path / "o.h5"
    for _ in range(2):
        # The file stays, because a new one may, but need not, get its inode number.
        shutil.rmtree(tmp_path / "o.h5.partial.journal", ignore_errors=True)
        write(source, out, options | {"overwrite": True}, "1/1")
    require_finish(source, out, options)


def test_parts_that_cannot_agree_name_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = flat_folder(tmp_path / "in", 8)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        h5pack.convert(source, tmp_path / "o.h5", part=(1, 2), num_workers=1)


def test_parts_replace_an_output_while_others_encode_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal begins before OUT.partial exists. Then an earlier output of the same options is not the result."""
    source, options = kept_files(tmp_path)
    options |= {"num_workers": 1, "overwrite": True}
    out = tmp_path / "o.h5"
    h5pack.convert(source, out, **options)
    expected, before = out.read_bytes(), out.stat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr("h5pack.pack.conversion.encode_images", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, part="1/2", **options)
    assert (tmp_path / "o.h5.partial.journal").exists()
    assert not (tmp_path / "o.h5.partial").exists()
    for part in ("2/2", "1/2"):
        assert not h5pack.convert(source, out, part=part, **options).already_complete
    h5pack.convert(source, out, finish=True, **options)
    assert (out.read_bytes(), out.stat().st_ino == before) == (expected, False)
    assert not list(tmp_path.glob("o.h5.partial*"))


def test_parts_that_reject_an_array_while_they_encode_are_finished(tmp_path: Path) -> None:
    source, options = tmp_path / "in.h5", {"keep": "jpeg"}
    images = np.zeros((6, 8, 8, 3), np.float32)
    images[4] = 1.5
    with h5py.File(source, "w") as file:
        file["images"] = images
    write(source, tmp_path / "o.h5", options, "1/2", "2/2")
    require_finish(source, tmp_path / "o.h5", options)


def test_a_strict_part_is_not_advised_to_resume(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    with pytest.raises(RejectedImageError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", num_workers=1, part="1/1", strict=True, **options)
    assert caught.value.parameters == ("strict=True",)  # A part always continues; resume=True would be refused.
    with pytest.raises(RejectedImageError):
        h5pack.convert(source, tmp_path / "p.h5", num_workers=1, strict=True, **options)
    with pytest.raises(ResumeError) as other:
        h5pack.convert(source, tmp_path / "p.h5", num_workers=1, part="1/1", overwrite=True, seed=5, **options)
    assert other.value.parameters == ("seed=0", "seed=5")


def test_the_example_of_an_array_job_runs_every_part_and_finishes(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    script = Path(__file__).parents[2] / "examples/convert_parts.sbatch"
    for task, expected in ((3, "--part 3/16"), (0, "--finish")):
        done = subprocess.run(
            ["bash", script, "a b", "o.h5", "--size", "64"], capture_output=True, text=True, check=True,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(task)},
        )  # fmt: skip
        assert done.stdout == f"h5pack convert a b o.h5 --size 64 {expected}\n"


class Late:
    """A process that writes part 1 and is held in a method, by default when its first row is decoded.

    It continues when it is released.
    """

    def __init__(
        self, source: Path, out: Path, options: dict[str, Any], held_in: tuple[Any, str] = (SampleDecoder, "decode")
    ) -> None:
        reached, self.release = out.with_name("reached"), out.with_name("release")
        method = getattr(*held_in)

        def held(*arguments: Any, **keywords: Any) -> Any:
            reached.touch()
            while not self.release.exists():
                time.sleep(0.005)
            return method(*arguments, **keywords)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*held_in, held)
            self.process = FORK.Process(target=self._convert, args=(source, out, options), daemon=True)
            self.process.start()
        wait_for(reached.exists)

    @staticmethod
    def _convert(source: Path, out: Path, options: dict[str, Any]) -> None:
        try:
            h5pack.convert(source, out, num_workers=1, part="1/2", **options)
        except (IncompletePackError, OutputBusyError):
            os._exit(7)

    def write(self) -> int | None:
        self.release.touch()
        self.process.join()
        exitcode: int | None = self.process.exitcode
        return exitcode


@pytest.mark.parametrize("isolated", [True, False])
def test_a_writer_that_comes_back_after_rows_moved_changes_nothing(
    isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = folder(tmp_path)
    options |= {"order": "sorted"}
    out = tmp_path / "o.h5"
    late = Late(source, out, options)
    write(source, out, options, "1/2", "2/2")
    if not isolated:
        # The late writer must be able to do harm, or this test would prove nothing.
        monkeypatch.setattr(OutputLock, "isolate", lambda _: None)
    report = h5pack.convert(source, out, num_workers=1, finish=True, **options)
    assert report.moved_rows > 0
    expected = local(source, tmp_path / "local.h5", options)
    assert out.read_bytes() == expected
    assert late.write() == 7
    assert (out.read_bytes() == expected) == isolated


def test_a_part_that_begins_to_write_while_rows_move_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = folder(tmp_path)
    options |= {"order": "sorted"}
    out = tmp_path / "o.h5"
    late = Late(source, out, options, (conversion.Conversion, "_require_unchanged"))
    write(source, out, options, "1/2", "2/2")
    expected = local(source, tmp_path / "local.h5", options)
    codes, make_tables = [], finish.make_tables

    def release(*arguments: Any) -> Any:
        codes.append(late.write())
        return make_tables(*arguments)

    monkeypatch.setattr(finish, "make_tables", release)
    h5pack.convert(source, out, num_workers=1, finish=True, **options)
    assert out.read_bytes() == expected
    assert codes == [7]


def test_parts_that_run_again_after_finishing_was_interrupted_have_nothing_to_do(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    options |= {"order": "sorted"}
    write(source, tmp_path / "o.h5", options, "1/2", "2/2")
    convert_until("h5pack.pack.finish.make_tables", source, tmp_path / "o.h5", {**options, "finish": True})
    for part in ("1/2", "2/2"):
        report = h5pack.convert(source, tmp_path / "o.h5", num_workers=1, part=part, **options)
        assert report.resumed_rows == report.images
    require_finish(source, tmp_path / "o.h5", options)


def test_a_writer_that_comes_back_while_others_write_changes_nothing(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    out = tmp_path / "o.h5"
    late = Late(source, out, options)
    write(source, out, options, "1/2")
    assert late.write() == 0
    write(source, out, options, "2/2")
    require_finish(source, out, options)


def test_rejected_images_of_the_source_are_the_same_in_parts(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    (source / "a/00007.jpg").write_bytes(b"no image")
    Image.new("CMYK", (64, 96)).save(source / "b/00001.jpg")
    write(source, tmp_path / "o.h5", options, "2/2", "1/2")
    require_finish(source, tmp_path / "o.h5", options)
    assert (tmp_path / "o.h5.rejects.csv").read_text() == (tmp_path / "local.h5.rejects.csv").read_text()


def with_file_to_encode(root: Path) -> tuple[Any, dict[str, Any]]:
    source, options = kept_files(root)
    save(source / "b/c.png", 5, (33, 22))
    return source, options


@pytest.mark.parametrize(
    ("make", "name"),
    [(folder, "b/00030.jpg"), (with_file_to_encode, "b/c.png"), (masks, "masks/9.png"), (archive, "")],
)
def test_a_part_refuses_images_that_changed_since_another_part_surveyed_them(
    make: Callable[[Path], tuple[Any, dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    source, options = make(tmp_path)
    changed = source / name
    options |= {"num_workers": 1, "order": "sorted"}
    out = tmp_path / "o.h5"
    h5pack.convert(source, out, part="1/2", **options)
    before = changed.stat()
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    for workers in (1, 2):
        with pytest.raises(ResumeError):
            h5pack.convert(source, out, part="2/2", **{**options, "num_workers": workers})
    report = h5pack.convert(source, out, part="1/2", **options)
    assert report.resumed_rows == report.images, "rows that are written are not surveyed again"
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    write(source, out, options, "2/2")
    require_finish(source, out, options)


def test_an_image_that_changed_before_it_was_encoded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = with_file_to_encode(tmp_path)
    changed = source / "b/c.png"
    whole, before = changed.read_bytes(), changed.stat()
    settings = {**options, "num_workers": 1, "order": "sorted"}
    with monkeypatch.context() as patch:

        def changing(*arguments: Any) -> Any:
            save(changed, 6, (33, 22))
            return encode_images(*arguments)

        patch.setattr("h5pack.pack.conversion.encode_images", changing)
        # Its row is in the other part.
        with pytest.raises(ResumeError):
            h5pack.convert(source, tmp_path / "o.h5", part="1/2", **settings)
    changed.write_bytes(whole)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    write(source, tmp_path / "o.h5", settings, "1/2", "2/2")
    require_finish(source, tmp_path / "o.h5", settings)


@pytest.mark.parametrize("keep", [None, "jpeg"])
def test_rejected_images_are_surveyed_again_at_the_end(keep: str | None, tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 12), tmp_path / "o.h5"
    options = {"num_workers": 1, "keep": keep}
    whole, bad = (source / "00003.jpg").read_bytes(), source / "00003.jpg"
    bad.write_bytes(whole[:40])
    write(source, out, options, "1/2", "2/2")
    bad.write_bytes(whole)
    with pytest.raises(ResumeError):
        h5pack.convert(source, out, finish=True, **options)
    assert not out.exists()
    bad.write_bytes(whole[:40])
    require_finish(source, out, options)


@pytest.mark.parametrize("error", ["survey", "encode", "strict"])
def test_parts_without_images_leave_shared_files_and_say_so(error: str, tmp_path: Path) -> None:
    """Parts that run at the same time still use the files, and those that begin later take the results in them."""
    source, out = tmp_path / "in", tmp_path / "o.h5"
    options = {"num_workers": 1, "keep": "jpeg", "strict": error == "strict"}
    data = save(source / "a.png").read_bytes()
    (source / "a.png").write_bytes(data[:40] if error == "survey" else data[:200] + bytes(50) + data[250:])
    expected = RejectedImageError if error == "strict" else NoImagesError
    for part in ("1/2", "2/2"):
        with pytest.raises(expected, match=r"OUT\.partial\*"):
            h5pack.convert(source, out, part=part, **options)
        assert "o.h5.partial.parts" in leftovers(tmp_path)


def test_an_unchanged_image_is_surveyed_at_most_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    for reader in (FileReader, ArchiveReader, MapStyleReader):

        def counting(*arguments: Any, call: Any = reader.survey, name: str = reader.__name__) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return call(*arguments)

        monkeypatch.setattr(reader, "survey", counting)
    (flat_folder(tmp_path / "in", 11) / "bad.jpg").write_bytes(b"no image")
    found = []
    for source in (tmp_path / "in", tar_file(tmp_path / "in.tar", tmp_path / "in"), Pictures(11)):
        for settings in ({"part": "1/2"}, {"part": "2/2"}, {"part": "2/2"}, {"finish": True}):
            counts.clear()
            h5pack.convert(source, tmp_path / f"{len(found) // 4}.h5", num_workers=1, chunk_rows=1, **settings)
            found.append(sum(counts.values()))
    assert found == [12 + 5, 6, 0, 1, 12 + 1, 1, 0, 1, 11, 0, 0, 0]


def test_only_one_process_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(tmp_path / "o.h5")
    first = OwnerFile(output)
    with pytest.raises(OutputBusyError):
        OwnerFile(output)
    with pytest.raises(OutputBusyError):
        OutputLock(output)
    owner = json.loads(output.owner.read_text())
    assert owner["host"] == socket.gethostname()

    # Its process has ended, and another one may have its number.
    for change in ({"pid": 2**22 + 1}, {"start": "1"}):
        output.owner.write_text(json.dumps({**owner, **change}))
        second = OwnerFile(output)
        with pytest.raises(OutputBusyError):
            first.confirm()
        second.confirm()
        first.release()
        assert output.owner.exists(), "the file of another process is kept"
        second.release()
        assert not output.owner.exists()

    # Its process has ended, but its parent has not waited for it yet.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        output.owner.write_text(json.dumps({**owner, **_process_identity(child.pid)}))
        with pytest.raises(OutputBusyError):
            OwnerFile(output)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        OwnerFile(output).release()

    # On another machine, in another container, or without /proc, it was not touched for long.
    monkeypatch.setattr("h5pack.pack.output._BEAT_SECONDS", 0.01)
    for change in ({"namespace": "elsewhere", "pid": 2**22 + 1}, {"namespace": None}, {"start": None}):
        output.owner.write_text(json.dumps({**owner, **change}))
        with pytest.raises(OutputBusyError):
            OwnerFile(output)
        os.utime(output.owner, (time.time() - 61, time.time() - 61))
        third = OwnerFile(output)
        assert third.took_over == ("namespace" in change)
        os.utime(output.owner, (0, 0))
        wait_for(lambda: output.owner.stat().st_mtime > 0)
        third.release()


@pytest.mark.parametrize("unaware", [False, True])
def test_a_process_that_was_silent_moves_no_rows_of_the_published_file(
    unaware: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The file system has no locks, as some network file systems.
    for module in ("system.files", "pack.output", "pack.journal"):
        monkeypatch.setattr(f"h5pack.{module}.lock", lambda *_, **__: None)
    source, options = folder(tmp_path)
    options |= {"order": "sorted"}
    out, move_rows = tmp_path / "o.h5", finish.move_rows
    expected = local(source, tmp_path / "local.h5", options)
    write(source, out, options, "1/2", "2/2")

    def suspended(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("h5pack.pack.finish.move_rows", move_rows)
            patch.setattr("h5pack.pack.output._SILENT_SECONDS", -1)
            patch.setattr("h5pack.pack.output._process_namespace", lambda: "elsewhere")
            h5pack.convert(source, out, num_workers=1, finish=True, **options)
        if unaware:
            # Even if it was suspended between noticing and writing.
            monkeypatch.setattr(OwnerFile, "confirm", lambda _: None)
        move_rows(*arguments)
        if unaware:
            raise OutputBusyError

    monkeypatch.setattr("h5pack.pack.finish.move_rows", suspended)
    with pytest.raises(OutputBusyError):
        h5pack.convert(source, out, num_workers=1, finish=True, **options)
    assert out.read_bytes() == expected


@pytest.mark.parametrize(
    ("module", "last_step", "next_step"),
    [(conversion, "close_holes", "move_rows"), (finish, "complete", "write_atomically")],
)
def test_a_process_that_lost_the_output_neither_moves_rows_nor_publishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, last_step: str, next_step: str
) -> None:
    source, options = folder(tmp_path)
    write(source, tmp_path / "o.h5", options, "1/1")
    step, following = getattr(module, last_step), Mock()

    def taken_over(*arguments: Any) -> Any:
        found = step(*arguments)
        (tmp_path / "o.h5.partial.owner").write_text("{}")
        return found

    monkeypatch.setattr(module, last_step, taken_over)
    monkeypatch.setattr(finish, next_step, following)
    with pytest.raises(OutputBusyError):
        h5pack.convert(source, tmp_path / "o.h5", num_workers=1, finish=True, **options)
    assert not following.called
    assert not (tmp_path / "o.h5").exists()


def test_a_process_that_lost_the_output_does_not_stop_the_writers_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = folder(tmp_path)
    write(source, tmp_path / "o.h5", options, "1/1")
    owner = tmp_path / "o.h5.partial.owner"
    monkeypatch.setattr(conversion.Conversion, "_write_rows", lambda *_: owner.write_text("{}"))
    with pytest.raises(OutputBusyError):
        h5pack.convert(source, tmp_path / "o.h5", num_workers=1, finish=True, **options)
    assert not (tmp_path / "o.h5.partial.journal/written.bin").exists()


def test_parts_run_again_after_a_damaged_record_of_written_rows(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    write(source, tmp_path / "o.h5", options, "1/2", "2/2")
    convert_until("h5pack.pack.finish.move_rows", source, tmp_path / "o.h5", {**options, "finish": True})
    journal = tmp_path / "o.h5.partial.journal"
    (journal / "written.bin").write_bytes(b"damaged")
    for path in journal.glob("rows-*.log"):
        path.unlink()
    with pytest.raises(IncompletePackError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", num_workers=1, finish=True, **options)
    assert caught.value.parameters[0] == "part='1/2'"
    write(source, tmp_path / "o.h5", options, "1/2", "2/2")
    require_finish(source, tmp_path / "o.h5", options)


def test_a_part_killed_before_it_records_the_job_leaves_nothing(tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"
    convert_in_child(source, out, {"num_workers": 1, "part": "1/2"}, 1)
    assert len(list(tmp_path.glob("o.h5.partial.parts-*"))) == 1
    h5pack.convert(source, out, num_workers=1, resume=True)
    assert leftovers(tmp_path) == {"in", "o.h5"}


def test_parts_begin_although_a_killed_run_left_a_part_of_its_journal(tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"
    (tmp_path / "o.h5.partial.journal").mkdir()
    for name in ("prints.bin", "rows-1.log"):
        (tmp_path / "o.h5.partial.journal" / name).write_bytes(b"old")
    write(source, out, {}, "1/2", "2/2")
    require_finish(source, out, {})


def test_an_array_job_that_replaces_an_output_is_finished_twice(tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"
    options = {"num_workers": 1, "overwrite": True}
    for _ in range(2):
        for part in ("1/2", "2/2"):
            assert not h5pack.convert(source, out, part=part, **options).already_complete
        for again in (False, True):
            assert h5pack.convert(source, out, finish=True, **options).already_complete == again
        assert leftovers(tmp_path) == {"in", "o.h5"}


def test_the_advice_to_replace_another_output_by_an_array_job_can_be_followed(tmp_path: Path) -> None:
    source, out, options = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5", {"order": "sorted"}
    h5pack.convert(source, out, num_workers=1)
    for settings in ({"finish": True}, {"part": "1/2"}):
        with pytest.raises(OutputExistsError) as caught:
            h5pack.convert(source, out, num_workers=1, **settings, **options)
        assert caught.value.parameters == ("overwrite=True",)  # Neither run takes resume=True.
    write(source, out, {**options, "overwrite": True}, "1/2", "2/2")
    require_finish(source, out, options)


def test_the_advice_about_a_damaged_temporary_file_of_an_array_job_can_be_followed(tmp_path: Path) -> None:
    source, options = kept_files(tmp_path)
    out = tmp_path / "o.h5"
    write(source, out, options, "1/2")
    for path in tmp_path.glob("o.h5.partial.journal/encoded-*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ResumeError, match=r"resume=True .in an array job, instead of part or finish"):
        write(source, out, options, "2/2")
    write(source, out, options, "1/2")
    h5pack.convert(source, out, **{**options, "num_workers": 1, "resume": True})
    assert out.read_bytes() == local(source, tmp_path / "local.h5", options)


@pytest.mark.parametrize(
    ("name", "method", "failure"),
    [
        ("folder", "h5pack.images.decode.Decoder.decode", {"side_effect": MemoryError()}),
        ("kept_files", "h5pack.sources.reader.FileReader.read", {"return_value": b"another length"}),
        ("hdf5", "h5pack.read.engine.Engine.read", {"side_effect": PackChangedError("replaced")}),
    ],
)
def test_the_advice_to_start_an_array_job_over_can_be_followed(
    name: str, method: str, failure: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = MAKERS[name](tmp_path)
    options.pop("max_side", None)  # JPEG files of any size are copied without decoding
    out = tmp_path / "o.h5"
    write(source, out, options, "1/2")
    with monkeypatch.context() as patch:
        patch.setattr(method, Mock(**failure))
        with pytest.raises(SourceError, match=r"in an array job, delete all of OUT.partial\* ") as caught:
            write(source, out, options, "2/2")
    assert "overwrite=True" in caught.value.parameters
    for path in tmp_path.glob("o.h5.partial*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write(source, out, options, "1/2", "2/2")
    require_finish(source, out, options)


def test_a_part_whose_source_cannot_be_read_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = hdf5(tmp_path)
    out = tmp_path / "o.h5"
    write(source, out, options, "1/2")
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.read.engine.Engine.read", Mock(side_effect=ReadError("no disk")))
        with pytest.raises(SourceError, match="without resume=True in an array job"):
            write(source, out, options, "2/2")
    write(source, out, options, "2/2")
    require_finish(source, out, options)


def test_the_advice_about_a_damaged_journal_of_an_array_job_can_be_followed(tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"
    write(source, out, {}, "1/2")
    (tmp_path / "o.h5.partial.journal/plan.json").write_text("{")
    with pytest.raises(ResumeError, match=r"in an array job, delete all of \S+/o.h5.partial\* instead"):
        write(source, out, {"overwrite": True}, "1/2")
    for path in tmp_path.glob("o.h5.partial*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write(source, out, {}, "1/2", "2/2")
    require_finish(source, out, {})


@pytest.mark.parametrize("replaces", [False, True])
def test_parts_that_ended_in_their_survey_are_not_finished(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5"
    if replaces:
        h5pack.convert(source, out, num_workers=1)
        save(source / "00003.jpg", 33)
    before = out.read_bytes() if replaces else None
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.pack.conversion.survey", interrupt)
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, num_workers=1, part="1/1", overwrite=replaces)
    for overwrite in {False, replaces}:
        with pytest.raises((IncompletePackError, OutputExistsError)):
            h5pack.convert(source, out, num_workers=1, finish=True, overwrite=overwrite)
        assert (tmp_path / "o.h5.partial.parts/job.json").exists()
        assert (out.read_bytes() if replaces else None) == before
    write(source, out, {"overwrite": replaces}, "1/1")
    require_finish(source, out, {"overwrite": replaces})


@pytest.mark.parametrize("settings", [{"finish": True}, {"part": "1/1"}, {"resume": True}])
def test_an_emptied_folder_of_parts_does_not_hide_that_the_output_is_complete(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    source, out, left = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5", tmp_path / "o.h5.partial.parts"
    h5pack.convert(source, out, num_workers=1)
    left.mkdir()
    with conversion.Conversion(source, out, num_workers=1, **settings) as planned:  # as with --dry-run
        assert planned.existing_report() is not None
    assert h5pack.convert(source, out, num_workers=1, **settings).already_complete
    assert not left.exists()


def test_the_record_of_an_array_job_is_on_the_disk_before_other_parts_see_it(tmp_path: Path) -> None:
    """Otherwise a power cut may leave an empty record, with which no part begins again."""
    source = flat_folder(tmp_path / "in", 6)
    changes = convert_in_child(source, tmp_path / "o.h5", {"num_workers": 1, "part": "1/2"}, None)
    seen = next(at for at, change in enumerate(changes) if change.startswith("rename o.h5.partial.parts-"))
    assert "fsync job.json.tmp" in changes[:seen]


def test_parts_of_a_release_with_a_further_option_are_refused(tmp_path: Path) -> None:
    folder, catalog = PartsFolder(tmp_path / "parts"), Mock(identity=dict)
    folder.agree(2, {"size": 8}, catalog)
    with pytest.raises(ResumeError):
        folder.agree(2, {"size": 8, "further": None}, catalog)


def squared(number: int) -> int:
    return number * number


def failing(number: int) -> int:
    raise H5PackError(str(number))


def test_results_are_shared_and_tasks_of_a_killed_part_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(folder: Path, function: Any, inner: Executor | None = None) -> list[int]:
        executor = SharedResults(folder, inner or SerialExecutor(), 1, 2)
        return list(run(executor, function, range(9), 1, ordered=True))

    expected = [number * number for number in range(9)]
    assert results(tmp_path, squared) == expected
    assert results(tmp_path, failing) == expected, "they are read"
    # A power cut took one result; a part was killed that had claimed it.
    (tmp_path / "4.result").write_bytes(b"")
    monkeypatch.setattr("h5pack.cluster.parts._IDLE_SECONDS", 0.0)
    random.seed(0)
    assert results(tmp_path, squared) == expected
    (tmp_path / "5.result").unlink()
    with pytest.raises(H5PackError, match="5"):
        results(tmp_path, failing)


def test_sigint_leaves_a_part_that_can_be_run_again(tmp_path: Path) -> None:
    source, options = folder(tmp_path)
    late = Late(source, tmp_path / "o.h5", options)
    assert late.process.pid is not None
    os.kill(late.process.pid, signal.SIGINT)
    late.process.join()
    assert late.process.exitcode == 1
    write(source, tmp_path / "o.h5", options, "1/2", "2/2")
    require_finish(source, tmp_path / "o.h5", options)


def test_a_part_that_begins_while_another_one_looks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(tmp_path / "o.h5")

    def count_parts(_: PartsFolder) -> int:
        output.parts.mkdir()
        output.partial.touch()
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(PartsFolder, "count", property(count_parts))
        output.check(ConvertOptions(part=(1, 2)))
    with pytest.raises(OutputExistsError):
        output.check(ConvertOptions())


def test_other_runs_do_not_read_the_record_of_an_array_job(tmp_path: Path) -> None:
    output = Output(tmp_path / "o.h5")
    output.parts.mkdir()
    (output.parts / "job.json").write_bytes(b"damaged")
    with pytest.raises(OutputExistsError):
        output.check(ConvertOptions())
    output.check(ConvertOptions(overwrite=True))
