"""The house rules that a program can check: import direction, sizes, names, docstrings, endings."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ringfold"

TIERS = (
    ("errors", "config", "states", "units", "limits"),
    ("wire",),
    ("runtime", "store", "topology"),
    ("state", "data", "probe", "clock", "iteration", "agent"),
    ("master", "peer"),
    ("observe",),
    ("torch", "compat", "cli", "testing", "tools"),
)
TIER = {package: number for number, packages in enumerate(TIERS) for package in packages}
SIDEWAYS = {("config", "errors"), ("clock", "probe"), ("store", "runtime"), ("tools", "cli"), ("tools", "torch")}
"""The imports inside one tier that are allowed. `cli` may use anything, and `ringfold` itself may import anything."""

MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions ("file:name") that may be longer, each with the reason."""

BANNED_NAMES = {"manager", "managers", "helper", "helpers", "util", "utils"}
# Put together here so that this file does not contain what it forbids.
META_WORDS = re.compile("|".join(("TO" + "DO", "FIX" + "ME", r"X{3}\b", r"\b[Ii]ssue" + r" #?\d", "iss" + "ues show")))
TEXT_ENDINGS = {".py", ".pyi", ".md", ".toml", ".txt", ".c", ".cpp", ".hpp", ".h", ".cmake", ".yml", ".yaml", ".json"}
TEXT_ENDINGS |= {".sh", ".service"}
TEXT_NAMES = {"Makefile", "LICENSE", "CMakeLists.txt", "run", ".gitignore"}
FOLDERS = ("src", "native", "include", "deploy", "tests", "docs", "benchmarks", "examples", ".ci")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def package_of(path: Path) -> str:
    """The package of a file; `__init__` and `__main__` of Ringfold itself are "ringfold"."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "ringfold" if first in ("__init__", "__main__") else first


def imported_packages(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """Every package of Ringfold that a file imports anywhere in it, with the line; "ringfold" is the library itself."""
    parents = ("ringfold", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module, names, level):
                base = ".".join(parents[: len(parents) - level + 1]) if level else ""
                start = ".".join(part for part in (base, module) if part)
                targets = [f"{start}.{alias.name}" for alias in names]
            case _:
                continue
        for target in targets:
            top, *rest = target.split(".")
            if top == "ringfold":
                known = bool(rest) and (rest[0] in TIER or rest[0] in ("_native", "_native_testing"))
                yield (rest[0] if known else "ringfold"), node.lineno


def fault(package: str, target: str) -> str:
    """Why a package may not import another; empty when it may."""
    if target == "_native_testing":
        return "" if package in ("testing", "tools") else "wheels do not contain the test module"
    if package in ("ringfold", "cli") or target in (package, "_native"):
        return ""
    if package not in TIER:
        return f"{package} is in no tier"
    if target == "ringfold":
        return "" if TIER[package] == len(TIERS) - 1 else "only the last tier imports the public names of ringfold"
    if TIER[target] > TIER[package]:
        return f"{target} is in a higher tier than {package}"
    if TIER[target] == TIER[package] and (package, target) not in SIDEWAYS:
        return f"{target} and {package} are in the same tier"
    return ""


def test_imports_go_one_way() -> None:
    faults = [
        f"{name_of(path)}:{line}: {why}"
        for path in modules()
        for target, line in imported_packages(tree_of(path), path)
        if (why := fault(package_of(path), target))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("package", "line", "allowed"),
    [
        ("wire", "from ringfold.errors import UsageError", True),
        ("wire", "from ringfold import runtime", False),
        ("wire", "import ringfold.runtime.clock", False),
        ("master", "from ringfold.peer.machine import Peer", False),
        ("master", "from ..peer import machine", False),
        ("master", "from . import machine", True),
        ("peer", "import ringfold", False),
        ("topology", "from ringfold.runtime import clock", False),
        ("store", "from ringfold.runtime import clock", True),
        ("runtime", "from ringfold import store", False),
        ("clock", "from ringfold.probe import fit", True),
        ("probe", "from ringfold.clock import now", False),
        ("observe", "from ringfold.master import server", True),
        ("cli", "from ringfold.testing import Simulation", True),
        ("testing", "from ringfold import cli", False),
        ("helpers", "from ringfold import errors", False),
    ],
)
def test_the_direction_check_sees_what_it_should(package: str, line: str, allowed: bool) -> None:
    """The check itself can fail: known good and bad imports, in every way of writing them."""
    path = SOURCE / package / "made_up.py"
    faults = [why for target, _ in imported_packages(ast.parse(line), path) if (why := fault(package_of(path), target))]
    assert (not faults) == allowed


# Purity. A module whose docstring says "Pure", and every machine, decides and does nothing else: it reads no clock,
# opens nothing, and touches no byte of a program's arrays. So it imports nothing that could, and no module of Ringfold
# that imports such a thing. The check is one of imports: it does not see what is done by an object that is passed in.

IMPURE = {
    "numpy": "it copies and writes arrays",
    "torch": "it copies and writes arrays, on devices too",
    "triton": "it runs on a device",
    "socket": "I/O",
    "select": "I/O",
    "ssl": "I/O",
    "asyncio": "I/O and time",
    "subprocess": "processes",
    "multiprocessing": "processes",
    "threading": "threads",
    "time": "a clock",
    "random": "randomness",
    "secrets": "randomness",
    "uuid": "randomness",
    "os": "the environment, files and processes",
    "logging": "output",
    "ringfold.runtime": "sockets, clocks, randomness and threads",
    "ringfold._native": "it writes arrays, and has threads",
}
PURE_EXCEPTIONS: dict[str, tuple[set[str], str]] = {
    "ringfold.topology": ({"numpy"}, "ring orders are computed on small matrices that are its own"),
    "ringfold.probe": ({"numpy"}, "statistics of probes are computed on arrays that are its own"),
    "ringfold.state.blocks": ({"ringfold._native"}, "the root of a hash list is a function of bytes"),
    "ringfold.config": ({"os", "logging"}, "pure modules use its constants and checks; only loading reads anything"),
    "ringfold.agent.adapters": ({"ringfold.runtime"}, "pure modules use its type of an observation"),
    "ringfold.agent.monitors": ({"ringfold.runtime", "os", "logging"}, "pure modules use its type of a reading"),
}
"""Modules, or packages with all of their modules, that may import something impure, each with the reason."""

PURE_LEAVES = (
    "ringfold.state.ancestry",
    "ringfold.state.blocks",
    "ringfold.state.election",
    "ringfold.state.fetch",
    "ringfold.state.fetch_effects",
    "ringfold.state.manifest",
    "ringfold.state.pool",
    "ringfold.state.serve",
    "ringfold.peer.sync.syncing",
)
"""The leaves around the program's arrays, which must go on saying that they are pure."""


