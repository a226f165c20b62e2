"""Arguments over environment over TOML over default, and messages that point at the fault."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import to_builtins

from ringfold import config
from ringfold.config import SETTINGS, Resolved, is_loopback, read_token, split_address
from ringfold.errors import ConfigError
from ringfold.wire.messages import Liveness

Load = Callable[..., Resolved]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`config.load` in a directory and home of its own."""
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)

    def call(arguments: dict[str, object] | None = None, env: dict[str, str] | None = None) -> Resolved:
        return config.load(arguments, environment=env or {}, directory=tmp_path, home=home)

    return call


def test_without_anything_the_defaults_hold(load: Load) -> None:
    resolved = load()
    assert {name: resolved.value(name) for name in SETTINGS} == {name: s.default for name, s in SETTINGS.items()}
    assert {resolved.origin(name) for name in SETTINGS} == {"default"}
    assert resolved.file is None


def test_the_nearest_source_wins(load: Load, tmp_path: Path) -> None:
    (tmp_path / "ringfold.toml").write_text("lanes = 2\nspin_us = 7\nsmall_bytes = 1\n")
    resolved = load({"lanes": 4}, {"RINGFOLD_LANES": "3", "RINGFOLD_SPIN_US": "8"})
    found = {name: (resolved.integer(name), resolved.origin(name)) for name in ("lanes", "spin_us", "small_bytes")}
    assert found == {
        "lanes": (4, "argument"),
        "spin_us": (8, "environment RINGFOLD_SPIN_US"),
        "small_bytes": (1, f"{tmp_path / 'ringfold.toml'}:3"),
    }


def test_an_argument_of_none_and_an_empty_variable_count_as_not_given(load: Load) -> None:
    assert load({"lanes": None}, {"RINGFOLD_LANES": ""}).origin("lanes") == "default"


def test_every_setting_can_come_from_the_environment_and_from_toml(load: Load, tmp_path: Path) -> None:
    """Each default, written out by hand, reads back as itself."""
    words, lines = {}, []
    for setting in SETTINGS.values():
        match setting.default:
            case None | "" | ():
                text = "some/where"
                lines.append(f'{setting.name} = "{text}"')
            case tuple() as parts:
                text = ",".join(parts)
                lines.append(f"{setting.name} = {list(parts)!r}")
            case bool() as switch:
                text = str(switch)
                lines.append(f"{setting.name} = {text.lower()}")
            case value:
                text = str(value)
                lines.append(f"{setting.name} = {value!r}")
        words[setting.env] = text
    by_env = load(None, words)
    (tmp_path / "ringfold.toml").write_text("\n".join(lines))
    by_file = load()
    for name, setting in SETTINGS.items():
        assert by_env.origin(name) == f"environment {setting.env}"
        assert by_file.origin(name).startswith(f"{tmp_path / 'ringfold.toml'}:")
        if setting.default not in (None, "", ()):
            assert by_env.value(name) == by_file.value(name) == setting.default


def test_the_file_is_the_named_one_then_the_nearest(load: Load, tmp_path: Path) -> None:
    named, other = tmp_path / "a.toml", tmp_path / "b.toml"
    for number, path in enumerate(
        (named, other, tmp_path / "ringfold.toml", tmp_path / "home" / ".config" / "ringfold.toml"), 1
    ):
        path.write_text(f"lanes = {number}\n")
    assert load({"config": named}, {"RINGFOLD_CONFIG": str(other)}).integer("lanes") == 1
    assert load(None, {"RINGFOLD_CONFIG": str(other)}).integer("lanes") == 2
    assert load().integer("lanes") == 3
    (tmp_path / "ringfold.toml").unlink()
    assert load().integer("lanes") == 4


def test_a_named_file_that_is_missing_is_an_error(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no settings file"):
        load({"config": tmp_path / "missing.toml"})


def test_a_path_in_a_file_means_beside_that_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "home" / ".config" / "ringfold.toml").write_text('token_file = "token"\n')
    assert load().value("token_file") == tmp_path / "home" / ".config" / "token"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lanes = \n", r"ringfold\.toml:1:\d+: not TOML"),
        ("\nlane = 2\n", r"ringfold\.toml:2.*'lane'; did you mean 'lanes'\?"),
        ("xyzzy = 2\n", r"unknown setting.*'xyzzy'.*ringfold config"),
        ("[master]\nport = 1\n", r"ringfold\.toml:1: master must be a list"),
        ('lanes = "many"\n', r"ringfold\.toml:1: lanes must be a whole number, not 'many'"),
        ("lanes = 1.5\n", r"lanes must be a whole number, not 1.5"),
        ("lanes = true\n", r"lanes must be a whole number, not True"),
        ("insecure = 1\n", r"insecure must be true or false, not 1"),
        ("lanes = 0\n", r"lanes must be from 1 to 64, not 0"),
        ("op_timeout_s = nan\n", r"op_timeout_s must be from"),
        ('evidence = "gossip"\n', r"evidence must be one of auto, ring, master, not 'gossip'"),
        ("name = 3\n", r"name must be text, not 3"),
        ("listen = [1]\n", r"listen must be a list of texts"),
        ("heartbeat_ms = 2000\n", r"need heartbeat_ms < suspect_after_ms < evict_after_ms.*2000, 1000 and 5000"),
    ],
)
def test_the_error_of_a_broken_file_names_place_and_reason(
    load: Load, tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "ringfold.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load()


def test_a_broken_variable_names_the_variable(load: Load) -> None:
    with pytest.raises(ConfigError, match="environment RINGFOLD_LANES: lanes must be a whole number, not 'two'"):
        load(None, {"RINGFOLD_LANES": "two"})


def test_an_unknown_argument_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="unknown argument 'lane'; did you mean 'lanes'"):
        load({"lane": 2})


