"""`h5pack export`: rows of a pack, or of any HDF5 file, back to image files in folders of splits and classes."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from h5pack.checksum import crc32
from h5pack.errors import DamagedRowsError, NoSpaceError, OutputExistsError
from h5pack.machine import available_cpus
from h5pack.pack.executors import open_executor, run
from h5pack.tools.export_again import command_back
from h5pack.tools.export_folder import ExportFolder
from h5pack.tools.export_image import SUFFIXES
from h5pack.tools.export_journal import ExportJournal
from h5pack.tools.export_manifest import Manifest, plan_manifest
from h5pack.tools.export_names import MANIFEST, ExportNames, NameRules, name_files
from h5pack.tools.export_options import DEFAULT_QUALITY, ExportOptions
from h5pack.tools.export_report import ExportReport, MissingRow
from h5pack.tools.export_rows import ExportWork, WholeForm, WrittenFiles, describe, export_rows, export_tasks
from h5pack.tools.export_source import SourceRows, open_rows
from h5pack.version import __version__


def export(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    progress: bool = False,
) -> ExportReport:
    """Write the images of an HDF5 file as PNG or JPEG files, in folders of their splits and classes.

    Stored file names are restored but for their endings; see `h5pack.tools.export_names` for what becomes of odd ones.
    Beside the images lies ``manifest.csv``, with every row's split, labels and fields, in stored order. Nothing appears
    under the name `folder` before it is whole, and a call that is interrupted, even by SIGKILL, is continued with
    ``ExportOptions(resume=True)``.

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset of images.
    folder : path
        The folder to make.
    options : ExportOptions, optional
    progress : bool
        Show a progress bar on standard error, where that is a terminal.

    Returns
    -------
    ExportReport
        Its `damaged` names the rows that could not be exported: those that differ from their checksums, cannot be
        decoded, or hold values outside the range.

    Raises
    ------
    OutputExistsError, OutputBusyError
        If the folder, or an unfinished export to it, is in the way.
    DamagedRowsError
        If none of the rows can be exported.
    H5PackError
        See `h5pack.errors`; one line that says what, where and what next.
    """
    return _Export(path, folder, options or ExportOptions(), progress).run()


@dataclass(frozen=True)
class _Plan:
    """Where everything goes."""

    names: ExportNames
    manifest: Manifest
    work: ExportWork
    identity: dict[str, Any]


@dataclass
class _Outcome:
    """What became of the rows."""

    files: WrittenFiles
    reasons: dict[int, str]
    copied: int = 0
    resumed: int = 0


class _Export:
    """One export."""

    def __init__(
        self, path: str | os.PathLike[str], folder: str | os.PathLike[str], options: ExportOptions, progress: bool
    ) -> None:
        self.begin = time.perf_counter()
        self.options, self.progress = options, progress
        self.workers = options.workers or available_cpus()
        self.target = ExportFolder(folder)
        self.target.check(options.overwrite, options.resume)
        self.path, self.folder = os.fspath(path), Path(folder)
        self.source = open_rows(path, options.datasets, options.splits, options.limit)

    def run(self) -> ExportReport:
        """Do it, or find that it was done."""
        if self._is_finished():
            return self._finished_before()
        try:
            with self.target.locked() as descriptor:
                return self._write(ExportJournal(str(self.target.journal), descriptor))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise NoSpaceError(
                f"{self.target.partial}: {os.strerror(error.errno)}; make room, then run the same command with --resume"
            ) from error

    def _is_finished(self) -> bool:
        target = self.target
        if not self.options.resume or target.partial.exists() or not target.has_output():
            return False
        if target.journal.exists():
            # A kill came between the last renaming and the end, or else before anything was begun.
            return target.journal.stat().st_size > 0
        return not self.options.overwrite

    def _finished_before(self) -> ExportReport:
        target, manifest = self.target, self._plan(fold=self.target.folds(self.target.final)).manifest
        missing = manifest.missing_from(target.final / MANIFEST)
        outcome = _Outcome(
            WrittenFiles.none(len(self.source)), dict.fromkeys(missing, "left out when this was exported")
        )
        there = [row for row in range(len(self.source)) if row not in outcome.reasons]
        for row in there:
            path = target.final / manifest.paths[row]
            try:
                outcome.files.sizes[row] = path.stat().st_size
            except OSError as error:
                raise OutputExistsError(
                    f"{path}: missing from an export that was complete; give another folder, or --overwrite without "
                    "--resume to make it anew"
                ) from error
        target.clean()
        return self._report(outcome, ExportNames(manifest.paths, (), 0), ("", ()), already_complete=True)

    def _write(self, journal: ExportJournal) -> ExportReport:
        target, options = self.target, self.options
        before = journal.header() if options.resume else None
        overwrite = options.overwrite or (before is not None and bool(before["overwrite"]))
        if target.has_output() and not overwrite:
            raise OutputExistsError(f"{target.final}: not empty by now; give another folder, or --overwrite")
        target.begin(anew=before is None)
        plan = self._plan(fold=target.folds(target.partial))
        if before is None:
            journal.start({**plan.identity, "overwrite": overwrite})
            files = WrittenFiles.none(len(self.source))
        else:
            journal.require(plan.identity)
            files = journal.written(len(self.source))
        for folder in plan.names.folders:
            (target.partial / folder).mkdir(exist_ok=True)
        outcome = self._write_files(plan, files, journal)
        if (outcome.files.sizes < 0).all():
            target.abandon()
            raise DamagedRowsError(
                f"{self.path}: none of its rows can be exported; the first: {outcome.reasons[min(outcome.reasons)]}",
                tuple(self.source.rows.tolist()),
            )
        plan.manifest.write(target.partial / MANIFEST, outcome.reasons)
        back = self._command_back(plan, outcome)
        target.publish(overwrite)
        return self._report(outcome, plan.names, back)

    def _plan(self, *, fold: bool) -> _Plan:
        source, options = self.source, self.options
        name_bytes = os.pathconf(self.target.final.parent, "PC_NAME_MAX")
        rules = NameRules(SUFFIXES[options.format], fold, name_bytes)
        names = name_files(source.catalog, source.rows, source.has_names, rules)
        stored = source.catalog.names if source.has_names else None
        manifest = plan_manifest(source.catalog, names.paths, source.rows, stored)
        reader = source.reader
        if reader.form is not None and options.format == "png":
            reader.form = WholeForm(reader.form.channel_axis, reader.form.value_range)
        work = ExportWork(reader, str(self.target.partial), options.format, options.quality or DEFAULT_QUALITY)
        checksum = crc32(reader.prints(np.arange(len(source))), source.catalog.tables_checksum())
        # In the order in which a difference is best explained.
        identity = {"h5pack": __version__, "options": options.content(), "source": checksum}
        return _Plan(names, manifest, work, identity)

    def _write_files(self, plan: _Plan, files: WrittenFiles, journal: ExportJournal) -> _Outcome:
        outcome = _Outcome(files, {})
        tasks = export_tasks(plan.work.reader, plan.names.paths, files, self.workers)
        with (
            open_executor(self.workers, self.options.start_method, plan.work) as executor,
            self._bar(len(self.source)) as bar,
        ):
            for part in run(executor, export_rows, tasks, 2 * self.workers, describe):
                journal.append(part)
                files.note(part.indices, part.sizes, part.checksums)
                for index in part.reasons:
                    files.sizes[index] = -1
                outcome.reasons.update(part.reasons)
                outcome.copied += part.copied
                outcome.resumed += part.resumed
                bar.update(len(part.indices) + len(part.reasons))
        return outcome

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Any]:
        # The monitor thread would be a second thread at the next fork.
        tqdm.monitor_interval = 0
        hidden = None if self.progress else True
        with tqdm(total=total, desc="export", unit=" images", disable=hidden, smoothing=0.1, leave=False) as bar:
            yield bar

    def _command_back(self, plan: _Plan, outcome: _Outcome) -> tuple[str, tuple[str, ...]]:
        source, target = self.source, self.target
        good = np.flatnonzero(outcome.files.sizes >= 0)
        whole = len(good) == len(source)
        expected = source.catalog if whole else source.catalog.take(good)
        paths = plan.names.paths if whole else plan.names.paths.take(good.tolist())
        rows = ["--mode", "gray"] if source.channels in (1, 2) else []
        if source.reader.pack.layout == "nchw":
            rows += ["--layout", "nchw"]
        command, lost = command_back(target.partial, self.folder, expected, paths, plan.manifest, rows)
        return command, (*lost, *_lost_values(source, self.options.format, len(good) == outcome.copied))

    def _report(
        self,
        outcome: _Outcome,
        names: ExportNames,
        back: tuple[str, tuple[str, ...]],
        *,
        already_complete: bool = False,
    ) -> ExportReport:
        source, catalog = self.source, self.source.catalog
        good = outcome.files.sizes >= 0
        counts = np.bincount(catalog.split_ids[good], minlength=len(catalog.split_names)).tolist()
        named = catalog.label_names is not None and catalog.labels is not None and catalog.labels.ndim == 1
        return ExportReport(
            path=str(self.target.final),
            source=f"{self.path} ({catalog.about})",
            format=self.options.format,
            rows=len(source),
            files=int(good.sum()),
            bytes=int(outcome.files.sizes[good].sum()),
            splits=dict(zip(catalog.split_names, counts, strict=True)),
            classes=len(catalog.label_names or ()) if named else 0,
            workers=self.workers,
            seconds=time.perf_counter() - self.begin,
            resumed_files=outcome.resumed,
            copied_files=outcome.copied,
            renamed_files=names.renamed,
            damaged=tuple(
                MissingRow(int(source.rows[index]), catalog.names[index], reason)
                for index, reason in sorted(outcome.reasons.items())
            ),
            again=back[0],
            lost=back[1],
            already_complete=already_complete,
        )


def _lost_values(source: SourceRows, kind: str, copied: bool) -> tuple[str, ...]:
    """What the files cannot hold of the values."""
    form, index = source.reader.form, source.reader.index
    if kind == "jpeg" and not copied:
        return ("pixels, which JPEG keeps only nearly; --format png keeps them",)
    if isinstance(form, WholeForm) and not form.is_exact(index.dtype, index.row_shape):
        return (f"values of {index.dtype}, which became 8 bits",)
    return ()
