"""What an installation of the operator allows the authors of resources: a profile, and what it adds to it."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from enum import Enum

RESTRICTED, TRUSTED = "restricted", "trusted"
PROFILES = (RESTRICTED, TRUSTED)
_HOSTNAME = re.compile(r"\*|(\*\.)?[a-z0-9{]([a-z0-9{}.-]*[a-z0-9}])?")


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
    SECRET_ENVIRONMENT = "podPolicy.secretEnvironment", "--allow-secret-environment"
    METADATA = "podPolicy.metadata", "--allow-metadata"
    HOSTNAMES = "podPolicy.hostnames", "--allow-hostname"
    TLS_SECRETS = "podPolicy.tlsSecrets", "--allow-tls-secret"
    VLLM_CODE = "vllm.allowCode", "--allow-vllm-code"
    PROFILE = "podPolicy.profile", "--pod-policy-profile"

    @property
    def remedy(self) -> str:
        """The remedy that names the chart value and the flag."""
        value, flag = self.value
        if self is Switch.PROFILE:
            value, flag = f"{value}={TRUSTED}", f"{flag} {TRUSTED}"
        return f"an administrator can allow it with {value} in the operator's chart ({flag})"


@dataclass(frozen=True, slots=True)
class PodPolicy:
    """The profile, and the further classes that are allowed; by default none."""

    profile: str = RESTRICTED
    """`restricted`: allow lists. `trusted`: authors are treated as users who may create pods in their namespaces."""
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
    """Further environment variables; one that ends in `*` is a prefix."""
    secret_environment: tuple[str, ...] = ()
    """Further environment variables whose value may come from a Secret that the spec names; `*` as above."""
    metadata: tuple[str, ...] = ()
    """Further keys of labels and annotations; one that ends in `/` or `*` is a prefix."""
    hostnames: tuple[str, ...] = ()
    """Host names of the front door. `*.SUFFIX` is every name below SUFFIX, `*` every name; `{namespace}` and `{name}`
    are those of the resource."""
    tls_secrets: tuple[str, ...] = ()
    """Secrets of spec.server.ingress.tlsSecretName, with the same placeholders; one that ends in `*` is a prefix."""
    vllm_code: bool = False
    """Arguments with which vLLM loads code, such as trust_remote_code."""

    @property
    def trusted(self) -> bool:
        return self.profile == TRUSTED

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            value, flag = Switch.PROFILE.value
            raise ValueError(f"{value} ({flag}): is {self.profile!r}; give one of {', '.join(PROFILES)}")
        for name in self.hostnames:
            if not _HOSTNAME.fullmatch(name):
                value, flag = Switch.HOSTNAMES.value
                raise ValueError(f"{value} ({flag}): is {name!r}; give a host name in lower case, *.SUFFIX or *")
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
