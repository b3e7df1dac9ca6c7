"""What an export tells when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h5pack.pack.plan import human_bytes
from h5pack.wording import counted

_LISTED = 20


@dataclass(frozen=True)
class MissingRow:
    """A row that could not be had.

    Attributes
    ----------
    row : int
        Its number in the HDF5 file.
    name : str
        Its stored name, or its dataset and number.
    reason : str
    """

    row: int
    name: str
    reason: str


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes
    ----------
    path : str
        The finished folder.
    source : str
        What was read: the HDF5 file, and which of its datasets.
    format : str
        png or jpeg.
    rows : int
        Rows that were asked for.
    files : int
        Images in the folder.
    bytes : int
        Their size.
    splits : dict of str to int
        Images of each split.
    classes : int
        Named classes; 0 without.
    workers : int
        Processes that encoded.
    seconds : float
    resumed_files : int
        Images that an earlier run had written.
    copied_files : int
        Images that are the bytes of encoded rows; counted in this run alone.
    renamed_files : int
        Images whose stored name could not be kept; the manifest tells which.
    damaged : tuple of MissingRow
        Rows that could not be exported.
    again : str
        The command that packs the folder anew.
    lost : tuple of str
        What that would not restore, in words.
    already_complete : bool
        With `resume`, whether the export was finished before this call.
    """

    path: str
    source: str
    format: str
    rows: int
    files: int
    bytes: int
    splits: dict[str, int]
    classes: int
    workers: int
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
        """Whether every row has its file."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """The report for programs; keys are stable."""
        return {**asdict(self), "seconds": round(self.seconds, 3), "ok": self.ok}


def export_text(report: ExportReport, folder: str) -> str:
    """An export in lines; `folder` is how it was called."""
    if report.already_complete:
        return f"{folder}: already complete"
    written = report.files - report.resumed_files
    speed = written / report.seconds if report.seconds else 0.0
    splits = ", ".join(f"{name} {count:,}" for name, count in report.splits.items())
    classes = f"; {counted(report.classes, 'class')}" if report.classes else ""
    images = counted(report.files, f"{report.format} image")
    time = f"{report.seconds:.1f} s ({speed:,.0f} images/s)"
    lines = [
        f"source   {report.source}",
        f"splits   {splits}{classes}",
        f"done     {folder}: {images}, {human_bytes(report.bytes)}, {time}",
    ]
    if report.resumed_files:
        lines.append(f"resumed  {counted(report.resumed_files, 'image')} of an earlier run")
    if report.copied_files:
        lines.append(f"copied   {counted(report.copied_files, 'encoded row')} as stored")
    if report.renamed_files:
        lines.append(f"renamed  {counted(report.renamed_files, 'file')}; manifest.csv has the stored names")
    lines.append(f"again    {report.again}")
    lines += [f"but not  {what}" for what in report.lost]
    return "\n".join(lines)


def damage_text(report: ExportReport, folder: str) -> str:
    """The rows that have no file, in lines; `folder` is how the export was called."""
    lines = [f"{folder}: {counted(len(report.damaged), 'row')} could not be exported; see 'h5pack verify'"]
    lines += [f"  row {row.row} ({row.name}): {row.reason}" for row in report.damaged[:_LISTED]]
    if len(report.damaged) > _LISTED:
        lines.append(f"  and {len(report.damaged) - _LISTED:,} more (--json lists all)")
    return "\n".join(lines)
