from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest, Status
from megatron_runtime.requests.sampling_params import SamplingParams


@pytest.fixture
def over_the_wire() -> Callable[[Any], Any]:
    return lambda value: msgpack.unpackb(
        msgpack.packb(value, use_bin_type=True), raw=False, strict_map_key=False, use_list=True
    )


@pytest.fixture
def request_factory() -> Callable[..., DynamicInferenceRequest]:
    def make(**values: Any) -> DynamicInferenceRequest:
        defaults = {
            "request_id": 5,
            "prompt": "hello",
            "prompt_tokens": torch.tensor([1, 2, 3]),
            "sampling_params": SamplingParams(num_tokens_to_generate=10),
            "status": Status.ACTIVE_AND_GENERATING_TOKENS,
        }
        return DynamicInferenceRequest(**{**defaults, **values})

    return make
