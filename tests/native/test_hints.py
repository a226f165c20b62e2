"""Hints from Python: the vectors of the reference page, a consumer in C, and readers beside a writer that is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfold import _native, _native_testing
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((Path(__file__).parent / "hints_vectors.json").read_text())
STALE_NS = 10_000_000_000


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "hints"


@pytest.mark.parametrize(("sup_bw", "share"), VECTORS["sup_bw"])
def test_the_classic_multiplier_is_a_share(sup_bw: int, share: int) -> None:
    assert _native.hint_share_of_sup_bw(sup_bw) == share


@pytest.mark.parametrize("vector", VECTORS["words"], ids=lambda vector: vector["what"])
def test_a_word_has_the_bits_of_the_reference_page(vector: dict) -> None:
    word = _native.hint_word(vector["generation"], vector["shares"], vector["backpressure"])
    assert f"{word:016x}" == vector["word"]
    parts = _native.hint_word_parts(word)
    assert parts == (True, vector["generation"], len(vector["shares"]), vector["read"], vector["backpressure"])


def test_the_reference_page_has_every_vector() -> None:
    page = (ROOT / "docs" / "reference" / "hints.md").read_text()
    rows = [f"`{vector['word']}`" for vector in VECTORS["words"]]
    rows += [f"| {sup_bw} | {share} |" for sup_bw, share in VECTORS["sup_bw"]]
    assert not [row for row in rows if row not in page]


@pytest.fixture(scope="module")
def c_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = tmp_path_factory.mktemp("c") / "read_hints"
    flags = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
    source = ROOT / "native" / "tests" / "read_hints.c"
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    return program


def ask(program: Path, *arguments: object) -> list[str]:
    said = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True, timeout=30)
    return said.stdout.splitlines()


def test_a_c_program_reads_what_python_wrote(c_reader: Path, table: Path) -> None:
    writer = _native.HintWriter(str(table), STALE_NS, 0o644)
    for slot, vector in enumerate(VECTORS["words"]):
        writer.open(slot, vector["generation"])
        writer.publish(slot, vector["shares"], vector["backpressure"])
    writer.open(100, 5)
    writer.publish(100, [0, 1, 2, 3, 4, 65525], 0b100001)
    places = [f"{slot}:{vector['generation']}" for slot, vector in enumerate(VECTORS["words"])]
    expected = [
        f"0 {len(vector['read'])} {vector['backpressure']} {' '.join(map(str, vector['read']))}"
        for vector in VECTORS["words"]
    ]
    assert ask(c_reader, table, *places) == expected
    assert ask(c_reader, table, "100:5", "100:6", "101:5", "4096:5") == [
        "0 6 33 0 1 2 3 4 65525",
        *["0 local"] * 3,
    ]
    _native_testing.tear_hint(writer, 100)
    assert ask(c_reader, table, "100:5") == ["0 busy"]
    writer.close()
    assert ask(c_reader, table, places[0]) == ["4 local"]


@pytest.mark.parametrize(("state", "content"), [("1", None), ("2", b"short"), ("2", b"\1" * 300_000)])
def test_a_c_program_takes_no_other_file_for_hints(
    c_reader: Path, table: Path, state: str, content: bytes | None
) -> None:
    if content is not None:
        table.write_bytes(content)
    assert ask(c_reader, table, "0:1") == [f"{state} local"]


def test_another_version_is_local_until_an_agent_of_this_one_comes(table: Path) -> None:
    _native.HintWriter(str(table), STALE_NS, 0o644).close()
    content = bytearray(table.read_bytes())
    content[8] = 99
    with table.open("r+b") as file:
        file.write(content)
    reader = _native.HintReader(str(table))
    assert reader.look() == "other version"
    writer = _native.HintWriter(str(table), STALE_NS, 0o644)
    assert reader.look() == "fresh"
    writer.close()


def test_a_second_writer_is_refused_and_names_the_first(table: Path) -> None:
    writer = _native.HintWriter(str(table), STALE_NS, 0o644)
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
        _native.HintWriter(str(table), STALE_NS, 0o644)
    writer.close()
    _native.HintWriter(str(table), STALE_NS, 0o644).close()


def test_a_file_of_something_else_is_left_alone(table: Path) -> None:
    table.write_bytes(b"precious")
    with pytest.raises(RuntimeError, match="holds something else"):
        _native.HintWriter(str(table), STALE_NS, 0o644)
    assert table.read_bytes()[:8] == b"precious"


def test_a_restart_keeps_the_inode_the_size_and_the_slots_generations(table: Path) -> None:
    writer = _native.HintWriter(str(table), STALE_NS, 0o644)
    writer.open(9, 77)
    writer.publish(9, [0, 65535])
    reader, before, life = _native.HintReader(str(table)), table.stat(), writer.generation
    writer.close()
    writer = _native.HintWriter(str(table), STALE_NS, 0o644)
    assert (table.stat().st_ino, table.stat().st_size) == (before.st_ino, before.st_size)
    assert (writer.generation, writer.slot_generations()[9]) == (life + 1, 77)
    assert (reader.look(), reader.read(9, 77)) == ("fresh", None)
    writer.close()


def test_no_read_is_torn_while_the_writer_is_killed_again_and_again(table: Path) -> None:
    """A million reads; `ringfold bench hints` makes a hundred million."""
    slots, generations = 4, [11] * 4
    _native.HintWriter(str(table), STALE_NS, 0o644).close()
    reader = _native.HintReader(str(table))
    seen = {"hints": 0, "torn": 0}
    for _ in range(10):
        life = reader.table_generation
        child = os.fork()
        if child == 0:  # nothing of pytest may run here
            try:
                writer = _native.HintWriter(str(table), STALE_NS, 0o644)
                for slot in range(slots):
                    writer.open(slot, 11)
                _native_testing.hammer_hint_writes(writer, slots, 0)
            finally:
                os._exit(1)
        try:
            is_enough = False
            while not is_enough:  # until its life has begun, and some more
                has_begun = reader.table_generation > life
                found = _native_testing.hammer_hint_reads(reader, slots, generations, 100_000)
                seen = {key: seen[key] + found[key] for key in seen}
                is_enough = has_begun and found["hints"] > 50_000
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert seen["hints"] >= 500_000
    assert seen["torn"] == 0


def _until(holds: Callable[[], bool]) -> None:
    deadline_ns, pause = monotonic_ns() + 20_000_000_000, threads.Event()
    while not holds():
        assert monotonic_ns() < deadline_ns, "it did not come to that"
        pause.wait(0.005)


@pytest.mark.parametrize("left", [0, 4_096 + 64 * 10])
def test_a_reader_survives_a_table_that_is_truncated_and_comes_back_with_it(table: Path, left: int) -> None:
    """The slot that is read lies on a page that is gone then."""
    slot = 4_000
    writer = _native.HintWriter(str(table), STALE_NS, 0o600)
    writer.open(slot, 7)
    writer.publish(slot, [65_535, 0])
    reader = _native.HintReader(str(table))
    assert reader.read(slot, 7) == ([65_535, 0], 0)
    os.truncate(table, left)
    assert reader.read(slot, 7) is None
    assert reader.look() == "foreign"
    writer.publish(slot, [0, 65_535])  # into nowhere
    writer.close()
    again = _native.HintWriter(str(table), STALE_NS, 0o600)
    again.open(slot, 8)
    again.publish(slot, [0, 65_535])
    _until(lambda: reader.look() == "fresh")
    assert reader.read(slot, 8) == ([0, 65_535], 0)
    again.close()


def test_a_bus_error_elsewhere_still_ends_the_process(table: Path) -> None:
    """With a reader in the process, whether it is a fault or a signal that was sent."""
    program = (
        "import mmap, os, signal, sys; from ringfold import _native\n"
        "path, other, what = sys.argv[1:]\n"
        "writer = _native.HintWriter(path, 10**10, 0o600); reader = _native.HintReader(path)\n"
        "assert reader.look() == 'fresh'\n"
        "if what == 'sent': os.kill(os.getpid(), signal.SIGBUS)\n"
        "file = open(other, 'w+b'); file.truncate(4096); mapped = mmap.mmap(file.fileno(), 4096); file.truncate(0)\n"
        "print(mapped[0])\n"
    )
    for what in ("sent", "fault"):
        words = [sys.executable, "-c", program, str(table), str(table.with_name("other")), what]
        done = subprocess.run(words, capture_output=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGBUS, done
