"""An optional seal on every message: HMAC-SHA256 with a key that all engines of a deployment share.

The seal covers the sender's name and the message, so that a message cannot be changed, made up, or
passed off as another worker's by somebody without the key. It hides nothing, and it does not stop
a copy of a message from being sent again; the protocol is idempotent against that.
"""

import hashlib
import hmac
from pathlib import Path

from kvflow.errors import ConfigurationError, RemoteProtocolError
from kvflow.wire.messages import PROTOCOL_VERSION

KEY_BYTES_MIN = 16
SIDE_CHANNEL = "side channel"
"""The sender's name of what travels on the side channel."""

_SEALED = bytes([0x80 | PROTOCOL_VERSION])
_PLAIN = bytes([PROTOCOL_VERSION])
_TAG_BYTES = 32


class Seal:
    """Seals and opens messages; without a key, plain ones pass and sealed ones are refused."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    def close(self, message: bytes, sender: str) -> bytes:
        """`message` as it goes out: version byte with the high bit set, tag, body."""
        if self._key is None:
            return message
        return _SEALED + self._tag(message[1:], sender) + message[1:]

    def open(self, received: bytes, sender: str) -> bytes:
        """The message inside. Raises `RemoteProtocolError` if it is not rightly sealed."""
        sealed = received[:1] == _SEALED
        if self._key is None:
            if sealed:
                raise RemoteProtocolError("a sealed message, but no shared_key_file is set here")
            return received
        if not sealed:
            raise RemoteProtocolError("a message without a seal, but shared_key_file is set here")
        tag, body = received[1 : 1 + _TAG_BYTES], received[1 + _TAG_BYTES :]
        if not hmac.compare_digest(tag, self._tag(body, sender)):
            raise RemoteProtocolError("a seal that was not made with our key")
        return _PLAIN + body

    def _tag(self, body: bytes, sender: str) -> bytes:
        assert self._key is not None
        name = sender.encode()
        head = len(name).to_bytes(4, "big") + name
        return hmac.new(self._key, head + body, hashlib.sha256).digest()


def from_file(path: str) -> Seal:
    """A seal with the key that the file holds, surrounding white space removed; "" means no key.

    Raises `ConfigurationError` if it cannot be read, or holds less than `KEY_BYTES_MIN` bytes.
    """
    if not path:
        return Seal()
    allowed = f"a readable file with a key of at least {KEY_BYTES_MIN} bytes"
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigurationError("shared_key_file", path, f"{allowed} ({error})") from error
    if len(key) < KEY_BYTES_MIN:
        raise ConfigurationError("shared_key_file", path, f"{allowed}; it has {len(key)}")
    return Seal(key)
