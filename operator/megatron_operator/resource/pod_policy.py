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
    """Helm chart values: the profile, and one for each further class of fields."""

    PROFILE = (
        *("profile", "podPolicy.profile", "--pod-policy-profile", None),
        "restricted: allow lists limit podTemplates; the options below extend them. trusted: a user who may create a "
        "resource is treated as one who may create pods in its namespace.",
    )
    HOST_PATHS = (
        *("host_paths", "podPolicy.hostPaths", "--allow-host-path", "PREFIX"),
        "podTemplates may mount host paths below PREFIX, read-only.",
    )
    MODEL_CACHE_PATHS = (
        *("model_cache_paths", "podPolicy.modelCachePaths", "--allow-model-cache-path", "PREFIX"),
        "spec.model.cache.hostPath may be PREFIX or below it.",
    )
    CAPABILITIES = (
        *("capabilities", "podPolicy.capabilities", "--allow-capability", "NAME"),
        "podTemplates may add this Linux capability, such as IPC_LOCK.",
    )
    HOST_NETWORK = (
        *("host_network", "podPolicy.hostNetwork", "--allow-host-network", None),
        "podTemplates may set hostNetwork.",
    )
    SIDECARS = (
        *("sidecars", "podPolicy.sidecars", "--allow-sidecars", None),
        "podTemplates may add containers and init containers.",
    )
    SERVICE_ACCOUNTS = (
        *("service_accounts", "podPolicy.serviceAccounts", "--allow-service-account", "NAME"),
        "podTemplates may name this service account.",
    )
    IMAGES = (
        *("image_repositories", "podPolicy.imageRepositories", "--allow-image-repository", "REPOSITORY"),
        "Images of this repository are allowed, besides those of the runtime images; all below it if it ends in /.",
    )
    ENVIRONMENT = (
        *("environment", "podPolicy.environment", "--allow-environment", "NAME"),
        "podTemplates may set this variable, which is rejected by default; a prefix if it ends in *.",
    )
    SECRET_ENVIRONMENT = (
        *("secret_environment", "podPolicy.secretEnvironment", "--allow-secret-environment", "NAME"),
        "podTemplates may set this variable to a value of a Secret that the spec names; a prefix if it ends in *.",
    )
    METADATA = (
        *("metadata", "podPolicy.metadata", "--allow-metadata", "KEY"),
        "Pods, Services and Ingresses may have this label or annotation, which is rejected by default; a prefix if it "
        "ends in /.",
    )
    HOSTNAMES = (
        *("hostnames", "podPolicy.hostnames", "--allow-hostname", "HOST"),
        "Ingresses and HTTPRoutes may have this host name; *.SUFFIX: every name below it; *: every name. {namespace} "
        "and {name} are those of the resource.",
    )
    TLS_SECRETS = (
        *("tls_secrets", "podPolicy.tlsSecrets", "--allow-tls-secret", "NAME"),
        "Ingresses may name this TLS Secret; a prefix if it ends in *. {namespace} and {name} are those of the "
        "resource.",
    )
    VLLM_CODE = (
        *("vllm_code", "vllm.allowCode", "--allow-vllm-code", None),
        "Resources may set arguments of vLLM that can load code.",
    )

    def __init__(self, field: str, chart_value: str, option: str, argument: str | None, text: str) -> None:
        """field: of PodPolicy. option: of the command line, argument: its value; None: it has none. text: its help."""
        self.field = field
        self.chart_value = chart_value
        self.option = option
        self.argument = argument
        self.text = text

    @property
    def remedy(self) -> str:
        """The remedy that names the chart value and the flag."""
        value, flag = self.chart_value, self.option
        if self is Switch.PROFILE:
            value, flag = f"{value}={TRUSTED}", f"{flag} {TRUSTED}"
        return f"an administrator can allow it with {value} in the operator's chart ({flag})"

    def bad(self, value: str, remedy: str) -> ValueError:
        """Return the error of a value that the switch cannot have."""
        return ValueError(f"{self.chart_value} ({self.option}): is {value!r}; give {remedy}")


@dataclass(frozen=True, slots=True)
class PodPolicy:
    """The profile, and the further classes that are allowed, as `Switch` describes them; by default none."""

    profile: str = RESTRICTED
    host_paths: tuple[str, ...] = ()
    model_cache_paths: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    host_network: bool = False
    sidecars: bool = False
    service_accounts: tuple[str, ...] = ()
    image_repositories: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    secret_environment: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()
    hostnames: tuple[str, ...] = ()
    tls_secrets: tuple[str, ...] = ()
    vllm_code: bool = False

    @property
    def trusted(self) -> bool:
        return self.profile == TRUSTED

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise Switch.PROFILE.bad(self.profile, f"one of {', '.join(PROFILES)}")
        for name in self.hostnames:
            if not _HOSTNAME.fullmatch(name):
                raise Switch.HOSTNAMES.bad(name, "a host name in lower case, *.SUFFIX or *")
        named = [(Switch.HOST_PATHS, prefix) for prefix in self.host_paths]
        named += [(Switch.MODEL_CACHE_PATHS, prefix) for prefix in self.model_cache_paths]
        for switch, prefix in named:
            if not prefix.strip("/") or posixpath.normpath(prefix) != prefix.rstrip("/") or not prefix.startswith("/"):
                raise switch.bad(prefix, "an absolute path below / without . and ..")


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
