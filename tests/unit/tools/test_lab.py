"""The lab's pure parts: what a file contains, what a change does to a cable, and what happens when."""

import signal
from pathlib import Path as File

import pytest
from typer.testing import CliRunner

from ringfold.cli import build
from ringfold.errors import UsageError
from ringfold.tools import namespaces
from ringfold.tools.lab.file import LabFile, parse, read
from ringfold.tools.lab.model import SWITCH, Cable, Change, Path, mbit_of, plan
from ringfold.tools.lab.switch import Losses, Queue, Sample
from ringfold.tools.lab.timeline import (
    GRACE_NS,
    RESTART_NS,
    CommandEnded,
    Effect,
    Ending,
    Event,
    Interrupted,
    Kill,
    LabCommand,
    Over,
    Script,
    ScriptEvent,
    Start,
    Tick,
    Timeline,
)

S = 1_000_000_000
TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
TWO_PATHS = {"hosts": ["a", "b"], "path": [{"name": "fast", "rate": "200mbit"}, {"name": "slow", "rate": 50}]}


def tree(**more: object) -> LabFile:
    return parse({**TWO_PATHS, **more}, "/usr/bin/python")


@pytest.mark.parametrize(
    ("rate", "mbit"),
    [("200mbit", 200), ("1.5 Gbit", 1_500), ("800kbit/s", 0.8), (50, 50), (None, None), ("none", None)],
)
def test_rates_may_be_written_in_several_units(rate: str | float | None, mbit: float | None) -> None:
    assert mbit_of(rate) == mbit


@pytest.mark.parametrize("rate", ["200", "fast", "-5mbit", 0, -1, float("nan"), "mbit"])
def test_what_is_no_rate_is_refused(rate: str | float) -> None:
    with pytest.raises(ValueError, match="rate"):
        Path(rate=rate)


@pytest.mark.parametrize(
    "wrong", [{"rtt_ms": -1}, {"loss": 1.5}, {"mtu": 100}, {"queue_bytes": 10}, {"burst_bytes": 100}, {"name": "a b"}]
)
def test_paths_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Path(**wrong)  # type: ignore[arg-type]


def test_addresses_follow_from_the_numbers_of_host_and_path() -> None:
    made = plan(["a", "b"], [Path(name="fast"), Path()])
    assert made.names == ("fast", "path1")
    assert made.address("b", "path1") == made.address(1, 1) == "10.79.1.2"
    assert made.address(SWITCH, 0) == "10.79.0.254"
    with pytest.raises(ValueError, match="there is no host 'c'; there are a, b"):
        made.address("c")
    with pytest.raises(ValueError, match="two hosts with the name 'a'"):
        plan(["a", "a"], [Path()])


def test_a_change_leaves_alone_what_it_does_not_name() -> None:
    cable = Path(rate="200mbit", rtt_ms=20).cable()
    assert Change(path=0, down="10mbit").applied(cable) == Cable(up_mbit=200, down_mbit=10, rtt_ms=20)
    assert Change(path=0, rate="none", loss=0.5).applied(cable) == Cable(rtt_ms=20, loss=0.5)


def test_a_queue_is_given_in_time_or_in_bytes() -> None:
    assert Path(queue_ms=100).cable().limit_bytes(800) == 10_000_000
    assert Path(queue_bytes=3_000).cable().limit_bytes(800) == 3_000
    assert Path().cable().limit_bytes(1) == 4 * Cable().burst_bytes


def test_a_cable_has_what_its_path_has_except_for_what_it_names() -> None:
    found = tree(cable=[{"host": "b", "path": "fast", "down": "100mbit"}, {"host": "a", "path": "slow", "rate": 20}])
    assert found.cables["b", "fast"].cable() == Cable(up_mbit=200, down_mbit=100)
    assert found.cables["a", "slow"].cable() == Cable(up_mbit=20, down_mbit=20)
    assert not found.is_relayed


def test_a_path_whose_delay_changes_later_is_relayed_from_the_beginning() -> None:
    found = tree(change=[{"at_s": 1, "path": "slow", "rtt_ms": 30}])
    assert [path.is_relayed for path in found.plan.paths] == [False, True]


