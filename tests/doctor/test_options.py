"""Options that make no sense are refused at the door."""

from __future__ import annotations

from typing import Any

import pytest

from h5pack.doctor.options import DoctorOptions
from h5pack.errors import OptionsError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"window": 0}, "window is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"threads": 2, "workers": 2}, "give one of the two"),
        ({"dtype": "int8"}, "give one of float32, bfloat16, float16"),
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"seconds": float("inf")}, "seconds is inf"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"model": "module"}, "model is 'module'; give MODULE:NAME"),
        ({"model": ":name"}, "model is ':name'"),
        ({"transform": "module:"}, "transform is 'module:'"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        DoctorOptions("x.h5", **changes)


def test_accepted() -> None:
    DoctorOptions("x.h5", workers=0, model="a.b:C.d", transform="a:f", dtype="bfloat16", seconds=0.5)
