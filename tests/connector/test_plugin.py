"""The facade as vLLM finds and uses it."""

import inspect
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="kvflow.connector imports vLLM")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvflow.connector import KVFlowConnector
from kvflow.connector.plugin import NAME, register

# vLLM 0.33's additions to the base class, with their parameters; 0.32 lacks them.
HOOKS_OF_VLLM_0_33 = {
    "supports_sleep_mode": ["kv_transfer_config"],
    "unregister_kv_caches": ["self"],
    "restore_kv_caches": ["self"],
}
# What vLLM 0.33 calls of those that the facade defines, with their parameters.
SIGNATURES_OF_VLLM_0_33 = {
    "bind_connector_metadata": ["self", "connector_metadata"],
    "build_connector_meta": ["self", "scheduler_output"],
    "build_connector_worker_meta": ["self"],
    "build_kv_connector_stats": ["data"],
    "build_prom_metrics": [
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ],
    "get_handshake_metadata": ["self"],
    "get_kv_connector_stats": ["self"],
    "get_loaded_kv_cache_group_ids": ["self", "request"],
    "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
    "get_transfer_results": ["self", "finished_req_ids"],
    "get_required_kvcache_layout": ["vllm_config"],
    "handle_preemptions": ["self", "kv_connector_metadata"],
    "has_pending_push_work": ["self"],
    "on_new_request": ["self", "request"],
    "register_kv_caches": ["self", "kv_caches"],
    "request_finished": ["self", "request", "block_ids"],
    "request_finished_all_groups": ["self", "request", "block_ids"],
    "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "set_host_xfer_buffer_ops": ["self", "copy_operation"],
    "set_xfer_handshake_metadata_pp_aware": ["self", "metadata"],
    "shutdown": ["self"],
    "start_load_kv": ["self", "forward_context", "kwargs"],
    "update_connector_output": ["self", "connector_output"],
    "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
    "wait_for_layer_load": ["self", "layer_name"],
    "wait_for_save": ["self"],
}


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def defined() -> dict[str, object]:
    """The facade's own methods that vLLM may call."""
    return {
        name: value
        for name, value in vars(KVFlowConnector).items()
        if inspect.isroutine(inspect.unwrap(getattr(value, "__func__", value)))
        and not name.startswith("_")
    }


def test_registering_twice_is_fine_and_the_class_is_found_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop(NAME, None)
    register()
    register()
    config = KVTransferConfig(kv_connector=NAME, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is KVFlowConnector


def test_the_class_is_found_by_its_module_path() -> None:
    config = KVTransferConfig(
        kv_connector=NAME, kv_connector_module_path="kvflow.connector", kv_role="kv_both"
    )
    assert KVConnectorFactory.get_connector_class(config) is KVFlowConnector


def test_the_installed_package_registers_itself_with_vllm() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvflow"]
    assert entry.load() is register


def test_every_abstract_method_is_implemented() -> None:
    assert KVFlowConnector.__abstractmethods__ == frozenset()
    assert issubclass(KVFlowConnector, KVConnectorBase_V1)
    assert issubclass(KVFlowConnector, SupportsHMA)


def test_every_method_overrides_one_of_vllms_or_is_a_hook_of_a_later_vllm() -> None:
    for name in defined():
        assert hasattr(KVConnectorBase_V1, name) or name in (
            *HOOKS_OF_VLLM_0_33,
            "request_finished_all_groups",
        ), f"{name} is nothing that vLLM calls"


@pytest.mark.parametrize("name", sorted(SIGNATURES_OF_VLLM_0_33 | HOOKS_OF_VLLM_0_33))
def test_a_method_takes_what_vllm_0_33_passes(name: str) -> None:
    wanted = (SIGNATURES_OF_VLLM_0_33 | HOOKS_OF_VLLM_0_33)[name]
    assert parameters(getattr(KVFlowConnector, name)) == wanted


def test_every_method_of_the_facade_was_compared_with_vllm_0_33() -> None:
    assert set(defined()) == set(SIGNATURES_OF_VLLM_0_33) | set(HOOKS_OF_VLLM_0_33)


@pytest.mark.parametrize("name", sorted(SIGNATURES_OF_VLLM_0_33))
def test_a_method_takes_what_the_installed_vllm_passes(name: str) -> None:
    theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
    assert parameters(getattr(KVFlowConnector, name)) == parameters(theirs)


def test_sleep_mode_is_supported() -> None:
    config = KVTransferConfig(kv_connector=NAME, kv_role="kv_both")
    assert KVFlowConnector.supports_sleep_mode(config)


@pytest.mark.parametrize(
    ("extra", "use_mla", "asked"),
    [
        ({}, False, "LBHNC"),
        ({"cache_layout": "BLHNC"}, False, "BLHNC"),
        ({"cache_layout": ""}, False, None),
        ({}, True, None),
    ],
)
def test_the_cache_layout_that_is_asked_for(
    extra: dict[str, str], use_mla: bool, asked: str | None
) -> None:
    transfer = KVTransferConfig(
        kv_connector=NAME, kv_role="kv_both", kv_connector_extra_config=extra
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla), kv_transfer_config=transfer
    )
    assert KVFlowConnector.get_required_kvcache_layout(config) == asked
