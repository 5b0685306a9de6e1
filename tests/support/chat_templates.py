"""The chat templates that the tests of llama.cpp have, from the source package of llama-cpp-python.

They are fetched from the package index once, checked against a digest, and kept in build/. Run as a program, this
fetches them.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = Path(__file__).parents[2] / "build" / f"chat-templates-{VERSION}"
_ARCHIVE = f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
_MEMBER = re.compile(r".*/models/templates/([^/]+\.jinja)")
_TIMEOUT_SECONDS = 60


def chat_templates() -> dict[str, str]:
    """Return the text of each template by its name. Raises OSError or ValueError if they cannot be fetched."""
    if not FOLDER.is_dir():
        _fetch()
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}


def _fetch() -> None:
    """Unpack the templates of the package into FOLDER, which appears when it is complete."""
    archive = _downloaded()
    if (digest := hashlib.sha256(archive).hexdigest()) != SHA256:
        raise ValueError(f"{_ARCHIVE} has the SHA-256 digest {digest}, not {SHA256}")
    FOLDER.parent.mkdir(exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(dir=FOLDER.parent))
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            if (match := _MEMBER.fullmatch(member.name)) is not None and (file := members.extractfile(member)):
                (unpacked / match[1]).write_bytes(file.read())
    unpacked.chmod(0o755)
    try:
        unpacked.rename(FOLDER)
    except OSError:  # another process was first
        shutil.rmtree(unpacked)


def _downloaded() -> bytes:
    index = os.environ.get("UV_INDEX_URL") or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{PACKAGE}/"
    with urllib.request.urlopen(page, timeout=_TIMEOUT_SECONDS) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read().decode())
    link = next((link for link in links if link.endswith(f"/{_ARCHIVE}")), None)
    if link is None:
        raise ValueError(f"{page} does not have {_ARCHIVE}")
    with urllib.request.urlopen(urljoin(page, link), timeout=_TIMEOUT_SECONDS) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    print(f"{len(chat_templates())} chat templates in {FOLDER}")
