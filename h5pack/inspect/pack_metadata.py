"""The metadata of a pack that `h5pack info` reports: splits, labels, fields, statistics and options."""

from __future__ import annotations

import contextlib
import json
import math
import os
import textwrap
from typing import Any

import h5py

from h5pack.format import schema
from h5pack.read.encoded import has_kept_images, index_kept, is_mask_group
from h5pack.read.hdf5 import attribute_names, find_item, require_dataset, text
from h5pack.read.ragged import index_ragged, is_ragged, own_fields
from h5pack.system.text import counted, format_bytes, labels_text, printable

_WIDTH, _MAX_NAMES_LENGTH = 110, 180  # maximum characters of a line, and of a list of class names


def describe_pack(file: h5py.File) -> dict[str, Any]:
    """Return the metadata of a pack for JSON; for an unfinished pack, only format, version, complete and options."""
    described: dict[str, Any] = {
        "format": int(file.attrs[schema.FORMAT]),
        "version": text(file.attrs.get(schema.VERSION, b"")),
        "complete": bool(file.attrs.get(schema.COMPLETE, 0)),
        "options": _options(text(file.attrs.get(schema.OPTIONS, b""))),
    }
    if not described["complete"]:
        return described
    names, rows, described["splits"] = file.get(schema.SPLIT_NAMES), file.get(schema.SPLIT_ROWS), {}
    pairs = () if names is None or rows is None else zip(names[()], rows[()].tolist(), strict=True)
    for name, (start, stop) in pairs:
        described["splits"].setdefault(text(name), []).append([int(start), int(stop)])
    labels = require_dataset(file, schema.LABELS) if schema.LABELS in file else None
    described["labels"] = "none"
    if labels is not None:
        described["labels"] = labels_text(labels.shape, labels.dtype, attribute_names(labels, schema.CLASSES))
    for kind in () if labels is None else (schema.CLASSES, schema.COLUMNS):
        if (found := attribute_names(labels, kind)) is not None:
            described[kind] = list(found)
    for name in ("mean", "std"):
        stored = file.get(f"{schema.STATISTICS}/{name}")
        values = [] if stored is None else stored[()].tolist()
        # JSON has no NaN. The statistics of an empty split are NaN.
        described[name] = [value if math.isfinite(value) else None for value in values]
    sampled = file[schema.STATISTICS].attrs if schema.STATISTICS in file else {}
    described["statistics_rows"] = int(sampled["rows"]) if "rows" in sampled else None
    described["statistics_split"] = text(sampled["split"]) if "split" in sampled else None
    described["fields"] = {os.path.basename(name): _describe_field(file, name) for name in own_fields(file)}
    if has_kept_images(file, schema.ENCODED):
        described["encoded"] = _describe_encoded(file)
    described["rejects"] = len(file[f"{schema.REJECTS}/filenames"]) if schema.REJECTS in file else 0
    return described


def _options(stored: str) -> Any:
    """Parse the stored options of a conversion; return the text itself if it is not valid JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        options = json.loads(stored)
        json.dumps(options, allow_nan=False)  # Python reads 1e999 and NaN, but JSON has no such numbers.
        return options
    return stored


def _describe_field(file: h5py.File, name: str) -> dict[str, Any]:
    """Return the kind, dtype and shape of a field's values; an axis whose length differs between rows is None.

    The dtype and the shape of a group are None if its kind is unknown.
    """
    group = find_item(file, name)
    if isinstance(group, h5py.Group):
        kind = text(group.attrs.get(schema.KIND, schema.RAGGED))
        if kind not in (schema.MASK, *schema.RAGGED_KINDS):
            return {"kind": kind, "dtype": None, "shape": None}
    if is_mask_group(file, name):
        return {"kind": schema.MASK, "dtype": str(index_kept(file, name).dtype), "shape": [None, None]}
    if is_ragged(file, name):
        index = index_ragged(file, name)
        described = {"kind": index.kind, "dtype": str(index.data.dtype), "shape": [None, *index.data.row_shape]}
        return {**described, "entries": index.data.rows}
    dataset = require_dataset(file, name)
    kind = text(dataset.attrs.get(schema.KIND, schema.ARRAY))
    return {"kind": kind, "dtype": str(dataset.dtype), "shape": list(dataset.shape[1:])}


def _describe_encoded(file: h5py.File) -> dict[str, Any]:
    """Return the number and total bytes of a pack's encoded images, and the range of their longer sides in pixels."""
    index = index_kept(file)
    sides = file[schema.ENCODED_SIZE][()].max(axis=1, initial=0)
    return {
        "images": index.rows,
        "bytes": int(index.offsets[-1]),
        "longer_sides": [int(sides.min(initial=2**31 - 1)), int(sides.max(initial=0))] if index.rows else [],
    }