def test_an_unknown_variable_is_a_warning(load: Load) -> None:
    assert load(None, {"RINGFOLD_LANE": "2"}).warnings == (
        "environment variable RINGFOLD_LANE is not a setting; did you mean 'lanes'?",
    )


@pytest.mark.parametrize(("word", "meaning"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("OFF", False)])
def test_switches_in_the_environment(load: Load, word: str, meaning: bool) -> None:
    assert load(None, {"RINGFOLD_INSECURE": word}).switch("insecure") is meaning


def test_liveness_defaults_are_those_of_the_protocol() -> None:
    defaults = {name: SETTINGS[name].default for name in Liveness.__struct_fields__}
    assert to_builtins(Liveness()) == defaults


# Tokens


def test_a_token_is_read_without_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hush\n")
    path.chmod(0o600)
    assert read_token(path) == b"hush"


def test_a_token_file_that_all_users_can_read_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("hush")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_token(path)
    assert "chmod 600" in caplog.text
    assert "hush" not in caplog.text
    caplog.clear()
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        read_token(path)
    assert caplog.text == ""


def test_an_empty_or_missing_token_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the token file"):
        read_token(tmp_path / "missing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(tmp_path / "empty")


# Addresses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:5", ("10.0.0.1", 5)),
        ("10.0.0.1", ("10.0.0.1", 48148)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 48148)),
        ("::1", ("::1", 48148)),
        ("fe80::1%eth0", ("fe80::1%eth0", 48148)),
        ("head-node:0", ("head-node", 0)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["", ":5", "host:x", "host:65536", "host:-1", "[::1", "http://host:1", "host:\u0665"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError):
        split_address(text)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "head")))


def test_the_agents_directory_is_the_chosen_one_or_the_users_own_and_then_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert config.agent_directories(Path("/x")) == (Path("/x"),)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert config.agent_directories(None, {"XDG_RUNTIME_DIR": "/run/user/1000"}) == (
        Path("/run/user/1000/ringfold"),
        Path("/run/ringfold"),
    )
    assert config.agent_directories(None, {}) == (Path("/tmp/ringfold-1000"), Path("/run/ringfold"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert config.agent_directories(None, {}) == (Path("/run/ringfold"),)


@pytest.mark.parametrize(
    ("text", "keys"),
    [("secret\n", {0: b"secret"}), ("# old and new\n1 first\n\n2 second\n", {1: b"first", 2: b"second"})],
)
def test_a_key_file_has_one_key_or_keys_with_ids(tmp_path: Path, text: str, keys: dict[int, bytes]) -> None:
    (tmp_path / "keys").write_text(text)
    (tmp_path / "keys").chmod(0o600)
    assert config.read_keys(tmp_path / "keys") == keys


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o620, 0o640, 0o660])
def test_a_key_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "keys").write_text("0123456789abcdef")
    (tmp_path / "keys").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        config.read_keys(tmp_path / "keys")


def test_a_key_file_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# the key is still missing\n\n")
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(ConfigError, match="has no key"):
        config.read_keys(tmp_path / "keys")


@pytest.mark.parametrize("text", ["1 a\n1 b\n", "300 a\n", "x y\n", "1 2 3\n", "a\nb\n"])
def test_another_key_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(ConfigError, match="has lines of"):
        config.read_keys(tmp_path / "keys")


@pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), ("off", "off"), ("90", 90.0), (90, 90.0)])
def test_a_number_may_have_words_beside_it(given: object, expected: object) -> None:
    assert SETTINGS["stall_timeout_s"].check(given) == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("never", "stall_timeout_s must be a number or auto or off, not 'never'"),
        (0, "stall_timeout_s must be auto, off, or from 0.1 to 86400, not 0"),
        (True, "stall_timeout_s must be a number or auto or off, not True"),
    ],
)
def test_neither_a_number_nor_one_of_its_words_is_refused(given: object, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        SETTINGS["stall_timeout_s"].check(given)
