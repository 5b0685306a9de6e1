"""A program that uses vLLM's code to read the tokenizer of a model that has no tokenizer.json.

The program runs in a child process, because vLLM and transformers are large, and the files can be hostile. vLLM reads
vocabularies of SentencePiece, tiktoken, Tekken (Mistral) and GPT-2. The child converts the tokenizer to a
tokenizer.json, so that servers and engines can load it like any other tokenizer. loader.py runs the child with the
directory of the model. The child writes a JSON object with these keys:

tokenizer:     content of a tokenizer.json.
special:       texts of special tokens, by their names in tokenizer_config.json.
adds_bos:      whether prompts begin with a begin-of-sequence token that `tokenizer` does not add.
chat_template: the chat template; null if the model has no chat template.
problem:       why the tokenizer cannot be read. If this key is present, the other keys are missing.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from megatron_runtime.checkpoints.model_files import ModelDirectory
from megatron_runtime.process.children import be_child
from megatron_runtime.process.sacrificial_process import limit_memory
from megatron_runtime.protocol import strict_json as json

MEMORY_BYTES = 32 << 30
"""Address space of the child process, in bytes. vLLM's libraries reserve much more than they use."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def _read(directory: Path) -> dict[str, Any]:
    if is_tekken := ModelDirectory(directory).file("tekken.json") is not None:
        # vLLM reads this file with mistral_common, which cannot produce a tokenizer.json.
        from transformers.integrations.mistral import convert_tekken_tokenizer

        tokenizer = convert_tekken_tokenizer(str(directory / "tekken.json"))
    else:
        from vllm.tokenizers import get_tokenizer

        tokenizer = get_tokenizer(str(directory))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"problem": f"{type(tokenizer).__name__} has no tokenizer.json: convert the tokenizer of the model"}
    template = getattr(tokenizer, "chat_template", None)
    return {
        "tokenizer": backend.to_str(),
        "special": {name: str(text) for name in _SPECIAL if (text := getattr(tokenizer, name, None)) is not None},
        "adds_bos": is_tekken,
        "chat_template": template if isinstance(template, str) else None,
    }


def main() -> None:
    """Write the tokenizer of a directory to standard output.

    Command-line arguments: the directory, and the time limit.
    """
    be_child()
    signal.alarm(int(sys.argv[2]))
    limit_memory(MEMORY_BYTES)
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # messages that libraries print must not reach the result
    try:
        reply = _read(Path(sys.argv[1]))
    except Exception as error:
        reply = {"problem": f"{type(error).__name__}: {error}"[:2000]}
    with os.fdopen(output, "w", encoding="utf-8") as file:
        file.write(json.dumps(reply))


if __name__ == "__main__":
    main()
