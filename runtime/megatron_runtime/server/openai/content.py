"""The content of a message with images, audio or video. media.py reads the files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from megatron_runtime.server.errors import invalid_value

_OF_URL: Mapping[str, str] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""Modality of each type of content part that has a URL."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio or video in a message.

    modality:    image, audio or video.
    url:         URL of the file.
    named:       the `type` of the content part in the request, for error messages.
    placeholder: text that replaces the part if the model does not accept its modality; None: the request is rejected.
    """

    modality: str
    url: str
    named: str
    placeholder: str | None = None

    def is_supported(self, supported: Collection[str]) -> bool:
        return self.placeholder is None or self.modality in supported


@dataclass(frozen=True, slots=True)
class MixedContent:
    """The content of a message that contains media."""

    parts: tuple[str | MediaPart, ...]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a pydantic schema that accepts no JSON, because only validators create instances of this class."""
        return core_schema.is_instance_schema(cls)

    @property
    def text(self) -> str:
        """The text of the content.

        Placeholders replace images, audio and video. Media without a placeholder are left out.
        """
        texts = [part if isinstance(part, str) else part.placeholder for part in self.parts]
        return "\n".join(text for text in texts if text is not None)

    def media(self, supported: Collection[str]) -> list[MediaPart]:
        """Return the images, audio and video that become part of the prompt. Placeholders replace all other media.

        supported: modalities that the model accepts.
        """
        return [part for part in self.parts if isinstance(part, MediaPart) and part.is_supported(supported)]

    def for_template(self, supported: Collection[str], numbers: Iterator[int]) -> str | list[dict[str, Any]]:
        """Return the content in the form that renderers expect: a text, or a list of text parts and media parts.

        supported: modalities that the model accepts. Other media are replaced by their placeholders.
        numbers:   yields consecutive indexes for the media of the conversation.
        """
        if not self.media(supported):
            return self.text
        parts: list[dict[str, Any]] = []
        for part in self.parts:
            if isinstance(part, MediaPart) and part.is_supported(supported):
                parts.append({"type": "media", "number": next(numbers)})
            else:
                parts.append({"type": "text", "text": part if isinstance(part, str) else part.placeholder})
        return parts


def content_of(parts: Sequence[str | MediaPart], separator: str = "\n") -> str | MixedContent:
    """Return the content of a message with these parts.

    If all parts are texts, the content is one text, in which `separator` is between the parts.
    """
    texts = [part for part in parts if isinstance(part, str)]
    return separator.join(texts) if len(texts) == len(parts) else MixedContent(tuple(parts))


def media_part(part: dict[str, Any]) -> MediaPart | None:
    """Return the image, audio or video of a content part of OpenAI's chat API.

    Return None if the part has another type or no URL.
    """
    named = part.get("type")
    if named == "input_audio":
        audio = part.get("input_audio")
        data = audio.get("data") if isinstance(audio, dict) else None
        return MediaPart("audio", f"data:audio/x;base64,{data}", named) if isinstance(data, str) and data else None
    modality = _OF_URL.get(named) if isinstance(named, str) else None
    if modality is None:
        return None
    value = part.get(str(named))
    url = value.get("url") if isinstance(value, dict) else value
    return MediaPart(modality, url, str(named)) if isinstance(url, str) and url else None


def check_supported(part: MediaPart, supported: Collection[str], *, param: str) -> None:
    """Raise ApiError 400 for media that this server's model does not accept."""
    if part.modality in supported:
        return
    reads = f"text, {' and '.join(supported)}" if supported else "text only"
    problem = f"this model reads {reads}: every content part needs type 'text' and a text, not {part.named!r}"
    raise invalid_value(param, problem)
