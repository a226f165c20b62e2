"""Where `ringfold master` keeps its journal: no two runs meet there by chance."""

from pathlib import Path

import pytest

from ringfold.cli.master import journal_address
from ringfold.config import load
from ringfold.errors import ConfigError


def address(tmp_path: Path, **arguments: object) -> str | None:
    return journal_address(load(arguments, environment={}, directory=tmp_path, home=tmp_path))


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("other", ["127.0.0.1:5001", "127.0.0.2:5000", "[::1]:5000"])
def test_another_port_or_address_has_another_journal(tmp_path: Path, other: str) -> None:
    first = address(tmp_path, listen=["127.0.0.1:5000"])
    assert first is not None
    assert first != address(tmp_path, listen=[other])
    assert first == address(tmp_path, listen=["127.0.0.1:5000"])


def test_another_machine_with_the_same_home_has_another_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = address(tmp_path, listen=["127.0.0.1:5000"])
    monkeypatch.setattr("ringfold.runtime.network.host_name", lambda: "elsewhere")
    assert address(tmp_path, listen=["127.0.0.1:5000"]) != first


def test_a_journal_is_for_its_owner_only(tmp_path: Path) -> None:
    address(tmp_path, listen=["127.0.0.1:5000"])
    [file] = (tmp_path / "state" / "ringfold").iterdir()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("options", ["", "?prefix=run-7"])
def test_a_file_that_masters_share_is_for_its_owner_only_too(tmp_path: Path, options: str) -> None:
    address(tmp_path, store=f"sqlite://{tmp_path}/shared.db{options}")
    assert (tmp_path / "shared.db").stat().st_mode & 0o077 == 0


def test_a_port_that_the_kernel_chooses_has_no_journal(tmp_path: Path) -> None:
    assert address(tmp_path, listen=["127.0.0.1:0"]) is None


def test_a_journal_is_kept_where_the_option_puts_it(tmp_path: Path) -> None:
    assert address(tmp_path, listen=["127.0.0.1:0"], journal=tmp_path / "mine.db") == f"sqlite://{tmp_path}/mine.db"
    assert address(tmp_path, store="etcd://10.0.0.1:2379") == "etcd://10.0.0.1:2379"
    assert address(tmp_path, no_journal=True) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"no_journal": True, "journal": "j.db"},
        {"no_journal": True, "store": "etcd://a:1"},
        {"journal": "j.db", "store": "etcd://a:1"},
    ],
)
def test_contradictions_are_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="leave"):
        address(tmp_path, **arguments)


def test_a_place_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no directory")
    with pytest.raises(ConfigError, match="--no-journal"):
        address(tmp_path, listen=["127.0.0.1:5000"])
