"""The side channel: where a consumer asks a producer engine who its workers are.

A router may also tell it that nobody will fetch a transfer.

One TCP connection carries one request and one reply, each a length (4 bytes, big endian) and a
message of `kvflow.wire`. The server answers from what it was given and knows nothing of transfers;
whatever arrives, it goes on serving. With a shared key, both request and reply are sealed.
"""

import asyncio
from collections.abc import Callable, Mapping

from kvflow.errors import RemoteProtocolError, TransportError
from kvflow.ids import Address, Rank, TransferId, new_incarnation
from kvflow.io.seal import SIDE_CHANNEL, Seal
from kvflow.io.thread import LoopThread
from kvflow.wire import codec
from kvflow.wire import messages as m

_NO_SEAL = Seal()
_LENGTH_BYTES = 4
_REQUEST_BYTES_MAX = 4096
_REQUEST_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 10.0


def _ignore(_: TransferId) -> None:
    """For a side channel that has nobody to tell."""


async def meet(
    address: Address, engine_id: str, timeout_s: float, seal: Seal = _NO_SEAL
) -> m.MeetReply:
    """Ask the side channel at `address` who it is; `engine_id` is ours.

    Raises `TransportError` when it cannot be reached or does not answer in `timeout_s`, and
    `RemoteProtocolError` when what answers is not a side channel of our version, or has another
    key.
    """
    reply = await _ask(address, m.MeetRequest(engine_id=engine_id), timeout_s, seal)
    if not isinstance(reply, m.MeetReply):
        raise RemoteProtocolError(f"{address} answers another question")
    return reply


async def release(
    address: Address, transfer_id: TransferId, timeout_s: float, seal: Seal = _NO_SEAL
) -> None:
    """Tell the producer at `address` that nobody will fetch a transfer. Raises as `meet` does."""
    request = m.ReleaseRequest(transfer_id=transfer_id)
    if not isinstance(await _ask(address, request, timeout_s, seal), m.Released):
        raise RemoteProtocolError(f"{address} answers another question")


async def _ask(
    address: Address, request: m.MeetRequest | m.ReleaseRequest, timeout_s: float, seal: Seal
) -> m.MeetReply | m.Released:
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(address, request, seal)
    except TimeoutError as error:
        raise TransportError(f"{address} did not answer in {timeout_s} s") from error
    except (OSError, asyncio.IncompleteReadError, UnicodeError) as error:
        # UnicodeError: a host name that cannot be one, such as "a..b".
        raise TransportError(f"{address}: {error}") from error


async def _exchange(
    address: Address, request: m.MeetRequest | m.ReleaseRequest, seal: Seal
) -> m.MeetReply | m.Released:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        _send(writer, seal.close(codec.encode(request), SIDE_CHANNEL))
        await writer.drain()
        reply = await _receive(reader, m.FRAME_BYTES_MAX)
        return codec.decode_reply(seal.open(reply, SIDE_CHANNEL))
    finally:
        writer.close()


class SideChannelServer:
    """Serves one engine's `MeetReply` until closed.

    reply            called per request, so that a worker may be replaced while serving.
    release          told of each transfer that a router gives up.
    refused          told what was refused, for logs and counters.
    connections_max  connections served at once; one more is closed unanswered.
    """

    def __init__(
        self,
        *,
        reply: Callable[[], m.MeetReply],
        refused: Callable[[str, str], None],
        connections_max: int,
        release: Callable[[TransferId], None] = _ignore,
        seal: Seal = _NO_SEAL,
    ) -> None:
        self._reply = reply
        self._release = release
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
        except OSError as error:
            raise TransportError(f"side channel cannot listen on {address}: {error}") from error
        return Address(address.host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

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
        reply: m.MeetReply | m.Released | m.Refusal
        try:
            received = await _receive(reader, _REQUEST_BYTES_MAX)
            request = codec.decode_request(self._seal.open(received, SIDE_CHANNEL))
        except RemoteProtocolError as error:
            self._refused("request", str(error))
            reply = m.Refusal(detail=str(error)[:1000])
        else:
            reply = self._answer_to(request)
        _send(writer, self._seal.close(codec.encode(reply), SIDE_CHANNEL))
        await writer.drain()

    def _answer_to(self, request: m.MeetRequest | m.ReleaseRequest) -> m.MeetReply | m.Released:
        if isinstance(request, m.MeetRequest):
            return self._reply()
        self._release(TransferId(request.transfer_id))
        return m.Released(transfer_id=request.transfer_id)


class SideChannel:
    """A server on a thread of its own, answering with the coordinates of an engine's workers.

    refused  told what was refused, in the server's thread.
    release  told of each transfer that a router gives up, in the server's thread.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        refused: Callable[[str, str], None],
        connections_max: int,
        release: Callable[[TransferId], None] = _ignore,
        seal: Seal = _NO_SEAL,
    ) -> None:
        self._engine_id = engine_id
        self._incarnation = new_incarnation()
        self._hellos: dict[Rank, m.Hello] = {}
        self._thread: LoopThread | None = None
        self._server = SideChannelServer(
            reply=self._reply,
            release=release,
            seal=seal,
            refused=refused,
            connections_max=connections_max,
        )

    def introduce(self, payloads: Mapping[Rank, bytes]) -> None:
        """Workers' coordinates, encoded; those of a rank replace older ones of it.

        Raises `RemoteProtocolError`.
        """
        hellos = {rank: codec.decode_hello(payload) for rank, payload in payloads.items()}
        self._hellos = self._hellos | hellos
        self._incarnation = new_incarnation()

    def listen(self, address: Address) -> Address:
        """Start to serve; returns the address, with the port that the system chose if it was 0.

        Raises `TransportError` if the address cannot be bound.
        """
        self._thread = LoopThread("kvflow-side-channel")
        try:
            return self._thread.run(self._server.start(address), _START_TIMEOUT_S)
        except TransportError:
            self.close()
            raise

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread is not None:
            self._thread.run(self._server.close(), _START_TIMEOUT_S)
            self._thread.stop()
            self._thread = None

    def _reply(self) -> m.MeetReply:
        return m.MeetReply(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            ranks=tuple(hello for _, hello in sorted(self._hellos.items())),
        )


def _send(writer: asyncio.StreamWriter, payload: bytes) -> None:
    try:
        writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
    except RuntimeError as error:
        # What uvloop says of a connection that the other side has reset.
        raise ConnectionResetError(str(error)) from error


async def _receive(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > bytes_max:
        raise RemoteProtocolError(f"{length} bytes announced, over the limit of {bytes_max}")
    return await reader.readexactly(length)
