"""See the README."""

from __future__ import annotations


class ToolParserManager:
    @classmethod
    def list_registered(cls) -> list[str]:
        return ["fake_calls", "hermes"]
