"""Which rows of which dataset: subsets of subsets, chosen indices, and the ranks of torch.distributed."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

import h5pack
from h5pack.data.selection import resolve_ranks, select_draws
from h5pack.errors import OptionsError
from h5pack.order.row_ranges import RowRange, RowSubset

FIRST, COUNT, UNIT = 5, 40, 6


@pytest.fixture(scope="module", params=["mine", ("late", "early")])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> h5pack.H5Dataset:
    """Samples are their row's number; sample 0 is row 5 or, of two splits with others between them, row 23."""
    path = tmp_path_factory.mktemp("rows") / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=np.arange(FIRST + COUNT)[:, None], chunks=(UNIT, 1))
        file.attrs["h5pack_format"] = 1
        file.attrs["h5pack_complete"] = 1
        names, edges = ("other mine", [0, 5, 45]) if request.param == "mine" else ("early other late", [0, 18, 23, 45])
        file["splits/name"] = np.array(names.split(), "S")
        file["splits/rows"] = list(itertools.pairwise(edges))
    return h5pack.H5Dataset(path, split=request.param)


def pairs(rows: Any) -> list[tuple[int, int]]:
    """Row of the file and index of everything in a row set, by index."""
    found = zip(*(part.tolist() for part in rows.rows_at(np.arange(rows.count))), strict=True)
    return sorted(found, key=lambda pair: pair[1])


def expected(dataset: Any, indices: Any) -> list[tuple[int, int]]:
    """What the dataset itself gives for these indices."""
    return sorted(((int(dataset[int(index)].image), int(index)) for index in indices), key=lambda pair: pair[1])


@pytest.mark.parametrize(
    "indices",
    [None, [3, 30, 7, 0], [], [39, -1, -40], np.arange(39, 0, -3), torch.tensor([4, 2]), range(5, 9), (7, 7, 7)],
    ids=repr,
)
def test_chosen_indices_of_a_dataset_and_of_a_subset(dataset: h5pack.H5Dataset, indices: Any) -> None:
    numbers = [int(index) for index in (range(COUNT) if indices is None else indices)]
    base, rows = select_draws(dataset, indices)
    assert base is dataset
    assert isinstance(rows, RowRange if indices is None and dataset.split == "mine" else RowSubset)
    assert rows.chunk_rows == UNIT
    assert pairs(rows) == expected(dataset, [index % COUNT for index in numbers])
    # A sampler over a Subset gives the Subset's own indices, which count from 0.
    subset: Subset[Any] = Subset(dataset, numbers)
    base, rows = select_draws(subset)
    assert base is dataset
    assert pairs(rows) == expected(subset, range(len(subset)))


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nest_of_subsets_is_what_indexing_gives(dataset: h5pack.H5Dataset, data: st.DataObject) -> None:
    nest: Any = dataset
    for _ in range(data.draw(st.integers(0, 3))):
        count = len(nest)
        nest = Subset(nest, data.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=50)))
    count = len(nest)
    chosen = data.draw(st.none() | st.lists(st.integers(-count, count - 1), max_size=30))
    base, rows = select_draws(nest, chosen)
    assert base is dataset
    assert pairs(rows) == expected(nest, range(count) if chosen is None else [index % count for index in chosen])


@pytest.mark.parametrize(
    "wrong",
    [
        *([0, 40], [0, -41], [10**12], [0.5], [[1, 2]], [[1], [2, 3]], [True, False], ["a"], 3),
        *(np.array([2**64 - 1], np.uint64), torch.zeros(2, device="meta")),
    ],
    ids=repr,
)
def test_wrong_indices_are_refused(dataset: h5pack.H5Dataset, wrong: Any) -> None:
    for data in (dataset, Subset(dataset, range(COUNT))):
        with pytest.raises(OptionsError, match="indices"):
            select_draws(data, wrong)
        with pytest.raises(OptionsError, match="Subset"):
            select_draws(Subset(data, wrong))
    with pytest.raises(OptionsError, match="indices"):
        select_draws(Subset(dataset, [0, 1]), [2])


class Endless(Dataset[int]):
    """A dataset without a length."""


@pytest.mark.parametrize(
    "wrong", [TensorDataset(torch.zeros(3)), Subset(TensorDataset(torch.zeros(3)), [9]), Subset(Endless(), [0]), [1, 2]]
)
def test_datasets_without_chunks(wrong: Any) -> None:
    with pytest.raises(OptionsError, match="chunks"):
        h5pack.ChunkBatchSampler(wrong, 4)


