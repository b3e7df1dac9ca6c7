"""What a preview tells when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h5pack.tools.export_report import MissingRow


@dataclass(frozen=True)
class ShownClass:
    """A class on the sheet.

    Attributes
    ----------
    name : str or None
        None where the file has no classes.
    rows : int
        How many rows it has.
    shown : list of int
        The rows on the sheet, by their numbers in the file.
    """

    name: str | None
    rows: int
    shown: list[int]


@dataclass(frozen=True)
class ShownSplit:
    """A split on the sheet.

    Attributes
    ----------
    name : str
    rows : int
    classes : list of ShownClass
    named : int
        Its classes, shown or not; rows without a label are none.
    left_out : int
        Those that are not on the sheet.
    """

    name: str
    rows: int
    classes: list[ShownClass]
    named: int
    left_out: int


@dataclass(frozen=True)
class PreviewReport:
    """What a sheet shows.

    Attributes
    ----------
    path : str
        The sheet.
    source : str
        The HDF5 file, and which of its datasets.
    width, height : int
        Of the sheet, in pixels.
    rows : int
        Of the file, or of the splits that were asked for.
    images : int
        On the sheet.
    splits : list of ShownSplit
    damaged : tuple of MissingRow
        Rows that were chosen and could not be shown.
    """

    path: str
    source: str
    width: int
    height: int
    rows: int
    images: int
    splits: list[ShownSplit]
    damaged: tuple[MissingRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every chosen row could be shown."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """The report for programs; keys are stable."""
        return {**asdict(self), "ok": self.ok}


def preview_lines(report: PreviewReport, sheet: str) -> str:
    """A preview in lines; `sheet` is how it was called."""
    images = "1 image" if report.images == 1 else f"{report.images:,} images"
    lines = [f"{sheet}: {images} of {report.rows:,} rows, {report.width}x{report.height} pixels"]
    for split in report.splits:
        if split.left_out:
            left = f"{split.left_out:,} of {split.named:,} classes not shown"
            lines.append(f"  {split.name}: {left}; --classes {split.named} shows all")
    return "\n".join(lines)
