"""See the README."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class ModelConfig:
    def __init__(self, model: str) -> None:
        self.model = model
        self.quantization: str | None = "fp8"
        self.max_model_len = 8
        config = json.loads((Path(model) / "config.json").read_text())
        self.hf_config = SimpleNamespace(model_type="fake", takes=config.get("takes", ()))


class VllmConfig:
    def __init__(self, *, model_config: Any) -> None:
        assert model_config.quantization is None
        self.model_config = model_config
