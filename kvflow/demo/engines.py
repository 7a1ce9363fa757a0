"""Starts real vLLM OpenAI API servers as child processes, and ends them.

Rules: every engine leads a process group of its own, and only groups that were started here are
ever signalled. A process is reaped in `Engine.stop` and nowhere else, so until then its id (and
its group's) cannot belong to anybody else. If the process that started an engine dies without
stopping it, Linux sends the engine SIGTERM.

The settings are those under which two engines share two cores; `environment` and `_arguments`
hold them all.

Known limits: Linux only. Linux ties "the parent died" to the thread that started the engine, so
start engines from a thread that outlives them (the main thread, say).
"""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import kvflow
from kvflow.demo.ports import PortLease, lease_port
from kvflow.errors import KVFlowError

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"

HOST = "127.0.0.1"
SERVED_MODEL = "kvflow-tiny"
READY_TIMEOUT_S = 300.0
_READY_POLL_S = 0.25
_STOP_TIMEOUT_S = 10.0
_STOP_POLL_S = 0.02
_LOG_TAIL_LINES = 25
_LOG_TAIL_BYTES_MAX = 64 * 1024

_STAGES = (
    ("Application startup complete", "ready to serve"),
    ("Starting vLLM", "starting the HTTP server"),
    ("GPU KV cache size", "allocating the KV cache"),
    ("CPU KV cache size", "allocating the KV cache"),
    ("Loading weights took", "weights loaded"),
    ("Starting to load model", "loading weights"),
    ("Initializing a V1 LLM engine", "creating the engine"),
    ("non-default args", "reading its settings"),
)
"""What a phrase in the log says about how far the engine is, latest first."""

