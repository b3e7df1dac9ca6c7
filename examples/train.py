"""Train a classifier on a pack: ``python examples/train.py PACK``; ``--help`` shows the rest.

One process on one device, or several ranks: ``torchrun --nproc_per_node 4 examples/train.py PACK``, or ``--spawn 4``.
``--batch-size`` is that of all ranks together, and H5Loader's streams give every step the same rows on any number of
ranks. So a killed run continues with ``--resume``, on another number of ranks too, as if it had never stopped.
The networks, the train and validation rows and the log are in files beside this one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss_log import LossLog
from networks import MODELS, NORMS, Network
from split_rows import open_rows, share_of
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import Subset

import h5pack

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A resumed run must have the same of these; the loader compares its seed, batch size and streams by itself.
SAME = ("model", "norm", "epochs", "lr", "warmup", "weight_decay", "label_smoothing", "dropout", "amp")
SAME += ("flip", "crop", "echo", "accumulate", "checkpoint_activations")


def device_of(options: argparse.Namespace, local_rank: int) -> torch.device:
    """The device of this rank."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise SystemExit(f"--device {options.device}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise SystemExit(
                f"cuda:{index} does not exist: there are {torch.cuda.device_count()} GPUs; try --device cpu"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def normalize(rows: Any, options: argparse.Namespace, **augmentation: Any) -> h5pack.Normalize:
    """uint8 to float, with the statistics of the training pack if it has any."""
    base = rows.dataset if isinstance(rows, Subset) else rows
    make = h5pack.Normalize if base.mean is None else lambda **given: h5pack.Normalize.from_dataset(base, **given)
    return make(dtype=AMP[options.amp], seed=options.seed, **augmentation)


class Training:
    """What a checkpoint saves and restores, and the step of the optimizer."""

    def __init__(self, options: argparse.Namespace, device: torch.device, rank: int, ranks: int):
        self.options, self.device, self.rank, self.ranks = options, device, rank, ranks
        if options.norm == "sync" and ranks > 1 and device.type != "cuda":
            raise SystemExit("--norm sync needs GPUs; --norm group too gives the same results on any number of ranks")
        if options.batch_size % (ranks * options.accumulate):
            raise SystemExit(f"--batch-size {options.batch_size} is not a multiple of {ranks} ranks x --accumulate")
        train, self.val, classes = open_rows(options.pack, options.val, options.val_split, options.seed)
        self.loader = h5pack.H5Loader(
            train,
            options.batch_size // ranks,
            seed=options.seed,
            drop_last=True,
            streams=options.streams,
            rank=rank,
            num_replicas=ranks,
            pin_memory=device.type == "cuda",
        )
        if not len(self.loader):
            raise SystemExit(f"{options.pack}: {len(train)} rows to train with, fewer than --batch-size")
        # Echoing before the feed: each repeat of a batch is augmented differently.
        loader = h5pack.EchoLoader(self.loader, options.echo) if options.echo != 1 else self.loader
        augment = normalize(train, options, flip=options.flip, crop=options.crop)
        watched = rank == 0 and sys.stderr.isatty()
        if device.type == "cuda":
            feed = h5pack.DeviceFeed(loader, device, transform=augment)
            self.batches = self.monitor = h5pack.FeedMonitor(feed, progress=watched)
        else:
            # Without a GPU the feed normalizes while the step waits, which a monitor around it would count.
            self.monitor = h5pack.FeedMonitor(loader, progress=watched)
            self.batches = h5pack.DeviceFeed(self.monitor, device, transform=augment)
        self.steps = len(self.batches) * options.epochs
        self.plain = normalize(train, options)  # For validation too, which needs the statistics of training.
        example = self.plain(train[0][0][None])
        torch.manual_seed(options.seed)
        self.network = Network(
            options.model,
            example.shape[1],
            classes,
            small=max(example.shape[2:]) <= 64,
            norm=options.norm,
            dropout=options.dropout,
            recompute=options.checkpoint_activations,
        ).to(device, memory_format=torch.channels_last)
        self.model = self.wrapped()
        # Weight decay is for weights, not for biases and normalizations.
        groups = [[p for p in self.network.parameters() if (p.ndim > 1) is large] for large in (True, False)]
        decays = [{"params": groups[0], "weight_decay": options.weight_decay}, {"params": groups[1]}]
        self.optimizer = torch.optim.SGD(decays, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=0)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.amp == "fp16")
        torch.manual_seed(options.seed + 1 + rank)
        self.epoch = self.step = 0
        self.accuracy = math.nan

    def wrapped(self) -> nn.Module:
        """The network wrapped for several ranks or several GPUs of this process, and compiled if asked for."""
        model: nn.Module = self.network
        if self.ranks > 1:
            gpus = [self.device.index] if self.device.type == "cuda" else None
            unused = self.options.find_unused_parameters
            model = DistributedDataParallel(model, device_ids=gpus, find_unused_parameters=unused)
        elif self.options.data_parallel:
            # One process drives all GPUs: each step copies the weights to each and gathers the outputs on the first,
            # and the global interpreter lock serializes their work. --spawn has none of these costs.
            model = DataParallel(model)
        return torch.compile(model) if self.options.compile else model

    def rate(self) -> float:
        """The learning rate of this step: linear warm-up, then half a cosine. A function of the step, so not saved."""
        up = max(1, round(self.options.warmup * self.steps))
        if self.step < up:
            return self.options.lr * (self.step + 1) / up
        return self.options.lr * 0.5 * (1 + math.cos(math.pi * (self.step - up) / max(1, self.steps - up)))

    def train(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Take one step of the optimizer; returns the mean loss of this rank's rows."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        count, total = self.options.accumulate, torch.zeros((), device=self.device)
        parts = list(zip(images.tensor_split(count), labels.tensor_split(count), strict=True))
        for number, (part, answers) in enumerate(parts, start=1):
            # Ranks exchange gradients once a step, at the last part.
            wait = self.ranks > 1 and number < count
            with self.model.no_sync() if wait else contextlib.nullcontext():
                with torch.autocast(self.device.type, AMP[self.options.amp], enabled=self.options.amp != "off"):
                    outputs = self.model(part)
                    loss = F.cross_entropy(outputs, answers, label_smoothing=self.options.label_smoothing) / count
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    @torch.no_grad()
    def validate(self) -> tuple[float, int]:
        """The accuracy on the validation rows, each counted once, and their number."""
        self.network.eval()
        if self.ranks > 1:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0)  # Each rank has its own batch statistics.
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        share = share_of(len(self.val), self.rank, self.ranks)
        if len(share):
            # num_replicas=1: with more, the loader would repeat rows to make the shares of ranks equal.
            loader = h5pack.H5Loader(self.val, 250, shuffle=False, indices=share, rank=0, num_replicas=1)
            for images, labels, *_ in h5pack.DeviceFeed(loader, self.device, transform=self.plain):
                with torch.autocast(self.device.type, AMP[self.options.amp], enabled=self.options.amp != "off"):
                    right = self.network(images).argmax(1) == labels
                counts += torch.stack([right.sum(), torch.ones_like(labels).sum()])
        if self.ranks > 1:
            dist.all_reduce(counts)
        self.network.train()
        right, seen = counts.tolist()
        return right / seen, seen

    def save(self, log: LossLog) -> None:
        """Write the checkpoint on rank 0, atomically: a kill leaves the old one or the new one."""
        if self.options.checkpoint is None:
            return
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        randoms = [random] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(randoms, random)
        logged = log.state_dict()
        if self.rank == 0:
            state = {
                "options": {name: getattr(self.options, name) for name in SAME},
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": randoms,
                "batches": self.batches.state_dict(),
                "epoch": self.epoch,
                "step": self.step,
                "accuracy": self.accuracy,
                "log": logged,
            }
            partial = self.options.checkpoint.with_name(self.options.checkpoint.name + ".partial")
            with open(partial, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.options.checkpoint)

    def resume(self) -> dict[str, Any] | None:
        """Restore the checkpoint if there is one; returns the state of the log."""
        path = self.options.checkpoint
        if not path.exists():
            require_no_log(self.options.json)
            return None
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, saved in state["options"].items():
            if saved != getattr(self.options, name):
                raise SystemExit(f"{path}: saved with --{name.replace('_', '-')} {saved}; resume with the same")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["batches"])
        self.epoch, self.step, self.accuracy = state["epoch"], state["step"], state["accuracy"]
        if len(state["random"]) == self.ranks:
            torch.set_rng_state(state["random"][self.rank]["cpu"])
            if self.device.type == "cuda" and "cuda" in state["random"][self.rank]:
                torch.cuda.set_rng_state(state["random"][self.rank]["cuda"], self.device)
        if not state["log"]["bytes"]:
            require_no_log(self.options.json)
        return state["log"]


