"""`h5pack export`: write the rows of a pack, or of any HDF5 file, as image files in folders of splits and classes."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from h5pack.errors import DamagedRowsError, OptionsError, OutputExistsError, SourceError
from h5pack.exporter.contents import (
    IMAGES,
    MANIFEST,
    ExportNames,
    Manifest,
    NameRules,
    is_header,
    name_files,
    plan_manifest,
)
from h5pack.exporter.image_files import (
    SUFFIXES,
    ExportForm,
    ExportResults,
    ExportWork,
    MissingRow,
    SourceRows,
    export_rows,
    export_tasks,
    open_rows,
)
from h5pack.pack.options import START_METHODS, check_choice, parse_range
from h5pack.read.encoded import EncodedIndex
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.system.files import (
    max_name_bytes,
    open_locked,
    reporting_disk_errors,
    require_replaceable,
    require_writable,
    sync_file_system,
    sync_path,
)
from h5pack.system.machine import available_cpus
from h5pack.system.parameters import flags, require_local, texts, whole_number
from h5pack.system.processes import MAX_WORKERS, open_executor, run
from h5pack.system.progress import Stages
from h5pack.system.text import counted, first_lines, format_bytes, printable, printable_lines

_DEFAULT_QUALITY = 95


@dataclass(frozen=True)
class ExportReport:
    """The result of an export."""

    path: str  #: the exported folder
    source: str  #: the HDF5 file and the datasets that were read
    format: str  #: the format of the image files, as in the parameter `format`
    rows: int  #: rows selected for export
    files: int  #: number of images in the folder
    bytes: int  #: total size of all image files, including masks and further images
    splits: dict[str, int]  #: number of images in each split
    classes: int  #: number of classes; 0 if there are no class names
    num_workers: int
    seconds: float
    resumed_files: int  #: number of images kept from an earlier run
    copied_files: int  #: number of rows already stored in the export's format, whose bytes were written unchanged
    #: number of images whose stored name had to change by more than its suffix and leading folders; the manifest lists
    #: the stored names
    renamed_files: int
    damaged: tuple[MissingRow, ...]  #: rows that could not be exported
    again: str  #: the `h5pack convert` command that packs the exported folder again
    lost: tuple[str, ...]  #: what the command in `again` would not restore, such as the order of classes
    already_complete: bool = False  #: with `resume`, whether the export was complete before this call

    @property
    def ok(self) -> bool:
        """Whether every selected row was exported."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        return {**asdict(self), "seconds": round(self.seconds, 3), "ok": self.ok}

    def to_text(self) -> str:
        """Return the report as a few lines of text."""
        if self.already_complete:
            return printable(f"{self.path}: already complete")
        speed = (self.files - self.resumed_files) / self.seconds if self.seconds else 0.0
        splits = [f"{name} {count:,}" for name, count in self.splits.items()]
        images = f"{counted(self.files, f'{self.format} image')}, {format_bytes(self.bytes)}"
        lines = [
            f"source   {self.source}",
            f"splits   {', '.join(splits)}" + (f"; {counted(self.classes, 'class')}" if self.classes else ""),
            f"done     {self.path}: {images}, {self.seconds:.1f} s ({speed:,.0f} images/s)",
            f"resumed  {counted(self.resumed_files, 'image')} of an earlier run" if self.resumed_files else "",
            f"copied   {counted(self.copied_files, 'encoded row')} as stored" if self.copied_files else "",
            f"renamed  {counted(self.renamed_files, 'file')}; {MANIFEST} has the stored names"
            if self.renamed_files
            else "",
            f"repack   {self.again}",
            *(f"loses    {what}" for what in self.lost),
        ]
        return printable_lines(filter(None, lines))

    def damage_text(self) -> str:
        """Return lines of text that list the rows that could not be exported (at most 20)."""
        lines = [f"{self.path}: {counted(len(self.damaged), 'row')} could not be exported"]
        rows = (f"  row {row.row} ({row.name}): {row.reason}" for row in self.damaged)
        return printable_lines([*lines, *first_lines(rows, len(self.damaged))])