def pack_lines(pack: dict[str, Any]) -> list[str]:
    """Format the result of `describe_pack` as lines of text."""
    if not pack["complete"]:
        return [f"an unfinished pack (h5pack {pack['version']}); resume its conversion"]
    newer = " (this h5pack is too old for it)" if pack["format"] > schema.FORMAT_VERSION else ""
    counts = {name: sum(stop - start for start, stop in parts) for name, parts in pack["splits"].items()}
    splits = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    lines = [f"a pack, format {pack['format']}{newer}, written by h5pack {pack['version']}", f"splits   {splits}"]
    named = [kind for kind in ("classes", "columns") if kind in pack]
    lines += [line for kind in named for line in _names_lines(f"{kind}  {len(pack[kind]):,}: ", pack[kind])]
    lines += [] if named else [f"labels   {pack['labels']}"]
    lines += [_field_line(name, found, sum(counts.values())) for name, found in pack["fields"].items()]
    if "encoded" in pack:
        kept = pack["encoded"]
        sides = " to ".join(f"{side:,}" for side in kept["longer_sides"])
        sides = f", longer sides {sides}" if sides else ""
        lines.append(f"encoded  {counted(kept['images'], 'JPEG file')}, {format_bytes(kept['bytes'])}{sides}")
    rows = _statistics_text(pack["statistics_rows"], pack["statistics_split"], counts)
    lines.append(f"mean     {number_text(pack['mean'])}   std {number_text(pack['std'])}   (values in 0..1{rows})")
    lines.append(f"rejects  {pack['rejects']:,}")
    return lines


def _names_lines(title: str, names: list[str]) -> list[str]:
    """Return about two lines: the title, and as many names as fit."""
    shown = printable(", ".join(names))
    if len(shown) > _MAX_NAMES_LENGTH:
        shown = (shown[:_MAX_NAMES_LENGTH].rpartition(", ")[0] or shown[:_MAX_NAMES_LENGTH]) + ", ..."
    return textwrap.wrap(title + shown, _WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)


def _statistics_text(used: int | None, split: str | None, counts: dict[str, int]) -> str:
    """Return a phrase such as ", of 900 rows of train" for the `used` rows from which statistics were computed."""
    if used is None:
        return ""
    count = counts.get(split or "", 0)
    part = f" of {split}" if len(counts) > 1 and used <= count else ""
    sample = "a sample of " if used < (count if part else sum(counts.values())) else ""
    return f", of {sample}{counted(used, 'row')}{part}"


def _field_line(name: str, found: dict[str, Any], rows: int) -> str:
    if "entries" in found:
        unit = "bytes" if found["kind"] in schema.TEXT_KINDS else "entries"
        held = f"{found['dtype']}, {found['entries'] / max(1, rows):,.1f} {unit} per row"
    elif found["shape"] is None:
        held = "a kind that needs a newer version of h5pack"
    elif None in found["shape"]:
        held = f"{found['dtype']}, each with the size of its image"
    else:
        held = f"{found['dtype']}, {shape_text(tuple(found['shape'])) or 'one number'} per row"
    return f"field    {name}: {found['kind']}, {held}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as "1,000 x 64 x 64"."""
    return " x ".join(f"{size:,}" for size in shape)


def number_text(values: list[float | None]) -> str:
    """Return statistics as text, one number per channel."""
    return " ".join("none" if value is None else f"{value:.4f}" for value in values)
