"""`Head`: a pattern for the beginning of a tool call, which a parser can match before the whole text has arrived."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

_ELEMENT = re.compile(r"\{(\w+)\}|\{\?(.)\}|(\s+)|(.)", re.DOTALL)
_WHITE_SPACE = r"\s{0,64}"
_MAX_HOLE = 256


@dataclass(frozen=True, slots=True)
class Head:
    """A literal text with holes, such as `<function={name}>`, at the beginning of a tool call or an argument.

    spec: literal text. White space matches any white space or none. `{name}` matches the name of a function. Any other
          `{hole}` matches text up to the character that follows the hole. The match has a group for each hole. `{?x}`
          at the end matches if the character x follows; x is not part of the match.

    pattern: matches the whole head.
    begin:   matches any text that can become a match when more text follows.
    """

    spec: str
    pattern: re.Pattern[str] = field(init=False)
    begin: re.Pattern[str] = field(init=False)

    @property
    def parts(self) -> Iterator[tuple[Literal["text", "space", "hole"], str]]:
        """Yield kind and text of each part of `spec` except `{?x}`. The text of a hole is its name."""
        for literal, group in groupby(_ELEMENT.finditer(self.spec), key=lambda element: element[4] is not None):
            if literal:
                yield "text", "".join(element[4] for element in group)
                continue
            for hole, _, space, _ in (element.groups() for element in group):
                if hole is not None:
                    yield "hole", hole
                elif space is not None:
                    yield "space", space

    def __post_init__(self) -> None:
        whole: list[str] = []
        beginnings: list[str] = []  # %s is replaced by the pattern for the beginning of the next element
        elements = list(_ELEMENT.finditer(self.spec))
        for element, following in zip(elements, [*elements[1:], None], strict=True):
            hole, next_character, space, literal = element.groups()
            if next_character is not None:
                whole.append(f"(?={re.escape(next_character)})")
            elif hole is not None:
                end = "" if following is None or following[4] is None else re.escape(following[4])
                characters = r"[\w.-]" if hole == "name" else rf"[^\n{end}]"
                characters = f"{characters}{{1,{_MAX_HOLE}}}"
                whole.append(f"(?P<{hole}>{characters})")
                beginnings.append(f"(?:{characters}%s)?")
            elif space is not None:
                whole.append(_WHITE_SPACE)
                beginnings.append(f"{_WHITE_SPACE}%s")
            else:
                whole.append(re.escape(literal))
                beginnings.append(f"(?:{re.escape(literal)}%s)?")
        begin = ""
        for beginning in reversed(beginnings):
            begin = beginning.replace("%s", begin)
        object.__setattr__(self, "pattern", re.compile("".join(whole)))
        object.__setattr__(self, "begin", re.compile(begin))
