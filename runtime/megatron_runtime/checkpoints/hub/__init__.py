"""Models from a Hugging Face hub: `hf:ORG/NAME[@REVISION]`. Imports no torch.

client.py speaks the hub's HTTP API and transfers single files, resuming and verifying them. download.py fetches
repositories: to a directory with a manifest of digests, or to the standard cache of the Hugging Face libraries.
"""

import os
from pathlib import Path

HUB_PREFIX = "hf:"


def hf_home() -> Path:
    """Return the directory of HF_HOME, by default ~/.cache/huggingface."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return Path(home)
