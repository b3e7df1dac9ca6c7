"""Numbers of things."""

from __future__ import annotations

from h5pack.wording import counted


def test_counts() -> None:
    assert [counted(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(2, noun) for noun in ("batch", "class")] == ["2 batches", "2 classes"]
