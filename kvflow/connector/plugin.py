"""The `vllm.general_plugins` entry point: makes `KVFlowConnector` known to vLLM by name alone."""

NAME = "KVFlowConnector"


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvflow.connector", NAME)