def export(
    file: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    format: str | None = None,
    quality: int | None = None,
    splits: str | Sequence[str] = (),
    limit: int | None = None,
    images: str | None = None,
    labels: str | None = None,
    fields: str | Sequence[str] = (),
    channel_axis: str | None = None,
    value_range: str | tuple[float, float] | None = None,
    num_workers: int | None = None,
    start_method: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> ExportReport:
    """Write the images of an HDF5 file as image files, in one folder per split and class.

    The files get the names stored in the HDF5 file, with the suffix of the export format (docs/cli.md has the rules).
    ``manifest.csv`` in `folder` lists the split, labels and fields of every exported row in stored order. The folder
    appears under the name `folder` only once it is complete. An interrupted call, even one ended by SIGKILL, can be
    continued with ``resume=True``.

    Parameters
    ----------
    file : path
        A pack, or any HDF5 file with a dataset of images.
    folder : path
        The folder to create.
    format : str, optional
        "png" (lossless) or "jpeg" (smaller files, lossy). Default: "jpeg" for a pack that keeps JPEG files, whose bytes
        are then written unchanged, else "png".
    quality : int, optional
        JPEG quality, 1 to 100; only for JPEG. Default: 95.
    splits : str or sequence of str
        Export only these splits. Default: all.
    limit : int, optional
        Export at most this many rows, evenly spaced in stored order.
    images, labels : str, optional
        Paths of the datasets of images and of labels inside the file; ``labels=""`` exports no labels.
        Default: detected.
    fields : str or sequence of str
        Names of fields of a pack, or paths of further datasets of numbers or texts with one row per image. The manifest
        lists their values. Masks and further images become files, and the manifest lists their paths. Default: all
        fields of a pack.
    channel_axis : str, optional
        Position of the channel axis in a row: "last", "first" or "none". Default: as stored in a pack, else inferred
        from the shape.
    value_range : (float, float) or str, optional
        The values mapped to 0 and 255, as a pair or as a string such as "0:1". Default: (0, 1) for floats. Values of
        uint8 and gray uint16 are kept, bool becomes 0 and 255, other uint16 values lose their low byte, and other
        integers must be from 0 to 255. (A JPEG has no 16-bit values: gray uint16 values lose their low byte, too.)
    num_workers : int, optional
        Number of worker processes; with 1, no process is started. Default: the number of CPUs this process may use.
    start_method : str, optional
        "fork", "forkserver" or "spawn". Default: "fork" if that is safe, else "forkserver".
    overwrite : bool
        Replace an earlier export once the new one is complete. If `resume` is false, an unfinished export is deleted at
        the start.
    resume : bool
        Continue an interrupted export: files that already hold the pixels of their rows are kept.
    progress : bool
        Show a progress bar on standard error if that is a terminal.

    Returns
    -------
    ExportReport
        Its `damaged` lists the rows that could not be exported because they do not match their checksums, cannot be
        decoded, hold values outside `value_range`, have a side too long for JPEG, or have a mask with numbers that are
        not from 0 to 65,535.

    Raises
    ------
    OutputExistsError
        If the folder is not empty. (But `overwrite` replaces an earlier export, and `resume` accepts a complete export
        of the same rows.) Also if an unfinished export exists, and neither `overwrite` nor `resume` is true.
    OutputBusyError
        If another process, or another call in this process, is exporting to the folder.
    DamagedRowsError
        If none of the rows can be exported.
    H5PackError
        The base class of all errors; see `h5pack.errors` for the others.
    """
    begin = time.perf_counter()
    check_choice("format", format, (None, *SUFFIXES))
    check_choice("start_method", start_method, START_METHODS)
    highest = {"quality": 100, "num_workers": MAX_WORKERS}
    # Convert NumPy's integers, which Pillow and JSON refuse.
    quality, limit, num_workers = (
        None if value is None else whole_number(name, value, 1, highest.get(name))
        for name, value in (("quality", quality), ("limit", limit), ("num_workers", num_workers))
    )
    fields = texts("fields", fields)
    bounds = None if value_range is None else parse_range(value_range)
    overwrite, resume, progress = flags(overwrite=overwrite, resume=resume, progress=progress)
    require_local(file, "file")
    target = ExportFolder(folder)
    target.check(overwrite, resume)
    source = open_rows(file, HDF5Datasets(images, labels, fields, channel_axis, bounds), splits, limit)
    if format is None:
        format = "jpeg" if isinstance(source.reader.index, EncodedIndex) else "png"
    if quality is not None and format != "jpeg":
        raise OptionsError(
            f"quality is given, but the format is {format}; leave out quality, or give format='jpeg'",
            parameters=("quality", "format='jpeg'"),
        )
    if source.reader.form is not None and format == "png":  # JPEG has neither alpha nor 16 bits.
        source.reader.form = ExportForm(source.reader.form.channel_axis, source.reader.form.value_range)
    return _Export(
        source=source,
        source_path=os.fsdecode(file),
        target=target,
        work=ExportWork(source.reader, str(target.partial), format, quality or _DEFAULT_QUALITY, keep=resume),
        num_workers=num_workers or available_cpus(),
        start_method=start_method,
        overwrite=overwrite,
        progress=progress,
        begin=begin,
    ).run()


class ExportFolder:
    """The output folder of an export, and its temporary siblings.

    An export is written to `partial`, which is renamed to `final` when it is complete. An earlier export is renamed to
    `replaced` while the new one takes its place. `lock_file` exists whenever `partial` or `replaced` does: a folder
    with one of these names, but without `lock_file`, was not made by an export. `given` is the folder as the user names
    it. In all other paths, symbolic links are resolved.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_local(folder, "folder")
        folder = os.fsdecode(folder)
        self.given = Path(folder)
        self.final = Path(os.path.realpath(folder))
        if not self.final.name:
            raise SourceError.at(self.final, "is the root folder; name a folder inside it")
        self.partial = self.final.with_name(f"{self.final.name}.partial")
        self.lock_file = self.final.with_name(f"{self.final.name}.partial.lock")
        self.replaced = self.final.with_name(f"{self.final.name}.replaced")

    def check(self, overwrite: bool, resume: bool) -> None:
        """Raise an error if an export cannot or must not be written to this folder. Call this before any work."""
        require_writable(self.final.parent)
        require_replaceable(self.lock_file, self.partial, self.replaced)
        require_replaceable(self.final, writable=False)
        if os.path.ismount(self.final):
            raise SourceError.at(self.final, "is a mount point; name a folder inside it")
        if self.final.exists() and not self.final.is_dir():
            raise OutputExistsError.at(self.final, "exists and is not a folder; give another name")
        for temporary in (self.partial, self.replaced):
            if temporary.exists() and not self.lock_file.exists():
                problem = f"was not made by an export, but exports to {self.final.name!r} need this name; move it away"
                raise OutputExistsError.at(temporary, problem)
        if overwrite:
            self.require_export()
        if resume or overwrite:
            return
        self.require_empty()
        if self.partial.exists():
            problem = "is an unfinished export; continue it with resume=True, or start over with overwrite=True"
            raise OutputExistsError.at(self.partial, problem, "resume=True", "overwrite=True")

    def has_output(self) -> bool:
        """Return whether the final folder exists and is not empty."""
        return self.final.exists() and any(self.final.iterdir())

    def require_empty(self) -> None:
        """Raise OutputExistsError if the final folder exists and is not empty."""
        if self.has_output():
            problem = "the folder is not empty; give another name, or overwrite=True to replace an earlier export"
            raise OutputExistsError.at(self.final, problem, "overwrite=True")

    def require_export(self) -> None:
        """Raise OutputExistsError if the final folder, which is to be replaced, is not an export or has further files.

        Raise no error if the folder is empty or missing.
        """
        if not self.has_output():
            return
        advice = "only an export can be replaced, so move this folder or give another name"
        try:
            with (self.final / MANIFEST).open(newline="", encoding="utf-8") as stream:
                lines = csv.reader(stream)
                if not is_header(next(lines, [])):
                    raise ValueError
                known = {MANIFEST}
                for line in lines:
                    known.add(line[0].removeprefix("./"))
                    folder, _, name = line[0].rpartition(".")[0].partition("/")
                    # The path of a mask or further image is the path of the row's image, but in another folder, and
                    # perhaps with another suffix. All other cells are the user's values. A file whose path is such a
                    # value is not part of the export.
                    beside = [f"{name}{suffix}" for suffix, *_ in SUFFIXES.values()] if folder == IMAGES else []
                    known.update(cell for cell in line[1:-1] if cell.partition("/")[2] in beside)
        except (OSError, ValueError, IndexError, csv.Error):
            raise OutputExistsError.at(self.final, f"has no {MANIFEST} of an export; {advice}") from None
        for parent, _, files in os.walk(self.final):
            for path in (os.path.relpath(os.path.join(parent, name), self.final) for name in files):
                if path not in known:
                    raise OutputExistsError.at(self.final, f"has {path!r}, which {MANIFEST} does not list; {advice}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this output during a `with` block; raise OutputBusyError if another export holds it."""
        busy = f"{self.final}: another export is writing this folder; wait until it has finished, or give another name"
        descriptor = open_locked(self.lock_file, busy)
        try:
            yield
        finally:
            if not self.partial.exists() and not self.replaced.exists():
                self.lock_file.unlink(missing_ok=True)
            os.close(descriptor)

    def restore(self) -> None:
        """Rename `replaced` back to `final` if a run was interrupted before it renamed `partial` to `final`."""
        if self.replaced.exists() and not self.final.exists():
            os.rename(self.replaced, self.final)

    def begin(self, *, keep: bool) -> None:
        """Create `partial` and an empty manifest in it, if they do not exist.

        If `keep` is false, first delete an unfinished export.
        """
        if not keep:
            self.remove_replaced()
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.partial)
        self.partial.mkdir(exist_ok=keep)
        (self.partial / MANIFEST).touch()

    def make_folders(self, names: ExportNames) -> None:
        """Create all folders in `partial`. Delete symbolic links, and all that a run with other options left there."""
        kept_files, kept_folders = {MANIFEST, *names.paths, *itertools.chain(*names.masks)}, set(names.folders)
        for parent, below, files in os.walk(self.partial, topdown=False):
            for found, kept, remove in ((files, kept_files, os.unlink), (below, kept_folders, os.rmdir)):
                for path in (os.path.join(parent, name) for name in found):
                    if os.path.islink(path):
                        os.unlink(path)
                    elif os.path.relpath(path, self.partial) not in kept:
                        remove(path)
        for folder in names.folders:
            (self.partial / folder).mkdir(exist_ok=True)

    def publish(self, overwrite: bool) -> None:
        """Rename `partial` to `final`; raise OutputExistsError if `final` now holds files that must not be replaced."""
        sync_file_system(self.partial)
        if overwrite and self.has_output():
            self.require_export()
            self.remove_replaced()
            os.rename(self.final, self.replaced)
        self.require_empty()
        # os.rename replaces an existing folder if it is empty.
        os.rename(self.partial, self.final)
        self.remove_replaced()
        sync_path(self.final.parent)

    def remove_replaced(self) -> None:
        """Delete `replaced`, an earlier export that a new one has replaced."""
        shutil.rmtree(self.replaced, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Export:
    source: SourceRows
    source_path: str
    target: ExportFolder
    work: ExportWork
    num_workers: int
    start_method: str | None
    overwrite: bool
    progress: bool
    begin: float  # time.perf_counter() at the start

    def run(self) -> ExportReport:
        """Write the export and return its report. If it is already complete and `work.keep` is true, write nothing."""
        target, source = self.target, self.source
        advice = "make room, then run again with resume=True"
        with reporting_disk_errors(target.partial, advice, "resume=True"), target.locked():
            target.restore()
            if self.work.keep and target.has_output() and not target.partial.exists():
                names, manifest, results = self._process_rows(target.final, check_only=True)
                if not results.differing and manifest.equals(target.final / MANIFEST, results.reasons):
                    target.remove_replaced()
                    return self._report(names, manifest, results, already_complete=True)
            if not self.overwrite:
                target.require_empty()
            target.begin(keep=self.work.keep)
            names, manifest, results = self._process_rows(target.partial)
            if len(results.reasons) == len(source):
                shutil.rmtree(target.partial)
                advice = f"; give {' and '.join(results.parameters)}" if results.parameters else ""
                reason = f"reason for the first row: {results.reasons[0]}{advice}"
                problem = f"none of the selected rows can be exported; {reason}"
                raise DamagedRowsError.at(self.source_path, problem, *results.parameters, rows=source.rows.tolist())
            manifest.write(target.partial / MANIFEST, results.reasons)
            target.publish(self.overwrite)
            return self._report(names, manifest, results)

    def _process_rows(self, folder: Path, *, check_only: bool = False) -> tuple[ExportNames, Manifest, ExportResults]:
        """Write the files of all rows into `folder`. If `check_only`, only compare existing files with the rows."""
        max_bytes = max_name_bytes(self.target.final.parent)
        # `folder` contains manifest.csv. If MANIFEST.CSV exists, too, the file system ignores case in names.
        folds_case = (folder / MANIFEST.upper()).exists()
        names = name_files(self.source, NameRules(SUFFIXES[self.work.format], folds_case, max_bytes))
        if not check_only:
            self.target.make_folders(names)
        work = replace(self.work, folder=str(folder), check_only=check_only)
        results = ExportResults()
        with (
            open_executor(self.num_workers, self.start_method, work) as executor,
            Stages(self.progress)("export", len(self.source)) as advance,
        ):
            tasks = export_tasks(work.reader, [names.paths, *names.masks], self.num_workers)
            for done in run(executor, export_rows, tasks, 2 * self.num_workers):
                results.add(done)
                advance(done.rows)
        return names, plan_manifest(self.source, names), results

    def _report(
        self, names: ExportNames, manifest: Manifest, results: ExportResults, *, already_complete: bool = False
    ) -> ExportReport:
        source, catalog = self.source, self.source.catalog
        damaged = sorted(results.reasons)
        counts = np.bincount(np.delete(catalog.split_ids, damaged), minlength=len(catalog.split_names)).tolist()
        has_classes = catalog.label_names is not None and catalog.labels is not None and catalog.labels.ndim == 1
        command, lost = manifest.command(self.target.given, source, names)
        files = len(source) - len(damaged)
        form, index = source.reader.form, source.reader.index
        if self.work.format != "jpeg" and isinstance(index, EncodedIndex):
            lost = (*lost, "the JPEG files, because convert encodes the PNG files as JPEG again")
        elif self.work.format != "png" and results.copied < files:
            lost = (*lost, "the exact pixels, which PNG files would keep")
        elif isinstance(form, ExportForm) and not form.is_exact(index.dtype, index.row_shape):
            lost = (*lost, f"the exact {index.dtype} values, which were converted to 8 bits")
        return ExportReport(
            path=str(self.target.final),
            source=f"{self.source_path} ({catalog.about})",
            format=self.work.format,
            rows=len(source),
            files=files,
            bytes=results.bytes,
            splits=dict(zip(catalog.split_names, counts, strict=True)),
            classes=len(catalog.label_names or ()) if has_classes else 0,
            num_workers=self.num_workers,
            seconds=time.perf_counter() - self.begin,
            resumed_files=results.resumed,
            copied_files=results.copied,
            renamed_files=names.renamed,
            damaged=tuple(
                MissingRow(int(source.rows[index]), catalog.names[index], results.reasons[index]) for index in damaged
            ),
            again=command,
            lost=lost,
            already_complete=already_complete,
        )
