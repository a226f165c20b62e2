"""What only real processes show of the communicator: Ctrl-C, forks, sudden ends."""

import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.wire.notices import Notice, PeerGone

DEADLINE_S = 30.0


class Watched:
    """A master, and a list of how each peer left."""

    def __init__(self) -> None:
        self.gone: queue.Queue[PeerGone] = queue.Queue()
        self.programs: list[subprocess.Popen[str]] = []
        self.master = MasterThread(on_notice=self._note)

    def _note(self, notice: Notice) -> None:
        if isinstance(notice, PeerGone):
            self.gone.put(notice)

    def next_gone(self) -> PeerGone:
        return self.gone.get(timeout=DEADLINE_S)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    with made.master:
        yield made
        for process in made.programs:
            process.kill()
            process.communicate()


class Program:
    """A Python process that has joined, and prints what it has reached."""

    def __init__(self, watched: Watched, body: str) -> None:
        begin = f"""
            import os, sys
            import numpy as np
            import ringfold as rf
            run = rf.join({watched.master.address!r}, op_timeout_s={DEADLINE_S})
        """
        script = textwrap.dedent(begin) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        watched.programs.append(self.process)

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == word, line + self.end()

    def end(self) -> str:
        """Wait for the end; what it wrote to standard error."""
        return self.process.communicate(timeout=DEADLINE_S)[1]


def pair(watched: Watched, body: str) -> tuple[rf.Communicator, Program]:
    """This process and a program as the two members of a group; the program then runs `body`."""
    gather = "while run.group_size < 2: run.update_topology(min_world=2)\n"
    program = Program(watched, gather + textwrap.dedent(body))
    run = rf.join(watched.master.address, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S)
    while run.group_size < 2:
        run.update_topology(min_world=2)
    return run, program


WAITS = {
    "a large op": "run.all_reduce(np.ones(100_000))",
    "a handle": "run.all_reduce_async(np.ones(100_000)).wait()",
    "a vote": "run.update_topology()",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_ctrl_c_ends_a_wait_and_the_peer_leaves_cleanly(watched: Watched, wait: str) -> None:
    run, program = pair(
        watched,
        f"""
        print("waits")
        with run:
            {wait}
        """,
    )
    with run:
        program.expect("waits")
        # The signal may come before the wait or inside it; both must end alike.
        program.process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in program.end()
        assert watched.next_gone().how == "left"
        with pytest.raises(rf.TooFewPeers):
            run.all_reduce(np.ones(100_000))


def test_a_program_that_just_ends_leaves_the_run(watched: Watched) -> None:
    program = Program(watched, "print('joined')")
    program.expect("joined")
    assert program.end() == ""
    assert watched.next_gone().how == "left"


def test_a_forked_child_neither_keeps_the_parent_alive_nor_uses_its_membership(watched: Watched) -> None:
    """The parent is killed while its child lives on: the master must see the parent's death at once."""
    program = Program(
        watched,
        """
        import signal
        if os.fork() == 0:
            try:
                run.update_topology()
            except rf.UsageError as error:
                print("refused" if "forked" in str(error) else error)
            sys.stdin.read()
            os._exit(0)
        signal.pause()
        """,
    )
    program.expect("refused")
    program.process.kill()
    assert watched.next_gone().how == "lost"
    program.end()  # closes the child's standard input, and it ends


def test_a_forked_child_that_exits_does_not_end_the_parents_membership(watched: Watched) -> None:
    run, program = pair(
        watched,
        """
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        run.all_reduce(np.ones(1_000))
        print("reduced")
        """,
    )
    with run:
        assert len(run.all_reduce(np.ones(1_000)).contributors) == 2
        program.expect("reduced")
        assert program.end() == ""
