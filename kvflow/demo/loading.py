"""Shows how far engines are that were started."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from kvflow.demo.engines import EngineProgress


class Loading:
    """Shows how far the engines are: one live line on a terminal, one line per stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stages: dict[str, str] = {}
        self.status = console.status("starting engines")

    def __call__(self, progress: EngineProgress) -> None:
        is_new = self._stages.get(progress.name) != progress.stage
        self._stages[progress.name] = progress.stage
        if self._console.is_terminal:
            stages = "; ".join(f"{name}: {stage}" for name, stage in self._stages.items())
            self.status.update(f"{progress.waited_s:3.0f} s  {stages}")
        elif is_new:
            self._console.print(f"{progress.waited_s:3.0f} s  {progress.name}: {progress.stage}")


@contextmanager
def loading(console: Console) -> Iterator[Loading]:
    shown = Loading(console)
    with shown.status:
        yield shown
