"""A run whose members fail one after the other, in every way except by dying, and a second run beside it.

The *scenes* repeat until the time is over: a member passes an array too many; one hangs in its loader; one skips a
step; one changes its weights; one gets SIGTERM; all are killed and started again. After each scene the four train
together before the next one begins. The two members of the second run, on the same master, must not be affected.

At the end the weights are computed again from what was committed (the end of this file), and must have the same bits.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import LocalCluster, Message
from ringfold.tools.soak.checks import Hang, SoakCheck, shown
from ringfold.tools.soak.member import COUNT, MISMATCH_STATUS, SAVE_EVERY, Floats, MemberStep, digest, gradient, learn
from ringfold.units import S as S

FIRST, SECOND = "worst", "beside"
MEMBERS = {FIRST: ("a", "b", "c", "d"), SECOND: ("x", "y")}
STALL_S = 8.0
HANG_S = 20.0
"""How long a member hangs: well beyond the stall timeout."""
SCENE_TIMEOUT_S = 120.0
"""How long a scene may take."""
QUIET_S = 3.0
"""How long all train together between two scenes."""
SETTINGS: dict[str, Any] = {"heartbeat_ms": 200, "evict_after_ms": 5_000, "stall_timeout_s": STALL_S}


@dataclass(slots=True)
class MemberSlot:
    """One of the members, whatever process it is at the moment."""

    run: str
    name: str
    lives: int = 0
    process: str = ""
    """The cluster's name of the present process."""
    step: int = -1
    peer: int = 0
    contributors: int = 0
    error_text: str = ""
    """Of its last mismatch."""
    came_back: int = 0
    diverged: set[str] = field(default_factory=set)
    finished: tuple[int, str] | None = None


