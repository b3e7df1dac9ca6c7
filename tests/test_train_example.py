"""`examples/train.py` on one rank and on two, killed and resumed, with each of its options."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

import h5pack
from tests.forking import output_of
from tests.makers import color_folders, quick

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = str(EXAMPLES / "train.py")
# On a busy machine the step may wait for the loader, of which the FeedMonitor warns.
pytestmark = pytest.mark.filterwarnings("ignore:h5pack train:UserWarning")
TRAIN, VAL, CLASSES = 166, 39, 3
BATCH = 16
STEPS = TRAIN // BATCH
"""Of an epoch; the 6 rows that are over come in another one."""

SMALL = ["--batch-size", str(BATCH), "--streams", "4", "--crop", "2", "--device", "cpu", "--log-every", "1"]
EPOCHS = 3
LONG = [*SMALL, "--norm", "group", "--epochs", str(EPOCHS), "--lr", "0.02", "--every", "7"]
HELD = 17
"""Step of the second epoch at which a run waits to be killed; the last checkpoint is that of step 14."""

Logs = tuple[dict[int, float], list[dict[str, Any]]]
"""The loss of each step, and the validations."""


class Killed(Exception):
    """Stands for a kill, in tests that stay in this process."""


@pytest.fixture(scope="module")
def train() -> Iterator[Any]:
    """The script as a module, on one thread: two of them would wait for the other tests' CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("train")
    sys.path.remove(str(EXAMPLES))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colors")
    source = color_folders(folder / "in", {"train": TRAIN, "val": VAL}, 40)
    h5pack.convert(source, folder / "colors.h5", **quick(chunk_rows=8))
    return folder / "colors.h5"


def run(*arguments: Any) -> None:
    """Run a process of Python, which finds the examples and must succeed."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, text=True
    )
    assert done.returncode == 0, done.stdout


def logged(path: Path) -> Logs:
    """What a run logged, each step once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in losses] == list(range(1, len(losses) + 1))
    return dict(losses), [line for line in lines if "accuracy" in line]


