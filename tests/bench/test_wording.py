"""Numbers in words: digits that count, units, and nothing that moves a cursor."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.bench.wording import plain, size_text, speed_text, speed_words, spread_text, times_text


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (0.0, "-"),
        (float("nan"), "-"),
        (8.314, "8.31"),
        (83.14, "83.1"),
        (831.4, "831"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (8_314, "8.31k"),
        (83_140, "83.1k"),
        (999_600, "1.00M"),
        (1_523_000, "1.52M"),
        (83_140_000, "83.1M"),
    ],
)
def test_speeds_have_three_digits(speed: float, text: str) -> None:
    assert speed_text(speed) == text


@given(st.floats(1, 1e9))
def test_a_speed_is_what_it_says(speed: float) -> None:
    text = speed_text(speed)
    value = float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1)
    assert value == pytest.approx(speed, rel=5.1e-3)
    assert len(re.sub(r"\D", "", text)) >= 3
    assert float(speed_words(speed).replace(",", "")) == pytest.approx(speed, rel=5.1e-3)


@pytest.mark.parametrize(
    ("speeds", "text"),
    [((), ""), ((5.0,), ""), ((5.0, 5.0), "±0%"), ((90, 100, 104), "±10%"), ((100, 100, 151), "±51%")],
)
def test_the_spread_is_that_of_the_farthest_repeat(speeds: tuple[float, ...], text: str) -> None:
    assert spread_text(speeds) == text


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
        (3 * 2**50, "3.07e+03 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text


def test_ratios() -> None:
    assert [times_text(ratio) for ratio in (0.921, 1.99, 3.42, 31.4, 1234)] == ["0.92", "1.99", "3.4", "31", "1,234"]


@given(st.text(st.characters(), max_size=40))
def test_a_text_of_others_is_printed_as_text(text: str) -> None:
    assert plain(text).isprintable()
    plain(text).encode("utf-8")
    assert plain(text) == text or not text.isprintable()


def test_what_moves_a_cursor_is_escaped() -> None:
    assert plain("a\x1b[31m\nb\udc80ä") == "a\\x1b[31m\\nb\\udc80ä"
