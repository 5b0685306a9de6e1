"""Reads the special and added tokens that files next to tokenizer.json declare, as transformers does.

tokenizer.json lists added tokens itself. tokenizer_config.json can add tokens to them and change their attributes, and
its special tokens are added tokens too. Directories of earlier releases of transformers have special_tokens_map.json
and added_tokens.json instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from megatron_runtime.checkpoints.model_files import ModelDirectory
from megatron_runtime.protocol import strict_json as json

SETTINGS_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MAIN_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_DECODER = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json. If it lists no added tokens, the files of earlier releases add them.

    Raises ModelFileError if a file is not a JSON object.
    """
    settings, named, added = (_read_json(directory, name) for name in (SETTINGS_FILE, MAP_FILE, ADDED_FILE))
    if _DECODER in settings:
        return settings
    decoder = {str(id_): {"content": text} for text, id_ in added.items()}
    return {**settings, **{name: token for name, token in named.items() if token is not None}, _DECODER: decoder}


def token_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens, such as "eos_token", which chat templates can use.

    Raises ValueError if a token of MAIN_TOKENS is not a token.
    """
    extra = settings.get("extra_special_tokens")
    texts = {}
    for name, value in {**settings, **(extra if isinstance(extra, dict) else {})}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name in MAIN_TOKENS and text is not None and not isinstance(text, str):
            raise ValueError(f"{SETTINGS_FILE}: {name} is {value!r:.80}: want a string, or an object with `content`")
        if name.endswith("_token") and isinstance(text, str) and text:
            texts[name] = text
    return texts


def with_declared_tokens(
    content: bytes, settings: Mapping[str, Any], backend: tokenizers.Tokenizer, *, logits: int | None
) -> bytes | None:
    """Return `content`, a tokenizer.json, with the tokens that `settings` declares; None if it has all of them.

    A token is left out if its id does not follow from the vocabulary, or if the model has no logit for it.

    backend: the tokenizer that was loaded from `content`.
    logits:  number of the model's logits per token; None if unknown.

    Raises ValueError if `settings` has an added token that is not an object with `content`.
    """
    known = {
        id_: {"content": token.content, **{flag: getattr(token, flag) for flag in _FLAGS}}
        for id_, token in backend.get_added_tokens_decoder().items()
    }
    next_id, changed = backend.get_vocab_size(with_added_tokens=True), {}
    for declared_id, token in sorted(_listed(settings).items()):
        id_ = backend.token_to_id(token["content"])
        if id_ is None and declared_id == next_id and (logits is None or next_id < logits):
            id_, next_id = next_id, next_id + 1
        if id_ == declared_id:
            changed[id_] = _token(token, known.get(id_))
    ids = {token["content"]: id_ for id_, token in changed.items()}
    for text in token_texts(settings).values():
        id_ = ids.get(text, backend.token_to_id(text))
        if id_ is not None:
            changed[id_] = _token({"content": text, "special": True}, changed.get(id_, known.get(id_)))
    changed = {id_: token for id_, token in changed.items() if token != known.get(id_)}
    if not changed:
        return None
    state = json.loads(content)
    listed = {token["id"]: token for token in state.get("added_tokens") or []}
    for id_, token in changed.items():
        listed[id_] = {"id": id_, **token}
    return json.dumps({**state, "added_tokens": [listed[id_] for id_ in sorted(listed)]}, ensure_ascii=False).encode()


def _token(declared: Mapping[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the attributes of an added token. known: its attributes without the declaration."""
    before = known or {**dict.fromkeys(_FLAGS, False), "normalized": not declared.get("special")}
    flags = {flag: declared[flag] for flag in _FLAGS if isinstance(declared.get(flag), bool)}
    is_special = bool(flags.get("special") or before["special"])
    return {**before, **flags, "content": declared["content"], "special": is_special}


def _listed(settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the added tokens that `settings` lists, by token id."""
    listed = settings.get(_DECODER)
    if not isinstance(listed, dict):
        return {}
    tokens = {}
    for id_, token in listed.items():
        if not id_.isdecimal() or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(
                f"{SETTINGS_FILE}: {_DECODER} has {token!r:.80} for {id_!r:.40}: want an object with `content` for "
                "each token id"
            )
        if token["content"]:
            tokens[int(id_)] = token
    return tokens


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    file = ModelDirectory(directory).file(name)
    return {} if file is None else file.read_json()