def require_no_log(path: Path | None) -> None:
    """Exit rather than overwrite the log of another run."""
    if path is not None and path.exists() and path.stat().st_size:
        raise SystemExit(f"{path}: exists, from another run; remove it, or give another name")


def profiler_of(options: argparse.Namespace, rank: int) -> Any:
    """A profiler that writes a trace of a few steps, for chrome://tracing or https://ui.perfetto.dev."""
    if options.profile is None:
        return contextlib.nullcontext()
    options.profile.mkdir(parents=True, exist_ok=True)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=2, active=6, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(options.profile / f"rank{rank}.json")),
    )


def run(options: argparse.Namespace, device: torch.device, rank: int, ranks: int) -> None:
    """Train on one of the ranks."""
    for path in filter(None, (options.checkpoint, options.json)):
        path.parent.mkdir(parents=True, exist_ok=True)
    training = Training(options, device, rank, ranks)
    if not options.resume and rank == 0:
        require_no_log(options.json)
    state = training.resume() if options.resume else None
    log = LossLog(options.json if rank == 0 else None, options.log_every, state)
    print_once = print if rank == 0 else lambda *_: None
    if training.step:
        print_once(f"resumed after step {training.step:,} of {training.steps:,}")
    with profiler_of(options, rank) as profiler:
        for epoch in range(training.epoch, options.epochs):
            for images, labels, *_ in training.batches:
                loss = training.train(images, labels.to(training.device))
                log.loss({"step": training.step, "epoch": epoch}, loss)
                if training.step % options.every == 0:
                    training.save(log)
                if profiler is not None:
                    profiler.step()
            mean = log.end_epoch()
            fed = training.monitor.report()
            training.accuracy, seen = training.validate()
            training.epoch = epoch + 1
            log.write({"epoch": epoch, "accuracy": training.accuracy, "images": seen})
            print_once(
                f"epoch {epoch}: loss {mean:.4f}, accuracy {training.accuracy:.4f} of {seen:,} images; "
                f"{'rank 0: ' if ranks > 1 else ''}{fed.seconds:.1f} s, {fed.summary()}"
            )
            training.save(log)
    print_once(f"accuracy {training.accuracy:.4f} after {training.epoch} epochs, {training.step:,} steps")


