"""The pages in docs/ say what the code does: options, errors, names of the format, code that runs, links that lead."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import runpy
import sys
import textwrap
import unicodedata
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import h5py
import pytest
from torch.utils.data import Subset

import h5pack
from h5pack import cli, errors
from h5pack.benchmark.cases import CACHES, ENGINES, ORDERS, BenchCase
from h5pack.benchmark.mixing import MixingReport, OrderMixing
from h5pack.benchmark.recommend import Recommendation
from h5pack.benchmark.report import BenchReport
from h5pack.combine.write import CombineReport
from h5pack.device import targets
from h5pack.doctor.loaders import DTYPES
from h5pack.exporter.exporter import ExportReport
from h5pack.exporter.image_files import SUFFIXES
from h5pack.format import schema
from h5pack.format.fields import BOX_FORMATS
from h5pack.inspect.info import DatasetReport
from h5pack.inspect.preview import PreviewReport
from h5pack.order import cursor
from h5pack.pack import compression
from h5pack.pack import options as choices
from h5pack.pack.conversion import Conversion
from h5pack.pack.output import ConvertReport
from h5pack.read.engine import ReadStats
from h5pack.sources import detect
from tests.doctor.test_report import report as doctor_report
from tests.forking import output_of
from tests.makers import split_folders
from tests.test_cli import COMMANDS, parsers

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(python|bash|console)\n(.*?)^```$", re.M | re.S)
ELSEWHERE = re.compile(
    # They install and test h5pack, which CI does; take a minute each; need several GPUs, a cluster, a download.
    r"(\./scripts/|\.venv/|python -m venv|\. |pip )"
    r"|h5pack (bench|doctor) "
    r"|(torchrun|sbatch|python examples/train\.py|h5pack convert cifar10) "
)
"""Commands of `console` blocks that the tests of the pages do not run."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands under a heading of level 2."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def words_of_rows(text: str) -> set[str]:
    """The words in the first column of the tables in a text, of the rows that begin with code."""
    return {word for cell in re.findall(r"^\| (`.*?) \|", text, re.M) for word in re.findall(r"\w+", cell)}


def prose(path: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


COMMON = {"--help", "--version", "--json", "--debug"}


def test_every_command_is_in_the_overviews() -> None:
    overview = page("cli.md").split("\n## ")[0]
    json_keys = " ".join(re.findall(r"^\*\*(.*)\*\*", page("json.md"), re.M))
    assert set(re.findall(r"^    h5pack (\w+)", overview, re.M)) == COMMANDS
    assert set(re.findall(r"\(#h5pack-(\w+)\)", overview)) == COMMANDS
    assert set(re.findall(r"^h5pack (\w+)", cli._EPILOG, re.M)) == COMMANDS
    assert set(re.findall(r"(\w+)(?: --\S+)? --json", json_keys)) == COMMANDS


def test_the_commands_that_exit_with_1_without_an_error_are_listed() -> None:
    (row,) = re.findall(r"^\| 1 .*$", section(page("cli.md"), "Exit codes"), re.M)
    sources = {name: inspect.getsource(parsers()[name].get_default("run")) for name in COMMANDS}
    assert set(re.findall(r"`(\w+)`", row)) == {name for name in COMMANDS if re.search(r"return . if ", sources[name])}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_of_a_command_has_a_row_and_no_other_has(command: str) -> None:
    rows = re.findall(r"^\| `(--[\w-]+)", section(page("cli.md"), f"h5pack {command}"), re.M)
    assert len(rows) == len(set(rows))
    described = set(rows)
    if command == "append":
        # The options for the source and the order of its rows are those of convert.
        described |= options(parsers()["convert"]) & options(parsers()["append"])
        assert described - set(rows) - COMMON <= set(re.findall(r"--[\w-]+", section(page("cli.md"), "h5pack convert")))
        described -= COMMON
    assert described == options(parsers()[command]) - COMMON


def test_every_option_of_a_conversion_is_one_of_the_command() -> None:
    parameters = {action.dest for action in parsers()["convert"]._actions}
    assert {field.name for field in fields(choices.ConvertOptions)} <= parameters


def test_the_options_of_every_command_are_in_their_section() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)", section(page("cli.md"), "Options of every command"), re.M)
    assert set(rows) == COMMON
    for command, parser in parsers().items():
        assert options(parser) >= COMMON - ({"--version"} if command else {"--json", "--debug"})


def train_options() -> set[str]:
    """The options of the training script."""
    return set(re.findall(r'add\("(--[\w-]+)"', (ROOT / "examples" / "train.py").read_text(encoding="utf-8")))


