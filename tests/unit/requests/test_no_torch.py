"""Code that only handles maps and lists does not load torch."""

import subprocess
import sys

from eventually import LONG_SECONDS

PROGRAM = """
import sys
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord

request = DynamicInferenceRequest(
    request_id=1, prompt_tokens=[1, 2, 3, 4], enable_prefix_caching=True, block_size_tokens=2, generated_tokens=[5]
)
record = DynamicInferenceRequestRecord.from_request(request)
record.checkpoint()
record.stamp_epoch(3)
merged = DynamicInferenceRequestRecord.deserialize(record.serialize()).merge()
assert merged.generated_tokens == [5]
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""


def test_requests_and_clients_run_without_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=LONG_SECONDS)


WITHOUT_MEGATRON = """
import sys
from megatron_runtime.requests.request import DynamicInferenceRequest

request = DynamicInferenceRequest.deserialize({"request_id": 1, "routing_indices": ("tensor", [[1, 2]], "uint8")})
assert request.routing_indices.tolist() == [[1, 2]]
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""


def test_without_megatrons_names_a_tensor_is_read_as_an_array() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_MEGATRON], check=True, timeout=LONG_SECONDS)
