"""The checks, and running them.

The idea: `Facts` asks each probe at most once, when a check first wants it. A check that cannot be
made, for whatever reason, is a finding of its own and ends no other.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvflow.doctor import network, nixl_probe, probes
from kvflow.doctor.checks import (
    config,
    engines,
    listening,
    memory,
    pair,
    rdma,
    transfer,
    transports,
    versions,
)
from kvflow.doctor.facts import (
    Asked,
    Gpu,
    Limits,
    Nixl,
    OpenAi,
    Packages,
    Rdma,
    Reached,
    Side,
    SideChannel,
)
from kvflow.doctor.findings import Finding, warning
from kvflow.ids import Address


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Where facts come from; tests give made-up ones."""

    packages: Callable[[], Packages] = probes.packages
    rdma: Callable[[], Rdma] = probes.rdma
    limits: Callable[[], Limits] = probes.limits
    gpu: Callable[[], Gpu] = probes.gpu
    nixl: Callable[..., Nixl] = nixl_probe.nixl
    listening: Callable[..., SideChannel] = network.listening
    reach: Callable[[Address, float], Reached] = network.reach
    meet: Callable[..., Side] = network.meet
    engine: Callable[[str, float], OpenAi] = network.engine
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class Facts:
    """What is known, found out when it is first wanted."""

    def __init__(self, asked: Asked, probes: Probes | None = None) -> None:
        self.asked = asked
        self._probes = probes or Probes()
        self.environment = self._probes.environment

    @cached_property
    def packages(self) -> Packages:
        return self._probes.packages()

    @cached_property
    def rdma(self) -> Rdma:
        return self._probes.rdma()

    @cached_property
    def limits(self) -> Limits:
        return self._probes.limits()

    @cached_property
    def gpu(self) -> Gpu:
        return self._probes.gpu()

    @cached_property
    def nixl(self) -> Nixl:
        return self._probes.nixl(self.asked.backends, self.environment, measure=self.asked.transfer)

    @cached_property
    def listening(self) -> SideChannel:
        asked = self.asked
        return self._probes.listening(
            asked.side_channel, self.environment, asked.seal, asked.timeout_s
        )

    @cached_property
    def peers(self) -> tuple[Reached, ...]:
        asked = self.asked
        return tuple(self._probes.reach(peer, asked.timeout_s) for peer in asked.peers)

    @cached_property
    def sides(self) -> tuple[Side | None, Side | None]:
        """Producer and consumer, running or described."""
        asked = self.asked
        if asked.described is not None:
            return asked.described
        return self._met("producer", asked.producer), self._met("consumer", asked.consumer)

    @cached_property
    def engines(self) -> tuple[OpenAi, ...]:
        return tuple(self._probes.engine(url, self.asked.timeout_s) for url in self.asked.engines)

    def _met(self, name: str, address: Address | None) -> Side | None:
        if address is None:
            return None
        return self._probes.meet(name, address, self.asked.seal, self.asked.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A row of `CHECKS`.

    looks_at  what it looks at, for people.
    run       from facts to findings; none where there is nothing to look at.
    """

    name: str
    looks_at: str
    run: Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check has found."""

    check: Check
    findings: tuple[Finding, ...]


def _transports(facts: Facts) -> Iterator[Finding]:
    # Without NIXL there is nothing to try, and the versions say so.
    if versions.has_nixl(facts.packages):
        remote = facts.asked.remote_peers
        yield from transports.check(facts.nixl, facts.rdma, facts.environment, remote_peers=remote)


def _transfer(facts: Facts) -> Iterator[Finding]:
    if facts.asked.transfer and versions.has_nixl(facts.packages):
        yield from transfer.check(facts.nixl)


def _rdma(facts: Facts) -> Iterator[Finding]:
    asked = facts.asked
    return rdma.check(
        facts.rdma, facts.limits, facts.gpu, asked.backends, remote_peers=asked.remote_peers
    )


def _listening(facts: Facts) -> Iterator[Finding]:
    asked = facts.asked
    yield from listening.check(
        facts.listening,
        listens=config.listens(asked.kv_config),
        remote_peers=asked.remote_peers,
    )


def _config(facts: Facts) -> Iterator[Finding]:
    if facts.asked.kv_config is not None:
        yield from config.check(facts.asked.kv_config)


CHECKS = (
    Check(
        name="versions",
        looks_at="Python, kvflow's requirements, NIXL, vLLM, against what pyproject.toml says",
        run=lambda facts: versions.check(facts.packages),
    ),
    Check(
        name="transports",
        looks_at="two processes with a NIXL agent each: what UCX says that it moves bytes by, "
        "within this machine and without shared memory",
        run=_transports,
    ),
    Check(
        name="rdma",
        looks_at="/sys/class/infiniband, /dev/infiniband, RLIMIT_MEMLOCK, the GPU driver's modules",
        run=_rdma,
    ),
    Check(
        name="memory",
        looks_at="/dev/shm, open files, UCX's registration cache",
        run=lambda facts: memory.check(facts.limits, facts.environment, facts.rdma),
    ),
    Check(
        name="config",
        looks_at="the given --kv-transfer-config: keys, role, policy, settings",
        run=_config,
    ),
    Check(
        name="side-channel",
        looks_at="the address that an engine here would listen at and tell to its peers",
        run=_listening,
    ),
    Check(
        name="peers",
        looks_at="TCP connections to the given side channels",
        run=lambda facts: map(listening.reached, facts.peers),
    ),
    Check(
        name="engines",
        looks_at="/version and /v1/models of the given engines",
        run=lambda facts: engines.check(facts.engines, facts.packages.wanted.get("vllm", "")),
    ),
    Check(
        name="pair",
        looks_at="what two engines tell of themselves, and whether KV moves between them",
        run=lambda facts: pair.check(*facts.sides),
    ),
    Check(
        name="transfer",
        looks_at="bandwidth of large and of scattered runs and round trips of notifications "
        "between two processes, beside a memory copy",
        run=_transfer,
    ),
)


def examine(
    facts: Facts,
    checks: tuple[Check, ...] = CHECKS,
    begin: Callable[[Check], None] = lambda _: None,
) -> list[Result]:
    """Run the checks, one after the other; `begin` is told of each before it."""
    results = []
    for check in checks:
        begin(check)
        results.append(Result(check=check, findings=tuple(_findings(check, facts))))
    return results


def _findings(check: Check, facts: Facts) -> Iterator[Finding]:
    try:
        yield from check.run(facts)
    except Exception as error:
        yield warning(
            f"Could not check {check.name}: {type(error).__name__}: {error}.",
            "Something is as nobody thought of, or kvflow doctor has a bug; nothing is known of "
            f"what it looks at: {check.looks_at}.",
            "Report it with this line; the other checks were made all the same.",
        )
