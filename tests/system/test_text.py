"""Numbers of things, and lists."""

from __future__ import annotations

import pytest

from h5pack.system.text import counted, format_bytes, listed


def test_counts() -> None:
    assert [counted(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(2, noun) for noun in ("batch", "class")] == ["2 batches", "2 classes"]


def test_lists() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1 KiB"),
        (65_536, "64 KiB"),
        (116_412, "114 KiB"),
        (9 * 116_412, "1 MiB"),
        (36 * 116_412, "4 MiB"),
        (144 * 116_412, "16 MiB"),
        (512 * 2**20, "512 MiB"),
        (3 * 2**49, "1.5 PiB"),
        (2**41, "2 TiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_a_size_has_a_binary_unit_and_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text
