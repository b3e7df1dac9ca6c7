"""Numbers of things, lists and errors."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, Dataset

from h5pack.errors import OptionsError
from h5pack.system.text import counted, error_line, format_bytes, listed, one_of, printable


class _Failing(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise ValueError("no such thing\n  indented\nmore")


def test_counts_and_lists() -> None:
    assert [counted(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [one_of(count, "'a'") for count in (1, 2)] == ["'a'", "one of 2 images, the first 'a'"]
    assert [counted(2, noun) for noun in ("batch", "class")] == ["2 batches", "2 classes"]
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_a_size_has_a_binary_unit_and_three_digits() -> None:
    sizes = [0, 999, 1023, 116_412, 9 * 116_412, 3 * 2**29, 2**41, 3 * 2**49]
    texts = ["0 B", "999 B", "1 KiB", "114 KiB", "1 MiB", "1.5 GiB", "2 TiB", "1.5 PiB"]
    assert list(map(format_bytes, sizes)) == texts


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (OptionsError("no such thing"), "no such thing"),
    ],
)
def test_errors_in_a_line(error: Exception, line: str) -> None:
    assert error_line(error) == line


def test_the_cause_of_a_workers_error_follows_its_traceback() -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        next(iter(DataLoader(_Failing(), num_workers=1)))
    assert error_line(caught.value) == "ValueError: no such thing"


def test_spaces_of_any_script_are_printable_and_controls_are_not() -> None:
    assert printable("a b\u00a0c\u3000\u96ea") == "a b\u00a0c\u3000\u96ea"
    assert printable("\x1b\t\n\u202e\ud800\u200b") == r"\x1b\t\n\u202e\ud800\u200b"
