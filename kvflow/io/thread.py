"""A thread with an event loop of its own, and the hand-over between it and vLLM's thread."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvflow.core import Reason
from kvflow.errors import TransportError
from kvflow.ids import RequestId

T = TypeVar("T")


class LoopThread:
    """Runs a uvloop event loop in a daemon thread from `__init__` until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int | None:
        """The thread's id for the system, for measuring its processor time."""
        return self._thread.native_id

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, function: Callable[[], object]) -> None:
        """Run `function` in the loop soon; no-op once stopped."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `coroutine` in the loop and wait for its result.

        Raises what it raises, or `TransportError` after `timeout_s`. Not for use on a hot path.
        """
        try:
            future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError as error:
            coroutine.close()
            raise TransportError("the loop thread has ended") from error
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if not future.cancel():
                raise
            raise TransportError(f"no result in {timeout_s} s") from error

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop the loop and wait for the thread; True if it ended in time. Idempotent."""
        self.call(self.loop.stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._name_for_the_system()
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.close()

    def _name_for_the_system(self) -> None:
        """So that `top -H` and profilers show it; Linux keeps 15 characters."""
        path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        with contextlib.suppress(OSError):
            path.write_text(self._thread.name[:15], encoding="ascii")


class Outbox:
    """Reports for vLLM: put in by the loop thread, taken out by vLLM's.

    Invariant: a request is in at most one report per direction at a time.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sent: list[RequestId] = []
        self._received: list[tuple[RequestId, Reason | None]] = []

    def sent(self, request_id: RequestId) -> None:
        """The prefill's blocks may be freed."""
        with self._condition:
            self._sent.append(request_id)
            self._condition.notify()

    def received(self, request_id: RequestId, reason: Reason | None) -> None:
        """The load has ended, with its KV if `reason` is None."""
        with self._condition:
            self._received.append((request_id, reason))
            self._condition.notify()

    def take(self) -> tuple[list[RequestId], list[tuple[RequestId, Reason | None]]]:
        """Everything reported since the last call."""
        with self._condition:
            taken = self._sent, self._received
            self._sent, self._received = [], []
            return taken

    def wait(self, timeout_s: float) -> None:
        """Return when something is reported, or after `timeout_s`."""
        with self._condition:
            if not self._sent and not self._received:
                self._condition.wait(timeout_s)
