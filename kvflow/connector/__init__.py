"""vLLM's side: the connector, as delegation to the layers below.

On a CPU with AMX, a decode engine that has never prefilled dies with an illegal instruction in its
first bfloat16 step after KV has arrived, since nothing in its process has asked the system for AMX
tiles. Importing this module asks.
"""

import torch

from kvflow.connector.facade import KVFlowConnector

if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

__all__ = ["KVFlowConnector"]
