"""Reports as text for a terminal."""

from __future__ import annotations

import shlex

from h5pack import schema
from h5pack.pack.plan import human_bytes
from h5pack.tools.info import DatasetReport, FileReport
from h5pack.tools.verify import VerifyReport

_LISTED = 20


def info_text(report: FileReport) -> str:
    """A file report in lines."""
    lines = [f"{report.path}: {human_bytes(report.bytes)}"]
    pack = report.pack
    if pack is None:
        lines.append("no pack, an HDF5 file of other making")
    elif not pack["complete"]:
        lines.append(f"an unfinished pack (h5pack {pack['version']}); continue it with 'h5pack convert ... --resume'")
    else:
        newer = ", newer than this h5pack reads" if pack["format"] > schema.FORMAT_VERSION else ""
        lines.append(f"a pack, format {pack['format']}{newer}, made by h5pack {pack['version']} at {pack['created']}")
        splits = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in pack["splits"].items())
        lines.append(f"splits   {splits}")
        for kind in ("classes", "columns"):
            if kind in pack:
                lines.append(f"{kind}  {len(pack[kind]):,}: {_some(pack[kind])}")
        lines.append(f"mean     {_numbers(pack['mean'])}   std {_numbers(pack['std'])}   (of 0..1)")
        lines.append(f"rejects  {pack['rejects']:,}")
    for dataset in report.datasets:
        lines += _dataset_lines(report.path, dataset)
    if report.stats is not None:
        lines += _stats_lines(report)
    return "\n".join(lines)


def verify_text(report: VerifyReport) -> str:
    """A verification in lines; damaged rows by name."""
    if report.ok:
        return f"{report.path}: {report.rows:,} rows, every checksum agrees"
    lines = [f"{report.path}: {problem}" for problem in report.problems]
    for name, rows in sorted(report.damaged.items()):
        count = "1 damaged row" if len(rows) == 1 else f"{len(rows):,} damaged rows"
        lines.append(f"{report.path}: {name!r}: {count}; restore the file or convert again")
        for row in rows[:_LISTED]:
            origin = report.filenames.get(row)
            lines.append(f"  row {row}" + (f" ({origin})" if origin is not None else ""))
        if len(rows) > _LISTED:
            lines.append(f"  and {len(rows) - _LISTED:,} more (--json lists all)")
    return "\n".join(lines)


def _dataset_lines(path: str, dataset: DatasetReport) -> list[str]:
    shape = " x ".join(f"{size:,}" for size in dataset.shape) or "scalar"
    stored = f"{human_bytes(dataset.stored_bytes)} stored"
    if dataset.bytes:
        stored += f", {dataset.overhead:.3f} of the data"
    lines = [f"/{dataset.name}: {dataset.dtype} {shape}, {dataset.layout}, {stored}"]
    if dataset.chunks is not None:
        chunks = " x ".join(f"{size:,}" for size in dataset.chunks)
        filters = ", ".join(dataset.filters) or "no filter"
        lines.append(f"  chunks {chunks}, {dataset.index}, {filters}")
    if dataset.cache is not None:
        cache = dataset.cache
        lines.append(f"  rdcc_nbytes={cache.nbytes} rdcc_nslots={cache.nslots} rdcc_w0={cache.w0} ({cache.reason})")
    lines += [f"  fault: {fault}" for fault in dataset.faults]
    if dataset.cure is not None:
        lines.append(f"  cure: {dataset.cure}")
        command = shlex.join(["h5pack", "bench", path, "--images", dataset.name])
        lines.append(f"  what it costs here, in images/s: {command}")
    return lines


def _stats_lines(report: FileReport) -> list[str]:
    stats = report.stats or {}
    lines = [f"  {name}: {count:,}" for name, count in stats.get("labels", {}).items()]
    if lines:
        lines.insert(0, "labels")
    channels = stats.get("channels")
    if channels is not None:
        rows = f"{channels['rows']:,} rows"
        lines.append(f"channels of {rows}: mean {_numbers(channels['mean'])}, std {_numbers(channels['std'])}")
    return lines


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _numbers(values: list[float | None]) -> str:
    return " ".join("none" if value is None else f"{value:.4f}" for value in values)
