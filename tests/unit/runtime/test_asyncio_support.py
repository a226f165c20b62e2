"""Socket options of connections: how long sent bytes may stay unacknowledged, and what was sent again."""

import asyncio
import socket

from ringfold.runtime import asyncio_support


def test_user_timeout_and_retransmits_of_a_connection() -> None:
    async def connect() -> tuple[int, int]:
        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()
            closed.set()

        closed = asyncio.Event()
        async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            asyncio_support.user_timeout(writer.transport, 4_321)
            sock = writer.get_extra_info("socket")
            found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            again = asyncio_support.retransmits(writer.transport)
            writer.close()
            await writer.wait_closed()
            await closed.wait()
        return found, again

    assert asyncio.run(connect()) == (4_321, 0)


def test_a_connection_that_is_closed_has_no_retransmits() -> None:
    assert asyncio_support.retransmits(None) == 0
