"""Models from a Hugging Face hub, `hf:ORG/NAME[@REVISION]`, and from object stores: `s3://`, `gs://`, `az://`,
`https://`. Imports no torch.

client.py speaks the hub's HTTP API, and objects.py reads object stores through obstore. Both list files and read one of
them from a byte offset. download.py fetches the files, resumes and verifies them: to a directory with a manifest of
digests, or to a cache.
"""

import os
from pathlib import Path

HUB_PREFIX = "hf:"
OBJECT_PREFIXES = ("s3://", "gs://", "az://", "https://")
REMOTE_PREFIXES = (HUB_PREFIX, *OBJECT_PREFIXES)
"""Prefixes of model references whose files are downloaded."""


def hf_home() -> Path:
    """Return the directory of HF_HOME, by default ~/.cache/huggingface."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return Path(home)