def test_every_option_of_the_training_script_is_on_its_page() -> None:
    text = page("training.md")
    assert len(train_options()) > 25
    assert [option for option in sorted(train_options()) if f"{option}`" not in text and f"{option} " not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_names_an_option_that_there_is_not(path: Path) -> None:
    known = set().union(*map(options, parsers().values()))
    if path.name == "cluster.md":
        known |= {"--dependency", "--array"}
    if path.name in ("recipes.md", "training.md"):
        known |= train_options() | {"--nproc_per_node", "--requeue"}
    for line in path.read_text(encoding="utf-8").splitlines():
        others = re.search(r"^#SBATCH|\b(pip|ruff|npm|pytest|h5pack\.benchmark\.synthetic|benchmarks)\b", line)
        if not others:
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?<!-)(?![\w-])", line)) <= known, line


CHOICES = {
    ("convert", "--source"): detect.KINDS,
    ("convert", "--box-format"): BOX_FORMATS,
    ("convert", "--fit"): choices.FITS,
    ("convert", "--resample"): choices.RESAMPLES,
    ("convert", "--mode"): choices.MODES,
    ("convert", "--layout"): choices.LAYOUTS,
    ("convert", "--keep"): choices.KEEP,
    ("convert", "--order"): choices.ORDERS,
    ("convert", "--io"): choices.IO,
    ("convert", "--compression"): compression.COMPRESSIONS,
    ("export", "--format"): SUFFIXES,
    ("bench", "--orders"): ORDERS,
    ("bench", "--engines"): ENGINES,
    ("bench", "--cache"): CACHES,
    ("doctor", "--dtype"): DTYPES,
}


@pytest.mark.parametrize(("command", "option"), CHOICES)
def test_the_choices_of_an_option_are_in_its_row_help_and_docstring(command: str, option: str) -> None:
    (row,) = re.findall(rf"^\| `{option} .*$", section(page("cli.md"), f"h5pack {command}"), re.M)
    (action,) = (action for action in parsers()[command]._actions if option in action.option_strings)
    docstring = inspect.getdoc(getattr(h5pack, {"doctor": "diagnose"}.get(command, command))) or ""
    parameter = re.split(rf"^{action.dest} : ", docstring, flags=re.M)[1]
    texts = [" ".join(re.findall(r"`[\w-]+`", row)), re.split(r"\n\w", parameter)[0]]
    if option != "--resample":  # The help leaves out the names of filters.
        texts.append(action.help or "")
    if option == "--format":
        texts += re.findall(r"^\| `format` \|.*$", page("json.md"), re.M)
    for text in texts:
        assert set(CHOICES[command, option]) <= set(re.findall(r"[\w-]+", text))


def test_every_kind_of_source_is_in_the_overview() -> None:
    (table,) = re.findall(r"^\| SOURCE \|.*?\n\n", page("sources.md"), re.M | re.S)
    assert set(re.findall(r"`(\w+)`", table)) == set(detect.KINDS)


def test_every_compression_method_is_described_with_its_levels() -> None:
    methods = schema.COMPRESSION_METHODS
    rows = re.findall(r"^\| `([a-z0-9-]+)(:L)?` \| (\d+)", page("format.md"), re.M)
    table = {name: (bool(level), int(number)) for name, level, number in rows}
    assert table == {name: (one.max_level > 0, one.filter) for name, one in methods.items()}
    for text in (section(page("cli.md"), "h5pack convert"), str(h5pack.convert.__doc__)):
        for name, one in methods.items():
            assert (f"{name}:1 to {name}:{one.max_level}" if one.max_level else name) in text.replace("`", "")
    with pytest.raises(errors.OptionsError) as caught:
        compression.parse_compression("lzma")
    assert str(caught.value).partition("; ")[2] in page("errors.md")


def test_the_json_keys_are_listed(tmp_path: Path) -> None:
    source = split_folders(tmp_path / "photos", {"train": {"x": 3}, "val": {"y": 2}})
    with Conversion(source, tmp_path / "o.h5", num_workers=1) as conversion:
        plan = conversion.plan().to_json()
        conversion.run()
    info = h5pack.info(tmp_path / "o.h5", stats=True).to_json()
    blocks = dict(re.findall(r"^\*\*`([^*]+)`\*\*(.*?)(?=^\*\*|\Z)", page("json.md"), re.M | re.S))
    found = {
        "convert --json": {field.name for field in fields(ConvertReport)},
        "convert --dry-run --json": {*plan, "estimated_seconds"},
        "append --json`, `join --json`, `subset --json": {field.name for field in fields(CombineReport)},
        "info --json": {*info, *info["pack"], *(field.name for field in fields(DatasetReport)), "overhead"},
        "verify --json": set(h5pack.verify(tmp_path / "o.h5").to_json()),
    }
    bench = BenchReport("photos", "folder", 1, (1, 1, 3), 3, 1, 60.0, {}).to_json()
    found["export --json"] = {"ok", *(field.name for field in fields(ExportReport))}
    found["preview --json"] = {"ok", *(field.name for field in fields(PreviewReport) if field.name != "sheet")}
    found["bench --json"] = {*bench, *(field.name for noun in (Recommendation, BenchCase) for field in fields(noun))}
    found["bench --mixing --json"] = {
        "advice",
        *(field.name for one in (MixingReport, OrderMixing) for field in fields(one)),
    }
    doctor = doctor_report().to_json()
    found["doctor --json"] = {*doctor, *doctor["stages"][0], *doctor["facts"]}
    assert set(blocks) == set(found)
    for name, keys in found.items():
        assert {key for key in keys if f"`{key}`" not in blocks[name]} == set(), name
    assert words_of_rows(blocks["verify --json"]) == found["verify --json"]


