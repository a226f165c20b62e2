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
    ("errors", "config", "states"),
    ("wire",),
    ("runtime", "store", "topology"),
    ("state", "probe", "clock", "iteration", "agent"),
    ("master", "peer"),
    ("observe",),
    ("torch", "compat", "cli", "testing", "tools"),
)
TIER = {room: number for number, rooms in enumerate(TIERS) for room in rooms}
SIDEWAYS = {("config", "errors"), ("clock", "probe"), ("store", "runtime"), ("tools", "cli")}
"""The imports inside one tier that are allowed. `cli` may use anything, and the package's face shows anything."""

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


def room_of(path: Path) -> str:
    """The room that a file belongs to; the package's own `__init__` and `__main__` are its face, "ringfold"."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "ringfold" if first in ("__init__", "__main__") else first


def imported_rooms(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """Every room of Ringfold that a file imports anywhere in it, with the line. The face itself is "ringfold"."""
    package = ("ringfold", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module, names, level):
                base = ".".join(package[: len(package) - level + 1]) if level else ""
                start = ".".join(part for part in (base, module) if part)
                targets = [f"{start}.{alias.name}" for alias in names]
            case _:
                continue
        for target in targets:
            top, *rest = target.split(".")
            if top == "ringfold":
                known = bool(rest) and (rest[0] in TIER or rest[0] == "_native")
                yield (rest[0] if known else "ringfold"), node.lineno


def fault(room: str, target: str) -> str:
    """Why a room may not import another; empty when it may."""
    if room in ("ringfold", "cli") or target in (room, "_native"):
        return ""
    if room not in TIER:
        return f"{room} is no room of DESIGN section 3"
    if target == "ringfold":
        return "" if TIER[room] == len(TIERS) - 1 else "a room does not import the package's face"
    if TIER[target] > TIER[room]:
        return f"{target} stands above {room}"
    if TIER[target] == TIER[room] and (room, target) not in SIDEWAYS:
        return f"{target} and {room} stand side by side"
    return ""


def test_imports_go_one_way() -> None:
    faults = [
        f"{name_of(path)}:{line}: {why}"
        for path in modules()
        for target, line in imported_rooms(tree_of(path), path)
        if (why := fault(room_of(path), target))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("room", "line", "allowed"),
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
def test_the_direction_check_sees_what_it_should(room: str, line: str, allowed: bool) -> None:
    """The check itself can fail: known good and bad imports, in every way of writing them."""
    path = SOURCE / room / "made_up.py"
    faults = [why for target, _ in imported_rooms(ast.parse(line), path) if (why := fault(room_of(path), target))]
    assert (not faults) == allowed


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


def test_every_room_and_module_says_what_it_is_for() -> None:
    silent = [name_of(path) for path in modules() if not ast.get_docstring(tree_of(path))]
    assert not silent, "\n".join(silent)
    bare = sorted({name_of(path.parent) for path in modules() if not (path.parent / "__init__.py").exists()})
    assert not bare, f"folders without an __init__.py: {bare}"


# Packages whose `__init__` does not name all of its files yet.
INCOMPLETE_MAPS = {
    "agent",
    "cli",
    "master",
    "peer",
    "runtime",
    "state",
    "tools/bench",
    "tools/demo",
    "tools/lab",
    "wire",
}


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
    elif package.relative_to(SOURCE).as_posix() not in INCOMPLETE_MAPS:
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
