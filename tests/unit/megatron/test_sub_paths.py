"""A program for Megatron-Core changes one prefix: each documented name is at Megatron-Core's own sub-path."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields

import pytest

from megatron_runtime import megatron_core

DOCUMENTED = {
    "apis": "MegatronLLM MegatronAsyncLLM ServeConfig SamplingParams DynamicInferenceRequest "
    "DynamicInferenceRequestRecord",
    "apis._llm_base": "_EventLoopManager _CoordinatorRuntime _MegatronLLMBase",
    "apis.async_llm": "MegatronAsyncLLM",
    "apis.llm": "MegatronLLM",
    "apis.serve_config": "ServeConfig",
    "async_stream": "AsyncStream",
    "config": "InferenceConfig KVCacheManagementMode PrefixCachingCoordinatorPolicy PrefixCachingEvictionPolicy",
    "contexts": "ActiveRequestCountOverflowError BlockOverflowError ContextOverflowError DynamicInferenceContext "
    "RequestOverflowError TokenOverflowError",
    "contexts.dynamic_context": "ActiveRequestCountOverflowError BlockOverflowError ContextOverflowError "
    "DynamicInferenceContext MaxSequenceLengthOverflowError RequestOverflowError TensorStateDeallocatedError "
    "TokenOverflowError",
    "data_parallel_inference_coordinator": "CoordinatorState DataParallelInferenceCoordinator",
    "engines": "DynamicInferenceEngine",
    "engines.dynamic_engine": "DynamicInferenceEngine",
    "headers": "Headers UnknownHeaderError decode_header",
    "inference_client": "InferenceClient",
    "inference_request": "DynamicInferenceEvent DynamicInferenceEventType DynamicInferenceRequest "
    "DynamicInferenceRequestRecord FinishedRequestRecord HASH_BASE HASH_PRIME InferenceRequest Status "
    "VLMInferenceRequest compute_block_hashes_batched deserialize_tensor serialize_tensor",
    "model_inference_wrappers.gpt.gpt_inference_wrapper": "GPTInferenceWrapper",
    "sampling_params": "SamplingParams",
    "text_generation_controllers.text_generation_controller": "TextGenerationController",
    "text_generation_server.dynamic_text_gen_server.text_generation_server": "start_text_gen_server "
    "stop_text_gen_server",
}
"""Names of the documents by sub-path."""

DOCUMENTS_ONLY = {("inference_request", name) for name in ("FinishedRequestRecord", "HASH_BASE", "HASH_PRIME")}
"""Documented names that release 0.19.2 does not have."""


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_name_is_at_the_sub_path_that_it_has_in_megatron_core(path: str) -> None:
    ours = importlib.import_module(f"megatron_runtime.megatron_core.{path}")
    theirs = importlib.import_module(f"megatron.core.inference.{path}")
    for name in DOCUMENTED[path].split():
        assert getattr(ours, name) is not None
        assert hasattr(theirs, name) or (path, name) in DOCUMENTS_ONLY, name


def test_every_header_of_the_release_has_its_number() -> None:
    from megatron.core.inference import headers as theirs

    from megatron_runtime.megatron_core import headers as ours

    for header in theirs.Headers:
        assert ours.decode_header(header.value) is ours.Headers[header.name]
        assert ours.Headers(header) is ours.Headers[header.name]
    with pytest.raises(ours.UnknownHeaderError, match="header 99"):
        ours.decode_header(99)


def test_every_module_of_the_package_is_at_a_sub_path_of_megatron_core() -> None:
    prefix = f"{megatron_core.__name__}."
    found = {
        module.name.removeprefix(prefix)
        for module in pkgutil.walk_packages(megatron_core.__path__, prefix)
        if not module.name.rpartition(".")[2].startswith("_")
    }
    packages = {path.rpartition(".")[0] for path in found} - {""}
    assert found - packages <= DOCUMENTED.keys()


def test_the_fields_of_sampling_params_by_position_are_those_of_megatron() -> None:
    from megatron.core.inference.sampling_params import SamplingParams as Reference

    from megatron_runtime.megatron_core.sampling_params import SamplingParams

    order = [item.name for item in fields(Reference)]
    assert [item.name for item in fields(SamplingParams)][: len(order)] == order
    theirs = Reference(0.5, 3, 0.9, True, True, False, 7)
    ours = SamplingParams(0.5, 3, 0.9, True, True, False, 7)
    assert {name: getattr(ours, name) for name in order} == {name: getattr(theirs, name) for name in order}
