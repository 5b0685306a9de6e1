"""Names of releases after 0.19.2: neutral values are accepted, others are rejected by name."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from echo_executor import EchoExecutor
from megatron.core.inference import config as theirs
from megatron.core.inference import inference_request as their_requests

from megatron_runtime.megatron_core import data_parallel_inference_coordinator, headers, inference_request
from megatron_runtime.megatron_core.config import (
    AsyncScheduleMode,
    CudaGraphSizingDistribution,
    ImageProcessingConfig,
    InferenceConfig,
    InvalidConfigError,
    MambaInferenceStateConfig,
)
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.sampling_params import InvalidSamplingParamsError, SamplingParams


def test_values_of_a_configuration() -> None:
    neutral = InferenceConfig(image_preprocessing_config=None, async_sched_mode=theirs.AsyncScheduleMode.LEGACY)
    assert neutral.async_sched_mode is AsyncScheduleMode.LEGACY
    with pytest.warns(UserWarning, match="cuda_graph_sizing_distribution"):
        InferenceConfig(cuda_graph_sizing_distribution=CudaGraphSizingDistribution.LINEAR)
    assert {member.value for member in CudaGraphSizingDistribution} == {
        member.value for member in theirs.CudaGraphSizingDistribution
    }
    with pytest.raises(InvalidConfigError, match="async_sched_mode"):
        DynamicInferenceEngine(EchoExecutor(), InferenceConfig(async_sched_mode=theirs.AsyncScheduleMode.ASYNC))
    with pytest.raises(InvalidConfigError, match="image_preprocessing_config"):
        InferenceConfig(image_preprocessing_config=object())
    for kind in (ImageProcessingConfig, MambaInferenceStateConfig):
        with pytest.raises(InvalidConfigError, match=kind.__name__):
            kind(layer_type_list=["M"])


def test_the_state_of_mamba_layers() -> None:
    """Megatron-Core's own class is the reference for a model without them."""
    attention = SimpleNamespace(decoder=SimpleNamespace(layer_type_list=["*", "-"]))
    assert MambaInferenceStateConfig.from_model(attention) is None
    assert theirs.MambaInferenceStateConfig.from_model(attention) is None
    with pytest.raises(InvalidConfigError, match="mamba"):
        MambaInferenceStateConfig.from_model(SimpleNamespace(decoder=SimpleNamespace(layer_type_list=["M", "*"])))


async def test_arguments_of_the_client() -> None:
    client = InferenceClient("127.0.0.1:1")
    try:
        for add in (client.add_request, client.add_request_streaming):
            with pytest.raises(ValueError, match="multi_modal_data"):
                add([1], SamplingParams(), multi_modal_data={"image": b""})
        for wrong in ({}, {"epoch": 1, "generation_epoch": 1}):
            with pytest.raises(TypeError, match="generation_epoch"):
                client.set_generation_epoch(**wrong)
    finally:
        client.stop()


def test_the_handoff_of_kv() -> None:
    assert SamplingParams(do_kv_handoff=True).serialize()["do_kv_handoff"] is True
    with pytest.raises(InvalidSamplingParamsError, match="do_kv_handoff"):
        SamplingParams(do_kv_handoff=1)
    for name in (headers.SEND_KV, headers.KV_HANDOFF_COMPLETE):
        with pytest.raises(headers.UnknownHeaderError, match=name):
            headers.decode_header(name)


def test_values_of_serialized_requests() -> None:
    array = np.array([[1, 2], [3, 4]], np.int16)
    packed = their_requests.serialize_ndarray(array)
    assert inference_request.serialize_ndarray(array) == packed
    assert inference_request.deserialize_ndarray(packed).tolist() == array.tolist()
    assert inference_request.deserialize_ndarray(packed).dtype == array.dtype
    request = {"prompt_tokens": ("tensor", [1, 2]), "tpot": [1, 2], "status": None}
    unwrapped = inference_request.unwrap_serialized_tensors(request)
    assert unwrapped == their_requests.unwrap_serialized_tensors(request)
    assert unwrapped["prompt_tokens"] == [1, 2]


def test_statistics_of_one_request() -> None:
    request = inference_request.DynamicInferenceRequest(request_id=3, policy_epoch=[[0, 7]])
    request.add_event_evict()
    finished = inference_request.FinishedRequestRecord.from_request(request)
    assert (finished.request_id, finished.policy_epoch, finished.num_evictions) == (3, [[0, 7]], 1)


def test_the_tables_of_the_coordinator() -> None:
    module = data_parallel_inference_coordinator
    assert {header.name for header in module.CONTROL_TRANSITIONS} == {"PAUSE", "UNPAUSE", "SUSPEND", "RESUME", "STOP"}
    assert not module.HANDLERS
    with pytest.raises(NotImplementedError, match="PAUSE"):
        module.message_handler(headers.Headers.PAUSE)