def error_classes() -> list[type[Exception]]:
    return [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, errors.H5PackError)]


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_has_its_section_and_its_place_in_the_tree(error: type[Exception]) -> None:
    text = page("errors.md")
    tree = text.split("```text\n")[1].split("```")[0]
    assert re.search(rf"\b{error.__name__}\b", tree)
    for base in error.__bases__:
        if base.__module__ == "builtins" and base is not Exception:
            assert f"{error.__name__} ({base.__name__})" in tree
    if error is not errors.H5PackError:
        under = text.split(f"# {error.__name__}\n")[1].split("\n#")[0]
        assert "**When**" in under
        assert "**What to do**" in under


def test_no_error_is_described_that_there_is_not() -> None:
    known = {error.__name__ for error in error_classes()}
    assert set(re.findall(r"^#+ (\w+Error)$", page("errors.md"), re.M)) <= known


def test_every_name_of_the_format_is_described() -> None:
    text = page("format.md")
    names = {value for name, value in vars(schema).items() if name.isupper() and isinstance(value, str)}
    names.remove(schema.REJECTS)
    assert {"images", "splits/rows", "h5pack_complete", "h5pack_rdcc_w0"} <= names
    assert {name for name in names | schema.RESERVED if not re.search(rf"`/?{re.escape(name)}`", text)} == set()
    for number in (schema.ALIGNMENT_THRESHOLD_BYTES, schema.ALIGNMENT_BYTES):
        assert f"{number:,} bytes" in text
    assert f"version {schema.FORMAT_VERSION}" in text.splitlines()[0]
    assert "has no label** while others have one" in " ".join(text.split())
    assert f"**{schema.NO_LABEL}:" in text
    rules: dict[str, object] = {}
    exec(next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "statistics_step" in block), rules)
    for rows in (0, 1, 2 * schema.STATISTICS_ROWS - 1, 2 * schema.STATISTICS_ROWS, 10**9):
        for encoded in (False, True):
            step = schema.statistics_step(rows, encoded)
            assert rules["statistics_step"](rows, encoded) == step  # type: ignore[operator]


def test_every_kind_of_field_has_a_row_in_the_tables_of_kinds() -> None:
    tables = {"samples.md": {*schema.KINDS}, "format.md": {*schema.KINDS} - {*schema.PIXEL_KINDS}}
    for name, kinds in (*tables.items(), ("training.md", {*targets._MOVERS})):
        assert kinds - set(re.findall(r'^\| `"?(\w+)"?` \|', page(name), re.M)) == set(), name


def test_everything_in_a_real_pack_is_described(tmp_path: Path) -> None:
    text = page("format.md")
    source = split_folders(tmp_path / "photos", {"train": {"x": 3}, "val": {"y": 2}})
    (source / "train" / "x" / "empty.jpg").write_bytes(b"")
    found: list[str] = []

    def look(name: str, item: h5py.Group | h5py.Dataset) -> None:
        found.extend(f"`{attribute}`" for attribute in item.attrs)
        found.append(f"`/{name}`" if isinstance(item, h5py.Dataset) else f"`{name}`")

    for mode in ("rgb", "gray"):
        h5pack.convert(source, tmp_path / f"{mode}.h5", num_workers=1, mode=mode)
        with h5py.File(tmp_path / f"{mode}.h5") as file:
            found.extend(f"`{name}`" for name in file.attrs)
            file.visititems(look)
    assert {"`INTERLACE_MODE`", "`IMAGE_WHITE_IS_ZERO`", "`/rejects/reasons`", "`h5pack_options`"} <= set(found)
    assert {name for name in found if name not in text} == set()


SECTIONS = {name: [name] for name in ("H5Dataset", "H5Loader", "DeviceFeed", "Normalize", "EchoLoader", "FeedMonitor")}
SECTIONS["Samplers"] = ["ChunkBatchSampler", "ChunkSampler"]
SECTIONS["Crops"] = ["RandomCrop", "CenterCrop", "RandomResizedCrop"]
SECTIONS["ConcatPack and MixtureSampler"] = ["MixtureSampler"]


