"""kvflow: a KV-transfer connector for vLLM in which every request is a state machine.

Importing this package needs neither vllm, torch nor nixl: those are imported by the layers that
use them (`kvflow.connector` and `kvflow.io.nixl_port`), and only there.
"""

__version__ = "0.1.0"