def module_of(path: Path) -> str:
    return ".".join(("ringfold", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@cache
def paths_of_modules() -> dict[str, Path]:
    return {module_of(path): path for path in modules()}


def says_pure(path: Path) -> bool:
    """Whether a module of the library promises to be pure. The docstring of a package describes its modules."""
    is_of_library = TIER.get(package_of(path), len(TIERS)) < len(TIERS) - 1 and package_of(path) != "runtime"
    if not is_of_library or path.name == "__init__.py":
        return False
    return path.name == "machine.py" or re.search(r"\bPure\b", ast.get_docstring(tree_of(path)) or "") is not None


def imported_modules(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """The dotted names that a file imports at run time, also inside functions and by `import_module`, with the line."""
    parents = ("ringfold", *path.relative_to(SOURCE).parent.parts)
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        match node:
            case ast.Import(names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module, names, level):
                base = ".".join(parents[: len(parents) - level + 1]) if level else ""
                start = ".".join(part for part in (base, module) if part)
                yield from ((f"{start}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield name, node.lineno


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def impure(tree: ast.Module, path: Path) -> list[str]:
    """What makes a module impure: its own imports, and those of the modules of Ringfold that it imports."""
    known = paths_of_modules()
    found: list[str] = []
    seen = {module_of(path)}
    to_visit = [(tree, path)]
    while to_visit:
        tree, path = to_visit.pop()
        module = module_of(path)
        allowed = {name for of, (names, _) in PURE_EXCEPTIONS.items() if is_under(module, of) for name in names}
        for name, line in imported_modules(tree, path):
            if reason := next((why for bad, why in IMPURE.items() if is_under(name, bad)), None):
                if not any(is_under(name, each) for each in allowed):
                    found.append(f"{name_of(path)}:{line} imports {name}: {reason}")
                continue
            target = name if name in known else name.rpartition(".")[0]
            if target in known and target not in seen and target != "ringfold":
                seen.add(target)
                to_visit.append((tree_of(known[target]), known[target]))
    return found


def test_pure_modules_import_nothing_impure() -> None:
    faults = {name_of(path): found for path in modules() if says_pure(path) and (found := impure(tree_of(path), path))}
    assert not faults, "\n".join(f"{path} says that it is pure, but {'; '.join(why)}" for path, why in faults.items())


def test_machines_and_the_leaves_around_arrays_are_checked() -> None:
    pure = {module_of(path) for path in modules() if says_pure(path)}
    assert {f"ringfold.{package}.machine" for package in ("agent", "iteration", "master", "peer")} <= pure
    assert not set(PURE_LEAVES) - pure, "their docstrings do not say Pure"


@pytest.mark.parametrize(
    ("package", "line", "allowed"),
    [
        ("state", "from hashlib import blake2b", True),
        ("state", "import numpy as np", False),
        ("state", "from numpy import copyto", False),
        ("state", "import numpy.typing", False),
        ("state", "def copy():\n    import torch", False),
        ("state", "torch = import_module('torch')", False),
        ("state", "torch = importlib.import_module('torch.cuda')", False),
        ("state", "if TYPE_CHECKING:\n    import numpy", True),
        ("state", "if TYPE_CHECKING:\n    import msgspec\nelse:\n    import numpy", False),
        ("peer", "import socket", False),
        ("peer", "from threading import Lock", False),
        ("peer", "from time import monotonic_ns", False),
        ("peer", "import random", False),
        ("peer", "import os.path", False),
        ("peer", "import timeit", True),
        ("peer", "from ringfold import runtime", False),
        ("peer", "from ringfold.runtime.clock import monotonic_ns", False),
        ("peer", "from ..runtime import clock", False),
        ("peer", "from ringfold.state.blocks import BlockRef", True),
        ("peer", "from ringfold.state.manifest import StateManifest", True),
        ("peer", "from ringfold.state.hashing import block_hash", False),
        ("peer", "from ringfold.state.snapshot import Snapshot", False),
        ("peer", "from ringfold.state import array_memory", False),
        ("peer", "from .sync import transfer", False),
        ("topology", "import numpy as np", True),
        ("topology", "import torch", False),
        ("master", "from ringfold import topology", True),
        ("master", "import ringfold._native", False),
    ],
)
def test_the_purity_check_sees_what_it_should(package: str, line: str, allowed: bool) -> None:
    """The check itself can fail: known good and bad imports, direct ones and those of an imported module."""
    path = SOURCE / package / "made_up.py"
    assert (not impure(ast.parse(line), path)) == allowed


def test_functions_are_short() -> None:
    long = {
        f"{name_of(path)}:{node.name}": lines
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), f"over {MAX_FUNCTION_LINES} lines: {long}"


def words_of(name: str) -> set[str]:
    """The words in a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_names_say_what_a_thing_is() -> None:
    assert words_of("PeerManager") & BANNED_NAMES
    assert words_of("http_utils") & BANNED_NAMES
    named = [(name_of(path), part) for path in modules() for part in path.relative_to(SOURCE).with_suffix("").parts]
    named += [
        (name_of(path), node.name)
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    faults = [f"{where}: {name}" for where, name in named if words_of(name) & BANNED_NAMES]
    assert not faults, "\n".join(faults)


def test_every_package_and_module_has_a_purpose_in_its_docstring() -> None:
    silent = [name_of(path) for path in modules() if not ast.get_docstring(tree_of(path))]
    assert not silent, "\n".join(silent)
    bare = sorted({name_of(path.parent) for path in modules() if not (path.parent / "__init__.py").exists()})
    assert not bare, f"folders without an __init__.py: {bare}"


def parts_of(package: Path) -> set[str]:
    """The files (`x.py`) and sub-packages (`x/`) of a package that its map must name."""
    files = {path.name for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py")}
    return files | {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}


def unmapped(package: Path) -> set[str]:
    """The parts of a package that the docstring of its `__init__` does not name in backquotes."""
    docstring = ast.get_docstring(tree_of(package / "__init__.py")) or ""
    return parts_of(package) - set(re.findall(r"`([^`\s]+)`", docstring))


@pytest.mark.parametrize("package", [path.parent for path in modules() if path.name == "__init__.py"], ids=name_of)
def test_the_map_of_a_package_names_all_of_its_parts(package: Path) -> None:
    if package == SOURCE:
        head = (package / "__init__.py").read_text(encoding="utf-8").partition("\nfrom ")[0]
        mapped = {name for line in re.findall(r"^#   (\S.*?)   ", head, re.MULTILINE) for name in line.split(", ")}
        assert mapped == {part.removesuffix(".py").removesuffix("/") for part in parts_of(package)}
    else:
        assert not unmapped(package), f"{name_of(package)}/__init__.py does not name {sorted(unmapped(package))}"


def test_no_map_names_a_file_that_is_gone() -> None:
    faults = [
        f"{name_of(path)}: {name}"
        for path in modules()
        if path.name == "__init__.py" and path.parent != SOURCE
        for name in re.findall(r"`(\w+\.py|\w+/)`", ast.get_docstring(tree_of(path)) or "")
        if name not in parts_of(path.parent)
    ]
    assert not faults, "\n".join(faults)


def text_files() -> list[Path]:
    """Every text file of the repository that people write."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found += ROOT.glob("*")
    return sorted(path for path in found if path.is_file() and (path.suffix in TEXT_ENDINGS or path.name in TEXT_NAMES))


def test_no_file_speaks_of_how_the_work_is_organised() -> None:
    assert META_WORDS.search("see iss" + "ue 7")
    assert not META_WORDS.search("reissue 7 tokens")
    faults = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if META_WORDS.search(line)
    ]
    assert not faults, "\n".join(faults)


def test_text_files_end_with_one_newline() -> None:
    faults = []
    for path in text_files():
        content = path.read_bytes()
        if content and (not content.endswith(b"\n") or content.endswith(b"\n\n") or b"\r" in content):
            faults.append(name_of(path))
    assert not faults, "\n".join(faults)
