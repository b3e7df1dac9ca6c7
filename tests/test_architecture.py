"""The architecture: which package may import which, what is public, what is imported lazily."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import h5pack
from h5pack import errors

PACKAGE = Path(h5pack.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

CONTRIBUTING = (PACKAGE.parent / "docs" / "contributing.md").read_text()
# A module imports only from its own package and from packages to the left of it.
PACKAGES = [
    "version", "errors", "system", "format", "images", "read", "sources", "cluster", "pack", "combine", "order", "data",
    "device", "monitor", "exporter", "inspect", "benchmark", "doctor", "commands", "cli",
]  # fmt: skip
# Pairs (package, other) in that order that must stay apart all the same.
FORBIDDEN = {("order", other) for other in ("images", "read", "sources", "cluster", "pack", "combine")}
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES = 16, 500, 60
TORCH_ALLOWED = {"data", "device", "monitor", "benchmark", "doctor"}
H5PY_ALLOWED = {"read", "sources", "pack", "combine", "inspect", "benchmark"}


@functools.cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


@functools.cache
def imports_of(module: Path) -> set[str]:
    """Names of the modules that a file imports, at its top or inside its functions."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module != "h5pack":
                found.add(node.module or "")
            if node.module and node.module.startswith("h5pack"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def place(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def test_the_page_for_contributors_has_the_order_of_packages() -> None:
    assert ["version", *re.findall(r"\w+", CONTRIBUTING.split("```text\n")[1].split("```")[0])] == PACKAGES


def test_the_table_of_subjects_has_every_module() -> None:
    found, packages = set(), []
    for subject, modules in re.findall(r"^\| (.*) \|(.*)\|$", CONTRIBUTING.split("\n## ")[2], re.M):
        packages = re.findall(r"`(\w+)/`", subject) if subject.startswith("**") else packages
        found |= {(package, name) for package in packages for name in re.findall(r"(\w+)`", modules)}
    modules = {((module.parent.parts or ("h5pack",))[0], module.stem) for module in MODULES if module.stem[0] != "_"}
    assert modules - found == set()
    assert {name for _, name in found} <= {name for _, name in modules}


def test_imports_point_left() -> None:
    for module in MODULES:
        package = place(module)
        if package in ("__init__", "__main__"):
            continue
        assert package in PACKAGES, f"{module}: DESIGN has no package {package}"
        for name in imports_of(module):
            if not name.startswith("h5pack."):
                assert name != "h5pack", f"{module}: imports the top-level package"
                continue
            other = name.split(".")[1]
            assert PACKAGES.index(other) <= PACKAGES.index(package), f"{module}: {package} may not import {other}"
            assert (package, other) not in FORBIDDEN, f"{module}: {package} may not import {other}"


def test_imports_have_no_cycle() -> None:
    graph = {}
    names = {".".join(("h5pack", *m.with_suffix("").parts)): m for m in MODULES if m.name != "__init__.py"}
    for name, module in names.items():
        graph[name] = {other for other in imports_of(module) if other in names}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        if name != "h5pack.__main__":
            visit(name, ())


def test_torch_and_h5py_are_imported_only_where_design_allows() -> None:
    for module in MODULES:
        roots = {name.split(".")[0] for name in imports_of(module)}
        assert "torch" not in roots or place(module) in TORCH_ALLOWED, module
        assert "h5py" not in roots or place(module) in H5PY_ALLOWED, module


def test_cached_properties_take_no_lock_where_another_thread_may_fork() -> None:
    for module in MODULES:
        if module.parts[0] in ("read", "order", "data", "device", "monitor"):
            assert "functools import cached_property" not in (PACKAGE / module).read_text(), module


def test_a_module_is_short_and_says_what_it_is_about() -> None:
    for module in MODULES:
        assert (PACKAGE / module).read_text().count("\n") <= MAX_LINES, module
        assert ast.get_docstring(tree_of(module)), module


def public(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.ClassDef]:
    return [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"]


def test_everything_public_is_documented() -> None:
    # Here, not when this file is imported: each test process would keep 80 MB of trees, and copy them in each fork.
    classes = [node for module in MODULES for node in tree_of(module).body if isinstance(node, ast.ClassDef)]
    bases = {node.name: [base.id for base in node.bases if isinstance(base, ast.Name)] for node in classes}
    documented = {
        (node.name, member.name)
        for node in classes
        for member in node.body
        if isinstance(member, ast.FunctionDef) and ast.get_docstring(member)
    }

    # Methods that override a documented one need no docstring.
    def ancestors(name: str) -> Iterator[str]:
        for base in bases.get(name, []):
            yield base
            yield from ancestors(base)

    for module in MODULES:
        for node in public(tree_of(module).body):
            assert ast.get_docstring(node), f"{module}: {node.name}"
            for member in public(node.body) if isinstance(node, ast.ClassDef) else ():
                overrides = node.bases and member.name in ("read", "submit", "head", "open")
                overrides = overrides or any((base, member.name) in documented for base in ancestors(node.name))
                assert ast.get_docstring(member) or overrides or _trivial(node), f"{module}: {node.name}.{member.name}"


def _trivial(node: ast.ClassDef) -> bool:
    """Implementations of a documented protocol."""
    return node.name.endswith("Reader") or any(
        isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
    )


def test_functions_fit_on_a_screen() -> None:
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef):
                body = [line for line in node.body if not isinstance(line, ast.Expr)]
                lines = (node.end_lineno or 0) - (body[0].lineno if body else node.lineno)
                assert lines <= MAX_FUNCTION_LINES, f"{module}: {node.name} has {lines} lines"


def test_the_public_names_are_those_of_the_design() -> None:
    raised = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    classes = """H5Dataset H5Loader ChunkSampler ChunkBatchSampler ConcatPack MixtureSampler DeviceFeed Normalize
        RandomCrop CenterCrop RandomResizedCrop Resize Views EchoLoader FeedMonitor"""
    functions = {"append", "bench", "convert", "info", "verify", "preview", "export", "diagnose", "join", "subset"}
    assert set(h5pack.__all__) == {*functions, *classes.split(), *raised, "__version__"}


def test_a_public_name_is_imported_when_it_is_first_used() -> None:
    for name in h5pack.__all__:
        assert getattr(h5pack, name) is not None
        assert name in dir(h5pack)
    with pytest.raises(AttributeError, match="nothing"):
        h5pack.nothing  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    seen = {
        alias.asname: node.module
        for node in ast.walk(tree_of(Path("__init__.py")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert seen == h5pack._MODULE_OF


def test_no_module_has_a_public_name_that_importing_it_would_replace() -> None:
    assert not {place(module) for module in MODULES} & (set(h5pack.__all__) - {"__version__"})


def test_help_and_the_options_of_crops_are_light_and_quick() -> None:
    code = (
        "import sys, h5pack.cli\n"
        "h5pack.RandomResizedCrop(8)\n"
        "try: h5pack.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'h5py', 'numpy', 'PIL', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "convert" in result.stdout


def test_packages_without_torch_import_none() -> None:
    modules = [module.with_suffix("") for module in MODULES if place(module) not in {*TORCH_ALLOWED, "__main__"}]
    imported = ", ".join(".".join(("h5pack", *module.parts)) for module in modules if module.name != "__init__")
    code = f"import sys, {imported}; assert not {{'torch', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
