"""Models from a Hugging Face hub (`hf:ORG/NAME[@REVISION]`) and object stores (`s3://`, `gs://`, `az://`, `https://`).

hub.py lists and fetches files through huggingface_hub, object_store.py through obstore. download.py selects the files,
verifies their digests, and writes their manifest, in a directory or a cache. This package does not import torch.
"""

import os
from pathlib import Path

HUB_PREFIX = "hf:"
OBJECT_PREFIXES = ("s3://", "gs://", "az://", "https://")
REMOTE_PREFIXES = (HUB_PREFIX, *OBJECT_PREFIXES)
"""Prefixes of model references whose files are downloaded."""
MODEL_CACHE = "MEGATRON_MODEL_CACHE"
"""Environment variable that names a cache written by `megatron fetch --cache`.

Its models are used without the network.
"""


def hf_home() -> Path:
    """Return the directory that HF_HOME names, by default ~/.cache/huggingface."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser()


def hub_cache() -> Path:
    """Return the cache directory of huggingface_hub."""
    from huggingface_hub import constants  # an optional dependency

    return Path(constants.HF_HUB_CACHE)