@pytest.mark.parametrize("path", ["a.h5", b"a.h5", Path("a.h5")])
def test_a_path_of_a_dataset_is_answered_by_the_code_that_opens_it(path: Any) -> None:
    for make in (
        *(h5pack.H5Loader, h5pack.ChunkSampler, h5pack.ConcatPack, lambda one: h5pack.ConcatPack([one])),
        *(partial(kind, batch_size=2) for kind in (h5pack.ChunkBatchSampler, h5pack.MixtureSampler)),
        *(h5pack.DeviceFeed, partial(h5pack.EchoLoader, factor=2), h5pack.FeedMonitor, h5pack.Normalize.from_dataset),
    ):
        with pytest.raises(OptionsError) as caught:
            make(path)
        assert f"H5Dataset({os.fspath(path)!r})" in str(caught.value)
        assert caught.value.parameters[0].endswith(f"={path!r}")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": "0", "num_replicas": "2"}, {"rank": 0, "num_replicas": 2.0}, {"streams": "8"}, {"lanes": "2"}),
        *({"streams": 2**40}, {"lanes": 2**40}, {"num_samples": np.ones((2, 2))}),
    ],
    ids=repr,
)
def test_wrong_numbers_are_refused_in_one_line(dataset: h5pack.H5Dataset, wrong: dict[str, Any]) -> None:
    for make in (h5pack.ChunkBatchSampler, h5pack.H5Loader):
        with pytest.raises(OptionsError) as caught:
            make(dataset, 2**40, **wrong)
        assert "\n" not in str(caught.value)
    if "lanes" not in wrong:
        with pytest.raises(OptionsError):
            h5pack.ChunkSampler(dataset, **wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_may_be_a_tensor_that_requires_a_gradient(dataset: h5pack.H5Dataset, dtype: torch.dtype) -> None:
    weights = torch.zeros(COUNT, dtype=dtype)
    weights[[3, 30]] = 1
    drawn = list(h5pack.ChunkSampler(dataset, weights=weights.requires_grad_(), num_samples=10))
    assert sorted(drawn) == [3] * 5 + [30] * 5


def test_ranks_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_ranks(2, 5) == (2, 5)
    for rank, num_replicas in ((0, None), (None, 2)):
        with pytest.raises(OptionsError, match="both"):
            resolve_ranks(rank, num_replicas)
    assert resolve_ranks(None, None) == (0, 1)
    for text in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", text)
        assert resolve_ranks(None, None) == (0, 1)


def test_a_launcher_variable_that_is_no_number_is_an_error(
    monkeypatch: pytest.MonkeyPatch, dataset: h5pack.H5Dataset
) -> None:
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "two")
            with pytest.raises(OptionsError) as caught:
                h5pack.H5Loader(dataset, 4)
        assert caught.value.parameters == (variable,)


def test_ranks_of_torch_distributed(monkeypatch: pytest.MonkeyPatch, dataset: h5pack.H5Dataset, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        # Once torch.distributed says it, the variable does not matter, and there is nothing to warn of.
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert resolve_ranks(None, None) == (0, 1)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        plan = h5pack.ChunkBatchSampler(dataset, 5).plan
        assert (plan.rank, plan.num_replicas, plan.streams) == (3, 4, 4)
        assert resolve_ranks(0, 2) == (0, 2), "what is given goes first"
    finally:
        monkeypatch.undo()
        torch.distributed.destroy_process_group()


def test_a_launcher_without_torch_is_warned_of(monkeypatch: pytest.MonkeyPatch, dataset: h5pack.H5Dataset) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for make in (
        lambda: h5pack.ChunkBatchSampler(dataset, 5),
        lambda: h5pack.ChunkSampler(dataset),
        lambda: h5pack.H5Loader(dataset, 5),
        lambda: h5pack.MixtureSampler(h5pack.ConcatPack([dataset]), 5),
    ):
        with pytest.warns(UserWarning, match="WORLD_SIZE") as caught:
            assert make().plan.num_replicas == 1
        assert [warning.filename for warning in caught] == [__file__], "points to the caller"
    h5pack.ChunkBatchSampler(dataset, 5, rank=1, num_replicas=4)


def test_a_loader_older_than_torch_distributed_warns(
    monkeypatch: pytest.MonkeyPatch, dataset: h5pack.H5Dataset
) -> None:
    assumed, given = h5pack.H5Loader(dataset, 5), h5pack.H5Loader(dataset, 5, rank=0, num_replicas=1)
    list(assumed)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.warns(UserWarning, match="initialized after") as caught:
        list(assumed)
    assert [warning.filename for warning in caught] == [__file__], "points to the loop"
    list(given)
    pack = h5pack.ConcatPack([dataset])
    for make in (h5pack.MixtureSampler, h5pack.ChunkBatchSampler):
        list(h5pack.H5Loader(pack, batch_sampler=make(pack, 5, rank=0, num_replicas=1)))
        with monkeypatch.context() as patched:
            patched.setattr(torch.distributed, "is_initialized", lambda: False)
            assumed = h5pack.H5Loader(pack, batch_sampler=make(pack, 5))
        with pytest.warns(UserWarning, match="initialized after"):
            list(assumed)
