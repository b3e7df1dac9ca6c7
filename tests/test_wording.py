"""Numbers of things, and lists."""

from __future__ import annotations

from h5pack.wording import counted, listed


def test_counts() -> None:
    assert [counted(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(2, noun) for noun in ("batch", "class")] == ["2 batches", "2 classes"]


def test_lists() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
