"""`spec.engine.accelerator`: the kind of device that `gpusPerPod` counts. Pods request devices as an extended resource
or as ResourceClaims.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from megatron_operator.resource.base import ApiModel, Matches, Name, SpecRule, list_by

DEFAULT_RESOURCE = "nvidia.com/gpu"
MIG_PREFIX = "nvidia.com/mig-"
MAX_CLAIMS = 8
_DOMAIN = "nvidia.com/"

ResourceName = Annotated[
    str,
    Matches(
        r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "an extended resource of nodes, such as nvidia.com/mig-1g.10gb, amd.com/gpu or gpu.intel.com/xe",
        without="kubernetes.io/",
    ),
]
Label = Annotated[
    str, Matches(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "lowercase letters, digits and -, such as gpu; no - at an end")
]


class AcceleratorClaim(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.resourceClaimTemplateName) != has(self.resourceClaimName)",
            lambda claim: (claim.resource_claim_template_name is None) != (claim.resource_claim_name is None),
            "spec.engine.accelerator.claims: set exactly one of resourceClaimTemplateName and resourceClaimName",
        ),
    )

    name: Label = Field(description="Name of the claim in the pod.", max_length=63)
    resource_claim_template_name: Name | None = Field(
        default=None,
        description="ResourceClaimTemplate in the namespace of this resource. Each pod gets its own claim.",
    )
    resource_claim_name: Name | None = Field(
        default=None,
        description="ResourceClaim in the namespace of this resource. All pods of all engines share its devices.",
    )
    request: Label | None = Field(
        default=None,
        description="Request in the claim whose devices the engine uses. Default: all requests of the claim.",
        max_length=63,
    )


class AcceleratorSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.resource) != has(self.claims)",
            lambda accelerator: (accelerator.resource is None) != (accelerator.claims is None),
            "spec.engine.accelerator: set exactly one of resource and claims",
        ),
    )

    resource: ResourceName | None = Field(
        default=None,
        description="Extended resource that each pod requests gpusPerPod times, such as nvidia.com/gpu. Native "
        "engines require a resource of nvidia.com.",
        max_length=317,
    )
    claims: list[AcceleratorClaim] | None = Field(
        default=None,
        description="ResourceClaims for the devices of each pod, instead of an extended resource. Together, the "
        "claims must request gpusPerPod devices.",
        min_length=1,
        max_length=MAX_CLAIMS,
        json_schema_extra=list_by("name"),
    )

    @model_validator(mode="after")
    def _different_claims(self) -> Self:
        """Reject two claims with the same name. The API server rejects them too, because `name` is the list's key."""
        names = [claim.name for claim in self.claims or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"spec.engine.accelerator.claims: {twice!r} is listed twice; give each claim a name of its own"
            )
        return self

    @property
    def is_nvidia(self) -> bool:
        """Whether the devices are NVIDIA GPUs or partitions of them.

        The value is False for resource claims, because their devices are unknown.
        """
        return self.resource is not None and self.resource.startswith(_DOMAIN)

    @property
    def is_mig(self) -> bool:
        return self.resource is not None and self.resource.startswith(MIG_PREFIX)
