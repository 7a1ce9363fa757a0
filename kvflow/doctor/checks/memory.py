"""Limits that show only after a while: shared memory, open files, UCX's registration cache."""

from collections.abc import Iterator, Mapping

from kvflow.doctor.checks.rdma import in_bytes
from kvflow.doctor.facts import UNLIMITED, Limits, Rdma
from kvflow.doctor.findings import Finding, breaks, note, ok, warning

_SHM_BYTES_MIN = 2**30
_SHM_FREE_BYTES_MIN = 128 * 2**20
_FILES_MIN = 4096
_FILES_WANTED = 65_536
_UNRELEASED = "UCX_RCACHE_MAX_UNRELEASED"
_CACHE = ("UCX_RCACHE_MAX_REGIONS", "UCX_RCACHE_MAX_SIZE")


def check(limits: Limits, environment: Mapping[str, str], rdma: Rdma) -> Iterator[Finding]:
    """What runs full."""
    yield _shm(limits)
    yield _files(limits)
    yield _unreleased(environment, rdma)
    yield _cache(environment)


def _shm(limits: Limits) -> Finding:
    if limits.shm_bytes is None or limits.shm_free_bytes is None:
        return breaks(
            "There is no /dev/shm.",
            "vLLM's workers talk through it, and so does UCX within a machine.",
            "Mount a tmpfs there (docker --shm-size=8g; in Kubernetes an emptyDir with medium "
            "Memory).",
        )
    found = f"/dev/shm: {in_bytes(limits.shm_bytes)}, {in_bytes(limits.shm_free_bytes)} free."
    if limits.shm_bytes < _SHM_BYTES_MIN or limits.shm_free_bytes < _SHM_FREE_BYTES_MIN:
        return warning(
            found,
            "vLLM's workers (their queues, NCCL) and UCX within a machine keep shared memory "
            "there; a process that finds it full ends with a bus error. Docker gives 64 MiB.",
            "docker --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium Memory on "
            "/dev/shm.",
        )
    return ok(found, "vLLM's workers and UCX keep shared memory there.")


def _files(limits: Limits) -> Finding:
    hard = "no limit" if limits.open_files_hard == UNLIMITED else f"{limits.open_files_hard}"
    count = "no limit" if limits.open_files == UNLIMITED else f"{limits.open_files}"
    found = f"Open files: {count} (hard limit: {hard})."
    if limits.open_files != UNLIMITED and limits.open_files < _FILES_MIN:
        return warning(
            found,
            "Each client, each peer and each of UCX's connections is an open file; at the limit an "
            "engine refuses requests, or a transfer fails.",
            f"ulimit -n {_FILES_WANTED} (systemd: LimitNOFILE={_FILES_WANTED}).",
        )
    return ok(found, "Each client, peer and connection is an open file.")


def _unreleased(environment: Mapping[str, str], rdma: Rdma) -> Finding:
    value = environment.get(_UNRELEASED)
    if value is not None and value != "inf":
        return ok(
            f"{_UNRELEASED}={value}.",
            "Memory that was unmapped while UCX had it cached is given back.",
        )
    found = f"{_UNRELEASED} is {'inf' if value else 'not set, which means inf'}."
    why = (
        "UCX watches each unmapping of memory in the process, and keeps what it had cached in a "
        "queue without a bound: engines were seen to grow steadily. "
        "vLLM sets it for its own connector alone; newer UCX is said to be cured."
    )
    to_do = f"{_UNRELEASED}=1024 in the engines' environment."
    return (warning if rdma.devices else note)(found, why, to_do)


def _cache(environment: Mapping[str, str]) -> Finding:
    bounds = {key: environment[key] for key in _CACHE if environment.get(key, "inf") != "inf"}
    if bounds:
        words = ", ".join(f"{key}={value}" for key, value in bounds.items())
        return ok(f"{words}.", "UCX's registration cache has a bound.")
    return note(
        f"{' and '.join(_CACHE)} are not set: UCX's registration cache has no bound.",
        "kvflow registers a worker's pool once, at start, so the cache stays small for it; another "
        "user of UCX in the process can make it grow.",
        f"{_CACHE[0]}=1024, if an engine's memory grows for days.",
    )