@dataclass(slots=True)
class MemberSoakOutcome:
    """What came out of it."""

    scenes: Counter[str] = field(default_factory=Counter)
    steps: dict[str, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Steps that were lost each time when all were killed."""
    wrong: list[str] = field(default_factory=list)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """Per run and member, what it ended with,"""
    replayed: dict[str, str] = field(default_factory=dict)
    """and what replaying gave."""
    disturbed: list[str] = field(default_factory=list)
    """What the second run noticed."""
    left_behind: list[str] = field(default_factory=list)


class MemberSoak:
    """Makes members fail for a while. `outcome` can be shown meanwhile."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster, self.outcome, self.pids = cluster, MemberSoakOutcome(), set[int]()
        self.slots = {name: MemberSlot(run, name) for run, names in MEMBERS.items() for name in names}
        self._generation = Counter[str]()
        self._logs: dict[tuple[str, int], list[Path]] = {}
        self._tick: Callable[[], None] = lambda: None
        self._where, self.scene = "", "starting"
        self._scenes: list[tuple[str, Callable[[], None]]] = [
            ("extra array", self._extra),
            ("hang in the loader", self._hang),
            ("skipped step", self._skip),
            ("divergence", self._diverge),
            ("SIGTERM", self._sigterm),
            ("all killed", self._kill_all),
        ]

    def direct(self, minutes: float, on_change: Callable[[float], None] = lambda seconds: None) -> MemberSoakOutcome:
        began_ns = monotonic_ns()
        self._tick = lambda: on_change((monotonic_ns() - began_ns) / S)
        journal = self._cluster.directory / "journal.db"
        master = self._cluster.start_master(store=f"sqlite://{journal}", **SETTINGS)
        master.wait_leading()
        self._where = master.address
        self.pids.add(master.pid)
        for slot in self.slots.values():
            self._start(slot)
        self._all_train()
        while True:
            for title, scene in self._scenes:
                self.scene = title
                scene()
                self.outcome.scenes[title] += 1
                self._all_train()
                if monotonic_ns() >= began_ns + int(minutes * 60 * S) and len(self.outcome.scenes) == len(self._scenes):
                    self._end()
                    return self.outcome

    # Scenes

    def _extra(self) -> None:
        self._mismatch("d", "extra", "2 arrays")

    def _skip(self) -> None:
        self._mismatch("b", "skip", "")

    def _mismatch(self, name: str, order: str, text: str) -> None:
        """The member is evicted for its call, and ends; the others go on. A fixed program takes its place."""
        slot = self.slots[name]
        self._cluster.allow_exit(slot.process)
        self._cluster.send([slot.process], {"what": order})
        self._watch_until(lambda: bool(slot.error_text), f"{name} learns of its mismatch")
        if ", you)" not in slot.error_text or text not in slot.error_text:
            self.outcome.wrong.append(f"{order}: the error does not name the mismatch: {slot.error_text}")
        if (status := self._cluster.wait_exit(slot.process, 30)) != MISMATCH_STATUS:
            self.outcome.wrong.append(f"{order}: it ended with status {status}")
        self._others_step(slot, 3)
        # The name of a program that was at fault is refused for a while: the fixed one has another.
        slot.lives += 1
        self._start(slot)

    def _hang(self) -> None:
        """It is evicted, comes back in the same process, and loses nothing but its contributions."""
        slot = self.slots["c"]
        before = slot.came_back
        self._cluster.send([slot.process], {"what": "hang", "seconds": HANG_S})
        self._others_step(slot, 3)
        self._watch_until(lambda: slot.came_back > before, "c comes back by itself")

    def _diverge(self) -> None:
        slot = self.slots["d"]
        for other in self.slots.values():
            other.diverged.clear()
        self._cluster.send([slot.process], {"what": "diverge"})
        name = self._name(slot)
        others = [each for each in self.slots.values() if each.run == FIRST]
        self._watch_until(lambda: all(name in each.diverged for each in others), "all learn that d has diverged")

    def _sigterm(self) -> None:
        slot = self.slots["c"]
        self._cluster.allow_exit(slot.process)
        os.kill(self._cluster.pid(slot.process), signal.SIGTERM)
        if (status := self._cluster.wait_exit(slot.process, 60)) != -signal.SIGTERM:
            self.outcome.wrong.append(f"SIGTERM: the process ended with status {status}")
        self._others_step(slot, 3)
        self._start(slot)

    def _kill_all(self) -> None:
        """The run goes on from the newest checkpoint that a peer has."""
        slots = [slot for slot in self.slots.values() if slot.run == FIRST]
        last = max(slot.step for slot in slots)
        for slot in slots:
            self._cluster.kill(slot.process)
        for slot in slots:
            self._cluster.wait_exit(slot.process, 10)
        self._generation[FIRST] += 1
        for slot in slots:
            self._start(slot)
        self._watch_until(lambda: all(slot.step >= 0 for slot in slots), "all train again")
        first = min(made.step for path in self._logs[FIRST, self._generation[FIRST]] for made in read(path))
        self.outcome.lost.append(last + 1 - first)
        if first == 0:
            self.outcome.wrong.append("all killed: the run began from nothing, in spite of its checkpoints")

    # Watching

    def _name(self, slot: MemberSlot) -> str:
        return f"{slot.name}{slot.lives or ''}"

    def _start(self, slot: MemberSlot) -> None:
        name, generation = self._name(slot), self._generation[slot.run]
        starts = sum(len(paths) for paths in self._logs.values())
        slot.process = f"{name}.{starts}"
        log = self._cluster.directory / f"{slot.process}.steps"
        log.touch()
        self._logs.setdefault((slot.run, generation), []).append(log)
        checkpoints = self._cluster.directory / f"checkpoints-{slot.run}-{slot.name}"
        env = {"OPENBLAS_NUM_THREADS": "1", "RINGFOLD_TOKEN_FILE": ""}
        arguments = (self._where, slot.run, name, checkpoints, log)
        self._cluster.start_worker(slot.process, "ringfold.tools.soak.member", *arguments, env=env)
        self.pids.add(self._cluster.pid(slot.process))
        slot.step = -1
        slot.contributors = 0
        slot.error_text = ""
        slot.peer = 0

    def _others_step(self, slot: MemberSlot, steps: int) -> None:
        """The other members of its run go on without it."""
        others = [each for each in self.slots.values() if each.run == slot.run and each is not slot]
        wanted = {each.name: each.step + steps for each in others}
        self._watch_until(
            lambda: all(each.step >= wanted[each.name] and each.contributors == len(others) for each in others),
            f"the others go on without {slot.name}",
        )

    def _all_train(self) -> None:
        """All members contribute, for a while."""

        def together() -> bool:
            return all(slot.contributors == len(MEMBERS[slot.run]) for slot in self.slots.values())

        self._watch_until(together, "all train together")
        quiet_ns = monotonic_ns() + int(QUIET_S * S)
        self._watch_until(lambda: monotonic_ns() >= quiet_ns, "a while")
        self._watch_until(together, "all train together")

    def _watch_until(self, settled: Callable[[], bool], what: str) -> None:
        end_ns = monotonic_ns() + int(SCENE_TIMEOUT_S * S)
        while not settled():
            self._tick()
            if monotonic_ns() > end_ns:
                logs = "\n".join(
                    f"{slot.process}: {self._cluster.log_tail(slot.process)}" for slot in self.slots.values()
                )
                raise Hang("the run", f"waited {SCENE_TIMEOUT_S:.0f} s until {what}: {self.slots}", None, logs)
            if (got := self._cluster.receive(0.1)) is not None:
                self._note(*got)

    def _note(self, process: str, message: Message) -> None:
        slot = next((each for each in self.slots.values() if each.process == process), None)
        if slot is None:
            return
        match message["what"]:
            case "step":
                if slot.run == SECOND:
                    self._judge_second(slot, message)
                slot.step, slot.peer, slot.contributors = message["step"], message["peer"], message["contributors"]
                slot.came_back += message["came_back"]
                slot.diverged |= set(message["diverged"])
            case "mismatch":
                slot.error_text = message["text"]
            case "finished":
                slot.finished = message["step"], message["digest"]

    def _judge_second(self, slot: MemberSlot, message: Message) -> None:
        """Once both of its members are there, nothing changes."""
        size = len(MEMBERS[SECOND])
        if slot.contributors == size and (message["contributors"] != size or message["peer"] != slot.peer):
            self.outcome.disturbed.append(f"{slot.name} at step {message['step']}: {message}")
        if slot.step >= 0 and message["step"] != slot.step + 1:
            self.outcome.disturbed.append(f"{slot.name} went from step {slot.step} to {message['step']}")

    # The end

    def _end(self) -> None:
        for slot in self.slots.values():
            self._cluster.allow_exit(slot.process)
        for run, names in MEMBERS.items():
            self._cluster.send([self.slots[names[0]].process], {"what": "stop"})
            members = [self.slots[name] for name in names]
            self._watch_until(lambda members=members: all(each.finished for each in members), f"{run} ends")  # type: ignore[misc]
            self.outcome.digests[run] = {}
            for slot in members:
                assert slot.finished is not None
                self.outcome.steps[run], self.outcome.digests[run][slot.name] = slot.finished
                if (status := self._cluster.wait_exit(slot.process, 30)) != 0:
                    self.outcome.left_behind.append(f"{slot.process} ended with status {status}")
            self.outcome.replayed[run] = self._replay(run)

    def _replay(self, run: str) -> str:
        logs = {
            generation: [read(path) for path in paths]
            for (owner, generation), paths in self._logs.items()
            if owner == run
        }
        last, steps = self.outcome.steps[run], history(logs)
        if lacking := missing(steps, last):
            return f"no member logged step {lacking[0]}"
        return digest(replay(steps, last))


def checks(outcome: MemberSoakOutcome) -> list[SoakCheck]:
    """What must have come out of it."""
    scenes = ", ".join(f"{title} {count} times" for title, count in outcome.scenes.items())
    found = [
        SoakCheck("the run outlives its worst member", not outcome.wrong, shown(outcome.wrong) or scenes),
        SoakCheck(
            "when all are killed, the run goes on from a checkpoint",
            bool(outcome.lost) and max(outcome.lost) <= 2 * SAVE_EVERY,
            f"steps lost each time: {', '.join(map(str, outcome.lost)) or 'never tried'}",
        ),
        SoakCheck(
            "the run beside it is not affected",
            not outcome.disturbed and outcome.steps.get(SECOND, 0) > 0,
            shown(outcome.disturbed) or f"{outcome.steps.get(SECOND, 0)} steps",
        ),
    ]
    for run, digests in outcome.digests.items():
        ends = set(digests.values())
        fact = f"{len(digests)} members: {', '.join(sorted(ends))} after step {outcome.steps[run]}"
        found.append(SoakCheck(f"{run}: all end with the same bits", len(ends) == 1, fact))
        again = outcome.replayed[run]
        found.append(SoakCheck(f"{run}: replaying what was committed gives these bits", {again} == ends, again))
    left = "; ".join(outcome.left_behind) or "no process, no file, no shared memory"
    found.append(SoakCheck("nothing is left behind", not outcome.left_behind, left))
    return found


Contributors = tuple[int, ...]


def history(logs: Mapping[int, Iterable[Iterable[MemberStep]]]) -> dict[int, Contributors]:
    """The contributors to each step of the run, from the logs of each generation."""
    steps: dict[int, Contributors] = {}
    for _, of_members in sorted(logs.items()):
        reported: dict[int, Counter[Contributors]] = {}
        for log in of_members:
            for made in log:
                reported.setdefault(made.step, Counter())[made.contributors] += 1
        if reported:
            steps = {step: by for step, by in steps.items() if step < min(reported)}
            steps |= {step: counts.most_common(1)[0][0] for step, counts in sorted(reported.items())}
    return steps


def missing(steps: Mapping[int, Contributors], last: int) -> list[int]:
    """Steps before `last` that no member logged."""
    return [step for step in range(last) if step not in steps]


def replay(steps: Mapping[int, Contributors], last: int) -> Floats:
    """The weights after all steps before `last`."""
    weights = np.zeros(COUNT, np.float32)
    for step in range(last):
        total = np.zeros(COUNT, np.float32)
        for peer in steps[step]:
            total += gradient(peer, step)
        learn(weights, total / np.float32(len(steps[step])) if steps[step] else total)
    return weights


def read(path: Path) -> Iterable[MemberStep]:
    """What a member wrote; a kill may have cut the last line short."""
    decode = msgspec.json.Decoder(MemberStep).decode
    with path.open("rb") as log:
        for text in log:
            if text.endswith(b"\n"):
                yield decode(text)
