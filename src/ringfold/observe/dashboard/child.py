"""A dashboard beside a master: a process of its own, whose end or load touches nobody.

The master starts it, prints its address, and starts it again a few times if it ends. It has a lower priority than the
master. It ends with its standard input, which is a pipe from the master: so it never outlives it, however that ends.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence

RESTARTS = 3
RESTART_AFTER_S = 2.0
END_TIMEOUT_S = 3.0
NICE = 10

_log = logging.getLogger(__name__)


class DashboardChild:
    """The process of a dashboard. `arguments` are those of its command; `say` gets its line with the address."""

    def __init__(
        self, arguments: Sequence[str], say: Callable[[str], None], env: Mapping[str, str] | None = None
    ) -> None:
        self._arguments, self._say, self._env = list(arguments), say, env
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the process; it is gone when this returns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep(self) -> None:
        """Start it, and again when it ends, a few times."""
        while self.starts <= RESTARTS:
            self.starts += 1
            try:
                await self._run()
            except OSError as error:
                _log.warning("the dashboard cannot be started: %s", error)
            if self.starts <= RESTARTS:
                _log.warning("the dashboard has ended; it is started again in %g s", RESTART_AFTER_S * self.starts)
                await asyncio.sleep(RESTART_AFTER_S * self.starts)
        _log.error("the dashboard has ended %d times; the run continues without it", self.starts)

    async def _run(self) -> None:
        command = [sys.executable, "-P", "-m", "ringfold.cli", "dashboard", *self._arguments, "--until-eof"]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=None if self._env is None else dict(self._env),
            start_new_session=True,  # a Ctrl-C of the terminal reaches the master, which ends it
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._say(line.decode(errors="replace").rstrip())
        await self._process.wait()


async def end_of_input(ended: asyncio.Event) -> None:
    """Set `ended` when standard input ends."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while await reader.read(1 << 12):
            pass
    finally:
        transport.close()
    ended.set()