def test_places_in_commands_become_addresses_and_other_braces_stay() -> None:
    run = ["{python}", "{a.slow}:1", "{switch}", "{x.y}", "{}", '{"a": 1}']
    found = tree(command=[{"name": "one", "host": "b", "run": run, "env": {"TO": "{b.fast}"}}])
    (command,) = found.script.commands
    assert command.arguments == ("/usr/bin/python", "10.79.1.1:1", "10.79.0.254", "{x.y}", "{}", '{"a": 1}')
    assert command.env == (("TO", "10.79.0.2"),)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"change": [{"at_s": 1, "path": "quick", "rate": 5}]},
            "change 1: there is no path 'quick'; there are fast, slow",
        ),
        ({"change": [{"at_s": 1, "path": "fast"}]}, "change 1: nothing changes"),
        ({"change": [{"at_s": 1, "rate": 5}]}, "change 1: name the path"),
        ({"change": [{"at_s": 1, "path": "fast", "cut": "maybe"}]}, "change 1: cut is"),
        ({"change": [{"at_s": 1, "path": "fast", "host": "switch", "rate": 5}]}, "change 1: the switch has no cable"),
        ({"change": [{"at_s": 1, "command": "x"}]}, "change 1: there is no command 'x'; there are none"),
        ({"change": [{"at_s": -1, "path": "fast", "rate": 5}]}, "change 1: -1.0 s"),
        ({"change": [{"at_s": 1, "path": "fast", "speed": 5}]}, "unknown field `speed`"),
        ({"command": [{"name": "x", "host": "c", "run": "true"}]}, "command 'x': there is no host 'c'"),
        ({"command": [{"name": "x", "host": "a", "run": "{b.quick}"}]}, "command 'x': there is no path 'quick'"),
        ({"command": [{"name": "x", "host": "a", "run": ""}]}, "command 'x': run is empty"),
        ({"command": [{"name": "x", "host": "a", "run": "'"}]}, "command 'x': No closing quotation"),
        ({"command": [{"name": "x", "host": "a", "run": "y"}] * 2}, "two commands with the name 'x'"),
        ({"path": [{"name": "fast", "rate": "quick"}]}, "path 'fast': 'quick' is no rate"),
        ({"path": []}, "1 to 16 paths, not 0"),
        ({"cable": [{"host": "a", "path": "fast", "loss": 2}]}, "cable of 'a' to 'fast': a loss is"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_place(wrong: dict[str, object], text: str, tmp_path: File) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        parse({**TWO_PATHS, **wrong}, "")
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ["hosts = [", "hosts = 2\npath = 3"])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(text: str, tmp_path: File) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"lab\.toml"):
        read(file, "")


def test_every_example_can_be_read() -> None:
    files = sorted((File(__file__).parents[3] / "examples" / "lab").glob("*.toml"))
    assert len(files) >= 2
    for file in files:
        assert read(file, "python").script.commands


def test_without_root_the_command_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: File) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1_000)
    file = tmp_path / "lab.toml"
    file.write_text('hosts = 1\n[[path]]\nname = "one"\n')
    ran = CliRunner().invoke(build(["lab"]), ["lab", str(file)])
    assert isinstance(ran.exception, UsageError)
    assert "need root" in str(ran.exception)
    assert CliRunner().invoke(build(["lab"]), ["lab", "--check", str(file)]).exit_code == 0


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    monkeypatch.setattr(namespaces, "_CAPABILITIES", 0)
    assert namespaces.missing(("ip", "tc")) == "tc not found (apt install iproute2)"


@pytest.mark.parametrize(
    ("backlog", "limit", "congestion"),
    [(0, 1_000, 0), (1, 1_000_000, 1), (500, 1_000, 100), (1_000, 1_000, 200), (9, 0, 0)],
)
def test_a_queue_is_as_congested_as_it_is_full(backlog: int, limit: int, congestion: int) -> None:
    assert Sample("a", "b", "fast", backlog, limit).congestion == congestion


def _lost(readings: list[tuple[int, int]]) -> float:
    """What part is lost at the last of these readings (dropped, sent), ten milliseconds apart."""
    losses, lost = Losses(), 0.0
    for number, (drops, sent) in enumerate(readings):
        lost = losses.of(number / 100, Queue("a", "fast", "down", 0, 1_000, drops, 0, sent))
    return lost


def test_a_queue_that_throws_a_good_part_away_is_overrun() -> None:
    assert _lost([(10 * at, 30 * at) for at in range(20)]) == pytest.approx(0.25)
    assert Sample("a", "b", "fast", 900, 1_000, 0.25).congestion == 255
    assert Sample("a", "b", "fast", 900, 1_000, 0.05).congestion == 180
    assert Sample("a", "b", "fast", 0, 1_000, 0.25).congestion == 0


def test_what_a_queue_lost_is_forgotten_and_a_new_shaper_counts_from_zero() -> None:
    assert _lost([(0, 0), (50, 50), *((50, 50 + 100 * at) for at in range(60))]) < 0.001
    assert _lost([(9_000, 500), (0, 0), (0, 100)]) == 0.0
    assert _lost([(9_000, 500)]) == 0.0


