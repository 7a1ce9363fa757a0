"""One request and one reply over TCP, each a length (4 bytes, big endian) and a message.

What the side channel and the workers' windows have in common: limits, times, the seal. Whatever
arrives, a server goes on serving. With a shared key, both request and reply are sealed.
"""

import asyncio
from collections.abc import Callable

from kvflow.errors import RemoteProtocolError, TransportError
from kvflow.ids import Address
from kvflow.io.seal import SIDE_CHANNEL, Seal
from kvflow.wire import codec
from kvflow.wire import messages as m

NO_SEAL = Seal()
_LENGTH_BYTES = 4
_HTTP = int.from_bytes(b"HTTP", "big")
_REQUEST_BYTES_MAX = 4096
_REQUEST_TIMEOUT_S = 5.0


async def ask(
    address: Address, request: codec.Request, timeout_s: float, seal: Seal
) -> codec.Answer:
    """The answer of whoever listens at `address`.

    Raises `TransportError` when it cannot be reached or does not answer in `timeout_s`, and
    `RemoteProtocolError` when what answers is not of our version, has another key, or refuses.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(address, request, seal)
    except TimeoutError as error:
        raise TransportError(f"{address} did not answer in {timeout_s} s") from error
    except (OSError, asyncio.IncompleteReadError, UnicodeError) as error:
        # UnicodeError: a host name that cannot be one, such as "a..b".
        raise TransportError(f"{address}: {error}") from error
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{address}: {error}") from error


async def _exchange(address: Address, request: codec.Request, seal: Seal) -> codec.Answer:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        _send(writer, seal.close(codec.encode(request), SIDE_CHANNEL))
        await writer.drain()
        reply = await _receive(reader, m.FRAME_BYTES_MAX)
        return codec.decode_reply(seal.open(reply, SIDE_CHANNEL))
    finally:
        writer.close()


class FramedServer:
    """Serves what `answer_to` says until closed.

    refused          told what was refused, for logs and counters.
    connections_max  connections served at once; one more is closed unanswered.
    """

    what = "server"
    """How errors name it."""

    def __init__(
        self, *, refused: Callable[[str, str], None], connections_max: int, seal: Seal = NO_SEAL
    ) -> None:
        self._seal = seal
        self._refused = refused
        self._connections_max = connections_max
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def start(self, address: Address) -> Address:
        """Listen; returns the address, with the port that the system chose if it was 0.

        Raises `TransportError` if the address cannot be bound.
        """
        try:
            self._server = await asyncio.start_server(self._serve, address.host, address.port)
        except (OSError, UnicodeError) as error:
            raise TransportError(f"{self.what} cannot listen on {address}: {error}") from error
        return Address(address.host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def answer_to(self, request: codec.Request) -> codec.Reply:
        """The reply to one request."""
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > self._connections_max:
                self._refused("connection", f"more than {self._connections_max} at once")
                return
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                await self._answer(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self._refused("connection", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            # The loop ends. Raised on, Python 3.11 would log it as an unhandled exception.
            pass
        finally:
            self._connections -= 1
            # Merely closed, one that does not read its reply would stay open for ever.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            received = await _receive(reader, _REQUEST_BYTES_MAX)
            request = codec.decode_request(self._seal.open(received, SIDE_CHANNEL))
        except RemoteProtocolError as error:
            reply: codec.Reply = m.Refusal(detail=str(error)[:1000])
        else:
            reply = await self.answer_to(request)
        if isinstance(reply, m.Refusal):
            self._refused("request", reply.detail)
        _send(writer, self._seal.close(codec.encode(reply), SIDE_CHANNEL))
        await writer.drain()


def _send(writer: asyncio.StreamWriter, payload: bytes) -> None:
    try:
        writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
    except RuntimeError as error:
        # What uvloop says of a connection that the other side has reset.
        raise ConnectionResetError(str(error)) from error


async def _receive(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length == _HTTP:
        raise RemoteProtocolError("an HTTP server answers, not a side channel")
    if length > bytes_max:
        raise RemoteProtocolError(f"{length} bytes announced, over the limit of {bytes_max}")
    return await reader.readexactly(length)
