"""The other process of `test_nixl_port`: a `NixlPort` with one buffer, led by JSON lines.

    python peer_process.py NAME BYTES COMMAND_FD ANSWER_FD

Between commands it answers notifications: `echo:X` by X itself, `digest` by the SHA-256 of its
buffer at that moment. It ends when its command pipe does. (NIXL logs to stdout, hence the fds.)
"""

import hashlib
import json
import select
import sys
from typing import Any, TextIO

import numpy as np

from kvflow.errors import TransportError
from kvflow.ids import AgentName
from kvflow.io.nixl_port import NixlPort
from kvflow.layout import Region

POLL_S = 0.0002


def whole(memory: np.ndarray) -> Region:
    """The buffer as one region of one block."""
    return Region.pages(
        layer="all",
        group=0,
        base=memory.ctypes.data,
        block_bytes=memory.nbytes,
        stride_bytes=memory.nbytes,
        blocks=1,
        memory="DRAM",
        device=0,
    )


def obey(port: NixlPort, memory: np.ndarray, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command; returns the answer."""
    match command["do"]:
        case "add_peer":
            return {"name": port.add_peer(bytes.fromhex(command["metadata"]))}
        case "read":
            return {"bytes": memory.tobytes().hex()}
        case "fill":
            memory[:] = command["value"]
            return {}
        case "send":
            port.send(AgentName(command["name"]), bytes.fromhex(command["payload"]))
            return {}
    raise ValueError(command)


def answer_notifications(port: NixlPort, memory: np.ndarray) -> None:
    for sender, payload in port.receive():
        if payload.startswith(b"echo:"):
            answer = payload.removeprefix(b"echo:")
        else:
            answer = hashlib.sha256(memory.tobytes()).digest()
        try:
            port.send(sender, answer)
        except TransportError as error:
            print(f"no answer to {sender}: {error}", file=sys.stderr)


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    name, size, command_fd, answer_fd = sys.argv[1:]
    memory = np.zeros(int(size), dtype=np.uint8)
    port = NixlPort(AgentName(name))
    port.register([whole(memory)])
    with open(int(command_fd), "rb", buffering=0) as commands, open(int(answer_fd), "w") as answers:
        say(answers, {"metadata": port.metadata().hex(), "base": memory.ctypes.data})
        while True:
            answer_notifications(port, memory)
            if not select.select([commands], [], [], POLL_S)[0]:
                continue
            line = commands.readline()
            if not line:
                break
            say(answers, obey(port, memory, json.loads(line)))
    port.close()


if __name__ == "__main__":
    main()
