"""How the two engines of a pair are set up: for the cores of one CPU, or for devices of their own.

On a CPU the settings are the demo's, under which two engines share two cores. With devices, each
engine has its own, and everything that is a concession to two cores is taken back.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvflow.bench import peers
from kvflow.bench.serve_connectors import Connector, Origin
from kvflow.bench.serve_options import ServeOptions
from kvflow.demo.engines import EngineSettings, import_path
from kvflow.demo.traces import TRACE_SUFFIX

CPU_CHUNK_TOKENS = 512
_SIDES = ("producer", "consumer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all engines of a run have in common."""

    options: ServeOptions
    model: str
    is_cpu: bool

    @property
    def even_peers(self) -> bool:
        given = self.options.even_peers
        return self.is_cpu if given is None else given

    def settings(self, connector: Connector, directory: Path) -> tuple[EngineSettings, ...]:
        """The producer's and the consumer's."""
        return tuple(self._engine(connector, side, directory) for side in _SIDES)

    def steps(self, connector: Connector) -> tuple[str, ...]:
        """What is changed when an engine of this connector starts."""
        even = peers.EVEN if self.even_peers and connector.origin is Origin.UPSTREAM else ()
        shared_cores = self.is_cpu and self.options.tensor_parallel_size > 1
        return (*even, *((peers.QUIET_QUEUE,) if shared_cores else ()))

    def arguments(self) -> tuple[str, ...]:
        """What every engine is started with, beyond the demo's arguments; the user's come last."""
        options = self.options
        arguments: list[str] = []
        if not self.is_cpu:
            arguments += ["--dtype", "auto", "--no-enforce-eager"]
        if options.tensor_parallel_size > 1:
            arguments += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
            arguments += ["--distributed-executor-backend", "mp"]
        chunk = options.max_num_batched_tokens or (CPU_CHUNK_TOKENS if self.is_cpu else None)
        if chunk is not None:
            arguments += ["--max-num-batched-tokens", str(chunk)]
        return (*arguments, *options.engine_arguments)

    def _engine(self, connector: Connector, side: str, directory: Path) -> EngineSettings:
        steps = self.steps(connector)
        at_start: dict[str, str] = {}
        if steps:
            modules = directory / "at_start"
            at_start = peers.start_environment(steps, modules)
            at_start["PYTHONPATH"] = import_path(modules)
        if connector.origin is Origin.KVFLOW:
            at_start["KVFLOW_TRACE"] = str(directory / f"{side}-%p{TRACE_SUFFIX}")
        return EngineSettings(
            name=side,
            model=Path(self.model),
            log_path=directory / f"{side}.log",
            kv_transfer_config=connector.transfer_config(f"kv_{side}"),
            max_model_tokens=max(self.options.lengths) + self.options.output_tokens,
            extra_env={**self._places(side), **at_start},
            extra_args=self.arguments(),
        )

    def _places(self, side: str) -> Mapping[str, str]:
        """Where an engine runs."""
        if self.is_cpu:
            return {}
        ranks = self.options.tensor_parallel_size
        first = _SIDES.index(side) * ranks
        given = {
            "producer": self.options.producer_devices,
            "consumer": self.options.consumer_devices,
        }[side]
        devices = given or tuple(str(number) for number in range(first, first + ranks))
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        }