ONE = LabCommand(name="one", host="a", arguments=("x",))
LATE = LabCommand(name="late", host="a", arguments=("x",), at_ns=5 * S)
BACK = LabCommand(name="back", host="b", arguments=("x",), background=True)
AGAIN = LabCommand(name="again", host="b", arguments=("x",), background=True, restart=True)


def effects_of(script: Script, *events: tuple[float, Event]) -> list[Effect]:
    """What comes of the last event."""
    timeline, effects = Timeline(script), list[Effect]()
    for at_s, event in events:
        effects = timeline.step(round(at_s * S), event)
    return effects


def test_commands_and_changes_happen_at_their_time() -> None:
    change = Change(path="fast", rate=5)
    timeline = Timeline(Script((ONE, LATE), (ScriptEvent(2 * S, change),)))
    assert timeline.next_ns() == 0
    assert timeline.step(0, Tick()) == [Start(ONE)]
    assert timeline.next_ns() == 2 * S
    assert timeline.step(2 * S - 1, Tick()) == []
    assert timeline.step(2 * S, Tick()) == [change]
    assert timeline.step(6 * S, Tick()) == [Start(LATE)]
    assert timeline.next_ns() is None


def test_the_last_end_in_the_foreground_ends_the_lab_and_what_is_in_the_background() -> None:
    script = Script((ONE, LATE, BACK))
    events = [(0, Tick()), (1, CommandEnded("one", 0)), (5, Tick())]
    assert effects_of(script, *events) == [Start(LATE)]
    *_, kill = effects_of(script, *events, (6, CommandEnded("late", 0)))
    assert kill == Kill("back", TERM)
    over = effects_of(script, *events, (6, CommandEnded("late", 0)), (7, CommandEnded("back", -TERM)))
    assert over == [Over(0, "all commands in the foreground have ended")]


def test_a_failure_ends_the_lab_with_status_1() -> None:
    effects = effects_of(Script((ONE, LATE)), (0, Tick()), (1, CommandEnded("one", 3)))
    assert effects == [Ending("one failed with status 3"), Over(1, "one failed with status 3")]


def test_a_failure_in_the_background_ends_it_too() -> None:
    assert Ending("back was ended by SIGSEGV") in effects_of(
        Script((ONE, BACK)), (0, Tick()), (1, CommandEnded("back", -11))
    )


def test_what_the_script_killed_has_not_failed() -> None:
    script = Script((ONE, LATE), (ScriptEvent(1 * S, Kill("one", KILL)),))
    assert effects_of(script, (0, Tick()), (1, Tick())) == [Kill("one", KILL)]
    assert effects_of(script, (0, Tick()), (1, Tick()), (1.1, CommandEnded("one", -KILL))) == []


def test_a_signal_to_a_command_that_has_ended_is_left_out() -> None:
    script = Script((ONE, LATE), (ScriptEvent(2 * S, Kill("one", KILL)),))
    assert effects_of(script, (0, Tick()), (1, CommandEnded("one", 0)), (2, Tick())) == []


def test_a_command_with_restart_comes_back_until_the_lab_ends() -> None:
    timeline = Timeline(Script((ONE, AGAIN)))
    timeline.step(0, Tick())
    assert timeline.step(S, CommandEnded("again", 1)) == []
    assert timeline.next_ns() == S + RESTART_NS
    assert timeline.step(S + RESTART_NS, Tick()) == [Start(AGAIN)]
    timeline.step(3 * S, CommandEnded("again", 1))
    assert timeline.step(3 * S, CommandEnded("one", 0))[-1] == Over(0, "all commands in the foreground have ended")


def test_what_does_not_end_by_itself_is_killed_after_a_moment() -> None:
    timeline = Timeline(Script((ONE,), end_ns=4 * S))
    timeline.step(0, Tick())
    assert timeline.next_ns() == 4 * S
    ending, kill = timeline.step(4 * S, Tick())
    assert isinstance(ending, Ending)
    assert kill == Kill("one", TERM)
    assert timeline.next_ns() == 4 * S + GRACE_NS
    assert timeline.step(4 * S + GRACE_NS, Tick()) == [Kill("one", KILL)]
    assert timeline.next_ns() is None
    (over,) = timeline.step(8 * S, CommandEnded("one", -KILL))
    assert isinstance(over, Over)
    assert over.status == 0


@pytest.mark.parametrize(("command", "status"), [(ONE, 130), (BACK, 0)])
def test_an_interrupt_is_a_failure_only_while_something_in_the_foreground_is_to_end(
    command: LabCommand, status: int
) -> None:
    events = [
        (0.0, Tick()),
        (1.0, Interrupted("SIGINT")),
        (2.0, Interrupted("SIGINT")),
        (3.0, CommandEnded(command.name, -TERM)),
    ]
    assert effects_of(Script((command,)), *events) == [Over(status, "SIGINT")]
