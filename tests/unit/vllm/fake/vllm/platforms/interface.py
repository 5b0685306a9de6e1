import os


class Platform:
    def is_sleep_mode_available(self) -> bool:
        return "FAKE_VLLM_CAN_SLEEP" in os.environ

    def is_cpu(self) -> bool:
        return "FAKE_VLLM_ON_GPU" not in os.environ

    def is_unspecified(self) -> bool:
        """Whether this is vLLM for GPUs on a machine without one."""
        return "FAKE_VLLM_WITHOUT_GPU" in os.environ
