"""`h5pack export`: write the rows of a pack, or of any HDF5 file, as image files in folders of splits and classes."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from h5pack.errors import (
    DamagedRowsError,
    NoSpaceError,
    OptionsError,
    OutputExistsError,
)
from h5pack.exporter.folder import ExportFolder
from h5pack.exporter.image_files import ExportForm, ExportWork, describe, export_rows, export_tasks
from h5pack.exporter.manifest import plan_manifest
from h5pack.exporter.names import MANIFEST, ExportNames, NameRules, name_files
from h5pack.exporter.source_rows import MissingRow, SourceRows, open_rows
from h5pack.images.encode import SUFFIXES
from h5pack.pack.options import check_choice, check_integer, parse_range
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.system.machine import available_cpus
from h5pack.system.processes import open_executor, run
from h5pack.system.text import counted, format_bytes

_DEFAULT_QUALITY = 95
_MAX_LISTED = 20


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes
    ----------
    path : str
        The finished folder.
    source : str
        The HDF5 file and the datasets that were read.
    format : str
        png or jpeg.
    rows : int
        Number of rows selected for export.
    files, bytes : int
        Number of images in the folder, and their total size.
    splits : dict of str to int
        Number of images in each split.
    classes : int
        Number of named classes; 0 if the classes have no names.
    num_workers : int
        Number of processes that encoded images.
    seconds : float
    resumed_files : int
        Number of images kept from an earlier, interrupted run.
    copied_files : int
        Number of rows that hold a file in the export's format already. Their bytes were copied unchanged.
    renamed_files : int
        Number of images whose stored file name could not be kept. The manifest lists the stored names.
    damaged : tuple of MissingRow
        Rows that could not be exported.
    again : str
        The `h5pack convert` command that packs the exported folder.
    lost : tuple of str
        Descriptions of what that command would not restore, such as the order of classes.
    already_complete : bool
        With `resume`, whether the export was complete before this call.
    """

    path: str
    source: str
    format: str
    rows: int
    files: int
    bytes: int
    splits: dict[str, int]
    classes: int
    num_workers: int
    seconds: float
    resumed_files: int
    copied_files: int
    renamed_files: int
    damaged: tuple[MissingRow, ...]
    again: str
    lost: tuple[str, ...]
    already_complete: bool = False

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
            return f"{self.path}: already complete"
        speed = (self.files - self.resumed_files) / self.seconds if self.seconds else 0.0
        splits = ", ".join(f"{name} {count:,}" for name, count in self.splits.items())
        classes = f"; {counted(self.classes, 'class')}" if self.classes else ""
        images = counted(self.files, f"{self.format} image")
        seconds = f"{self.seconds:.1f} s ({speed:,.0f} images/s)"
        lines = [
            f"source   {self.source}",
            f"splits   {splits}{classes}",
            f"done     {self.path}: {images}, {format_bytes(self.bytes)}, {seconds}",
        ]
        if self.resumed_files:
            lines.append(f"resumed  {counted(self.resumed_files, 'image')} of an earlier run")
        if self.copied_files:
            lines.append(f"copied   {counted(self.copied_files, 'encoded row')} as stored")
        if self.renamed_files:
            lines.append(f"renamed  {counted(self.renamed_files, 'file')}; {MANIFEST} has the stored names")
        lines.append(f"again    {self.again}")
        lines += [f"but not  {what}" for what in self.lost]
        return "\n".join(lines)

    def damage_text(self) -> str:
        """Return a text that lists the rows that could not be exported, one per line (at most 20)."""
        lines = [f"{self.path}: {counted(len(self.damaged), 'row')} could not be exported; see 'h5pack verify'"]
        lines += [f"  row {row.row} ({row.name}): {row.reason}" for row in self.damaged[:_MAX_LISTED]]
        if len(self.damaged) > _MAX_LISTED:
            lines.append(f"  and {len(self.damaged) - _MAX_LISTED:,} more")
        return "\n".join(lines)


