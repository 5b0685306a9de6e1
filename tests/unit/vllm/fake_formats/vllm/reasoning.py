"""See the README."""

from __future__ import annotations


class ReasoningParserManager:
    @classmethod
    def list_registered(cls) -> list[str]:
        return ["fake_thoughts"]
