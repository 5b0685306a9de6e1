"""The pod policy: the profile that limits what authors of custom resources may set, and extensions of the profile."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from enum import Enum

RESTRICTED, TRUSTED = "restricted", "trusted"
PROFILES = (RESTRICTED, TRUSTED)
_HOSTNAME = re.compile(r"\*|(\*\.)?[a-z0-9{]([a-z0-9{}.-]*[a-z0-9}])?")


class Switch(Enum):
    """A setting of the pod policy, with its chart value, its command-line option and the option's help text.

    PROFILE selects the profile. Each other setting allows additional values of one class of fields.
    """

    PROFILE = (
        *("profile", "podPolicy.profile", "--pod-policy-profile", None),
        "Fields that podTemplates may contain. restricted accepts only fields on allow lists, which the options "
        "below extend. trusted accepts every field. Choose trusted only if all users who can create a resource may "
        "also create pods in its namespace.",
    )
    HOST_PATHS = (
        *("host_paths", "podPolicy.hostPaths", "--allow-host-path", "PREFIX"),
        "Allow podTemplates to mount hostPath volumes at PREFIX and below, read-only.",
    )
    MODEL_CACHE_PATHS = (
        *("model_cache_paths", "podPolicy.modelCachePaths", "--allow-model-cache-path", "PREFIX"),
        "Allow spec.model.cache.hostPath to be PREFIX or a path below it.",
    )
    CAPABILITIES = (
        *("capabilities", "podPolicy.capabilities", "--allow-capability", "NAME"),
        "Allow podTemplates to add this Linux capability, such as IPC_LOCK.",
    )
    HOST_NETWORK = (
        *("host_network", "podPolicy.hostNetwork", "--allow-host-network", None),
        "Allow podTemplates to set hostNetwork. NetworkPolicies do not apply to such pods.",
    )
    SIDECARS = (
        *("sidecars", "podPolicy.sidecars", "--allow-sidecars", None),
        "Allow podTemplates to add containers and init containers.",
    )
    SERVICE_ACCOUNTS = (
        *("service_accounts", "podPolicy.serviceAccounts", "--allow-service-account", "NAME"),
        "Allow podTemplates to use this service account.",
    )
    IMAGES = (
        *("image_repositories", "podPolicy.imageRepositories", "--allow-image-repository", "REPOSITORY"),
        "Allow images of this repository in addition to the runtime images. A value that ends in / allows every "
        "repository below it.",
    )
    ENVIRONMENT = (
        *("environment", "podPolicy.environment", "--allow-environment", "NAME"),
        "Allow podTemplates to set this environment variable. A value that ends in * allows every name with that "
        "prefix.",
    )
    SECRET_ENVIRONMENT = (
        *("secret_environment", "podPolicy.secretEnvironment", "--allow-secret-environment", "NAME"),
        "Allow podTemplates to set this environment variable from a Secret. A value that ends in * allows every "
        "name with that prefix.",
    )
    METADATA = (
        *("metadata", "podPolicy.metadata", "--allow-metadata", "KEY"),
        "Allow this label or annotation on Pods, Services and Ingresses. A value that ends in / allows every key "
        "with that prefix.",
    )
    HOSTNAMES = (
        *("hostnames", "podPolicy.hostnames", "--allow-hostname", "HOST"),
        "Allow this host name in Ingresses and HTTPRoutes. *.SUFFIX allows every name below SUFFIX, and * every "
        "name. {namespace} and {name} stand for the namespace and name of the resource.",
    )
    TLS_SECRETS = (
        *("tls_secrets", "podPolicy.tlsSecrets", "--allow-tls-secret", "NAME"),
        "Allow Ingresses to use this TLS Secret. A value that ends in * allows every name with that prefix. "
        "{namespace} and {name} stand for the namespace and name of the resource.",
    )
    VLLM_CODE = (
        *("vllm_code", "vllm.allowCode", "--allow-vllm-code", None),
        "Allow resources to set vLLM arguments that can load code, such as trust_remote_code.",
    )

    def __init__(self, field: str, chart_value: str, option: str, argument: str | None, text: str) -> None:
        """Initialize the attributes of one switch.

        field:       name in PodPolicy.
        chart_value: name in values.yaml.
        option:      name on the command line.
        argument:    placeholder of the option's value; None for a flag.
        text:        help text of the option.
        """
        self.field = field
        self.chart_value = chart_value
        self.option = option
        self.argument = argument
        self.text = text

    @property
    def remedy(self) -> str:
        """The remedy for a rejected field, as a sentence that names the chart value and the flag."""
        value, flag = self.chart_value, self.option
        if self is Switch.PROFILE:
            value, flag = f"{value}={TRUSTED}", f"{flag} {TRUSTED}"
        return f"an administrator can allow it with {value} in the operator's chart ({flag})"

    def bad(self, value: str, remedy: str) -> ValueError:
        """Return the error for a value that the switch does not accept."""
        return ValueError(f"{self.chart_value} ({self.option}): is {value!r}; give {remedy}")


@dataclass(frozen=True, slots=True)
class PodPolicy:
    """The values that authors of custom resources may set.

    `profile` selects the general rules. Each other attribute allows additional values (see `Switch`).
    """

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
    """Return the repository of an image, with explicit registry and namespace but without tag and digest."""
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
    """Return whether an image is in one of the repositories.

    An entry that ends in `/` matches all repositories whose names begin with the entry.
    """
    repository = repository_of(image)
    for entry in repositories:
        if entry.endswith("/"):
            if repository.startswith(repository_of(f"{entry}x/x").removesuffix("x/x")):
                return True
        elif repository == repository_of(entry):
            return True
    return False
