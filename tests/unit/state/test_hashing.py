"""The hashes of shared state: the vectors in the docs, both kinds, and the error when one is missing."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hash_reference
import numpy as np
import pytest

from ringfold.errors import UsageError
from ringfold.state import hashing
from ringfold.state.blocks import digest_bytes, load_blake3, root_hash
from ringfold.wire.messages import HashKind

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "hash.md"
MIB = 1 << 20
KINDS: list[HashKind] = ["rf64", "blake3"]

MESSAGES = {
    "nothing": b"",
    "one byte 00": b"\x00",
    '"abc"': b"abc",
    "00 01 ... ff": bytes(range(256)),
    "1 MiB of zeros": bytes(MIB),
    "1 MiB + 1 of zeros": bytes(MIB + 1),
    "the numbers from 0 to 699,999 as 4 bytes each": np.arange(700_000, dtype="<u4").tobytes(),
}
ROW = re.compile(r"^\| (.+?) \| ([\d,]+) \| (.*?) \| `([0-9a-f]{16})` \|$", re.MULTILINE)


def vectors() -> dict[str, tuple[int, list[int], int]]:
    """The table of the page: message -> bytes, block hashes, root."""
    found = {}
    for name, count, hashes, root in ROW.findall(PAGE.read_text(encoding="utf-8")):
        numbers = [int(number, 16) for number in re.findall(r"[0-9a-f]{16}", hashes)]
        found[name] = (int(count.replace(",", "")), numbers, int(root, 16))
    return found


def memory(content: bytes) -> hashing.Bytes:
    return np.frombuffer(content, np.uint8)


def need(kind: HashKind) -> None:
    if kind == "blake3":
        pytest.importorskip("blake3", reason="needs the blake3 package")


def test_the_page_has_a_vector_for_every_message() -> None:
    assert vectors().keys() == MESSAGES.keys()


@pytest.mark.parametrize("name", MESSAGES)
def test_the_native_core_gives_the_vectors_of_the_page(name: str) -> None:
    count, blocks, root = vectors()[name]
    content = MESSAGES[name]
    hashes = hashing.block_hashes(memory(content), "rf64")
    assert len(content) == count
    assert np.frombuffer(hashes, "<u8").tolist() == blocks
    assert root_hash(hashes, count, "rf64") == root.to_bytes(8, "little")


@pytest.mark.parametrize("name", MESSAGES)
def test_the_reference_gives_the_vectors_of_the_page(name: str) -> None:
    count, blocks, root = vectors()[name]
    hashes = hash_reference.block_hashes(MESSAGES[name])
    assert np.frombuffer(hashes, "<u8").tolist() == blocks
    assert hash_reference.root_hash(hashes, count) == root


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_has_one_hash_per_block(kind: HashKind) -> None:
    need(kind)
    array = memory(np.random.default_rng(3).bytes(2 * MIB + 5))
    size = digest_bytes(kind)
    hashes = hashing.block_hashes(array, kind)
    assert [hashes[at : at + size] for at in range(0, len(hashes), size)] == [
        hashing.block_hash(array[at : at + MIB], kind) for at in (0, MIB, 2 * MIB)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: HashKind) -> None:
    need(kind)
    array = np.arange(9 * MIB + 1, dtype=np.uint32).view(np.uint8)[: 9 * MIB + 1]
    assert hashing.block_hashes(array, kind, threads=1) == hashing.block_hashes(array, kind, threads=3)
    assert hashing.block_hashes(array, kind, threads=1) == hashing.block_hashes(array, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_may_be_bytes_or_an_array(kind: HashKind) -> None:
    need(kind)
    assert hashing.block_hash(b"abc", kind) == hashing.block_hash(memory(b"abc"), kind)
    assert len(hashing.block_hash(b"abc", kind)) == digest_bytes(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_array_has_no_blocks_and_a_root(kind: HashKind) -> None:
    need(kind)
    assert hashing.block_hashes(memory(b""), kind) == b""
    assert len(root_hash(b"", 0, kind)) == digest_bytes(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_root_tells_apart_sizes_orders_and_numbers_of_blocks(kind: HashKind) -> None:
    need(kind)
    size = digest_bytes(kind)
    one, two, zero = b"\x01" * size, b"\x02" * size, bytes(size)
    roots = [
        root_hash(hashes, total, kind)
        for hashes, total in (
            (one + two, 2 * MIB),
            (two + one, 2 * MIB),
            (one + two, 2 * MIB - 1),
            (one + two + zero, 2 * MIB),
            (one, 2 * MIB),
            (one + two[:-1], 2 * MIB),
            (one + two + zero[:1], 2 * MIB),
        )
    ]
    assert len(set(roots)) == len(roots)


@pytest.fixture
def no_blake3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were not installed."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    load_blake3.cache_clear()
    yield
    load_blake3.cache_clear()


@pytest.mark.usefixtures("no_blake3")
def test_a_missing_blake3_names_the_package_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install 'ringfold\[blake3\]'"):
        hashing.check_available("blake3")


@pytest.mark.usefixtures("no_blake3")
def test_rf64_needs_no_package() -> None:
    hashing.check_available("rf64")


def test_an_unknown_hash_is_refused_by_name() -> None:
    unknown: Any = "md5"
    with pytest.raises(UsageError, match="md5"):
        hashing.check_available(unknown)


def test_blake3_gives_its_published_hash() -> None:
    """The hash of nothing, from the specification of BLAKE3."""
    need("blake3")
    expected = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert hashing.block_hash(b"", "blake3").hex() == expected
