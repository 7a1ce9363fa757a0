"""Bytes <-> messages, and wire twins <-> core notices."""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from kvflow.core.notices import Notice
from kvflow.errors import RemoteProtocolError
from kvflow.wire import live
from kvflow.wire import messages as m

Request = (
    m.MeetRequest | m.ReleaseRequest | live.WindowsRequest | live.LiveRequest | live.InspectRequest
)
Answer = m.MeetReply | m.Released | live.Windows | live.Live | live.Inspected
Reply = Answer | m.Refusal

_VERSION = bytes([m.PROTOCOL_VERSION])
_ENCODER = msgspec.msgpack.Encoder()
_FRAME = msgspec.msgpack.Decoder(m.Frame)
_HELLO = msgspec.msgpack.Decoder(m.Hello)
_REQUEST = msgspec.msgpack.Decoder(Request)
_REPLY = msgspec.msgpack.Decoder(Reply)
_TWINS = {message.core: message for message in m.NOTICES}

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """Version byte and msgpack."""
    return _VERSION + _ENCODER.encode(message)


def encode_frame(notices: Iterable[Notice], hello: m.Hello | None) -> bytes:
    """One notification's payload."""
    twins = tuple(_to_wire(notice) for notice in notices)
    return encode(m.Frame(notices=twins, hello=hello))


def is_sendable(notices: int, payload_bytes: int) -> bool:
    """Whether a frame of so many notices and bytes is within what a receiver takes."""
    return notices <= m.NOTICES_PER_FRAME_MAX and payload_bytes <= m.FRAME_BYTES_MAX


def decode_frame(payload: bytes) -> tuple[list[Notice], m.Hello | None]:
    """The notices and the sender's coordinates, if it sent them.

    Raises `RemoteProtocolError` for anything that is not exactly a frame of our version.
    """
    frame = _decode(_FRAME, payload)
    return [_from_wire(notice) for notice in frame.notices], frame.hello


def decode_hello(payload: bytes) -> m.Hello:
    """One worker's coordinates. Raises `RemoteProtocolError`."""
    return _decode(_HELLO, payload)


def decode_request(payload: bytes) -> Request:
    """What a side channel, or a window, is asked. Raises `RemoteProtocolError`."""
    return _decode(_REQUEST, payload)


def decode_reply(payload: bytes) -> Answer:
    """What one of them answers. Raises `RemoteProtocolError`, also for a refusal."""
    reply: Reply = _decode(_REPLY, payload)
    if isinstance(reply, m.Refusal):
        raise RemoteProtocolError(f"refused: {reply.detail}")
    return reply


def _decode(decoder: "msgspec.msgpack.Decoder[T]", payload: bytes) -> T:
    if len(payload) > m.FRAME_BYTES_MAX:
        raise RemoteProtocolError(f"{len(payload)} bytes, over the limit of {m.FRAME_BYTES_MAX}")
    if payload[:1] != _VERSION:
        theirs = payload[0] if payload else None
        raise RemoteProtocolError(f"protocol version {theirs}, ours is {m.PROTOCOL_VERSION}")
    try:
        return decoder.decode(memoryview(payload)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error


def _to_wire(notice: Notice) -> Any:
    fields = {field.name: getattr(notice, field.name) for field in dataclasses.fields(notice)}
    return _TWINS[type(notice)](**fields)


def _from_wire(message: Any) -> Notice:
    notice: Notice = message.core(**msgspec.structs.asdict(message))
    return notice