def public_names(kind: Callable[[object], bool]) -> set[str]:
    """The public functions or classes, without errors; `kind` is a function of `inspect`."""
    return {name for name in h5pack.__all__ if kind(getattr(h5pack, name))} - vars(errors).keys()


def test_every_class_has_its_parameters_in_the_reference() -> None:
    owners = {owner for owners in SECTIONS.values() for owner in owners}
    assert owners | {"ConcatPack", "Resize", "Views"} == public_names(inspect.isclass)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_parameter_has_a_row_in_the_reference(title: str) -> None:
    table = section(page("api.md"), title).split("| parameter |")[1].split("\n\n")[0]
    parameters = [inspect.signature(getattr(h5pack, owner)).parameters for owner in SECTIONS[title]]
    assert words_of_rows(table) == {name for names in parameters for name in names}


def test_every_public_name_is_in_the_reference_the_changelog_and_on_the_site() -> None:
    text = page("api.md")
    functions = public_names(inspect.isfunction)
    names = functions | public_names(inspect.isclass)
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert names <= set(re.findall(r"`(\w+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    listed = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page("reference.md"), re.M))
    assert {name for name in listed if "." not in name} == names
    assert errors.__name__ in listed
    assert {f"{targets.__name__}.{move.__name__}" for move, _ in targets._MOVERS.values()} <= listed
    reports = {inspect.signature(getattr(h5pack, name)).return_annotation for name in functions}
    assert reports <= {name.rpartition(".")[2] for name in listed}


def test_what_a_state_belongs_to_is_listed_and_has_a_message_if_it_differs(tmp_path: Path) -> None:
    h5pack.convert(split_folders(tmp_path / "photos", {"train": {"x": 3}}), tmp_path / "o.h5", num_workers=1)
    dataset = h5pack.H5Dataset(tmp_path / "o.h5")
    samplers = [
        h5pack.ChunkSampler(dataset),
        h5pack.ChunkBatchSampler(Subset(dataset, [2, 0]), 2),
        h5pack.ChunkBatchSampler(dataset, 2, weights=[1, 2, 1]),
        h5pack.MixtureSampler(h5pack.ConcatPack([dataset, dataset]), 2),
    ]
    assert {type(one).__name__ for one in samplers} == {name for name in h5pack.__all__ if name.endswith("Sampler")}
    names = {name for sampler in samplers for name in sampler.state_dict()["order"]}
    assert words_of_rows(section(page("api.md"), "States")) == names
    given = {cursor._PARAMETERS.get(name, name) for name in names - {*cursor._PROBLEMS, *cursor._OF_SPLIT}}
    assert given <= inspect.signature(h5pack.ChunkBatchSampler).parameters.keys()


def test_the_keys_of_feed_reports_are_listed() -> None:
    keys = h5pack.FeedMonitor([]).report().to_json().keys()
    assert words_of_rows(section(page("api.md"), "FeedMonitor").split("| key |")[1]) == keys


def test_what_was_read_is_listed() -> None:
    names = {"amplification", *(field.name for field in fields(ReadStats))}
    assert words_of_rows(section(page("api.md"), "Read statistics")) == names


def script_of(path: Path) -> str:
    """The blocks of a page that a reader can type, in order, as one script; empty if there are none.

    Commands of ``console`` blocks must print the lines that follow them. The script is guarded, because workers import
    it on Python 3.14.
    """
    lines = []
    for language, code in BLOCK.findall(path.read_text(encoding="utf-8")):
        if language == "python":
            lines.append(code)
        elif language == "bash":
            lines.append(f"shell({code!r})")
        else:
            for command, *printed in (text.splitlines() for text in re.split(r"^\$ ", code, flags=re.M)[1:]):
                if not ELSEWHERE.match(command):
                    lines.append(f"shell({command!r}, {printed!r})")
    script = "\n".join(["from tests.pages import shell", *lines])
    return "if __name__ == '__main__':\n" + textwrap.indent(script, "    ") if lines else ""


def run_script(script: Path) -> None:
    """Run a script as Python does, in this process."""
    os.chdir(script.parent)
    for name, folder in {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}.items():
        os.environ[name] = f"{folder}{os.pathsep}{os.environ.get(name, '')}"
    sys.argv, sys.path[:0] = [script.name], [str(script.parent), str(ROOT)]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("path", [path for path in PAGES if script_of(path)], ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_in_an_empty_folder(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(script_of(path), encoding="utf-8")
    output_of(run_script, script)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", prose(path)):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as its renderers make them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", prose(path), re.M):
        kept = (sign for sign in title.lower() if sign in "- _" or unicodedata.category(sign)[0] in "LN")
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_headings_of_a_page_differ(path: Path) -> None:
    titles = re.findall(r"^#+ (.*)$", prose(path), re.M)
    assert len(titles) == len(set(titles))
