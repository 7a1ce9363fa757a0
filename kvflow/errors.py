"""Every error that kvflow raises, by whose fault it is.

`KVFlowError` is the root. Foreign exceptions (NIXL's, sockets', msgspec's) are mapped to one of
these at the border where they appear, with the original as `__cause__`.
"""


class KVFlowError(Exception):
    """Root of every error raised by kvflow."""


class LocalProtocolError(KVFlowError):
    """A bug of ours: an event for which a table has no row, or a broken invariant."""


class RemoteProtocolError(KVFlowError):
    """A peer sent something that it must not send (bad bytes, bad version, an id out of range)."""


class TransportError(KVFlowError):
    """The network, or NIXL below us, did not do what was asked."""


class PeerDeadError(TransportError):
    """The library says that the peer's process is gone, not merely silent."""


class IncompatiblePeersError(KVFlowError):
    """Two engines that cannot exchange KV: names the field and both sides' values."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(f"incompatible peers: {field} is {ours!r} here and {theirs!r} there")


class ConfigurationError(KVFlowError):
    """A setting or a request parameter: names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        super().__init__(f"{key}={value!r} is not allowed; allowed: {allowed}")


class CapacityError(KVFlowError):
    """A named limit was reached."""

    def __init__(self, limit: str, value: int) -> None:
        self.limit = limit
        self.value = value
        super().__init__(f"limit {limit} of {value} reached")
