"""A question to a program of this package that takes long: a process of its own, with the time that is to spare."""

import asyncio
import contextlib
import os
import sys

_NICE = 19


async def ask_aside(module: str, question: bytes, limit_s: float) -> bytes | None:
    """What `python -m module` answers on standard output; None if it failed or took longer than `limit_s`.

    It has a session of its own, so that a Ctrl-C in this one's terminal is not meant for it. It never outlives this
    call: whoever cancels it ends the process.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate(question)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return said if process.returncode == 0 else None
