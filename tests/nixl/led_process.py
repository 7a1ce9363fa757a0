"""Starting a `loop_process.py` and leading it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvflow.ids import Address

WAIT_S = 30.0


class LedEngine:
    """A running `loop_process.py`."""

    def __init__(self, name: str, seed: int) -> None:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        script = str(Path(__file__).with_name("loop_process.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, name, str(seed), str(command_read), str(answer_write)],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._commands = os.fdopen(command_write, "w")
        self._answers = os.fdopen(answer_read)
        self.name = name
        self.address = Address(*self._answer()["address"])

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        self._commands.write(json.dumps({"do": do, **fields}) + "\n")
        self._commands.flush()
        return self._answer()

    def stop(self) -> None:
        """As a debugger or a full swap would."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        self._commands.close()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait(WAIT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
