"""A plugin of vLLM, for one engine of a test: its workers cannot load other weights."""

from pathlib import Path


def install() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def fail(self: Worker, *, weights_path: str, **options: object) -> None:
        raise RuntimeError(f"the disk of this engine failed while it read {Path(weights_path).name}")

    Worker.reload_weights = fail
