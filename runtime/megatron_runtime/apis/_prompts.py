"""The shapes in which prompts may come."""

from __future__ import annotations

from typing import Any, TypeAlias

Prompt: TypeAlias = str | list[int]
Prompts: TypeAlias = str | list[int] | list[str] | list[list[int]]


def normalize_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """(prompts as a list, whether a batch was given). Only the first element is looked at; the engine checks the rest.

    Raises TypeError for anything but str, list[int], list[str], list[list[int]].
    """
    if isinstance(prompts, str):
        return [prompts], False
    if isinstance(prompts, list):
        if not prompts:
            return [], True
        first = prompts[0]
        if isinstance(first, int) and not isinstance(first, bool):
            return [prompts], False
        if isinstance(first, str | list):
            return prompts, True
    shown = f"a list of {type(prompts[0]).__name__}" if isinstance(prompts, list) else type(prompts).__name__
    raise TypeError(f"prompts is {shown}: want str, list[int], list[str] or list[list[int]]")
