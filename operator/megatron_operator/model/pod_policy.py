"""Fields of pod templates that an installation of the operator allows beyond the default allow list."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from enum import Enum


class Switch(Enum):
    """Helm chart values, one for each further class of fields, with their paths and command line flags."""

    HOST_PATHS = "podPolicy.hostPaths", "--allow-host-path"
    MODEL_CACHE_PATHS = "podPolicy.modelCachePaths", "--allow-model-cache-path"
    CAPABILITIES = "podPolicy.capabilities", "--allow-capability"
    HOST_NETWORK = "podPolicy.hostNetwork", "--allow-host-network"
    SIDECARS = "podPolicy.sidecars", "--allow-sidecars"
    SERVICE_ACCOUNTS = "podPolicy.serviceAccounts", "--allow-service-account"
    IMAGES = "podPolicy.imageRepositories", "--allow-image-repository"
    ENVIRONMENT = "podPolicy.environment", "--allow-environment"
    METADATA = "podPolicy.metadata", "--allow-metadata"
    VLLM_CODE = "vllm.allowCode", "--allow-vllm-code"

    @property
    def remedy(self) -> str:
        """The remedy that names the chart value and the flag."""
        value, flag = self.value
        return f"an administrator can allow it with {value} in the operator's chart ({flag})"


@dataclass(frozen=True, slots=True)
class PodPolicy:
    """The further classes that are allowed; by default none."""

    host_paths: tuple[str, ...] = ()
    """Absolute path prefixes of hostPath volumes, which are mounted read-only."""
    model_cache_paths: tuple[str, ...] = ()
    """Absolute path prefixes of spec.model.cache.hostPath, to which init containers of the operator write models."""
    capabilities: tuple[str, ...] = ()
    """Linux capabilities that containers may add, without the prefix CAP_."""
    host_network: bool = False
    sidecars: bool = False
    """Containers and init containers that the operator does not render."""
    service_accounts: tuple[str, ...] = ()
    image_repositories: tuple[str, ...] = ()
    """Further repositories of images, besides those of the runtime images; one that ends in `/` allows all below it."""
    environment: tuple[str, ...] = ()
    """Environment variables that the default policy rejects because they load code or redirect a token."""
    metadata: tuple[str, ...] = ()
    """Keys of labels and annotations that the default policy rejects; one that ends in `/` is a prefix."""
    vllm_code: bool = False
    """Arguments with which vLLM loads code, such as trust_remote_code."""

    def __post_init__(self) -> None:
        named = [(Switch.HOST_PATHS, prefix) for prefix in self.host_paths]
        named += [(Switch.MODEL_CACHE_PATHS, prefix) for prefix in self.model_cache_paths]
        for switch, prefix in named:
            if not prefix.strip("/") or posixpath.normpath(prefix) != prefix.rstrip("/") or not prefix.startswith("/"):
                value, flag = switch.value
                raise ValueError(f"{value} ({flag}): is {prefix!r}; give an absolute path below / without . and ..")


def repository_of(image: str) -> str:
    """Return the repository of an image, with explicit registry and namespace, without tag and digest."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    name = f"{head}{slash}{last.partition(':')[0]}"
    first, slash, rest = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    if "." in first or ":" in first or first == "localhost":
        return f"docker.io/library/{rest}" if first == "docker.io" and "/" not in rest else name
    return f"docker.io/{name}"


def in_repositories(image: str, repositories: tuple[str, ...]) -> bool:
    """Return whether an image is of one of the repositories. An entry that ends in `/` matches all below it."""
    found = repository_of(image)
    for entry in repositories:
        if entry.endswith("/"):
            if found.startswith(repository_of(f"{entry}x/x").removesuffix("x/x")):
                return True
        elif found == repository_of(entry):
            return True
    return False