def export(
    file: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    format: str = "png",
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
    """Write the images of an HDF5 file as PNG or JPEG files, in one folder per split and class.

    The files get the names stored in the HDF5 file, with the suffix of the export format; `h5pack.exporter.names`
    documents the rules. ``manifest.csv``, written into the same folder, lists the split, labels and fields of every
    row in stored order. The folder appears under the name `folder` only once it is complete. If a call is
    interrupted, even by SIGKILL, another one with ``resume=True`` continues it.

    Parameters
    ----------
    file : path
        A pack, or any HDF5 file with a dataset of images.
    folder : path
        The folder to create.
    format : str
        "png" (lossless) or "jpeg" (smaller files, lossy).
    quality : int, optional
        JPEG quality, 1 to 100. Default: 95.
    splits : str or sequence of str
        Export only these splits. Default: all.
    limit : int, optional
        Export at most this many rows, evenly spaced in stored order.
    images, labels : str, optional
        Paths of the datasets of images and of labels inside the file; ``labels=""`` exports no labels.
        Default: detected.
    fields : str or sequence of str
        Paths of further numeric datasets to include in the manifest. The fields of a pack are always included.
    channel_axis : str, optional
        Position of the channel axis in a row: "last", "first" or "none". Default: inferred from the shape.
    value_range : (float, float) or str, optional
        The values mapped to 0 and 255, as a pair or as a string such as "0:1".
    num_workers : int, optional
        Number of worker processes; with 1, no process is started. Default: the number of CPUs this process may use.
    start_method : str, optional
        "fork", "forkserver" or "spawn". Default: "fork" if that is safe, else "forkserver".
    overwrite : bool
        Replace an earlier export once the new one is complete, and discard an unfinished one at the start.
    resume : bool
        Continue an interrupted export: files that already hold the pixels of their rows are kept.
    progress : bool
        Show a progress bar on standard error if that is a terminal.

    Returns
    -------
    ExportReport
        Its `damaged` lists the rows that could not be exported because they do not match their checksums, cannot be
        decoded, or hold values outside `value_range`.

    Raises
    ------
    OutputExistsError, OutputBusyError
        If the folder or an unfinished export to it already exists, or if another process is exporting to it.
    DamagedRowsError
        If none of the rows can be exported.
    H5PackError
        The base class of all errors; see `h5pack.errors` for the others.
    """
    check_choice("format", format, tuple(SUFFIXES))
    check_choice("start_method", start_method, (None, "fork", "forkserver", "spawn"))
    for name, value, maximum in (("quality", quality, 100), ("limit", limit, None), ("num_workers", num_workers, None)):
        if value is not None:
            check_integer(name, value, 1, maximum)
    if quality is not None and format != "jpeg":
        raise OptionsError(
            f"quality is for JPEGs, and the format is {format}; leave one out", parameters=("quality", "format")
        )
    fields = (fields,) if isinstance(fields, str) else tuple(fields)
    bounds = None if value_range is None else parse_range(value_range)
    planned = _Export(
        source_path=os.fspath(file),
        target=ExportFolder(folder),
        format=format,
        quality=quality or _DEFAULT_QUALITY,
        num_workers=num_workers or available_cpus(),
        start_method=start_method,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
    )
    planned.target.check(overwrite, resume)
    datasets = HDF5Datasets(images, labels, fields, channel_axis, bounds)
    return planned.run(open_rows(file, datasets, (splits,) if isinstance(splits, str) else tuple(splits), limit))


@dataclass
class _Results:
    """The outcome for every row: the size of its file in bytes, or -1 and a reason if it could not be exported."""

    sizes: npt.NDArray[np.int64]
    reasons: dict[int, str] = field(default_factory=dict)
    resumed: int = 0
    copied: int = 0
    differing: int = 0


@dataclass(frozen=True, kw_only=True)
class _Export:
    """The options of one export, and the methods that carry it out."""

    source_path: str
    target: ExportFolder
    format: str
    quality: int
    num_workers: int
    start_method: str | None
    overwrite: bool
    resume: bool
    progress: bool

    def run(self, source: SourceRows) -> ExportReport:
        """Write the export, or return its report if `resume` finds it complete already."""
        begin = time.perf_counter()
        reader, target = source.reader, self.target
        if reader.form is not None and self.format == "png":
            reader.form = ExportForm(reader.form.channel_axis, reader.form.value_range)
        try:
            with target.locked():
                if self.resume and target.has_output() and not target.partial.exists():
                    names, results = self._complete(source)
                    if results is not None:
                        target.remove_replaced()
                        return self._report(source, names, results, begin, already_complete=True)
                return self._write(source, begin)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise NoSpaceError(
                f"{target.partial}: {os.strerror(error.errno)}; make room, then run again with resume=True",
                path=target.partial,
                parameters=("resume=True",),
            ) from error

    def _complete(self, source: SourceRows) -> tuple[ExportNames, _Results | None]:
        """Compare the existing folder with this export; return the file names and the results.

        The results are None if the folder is a different export and may be replaced.

        Raises
        ------
        OutputExistsError
            If the folder is a different export and `overwrite` is false.
        """
        final = self.target.final
        names = self._names(source, final)
        results = self._write_files(source, names, final, check_only=True)
        if not results.differing and plan_manifest(source, names.paths).equals(final / MANIFEST, results.reasons):
            return names, results
        if not self.overwrite:
            raise OutputExistsError(
                f"{final}: exists, and is another export; give another folder, or overwrite=True to replace it",
                path=final,
                parameters=("overwrite=True",),
            )
        return names, None

    def _write(self, source: SourceRows, begin: float) -> ExportReport:
        target = self.target
        if target.has_output() and not self.overwrite:
            raise target.not_empty()
        target.begin(keep=self.resume)
        names = self._names(source, target.partial)
        target.make_folders(names)
        results = self._write_files(source, names, target.partial)
        if (results.sizes < 0).all():
            target.remove_partial()
            first = results.reasons[min(results.reasons)]
            raise DamagedRowsError(
                f"{self.source_path}: none of its rows can be exported; the first: {first}",
                path=self.source_path,
                rows=tuple(source.rows.tolist()),
            )
        plan_manifest(source, names.paths).write(target.partial / MANIFEST, results.reasons)
        target.publish(self.overwrite)
        return self._report(source, names, results, begin)

    def _names(self, source: SourceRows, folder: Path) -> ExportNames:
        max_bytes = os.pathconf(self.target.final.parent, "PC_NAME_MAX")
        return name_files(source, NameRules(SUFFIXES[self.format], self.target.folds_case(folder), max_bytes))

    def _write_files(
        self, source: SourceRows, names: ExportNames, folder: Path, *, check_only: bool = False
    ) -> _Results:
        work = ExportWork(
            reader=source.reader,
            folder=str(folder),
            format=self.format,
            quality=self.quality,
            keep=self.resume or check_only,
            check_only=check_only,
        )
        results = _Results(np.full(len(source), -1, np.int64))
        # Disable tqdm's monitor thread: forking worker processes is safe only while there is a single thread.
        tqdm.monitor_interval = 0
        hidden = None if self.progress else True
        with (
            open_executor(self.num_workers, self.start_method, work) as executor,
            tqdm(total=len(source), desc="export", unit=" images", disable=hidden, smoothing=0.1, leave=False) as bar,
        ):
            tasks = export_tasks(source.reader, names.paths, self.num_workers)
            for done in run(executor, export_rows, tasks, 2 * self.num_workers, describe):
                results.sizes[list(done.sizes)] = list(done.sizes.values())
                results.reasons.update(done.reasons)
                results.resumed += done.resumed
                results.copied += done.copied
                results.differing += done.differing
                bar.update(len(done.sizes) + len(done.reasons))
        return results

    def _report(
        self, source: SourceRows, names: ExportNames, results: _Results, begin: float, *, already_complete: bool = False
    ) -> ExportReport:
        catalog, good = source.catalog, results.sizes >= 0
        counts = np.bincount(catalog.split_ids[good], minlength=len(catalog.split_names)).tolist()
        has_classes = catalog.label_names is not None and catalog.labels is not None and catalog.labels.ndim == 1
        command, lost = plan_manifest(source, names.paths).command(self.target.given, source, names)
        all_copied = int(good.sum()) == results.copied
        return ExportReport(
            path=str(self.target.final),
            source=f"{self.source_path} ({catalog.about})",
            format=self.format,
            rows=len(source),
            files=int(good.sum()),
            bytes=int(results.sizes[good].sum()),
            splits=dict(zip(catalog.split_names, counts, strict=True)),
            classes=len(catalog.label_names or ()) if has_classes else 0,
            num_workers=self.num_workers,
            seconds=time.perf_counter() - begin,
            resumed_files=results.resumed,
            copied_files=results.copied,
            renamed_files=names.renamed,
            damaged=tuple(
                MissingRow(int(source.rows[index]), catalog.names[index], reason)
                for index, reason in sorted(results.reasons.items())
            ),
            again=command,
            lost=(*lost, *_lost_values(source, self.format, all_copied)),
            already_complete=already_complete,
        )


def _lost_values(source: SourceRows, kind: str, all_copied: bool) -> tuple[str, ...]:
    """Return descriptions of the pixel values that the exported files do not preserve; empty if they preserve all."""
    form, index = source.reader.form, source.reader.index
    if kind == "jpeg" and not all_copied:
        return ("the exact pixels, which PNG files would keep",)
    if isinstance(form, ExportForm) and not form.is_exact(index.dtype, index.row_shape):
        return (f"values of {index.dtype}, which became 8 bits",)
    return ()
