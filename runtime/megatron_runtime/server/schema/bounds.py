"""Bounded types for request fields: every list and map has a longest length, and stops at its first wrong element."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictInt

MAX_NAME_CHARACTERS = 256
MAX_TOKEN_IDS = 1 << 20
MAX_STOP_TOKEN_IDS = 1024
MAX_MESSAGES = 4096
MAX_CALLS = 128
MAX_TEMPLATE_VARIABLES = 64
MAX_SCHEMA_KEYS = 4096

FREE_JSON = "bounded by JsonScan"
"""Marks JSON of any shape: `json_limits` bounds its depth and size before the body is parsed."""

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
JsonValue = Annotated[Any, FREE_JSON]
JsonObject = Annotated[dict[str, JsonValue], Field(max_length=MAX_SCHEMA_KEYS)]
Discarded = Annotated[Any, BeforeValidator(lambda _: None)]
"""A field that is accepted without effect: its value is dropped, whatever it is."""
Neutral = Annotated[Any, FREE_JSON]
"""A field that is not offered: `refused_unless` accepts only values that request nothing."""
