"""Files of sources, and what is read from them, for the tests of h5pack.sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h5pack.format.fields import FieldValues, RaggedRows


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows_of(values: FieldValues) -> tuple[str, list[Any]]:
    assert isinstance(values, RaggedRows)
    return values.kind, [row if isinstance(row, (str, list)) else row.tolist() for row in values.values()]
