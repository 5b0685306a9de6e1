"""Loads the tokenizer of a model reference, and reads and writes Hugging Face tokenizer directories.

A tokenizer.json is part of the model and can be hostile. For example, a regular expression can take years to compile,
and a normalizer can turn ten characters into gigabytes, which aborts the process. Therefore, a child process with
limits first loads the file and encodes some texts. This process loads the file only after the child has succeeded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from megatron_runtime.checkpoints.model_files import (
    MAX_TOKENIZER_BYTES,
    NO_TOKEN,
    OTHER_VOCABULARIES,
    TOKENIZER_FILE,
    ModelDirectory,
    text_part,
)
from megatron_runtime.checkpoints.remote import REMOTE_PREFIXES
from megatron_runtime.checkpoints.source import ModelSourceError, resolve
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.config_fields import Fields, longest_sequence, rope_of_hf
from megatron_runtime.process.children import child_environment, module_command
from megatron_runtime.process.sacrificial_process import ProcessLostError, ProcessStartError, SacrificialProcess
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.tokenization.chat_template import DEFAULT_TEMPLATE, TOOL_TEMPLATE, ChatTemplate
from megatron_runtime.tokenization.gguf_tokenizer import tokenizer_from_gguf
from megatron_runtime.tokenization.special_tokens import (
    SETTINGS_FILE,
    read_settings,
    token_texts,
    with_declared_tokens,
)
from megatron_runtime.tokenization.tokenizer import Tokenizer
from megatron_runtime.tokenization.vocabulary import contained, load_vocabulary

TRIAL_SECONDS, TRIAL_SECONDS_PER_MEGABYTE = 10.0, 1.0
"""Timeout in seconds for loading a tokenizer.json and encoding the trial texts: a fixed part, and a part per
megabyte.
"""
TRIAL_MEMORY_BYTES = 4 << 30
"""Address space of the child process for the tokenizer, in bytes."""
VLLM_SECONDS = 300
"""Timeout in seconds for importing vLLM and reading a vocabulary, which takes about a minute on two loaded cores."""
VLLM_ENVIRONMENT: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
"""Environment of child processes that use vLLM without an engine. They get no GPU and no network access."""
TEMPLATE_FILE, OLD_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
TOOL_TEMPLATE_FILE = f"additional_chat_templates/{TOOL_TEMPLATE}.jinja"
MAX_TOKEN_ID = (1 << 31) - 1


class TokenizerLoadError(ValueError):
    """Raised if a model reference has no usable tokenizer. The message names the reference and the remedy."""


def load_tokenizer(model: str, *, renders_chat: bool = True) -> Tokenizer:
    """Load the tokenizer of a model reference.

    model: `builtin:NAME`, `hf:ORG/NAME[@REVISION]`, the URL of an object store, a .gguf file, or a directory. The
           directory has a tokenizer.json, one .gguf file, or a Megatron-Core checkpoint and a tokenizer.json. If vLLM
           is installed, the directory can instead contain any other vocabulary that vLLM can read.
    renders_chat: whether to load the chat template, which only servers need.

    Raises TokenizerLoadError if the reference has no usable tokenizer.
    """
    try:
        path = tokenizer_location(model)
        load = tokenizer_from_gguf if path.is_file() else tokenizer_from_directory
        return load(path, renders_chat=renders_chat)
    except TokenizerLoadError:
        raise
    except (ValueError, OSError, MemoryError) as error:
        raise TokenizerLoadError(f"the tokenizer of model {model!r} cannot be loaded: {error}") from error


def tokenizer_location(model: str) -> Path:
    """Return the directory, or the .gguf file, that has the tokenizer of a model reference.

    Raises TokenizerLoadError, and the errors of cached_directory().
    """
    if model.startswith(REMOTE_PREFIXES):
        from megatron_runtime.checkpoints.remote.download import cached_directory

        model = str(cached_directory(model, tokenizer_only=True))
    directory = Path(model).expanduser()
    if _has_tokenizer(directory):
        return directory
    try:
        source = resolve(model)
    except ModelSourceError as error:
        raise TokenizerLoadError(str(error)) from error
    if source.format == "GGUF" or _has_tokenizer(source.location):
        return source.location
    other = next((name for name in OTHER_VOCABULARIES if (source.location / name).is_file()), None)
    remedy = "complete the directory" if other is None else f"{other} is read where vLLM is installed (backend: VLLM)"
    raise TokenizerLoadError(f"model {model!r} has no {TOKENIZER_FILE} in {source.location}: {remedy}")


def _has_tokenizer(directory: Path) -> bool:
    files = (TOKENIZER_FILE, *(() if importlib.util.find_spec("vllm") is None else OTHER_VOCABULARIES))
    return any(ModelDirectory(directory).file(name) is not None for name in files)


def tokenizer_from_directory(directory: Path, *, renders_chat: bool = True) -> Tokenizer:
    """Build the tokenizer of a directory. renders_chat: whether to load the chat template.

    If the directory has no tokenizer.json, vLLM reads its vocabulary.

    Special tokens and the chat template come from tokenizer_config.json and chat_template.jinja, or from the files in
    which earlier releases of transformers wrote them. generation_config.json adds end-of-answer tokens and default
    sampling parameters. config.json contains the context length. Each of these files can be absent.

    Raises ValueError if a file is invalid. The message names the file.
    """
    file = ModelDirectory(directory).file(TOKENIZER_FILE)
    vllms: dict[str, Any] = {}
    if file is not None:
        content, name = file.read_bytes(MAX_TOKENIZER_BYTES), str(file.path)
    else:
        vllms = _vllm_tokenizer(directory)
        content, name = vllms["tokenizer"].encode(), f"vLLM's tokenizer of {directory}"
    backend = backend_from_json(content, name=name)
    config = {**vllms.get("special", {}), **read_settings(directory)}
    length, logits = _limits(directory / "config.json")
    if (completed := with_declared_tokens(content, config, backend, logits=logits)) is not None:
        backend = backend_from_json(completed, name=f"{name} with the added tokens of {SETTINGS_FILE}")
    special = token_texts(config)
    templates = _template_sources(directory, config) if renders_chat else {}
    if renders_chat and not templates and vllms.get("chat_template") is not None:
        templates = {DEFAULT_TEMPLATE: vllms["chat_template"]}
    return Tokenizer(
        backend,
        bos_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        add_bos=bool(config.get("add_bos_token", vllms.get("adds_bos", False))),
        eos_ids=_end_ids(directory, backend, special.get("eos_token")),
        chat_template=ChatTemplate.of(templates, DEFAULT_TEMPLATE, special=special),
        tool_template=ChatTemplate.of(templates, TOOL_TEMPLATE, special=special),
        context_length=length,
        logits=logits or 0,
        generation_config=_read_json(directory / "generation_config.json"),
    )


def backend_from_json(content: bytes, *, name: str) -> tokenizers.Tokenizer:
    """Load the content of a tokenizer.json, after a trial in a child process.

    The padding and truncation settings of the file are ignored.

    name: path of the file, for errors.

    Raises ValueError if the file is invalid. The message names the file.
    """
    _run_trial(content, name=name)
    with contained(f"{name} is not a readable tokenizer"):
        return load_vocabulary(content)


def _run_trial(content: bytes, *, name: str) -> None:
    child = SacrificialProcess("megatron_runtime.tokenization.tokenizer_trial", memory_bytes=TRIAL_MEMORY_BYTES)
    seconds = TRIAL_SECONDS + TRIAL_SECONDS_PER_MEGABYTE * len(content) / 1e6
    try:
        verdict = child.call(content, timeout_seconds=seconds)
    except ProcessLostError as error:
        raise ValueError(
            f"{name} is not a usable tokenizer: the process of its trial is limited to {seconds:.0f} s and "
            f"{TRIAL_MEMORY_BYTES >> 20} MiB, and {error}"
        ) from error
    except ProcessStartError as error:
        raise ValueError(f"the trial of {name} could not run: {error}") from error
    finally:
        child.close()
    if verdict:
        raise ValueError(f"{name} is not a readable tokenizer: {verdict.decode()}")


def _vllm_tokenizer(directory: Path) -> dict[str, Any]:
    """Run vllm_tokenizer.py for a directory and return its output.

    Raises ValueError if the tokenizer cannot be read.
    """
    command = module_command("megatron_runtime.tokenization.vllm_tokenizer", str(directory), str(VLLM_SECONDS))
    try:
        child = subprocess.run(
            command,
            env=child_environment(VLLM_ENVIRONMENT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # otherwise, Ctrl-C in a terminal would reach the child too
            timeout=VLLM_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"the tokenizer of {directory} could not be read with vLLM: {error}") from error
    if child.returncode != 0:
        raise ValueError(
            f"the tokenizer of {directory} could not be read with vLLM: its process ended with exit status "
            f"{child.returncode}"
        )
    reply: dict[str, Any] = json.loads(child.stdout)
    if (problem := reply.get("problem")) is not None:
        raise ValueError(f"vLLM cannot read the tokenizer of {directory}: {problem}")
    return reply


def write_gguf_tokenizer(path: Path, directory: Path) -> list[int]:
    """Write the tokenizer of the .gguf file at `path` to `directory` in transformers' format. Return all EOS ids.

    The written files contain only the first EOS id. Raises the errors of tokenizer_from_gguf().
    """
    tokenizer = tokenizer_from_gguf(path)
    template = tokenizer.chat_template
    special = template.special if template is not None else {}
    for name, id_ in (("bos_token", tokenizer.bos_id), ("eos_token", next(iter(tokenizer.eos_ids), None))):
        if id_ is not None:
            special = {name: tokenizer.token_bytes(id_).decode(), **special}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.adds_bos, **special}
    (directory / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    (directory / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for written, name in ((template, TEMPLATE_FILE), (tokenizer.tool_template, TOOL_TEMPLATE_FILE)):
        if written is not None:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(written.source, encoding="utf-8")
    return list(tokenizer.eos_ids)


def _end_ids(directory: Path, backend: tokenizers.Tokenizer, eos_text: str | None) -> list[int]:
    own = backend.token_to_id(eos_text) if eos_text is not None else None
    ids = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        values = _read_json(directory / name)
        listed = values.get("eos_token_id", text_part(values).get("eos_token_id"))
        listed = listed if isinstance(listed, list) else [] if listed in (None, NO_TOKEN) else [listed]
        wrong = next((id_ for id_ in listed if type(id_) is not int or not 0 <= id_ <= MAX_TOKEN_ID), None)
        if wrong is not None:
            raise ValueError(f"{directory / name}: eos_token_id has {wrong!r:.80}: want integers in 0..{MAX_TOKEN_ID}")
        ids.extend(listed)
    return list(dict.fromkeys(ids))


def _template_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. As in transformers, template files override tokenizer_config.json."""
    files = {DEFAULT_TEMPLATE: TEMPLATE_FILE, TOOL_TEMPLATE: TOOL_TEMPLATE_FILE}
    templates = {
        name: file for name, path in files.items() if (file := ModelDirectory(directory).file(path)) is not None
    }
    if templates:
        return {name: file.read_text() for name, file in templates.items()}
    listed = config.get("chat_template")
    if listed is None:  # earlier releases wrote the template of a multimodal model into a file of its own
        listed = _read_json(directory / OLD_TEMPLATE_FILE).get("chat_template")
    if listed is None or isinstance(listed, str):
        return {} if listed is None else {DEFAULT_TEMPLATE: listed}
    if isinstance(listed, dict) and "template" not in listed:
        listed = [{"name": name, "template": template} for name, template in listed.items()]
    entries = listed if isinstance(listed, list) else [listed]
    if not all(
        isinstance(entry, dict) and type(entry.get("name")) is type(entry.get("template")) is str for entry in entries
    ):
        raise ValueError(
            f"{directory / SETTINGS_FILE}: chat_template is {type(listed).__name__}: want a string, or a list of "
            "{name, template}, or templates by name"
        )
    return {entry["name"]: entry["template"] for entry in entries}


def _limits(path: Path) -> tuple[int | None, int | None]:
    """Return the maximum sequence length and the number of logits per token from config.json; None if it has none."""
    fields = text_part(_read_json(path))
    numbers = {name: fields.get(name) for name in ("max_position_embeddings", "vocab_size")}
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"{path}: {name} is {number!r:.80}: want a positive integer")
    length, logits = numbers.values()
    if length is not None:
        with contextlib.suppress(UnsupportedModelError):  # vLLM runs models with other rope scalings
            scaling = rope_of_hf(Fields(fields, where=str(path)), theta=1.0)["rope_scaling"]
            length = longest_sequence(length, scaling)
    return length, logits


def _read_json(path: Path) -> dict[str, Any]:
    file = ModelDirectory(path.parent).file(path.name)
    return {} if file is None else file.read_json()