_START = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; it survives the exec below
if os.getppid() != int(sys.argv[1]): sys.exit("the starter of this engine is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class EngineFailedError(KVFlowError):
    """An engine died, or was not ready in time; the message ends with its log's last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What one engine is started with."""

    name: str
    model: Path
    log_path: Path
    kv_transfer_config: Mapping[str, Json] | None
    """The value of `--kv-transfer-config`, passed on as it is; None: an engine without one."""
    host: str = HOST
    max_model_tokens: int = 4096
    block_tokens: int = 32
    kv_space_gib: int = 1
    extra_env: Mapping[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    """Come last on the command line, so they override what is set here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgress:
    """How far an engine has come."""

    name: str
    stage: str
    waited_s: float
    is_ready: bool


def kvflow_connector(role: str, *, by_name: bool = False, **settings: Json) -> dict[str, Json]:
    """The `--kv-transfer-config` that loads kvflow, by module path or by its registered name.

    By name needs an installed distribution (its entry point registers the connector). `settings`
    become `kv_connector_extra_config`.
    """
    config: dict[str, Json] = {
        "kv_connector": "KVFlowConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
    }
    if not by_name:
        config["kv_connector_module_path"] = "kvflow.connector"
    if settings:
        config["kv_connector_extra_config"] = settings
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One running API server."""

    settings: EngineSettings
    process: "subprocess.Popen[bytes]"
    http_lease: PortLease
    side_channel_lease: PortLease
    started_at: float

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def host(self) -> str:
        return self.settings.host

    @property
    def http_port(self) -> int:
        return self.http_lease.port

    @property
    def side_channel_port(self) -> int:
        return self.side_channel_lease.port

    @property
    def log_path(self) -> Path:
        return self.settings.log_path

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    def is_running(self) -> bool:
        """Whether the process has not ended; does not reap it."""
        if self.process.returncode is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is None

    def is_ready(self) -> bool:
        """Whether the server answers its health check."""
        connection = http.client.HTTPConnection(self.host, self.http_port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def progress(self) -> EngineProgress:
        """How far it has come; raises `EngineFailedError` if the process has ended."""
        if not self.is_running():
            raise EngineFailedError(self.failure("died"))
        is_ready = self.is_ready()
        return EngineProgress(
            name=self.name,
            stage="ready" if is_ready else self._stage(),
            waited_s=time.monotonic() - self.started_at,
            is_ready=is_ready,
        )

    def failure(self, what: str) -> str:
        """A message that says what happened and ends with the log's last lines."""
        lines = _tail(self.log_path).splitlines()[-_LOG_TAIL_LINES:]
        shown = "\n".join(f"  | {line}" for line in lines)
        waited_s = time.monotonic() - self.started_at
        return (
            f"engine {self.name} (process {self.process.pid}) {what} {waited_s:.0f} s after its "
            f"start; the end of {self.log_path}:\n{shown}"
        )

    def stop(self) -> None:
        """Ends the engine and everything in its process group; doing it twice does no harm."""
        stop_engines([self])

    def _stage(self) -> str:
        log = _tail(self.log_path)
        return next((stage for phrase, stage in _STAGES if phrase in log), "importing vLLM")


def start_engine(settings: EngineSettings) -> Engine:
    """Starts one engine and returns at once; see `wait_ready`."""
    return _launch(settings, lease_port(settings.host), lease_port(settings.host))


def restart_engine(engine: Engine, settings: EngineSettings | None = None) -> Engine:
    """Ends what is left of an engine, and starts one on the same ports; see `wait_ready`.

    `settings`: the new engine's, by default the old one's.
    """
    _end([engine])
    return _launch(settings or engine.settings, engine.http_lease, engine.side_channel_lease)


def _launch(
    settings: EngineSettings, http_lease: PortLease, side_channel_lease: PortLease
) -> Engine:
    settings.log_path.parent.mkdir(parents=True, exist_ok=True)
    starter = [sys.executable, "-c", _START, str(os.getpid())]
    server = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    arguments = _arguments(settings, http_lease.port)
    with settings.log_path.open("wb") as log:
        process = subprocess.Popen(
            [*starter, *server, *arguments],
            env=environment(settings, side_channel_lease.port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Engine(
        settings=settings,
        process=process,
        http_lease=http_lease,
        side_channel_lease=side_channel_lease,
        started_at=time.monotonic(),
    )


def wait_ready(
    engines: Sequence[Engine],
    *,
    timeout_s: float = READY_TIMEOUT_S,
    progress: Callable[[EngineProgress], None] | None = None,
) -> None:
    """Waits until every engine serves; raises `EngineFailedError` if one dies or is too late."""
    for _ in _until_ready(engines, timeout_s, progress):
        time.sleep(_READY_POLL_S)


async def wait_ready_async(
    engines: Sequence[Engine],
    *,
    timeout_s: float = READY_TIMEOUT_S,
    progress: Callable[[EngineProgress], None] | None = None,
) -> None:
    """Like `wait_ready`, for a caller in an asyncio loop: it can be cancelled at any time."""
    for _ in _until_ready(engines, timeout_s, progress):
        await asyncio.sleep(_READY_POLL_S)


def stop_engines(engines: Sequence[Engine]) -> None:
    """Ends the engines together: SIGTERM, a bounded wait, then SIGKILL to what is left."""
    _end(engines)
    for engine in engines:
        engine.http_lease.release()
        engine.side_channel_lease.release()


def _end(engines: Sequence[Engine]) -> None:
    left = [engine for engine in engines if engine.process.returncode is None]
    for engine in left:
        _signal_group(engine, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while any(engine.is_running() for engine in left) and time.monotonic() < deadline:
        time.sleep(_STOP_POLL_S)
    for engine in left:
        # Also where the leader has ended: its workers may not have. It is not reaped yet, so the
        # group's id is still ours.
        _signal_group(engine, signal.SIGKILL)
        engine.process.wait()


class EnginePair:
    """A context in which a producer and a consumer run; entering starts both and does not wait."""

    def __init__(self, *, producer: EngineSettings, consumer: EngineSettings) -> None:
        self._settings = (producer, consumer)
        self._engines: list[Engine] = []

    @property
    def producer(self) -> Engine:
        return self._engines[0]

    @property
    def consumer(self) -> Engine:
        return self._engines[1]

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._engines)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(stop_engines, self._engines)
            for settings in self._settings:
                self._engines.append(start_engine(settings))
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop_engines(self._engines)


def environment(settings: EngineSettings, side_channel_port: int) -> dict[str, str]:
    """The environment of an engine: ours, what two engines on two cores need, and the extra."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_space_gib),
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": settings.host,
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "PYTHONPATH": import_path(),
        **settings.extra_env,
    }


def import_path(*first: Path) -> str:
    """`PYTHONPATH` for a child: `first`, and this checkout's root unless kvflow is installed."""
    root = str(Path(kvflow.__file__).resolve().parent.parent)
    ours = "" if root == sysconfig.get_path("purelib") else root
    parts = (*map(str, first), ours, os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(part for part in parts if part)


def _arguments(settings: EngineSettings, http_port: int) -> list[str]:
    arguments = [
        *("--host", settings.host),
        *("--port", str(http_port)),
        *("--model", str(settings.model)),
        *("--served-model-name", SERVED_MODEL),
        *("--dtype", "float32"),
        *("--max-model-len", str(settings.max_model_tokens)),
        *("--block-size", str(settings.block_tokens)),
        *("--distributed-executor-backend", "uni"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
    ]
    if settings.kv_transfer_config is not None:
        arguments += ["--kv-transfer-config", json.dumps(settings.kv_transfer_config)]
    return [*arguments, *settings.extra_args]


def _until_ready(
    engines: Sequence[Engine],
    timeout_s: float,
    progress: Callable[[EngineProgress], None] | None,
) -> Iterator[None]:
    """Looks at every engine, yields for a pause, and ends when all are ready."""
    deadline = time.monotonic() + timeout_s
    while True:
        reports = [engine.progress() for engine in engines]
        for report in reports:
            if progress is not None:
                progress(report)
        if all(report.is_ready for report in reports):
            return
        if time.monotonic() > deadline:
            late = next(e for e, r in zip(engines, reports, strict=True) if not r.is_ready)
            raise EngineFailedError(late.failure("was not ready"))
        yield


def _signal_group(engine: Engine, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
        os.killpg(engine.process.pid, number)


def _tail(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _LOG_TAIL_BYTES_MAX))
        return log.read().decode(errors="replace")
