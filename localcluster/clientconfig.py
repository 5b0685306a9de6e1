"""Passes the machine's pip and uv settings to an image build without storing them in the image.

This module writes the settings, such as an index, a proxy or a certificate authority, to files that the build mounts.
"""

from __future__ import annotations

import configparser
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from localcluster.shell import run
from megatron_runtime.protocol import strict_json as json

SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PIP_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout", "retries")
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class Mount:
    """A file or folder of this machine that a build mounts at `target`."""

    source: Path
    target: str
    read_only: bool = True

    def argument(self) -> str:
        return f"--volume={self.source}:{self.target}" + (":ro" if self.read_only else "")


def pip_settings(environment: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """Return pip's settings on this machine.

    Environment variables override the files, and later files override earlier files.
    """
    settings: dict[str, str] = {}
    for path in files:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(path)
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {key: value for key, value in parser.items(section) if key in PIP_KEYS}
    for key in PIP_KEYS:
        value = environment.get("PIP_" + key.upper().replace("-", "_"))
        if value:
            settings[key] = value
    return settings


def pip_files(environment: Mapping[str, str], home: Path) -> list[Path]:
    """Return the paths of pip's configuration files, in ascending precedence."""
    config_home = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", config_home / "pip" / "pip.conf"]
    if "PIP_CONFIG_FILE" in environment:
        files.append(Path(environment["PIP_CONFIG_FILE"]))
    return files


def pip_conf(settings: Mapping[str, str]) -> str:
    lines = ["[global]", f"cert = {SYSTEM_CERTIFICATES}"]
    lines += [f"{key} = " + value.replace("\n", "\n    ") for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def uv_toml(environment: Mapping[str, str], pip: Mapping[str, str], *, cache: str) -> str:
    """Return the text of uv.toml. The package indexes are from uv's environment variables, or else from `pip`."""
    values: dict[str, object] = {"system-certs": True, "cache-dir": cache, "link-mode": "copy"}
    index = environment.get("UV_DEFAULT_INDEX") or environment.get("UV_INDEX_URL") or pip.get("index-url")
    extra = environment.get("UV_INDEX") or environment.get("UV_EXTRA_INDEX_URL") or pip.get("extra-index-url")
    if index:
        values["index-url"] = index
    if extra:
        values["extra-index-url"] = extra.split()
    if pip.get("find-links"):
        values["find-links"] = pip["find-links"].split()
    if pip.get("trusted-host"):
        values["allow-insecure-host"] = pip["trusted-host"].split()
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def uv_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of the machine's uv cache.

    An image build uses this cache, so that the packages of `.venv` are not downloaded again.
    """
    if environment.get("UV_CACHE_DIR"):
        return Path(environment["UV_CACHE_DIR"])
    if shutil.which("uv"):
        return Path(run(["uv", "cache", "dir"]).stdout.strip())
    # The default cache of the uv in build/, which `make setup` uses.
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv"


def mounts(folder: Path, *, target: str) -> list[Mount]:
    """Write pip.conf and uv.toml into `folder`, and return the mounts for a build.

    target: path at which the build mounts `folder`.
    """
    environment = os.environ
    home = Path.home()
    pip = pip_settings(environment, pip_files(environment, home))
    links = pip.get("find-links", "").split()
    local_links = [Path(link) for link in links if link.startswith("/") and Path(link).is_dir()]
    remote_links = [link for link in links if not link.startswith("/")]
    pip["find-links"] = " ".join([*map(str, local_links), *remote_links])
    pip = {key: value for key, value in pip.items() if value}
    (folder / "uv-cache").mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    (folder / "pip.conf").write_text(pip_conf(pip))
    (folder / "uv.toml").write_text(uv_toml(environment, pip, cache=f"{target}/uv-cache"))
    cache = uv_cache(environment)
    cache.mkdir(parents=True, exist_ok=True)
    certificates = Path(environment.get("SSL_CERT_FILE") or SYSTEM_CERTIFICATES)
    mounted = [
        Mount(folder, target),
        Mount(cache, f"{target}/uv-cache", read_only=False),
        *(Mount(path, str(path)) for path in local_links),
    ]
    if certificates.is_file():
        mounted.append(Mount(certificates, SYSTEM_CERTIFICATES))
    if (home / ".netrc").is_file():
        mounted.append(Mount(home / ".netrc", "/tmp/.netrc"))
    return mounted