@pytest.fixture(scope="module")
def uninterrupted(train: Any, pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """What a run of one rank logs."""
    log = tmp_path_factory.mktemp("whole") / "log.json"
    train.main([str(pack), *LONG, "--json", str(log)])
    losses, validations = logged(log)
    assert len(losses) == EPOCHS * STEPS
    assert [line["epoch"] for line in validations] == list(range(EPOCHS))
    assert {line["images"] for line in validations} == {VAL}
    return losses, validations


def train_until_held(held: Event, arguments: list[str]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    train = importlib.import_module("train")
    step = train.Training.train

    def hold(self: Any, *batch: Any) -> Any:
        if self.step == HELD:
            held.set()
            signal.pause()
        return step(self, *batch)

    train.Training.train = hold
    train.main(arguments)


@pytest.fixture(scope="module")
def killed_once(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint and the log of a run that SIGKILL ended."""
    folder = tmp_path_factory.mktemp("killed")
    # Processes of the fork server have imported torch.
    context = multiprocessing.get_context("forkserver")
    held = context.Event()
    arguments = [str(pack), *LONG, "--checkpoint", str(folder / "c.pt"), "--json", str(folder / "log.json")]
    process = context.Process(target=train_until_held, args=(held, arguments))
    process.start()
    assert held.wait(300)
    process.kill()
    process.join()
    return folder


@pytest.fixture
def killed(killed_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed_once, tmp_path / "copy")


def resume(train: Any, pack: Path, folder: Path, *more: str) -> Logs:
    """Resume the run of which a folder holds the checkpoint and the log; return the whole log."""
    saving = ["--checkpoint", str(folder / "c.pt"), "--json", str(folder / "log.json")]
    train.main([str(pack), *LONG, *saving, "--resume", *more])
    return logged(folder / "log.json")


def test_a_killed_run_resumes_with_identical_losses(
    train: Any, pack: Path, killed: Path, uninterrupted: Logs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(train, pack, killed) == uninterrupted
    output = capsys.readouterr().out
    assert "resumed after step 14" in output
    # The second epoch was resumed within; its loss is of all of its steps.
    losses = list(uninterrupted[0].values())
    means = [sum(losses[epoch * STEPS : (epoch + 1) * STEPS]) / STEPS for epoch in (1, 2)]
    printed = re.findall(r"^epoch \d+: loss ([\d.]+),", output, re.M)
    assert [float(loss) for loss in printed] == pytest.approx(means, abs=1e-4)


def begin_and_list_threads(rank: int, folder: Path, *arguments: Any) -> None:
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("train").begin_rank(rank, *arguments)
    tasks = Path("/proc/self/task").iterdir()
    (folder / str(rank)).write_text("\n".join((task / "comm").read_text().strip() for task in tasks))


def test_a_killed_run_resumes_on_two_ranks(
    train: Any, pack: Path, killed: Path, uninterrupted: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(function: Any, arguments: tuple[Any, ...], ranks: int) -> None:
        assert function is train.begin_rank
        # Processes of the fork server have imported torch.
        mp.start_processes(begin_and_list_threads, (killed, *arguments), ranks, start_method="forkserver")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(mp, "spawn", spawn)
    losses, validations = resume(train, pack, killed, "--spawn", "2")
    assert list(losses.values())[14:] == pytest.approx(list(uninterrupted[0].values())[14:], rel=1e-3, abs=1e-5)
    assert [(line["epoch"], line["images"]) for line in validations] == [(epoch, VAL) for epoch in range(EPOCHS)]
    # A thread of gloo that still holds a tensor when the interpreter is finalized would end the rank with SIGABRT.
    for rank in range(2):
        names = (killed / str(rank)).read_text().split()
        assert names
        assert [name for name in names if "gloo" in name] == []


def run_torchrun(*arguments: Any) -> None:
    # The ranks are started as commands.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    importlib.import_module("torch.distributed.run").main([*map(str, arguments)])


def test_two_ranks_of_torchrun_have_the_losses_of_one(pack: Path, uninterrupted: Logs, tmp_path: Path) -> None:
    options = ["--json", tmp_path / "log.json", "--find-unused-parameters", "--accumulate=2"]
    output_of(run_torchrun, "--nproc_per_node=2", "--standalone", SCRIPT, pack, *LONG, *options)
    losses, validations = logged(tmp_path / "log.json")
    assert list(losses.values())[:20] == pytest.approx(list(uninterrupted[0].values())[:20], rel=1e-3)
    assert {line["images"] for line in validations} == {VAL}


def test_the_shares_of_ranks_cover_each_row_once(train: Any) -> None:
    for rows, ranks in itertools.product((1, 2, 7, 39), (1, 2, 3, 8)):
        assert [row for rank in range(ranks) for row in train.share_of(rows, rank, ranks)] == list(range(rows))


def test_the_defaults_learn(train: Any, pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main([str(pack), *SMALL, "--json", str(tmp_path / "log.json")])
    losses, validations = logged(tmp_path / "log.json")
    assert (len(losses), len(validations)) == (10 * STEPS, 10)
    assert validations[-1]["accuracy"] >= 0.9, "a third of them is chance"
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"accuracy {validations[-1]['accuracy']:.4f} after")


# What has a state, the step to stop at, of how many steps, and options.
STATES = {
    "dropout": (STEPS + 6, 2 * STEPS, "--epochs=2 --dropout=0.3 --label-smoothing=0.1"),
    "epoch's end": (STEPS, 2 * STEPS, "--epochs=2"),
    "echo": (2 * STEPS + 1, 4 * STEPS, "--epochs=2 --echo=2"),
    "fp16": (5, STEPS, "--epochs=1 --amp=fp16 --accumulate=2"),
    "bf16": (4, 2 * STEPS, "--epochs=2 --amp=bf16 --deterministic --checkpoint-activations"),
}


@pytest.mark.parametrize("what", STATES)
def test_a_resumed_run_equals_an_uninterrupted_one(
    train: Any, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stop, steps, options = STATES[what]
    whole, ours = (
        [str(pack), *SMALL, "--every=3", *options.split(), f"--checkpoint={path}.pt", f"--json={path}.json"]
        for path in (tmp_path / "whole", tmp_path / "ours")
    )
    step = train.Training.train

    def stopping(self: Any, *batch: Any) -> Any:
        if self.step == stop:
            raise Killed
        return step(self, *batch)

    try:
        train.main(whole)
        with monkeypatch.context() as patch:
            patch.setattr(train.Training, "train", stopping)
            with pytest.raises(Killed):
                train.main(ours)
        train.main([*ours, "--resume"])
    finally:
        torch.use_deterministic_algorithms(False)
    losses, validations = logged(tmp_path / "ours.json")
    assert (losses, validations) == logged(tmp_path / "whole.json")
    assert len(losses) == steps
    # All that is saved is the same: weights, momentum, the scaler's count of steps, random numbers.
    states = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "ours")]
    assert same(*states)


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints hold the same."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def losses_of(train: Any, pack: Path, log: Path, *options: str) -> list[float]:
    train.main([str(pack), *SMALL, "--norm", "group", "--epochs", "1", "--json", str(log), *options])
    return list(logged(log)[0].values())


def test_accumulation_and_recomputed_activations_change_no_loss(train: Any, pack: Path, tmp_path: Path) -> None:
    plain = losses_of(train, pack, tmp_path / "1")
    assert losses_of(train, pack, tmp_path / "2", "--accumulate", "4") == pytest.approx(plain, rel=1e-3)
    assert losses_of(train, pack, tmp_path / "3", "--checkpoint-activations") == pytest.approx(plain, rel=1e-5)
    assert losses_of(train, pack, tmp_path / "4", "--data-parallel", "--log-every", "7") == plain
    assert losses_of(train, pack, tmp_path / "5", "--flip", "0") != pytest.approx(plain, rel=1e-3)


def test_the_learning_rate_rises_and_falls(train: Any) -> None:
    training = train.Training.__new__(train.Training)
    training.options, training.steps = train.parse(["p", "--lr", "0.4", "--warmup", "0.1"]), 100
    rates = [training.rate() for training.step in range(100)]
    assert rates[:10] == pytest.approx([0.04 * step for step in range(1, 11)])
    assert rates[10] == 0.4
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.2)
    assert 0 < rates[-1] < 0.001


@pytest.mark.parametrize(("model", "parameters"), [("resnet18", 11_181_642), ("resnet50", 23_528_522)])
def test_networks_have_the_known_number_of_parameters(train: Any, model: str, parameters: int) -> None:
    """Parameters as torchvision's, with 10 classes: 11,689,512 and 25,557,032 have 1000."""
    network = train.Network(model, 3, 10, small=False)
    assert sum(one.numel() for one in network.parameters()) == parameters
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 70, 97)).shape == (1, 10)
        # Five times half of the size, and no ReLU before the sum of a block.
        assert torch.nn.Sequential(network.stem, *network.stages)(torch.zeros(1, 3, 70, 97)).shape[2:] == (3, 4)
        assert isinstance(network.stages[0][0].body[-1][-1], torch.nn.BatchNorm2d)
        assert train.Network(model, 1, 4, small=True, norm="group")(torch.zeros(2, 1, 16, 17)).shape == (2, 4)


def test_profile_writes_a_trace_of_a_few_steps(train: Any, pack: Path, tmp_path: Path) -> None:
    losses_of(train, pack, tmp_path / "log", "--profile", str(tmp_path / "trace"))
    trace = json.loads((tmp_path / "trace" / "rank0.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"h5pack: wait", "h5pack: read", "h5pack: transform", "h5pack: step"} <= names


def opened(train: Any, pack: Path, *more: str) -> tuple[Any, Any, int]:
    options = train.parse([str(pack), *more])
    return train.open_rows(options.pack, options.val, options.val_split, options.seed)


def rows_of(dataset: Any) -> list[int]:
    return [dataset[index][-1] for index in range(len(dataset))]


def unsplit(path: Path, **splits: tuple[int, int]) -> Path:
    """A file of 50 rows with labels, made by h5py."""
    with h5py.File(path, "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 255, (50, 8, 8, 3), np.uint8)
        file["labels"] = np.arange(50) % 5
        if splits:
            file["splits/name"] = np.array(list(splits), "S")
            file["splits/rows"] = np.array(list(splits.values()))
    return path


def test_training_and_validation_rows_are_chosen_by_split(train: Any, pack: Path, tmp_path: Path) -> None:
    train_rows, val_rows, classes = opened(train, pack)
    assert (len(train_rows), len(val_rows), classes) == (TRAIN, VAL, CLASSES)
    # Without splits a tenth is held out: by the seed, and never trained on.
    plain = unsplit(tmp_path / "plain.h5")
    train_rows, val_rows, classes = opened(train, plain)
    assert (len(train_rows), len(val_rows), classes) == (45, 5, 5)
    assert sorted(rows_of(train_rows) + rows_of(val_rows)) == list(range(50))
    assert rows_of(opened(train, plain)[1]) == rows_of(val_rows)
    assert rows_of(opened(train, plain, "--seed", "1")[1]) != rows_of(val_rows)
    # A split that is named is kept from training, too, and another file is what it is.
    odd = unsplit(tmp_path / "odd.h5", one=(0, 20), two=(20, 50))
    train_rows, val_rows, _ = opened(train, odd, "--val-split", "one")
    assert (rows_of(train_rows), rows_of(val_rows)) == (list(range(20, 50)), list(range(20)))
    train_rows, val_rows, _ = opened(train, plain, "--val", str(odd))
    assert (len(train_rows), len(val_rows)) == (50, 50)
    # Unless it is the same file under another name.
    (tmp_path / "link.h5").symlink_to(odd)
    train_rows, val_rows, _ = opened(train, odd, "--val", str(tmp_path / "link.h5"), "--val-split", "one")
    assert (rows_of(train_rows), rows_of(val_rows)) == (list(range(20, 50)), list(range(20)))
    # So are the rows of a split for testing that is not validated with.
    three = unsplit(tmp_path / "three.h5", test=(0, 10), one=(10, 20), two=(20, 50))
    assert rows_of(opened(train, three, "--val-split", "one")[0]) == list(range(20, 50))
    # Another pack must number the same classes.
    for number, path in enumerate((plain, odd)):
        with h5py.File(path, "r+") as file:
            file["labels"].attrs["classes"] = [f"{number}{name}" for name in "abcde"]
    with pytest.raises(SystemExit, match="its classes"):
        opened(train, plain, "--val", str(odd))


def test_a_file_without_splits_and_statistics_trains(train: Any, tmp_path: Path) -> None:
    plain = unsplit(tmp_path / "plain.h5")
    saving = ["--checkpoint", str(tmp_path / "new" / "c.pt"), "--json", str(tmp_path / "a" / "b" / "log")]
    train.main([str(plain), *SMALL, "--epochs", "1", *saving])
    assert (tmp_path / "new" / "c.pt").is_file()
    losses, validations = logged(tmp_path / "a" / "b" / "log")
    assert (len(losses), validations[0]["images"]) == (45 // BATCH, 5)


def test_invalid_options_are_refused_in_one_line(
    train: Any, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: Any) -> str:
        with pytest.raises(SystemExit) as stopped:
            train.main([*map(str, arguments), "--epochs", "1"])
        code = stopped.value.code
        said = code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1]
        assert "\n" not in said
        return said

    with h5py.File(tmp_path / "bare.h5", "w") as file:
        file["images"] = np.zeros((9, 4, 4, 3), np.uint8)
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((9, 4, 4, 3), np.uint8), np.zeros((9, 40), np.uint8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    saved = [*SMALL, f"--checkpoint={tmp_path / 'c.pt'}"]
    train.main([str(pack), *saved, "--epochs", "1"])
    for expected, *arguments in (
        ("none.h5", tmp_path / "none.h5"),
        ("no labels", tmp_path / "bare.h5"),
        ("class", tmp_path / "table.h5"),
        ("cuda:0 does not exist", pack, "--device", "cuda"),
        ("--device xyz", pack, "--device", "xyz"),
        ("--accumulate", pack, *SMALL, "--accumulate", "5"),
        ("fewer than --batch-size", pack, "--device", "cpu", "--batch-size", "512"),
        ("streams", pack, *SMALL, "--streams", "3"),
        ("no split 'x'", pack, "--val-split", "x", "--device", "cpu"),
        ("--val-split", pack, "--val-split", "train", "--device", "cpu"),
        ("--val-split", pack, "--val", pack, "--device", "cpu"),
        ("--resume needs --checkpoint", pack, "--resume"),
        ("add --resume", pack, *saved),
        ("saved with --lr 0.1", pack, *saved, "--resume", "--lr", "7"),
        ("seed", pack, *saved, "--resume", "--seed", "7"),
    ):
        assert expected in refused(*arguments)
    assert not list(tmp_path.glob("*.partial"))


def test_help_names_each_default_once(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse(["--help"])
    options = re.split(r"\n  -", capsys.readouterr().out)[1:]
    assert len(options) > 30
    assert all(option.count("default:") <= 1 and "None" not in option for option in options)


def test_the_batch_script_resumes_on_all_gpus(train: Any, tmp_path: Path) -> None:
    for name, printing in (("srun", '"%s\\n" "$@"'), ("scontrol", r'"n1\nn2\n"')):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf {printing}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", EXAMPLES / "train.sbatch", "a b.h5", str(tmp_path / "c d")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=slurm).stdout
    torchrun, _, arguments = printed.partition("examples/train.py\n")
    assert {"torchrun", "--nnodes=2", "--nproc_per_node=4", "--rdzv_endpoint=n1:29500"} <= set(torchrun.split())
    options = train.parse(arguments.splitlines())
    assert (options.pack, options.checkpoint, options.resume) == ("a b.h5", tmp_path / "c d" / "checkpoint.pt", True)
    assert (options.streams % 8, options.batch_size % options.streams) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [["--amp", "bf16", "--compile"], ["--amp", "fp16"], ["--deterministic"]])
def test_it_learns_on_a_gpu(pack: Path, tmp_path: Path, options: list[str]) -> None:
    saving = ["--checkpoint", tmp_path / "c.pt", "--json", tmp_path / "log"]
    run(SCRIPT, pack, *SMALL, "--device", "cuda", *saving, *options)
    assert logged(tmp_path / "log")[1][-1]["accuracy"] >= 0.9