def begin_rank(local_rank: int, options: argparse.Namespace, meeting: str | None = None) -> None:
    """Run one process: alone, of torchrun (by its environment variables), or of --spawn (ranks meet in a file)."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if meeting is not None:
        rank, ranks = local_rank, options.spawn
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not options.deterministic
    device = device_of(options, local_rank)
    if ranks > 1:
        # DistributedDataParallel imports this, too. If that happens after init_process_group (seen with torch 2.13),
        # destroy_process_group does not end the threads of gloo, which may then crash the interpreter when it exits.
        importlib.import_module("torch._dynamo")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, meeting, rank=rank, world_size=ranks)
    try:
        run(options, device, rank, ranks)
        if ranks > 1:
            # A rank that exits closes its connections, so all must have finished reading.
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    except (h5pack.H5PackError, OSError) as error:
        other = "images=NAME" in getattr(error, "parameters", ())
        hint = "; this script reads packs: make one of the file with 'h5pack convert'" if other else ""
        raise SystemExit(f"train.py: {error}{hint}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Add the default to an option's help, unless it is None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked as far as possible without a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("pack", help="file of `h5pack convert`, or another HDF5 file with datasets called images and labels")
    add("--val", metavar="PACK", help="validate on this file")
    names = "val, valid, validation, test or testing"
    add("--val-split", metavar="NAME", help=f"validate on this split (default: {names}, else a tenth of the rows)")
    add("--model", choices=MODELS, default="cnn")
    add("--norm", choices=NORMS, default="batch", help="sync or group: the same results on any number of ranks")
    add("--epochs", type=count, default=10)
    add("--batch-size", type=count, default=128, help="rows a step, of all ranks together")
    add("--accumulate", type=count, default=1, help="parts of a rank's batch whose gradients are accumulated")
    add("--streams", type=count, default=8, help="a multiple of every number of ranks that you will use")
    add("--lr", type=float, default=0.1, help="maximum learning rate")
    add("--warmup", type=share, default=0.1, help="share of the steps in which the learning rate rises")
    add("--weight-decay", type=float, default=5e-4)
    add("--label-smoothing", type=share, default=0.0)
    add("--dropout", type=share, default=0.0)
    add("--flip", type=share, default=0.5, help="probability of a horizontal flip")
    add("--crop", type=int, default=4, help="pixels of padding before a random crop; 0: none")
    add("--echo", type=float, default=1.0, help="how often to give each batch, augmented differently each time")
    add("--amp", choices=AMP, default="off")
    add("--checkpoint-activations", action="store_true", help="less memory, more work")
    add("--compile", action="store_true")
    add("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--spawn", type=count, default=1, metavar="N", help="start N ranks on this machine")
    add("--data-parallel", action="store_true", help="all GPUs from one process; --spawn is faster")
    add("--find-unused-parameters", action="store_true", help="for networks that skip parts in some steps")
    add("--seed", type=int, default=0)
    add("--deterministic", action="store_true", help="use deterministic algorithms only")
    add("--checkpoint", type=Path, metavar="FILE", help="written every --every steps, and after each epoch")
    add("--every", type=count, default=200)
    add("--resume", action="store_true", help="continue from --checkpoint if it exists")
    add("--json", type=Path, metavar="FILE", help="a line for each step and each validation")
    add("--log-every", type=count, default=20, help="steps between fetches of losses from the device")
    add("--profile", type=Path, metavar="FOLDER", help="write a trace of a few steps")
    options = parser.parse_args(arguments)
    ranks = options.spawn * int(os.environ.get("WORLD_SIZE", "1"))
    if options.spawn not in (1, ranks):
        parser.error("torchrun starts the ranks; leave --spawn out")
    if options.data_parallel and ranks > 1:
        parser.error("--data-parallel is for one process, and several ranks are faster; leave it out")
    if options.data_parallel and options.device not in (None, "cpu", "cuda", "cuda:0"):
        parser.error("--data-parallel uses all GPUs; leave --device out")
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint FILE")
    if options.checkpoint is not None and options.checkpoint.exists() and not options.resume:
        parser.error(f"{options.checkpoint}: exists; add --resume to continue from it, or remove it")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, in this process or in spawned ones."""
    options = parse(arguments)
    if options.spawn == 1:
        begin_rank(int(os.environ.get("LOCAL_RANK", "0")), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(begin_rank, (options, f"file://{folder}/meeting"), options.spawn)
        except mp.ProcessExitedException as error:
            raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
