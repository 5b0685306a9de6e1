"""axe-core, which finds accessibility errors in a page, from the npm registry.

It is fetched once, checked against a digest, and kept in build/.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "4.14.1"
SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
FILE = Path(__file__).parents[2] / "build" / f"axe-core-{VERSION}.js"
_TIMEOUT_SECONDS = 60


def axe_source() -> str:
    """Return the script. Raises OSError or ValueError if it cannot be fetched."""
    if not FILE.is_file():
        registry = os.environ.get("NPM_CONFIG_REGISTRY") or "https://registry.npmjs.org"
        address = f"{registry.rstrip('/')}/axe-core/-/axe-core-{VERSION}.tgz"
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
            archive = answer.read()
        if (digest := hashlib.sha256(archive).hexdigest()) != SHA256:
            raise ValueError(f"{address} has the SHA-256 digest {digest}, not {SHA256}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            script = members.extractfile("package/axe.min.js")
            assert script is not None
            FILE.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=FILE.parent, delete=False) as unfinished:
                unfinished.write(script.read())
        Path(unfinished.name).replace(FILE)
    return FILE.read_text()
