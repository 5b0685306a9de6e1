"""`spec.model` and `spec.weights`: the model, its LoRA adapters, and the source and format of its weights."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from megatron_operator.resource.base import ApiModel, Matches, Name, Selector, SpecRule, list_by
from megatron_runtime.protocol.adapters import MAX_ADAPTER_NAME_CHARACTERS, MAX_ADAPTERS

MAX_TRAINER_PEERS = 16


class Format(StrEnum):
    AUTO = "Auto"
    SAFETENSORS = "SafeTensors"
    GGUF = "GGUF"
    TORCH_DIST = "TorchDist"
    PACKED = "Packed"


class Dtype(StrEnum):
    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"
    INT8 = "Int8"
    INT4 = "Int4"


class SecretKeyRef(ApiModel):
    name: Name = Field(description="Name of a Secret in the namespace of this resource.")
    key: Name = Field(description="Key in that Secret.")


_PATH_PART = r"([^/.\x00-\x1f\x7f][^/\x00-\x1f\x7f]*|\.[^/.\x00-\x1f\x7f][^/\x00-\x1f\x7f]*|\.\.[^/\x00-\x1f\x7f]+)"
_PATH_PATTERN = rf"^/+({_PATH_PART}(/+{_PATH_PART})*/*)?$"
"""Pattern of an absolute path without `.` and `..` parts. The path is joined to the mount path of the volume."""
VolumePath = Annotated[
    str,
    Matches(
        _PATH_PATTERN,
        "an absolute path without . and .. parts, such as /models/llama; begin it with /, without control characters",
    ),
]
Repository = Annotated[
    str, Matches(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$", "a repository of the hub, as org/name, without ..", "..")
]
Commit = Annotated[
    str,
    Matches(
        r"^[A-Za-z0-9][\w./-]*$", "letters, digits and . _ / -, beginning with a letter or digit, without ..", ".."
    ),
]
BuiltinName = Annotated[
    str, Matches(r"^[a-z0-9][a-z0-9.-]*$", "the name of a builtin model in lower case, such as smollm2-135m")
]
ModelName = Annotated[
    str,
    Matches(
        r"^[A-Za-z0-9][\w./:-]*$", "letters, digits and . _ - / :, beginning with a letter or digit, without ..", ".."
    ),
]
WeightsRevision = Annotated[
    str,
    Matches(
        r"^[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$",
        "letters, digits and . _ -, beginning and ending with a letter or digit, without ..",
        "..",
    ),
]


class HuggingFaceSource(ApiModel):
    repo: Repository = Field(
        description="Repository on the Hugging Face hub, as org/name.",
        max_length=200,
    )
    revision: Commit | None = Field(
        default=None,
        description="Commit to load. Use a commit hash: a branch can change between the starts of two engines.",
        min_length=1,
        max_length=200,
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Access token for a gated or private repository."
    )


class ClaimSource(ApiModel):
    claim_name: Name = Field(
        description="PersistentVolumeClaim in the namespace of this resource. It is mounted read-only."
    )
    path: VolumePath = Field(
        default="/",
        description="Absolute path of the model in the volume, without . and .. parts. {revision} is replaced by "
        "spec.weights.revision.",
        max_length=1024,
    )


class ImageSource(ApiModel):
    reference: str = Field(
        description="Reference of the OCI image or artifact with the weights.",
        min_length=1,
        max_length=512,
    )
    path: VolumePath = Field(
        default="/",
        description="Absolute path of the model in the image, without . and .. parts. {revision} is replaced by "
        "spec.weights.revision.",
        max_length=1024,
    )


_URL_PART = r"[A-Za-z0-9_@+=~{}-][A-Za-z0-9_.@+=~{}-]*"
ObjectUrl = Annotated[
    str,
    Matches(
        rf"^(s3|gs|az|https)://[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]{{1,5}})?(/{_URL_PART})*/?$",
        "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or https://HOST/PATH of letters, digits and "
        "_ . @ + = ~ -, without a query",
    ),
]


class SecretRef(ApiModel):
    name: Name = Field(description="Name of a Secret in the namespace of this resource.")


class ObjectStoreSource(ApiModel):
    url: ObjectUrl = Field(
        description="URL of the model: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
        "https://HOST/PATH. {revision} is replaced by spec.weights.revision.",
        max_length=1024,
    )
    credentials_secret_ref: SecretRef | None = Field(
        default=None,
        description="Secret whose keys are names of environment variables, such as AWS_ACCESS_KEY_ID. Default: the "
        "workload identity of the ServiceAccount.",
    )


_SOURCES = ("builtin", "huggingFace", "objectStore", "persistentVolumeClaim", "image")
_SET_SOURCES = "[" + ", ".join(f"has(self.{name})" for name in _SOURCES) + "]"


class ModelSource(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            f"{_SET_SOURCES}.exists(set, set)",
            lambda source: source.model_dump(exclude_none=True),
            f"spec.model.source: no source is set; set exactly one of {', '.join(_SOURCES)}",
        ),
        SpecRule(
            f"{_SET_SOURCES}.exists_one(set, set) || !{_SET_SOURCES}.exists(set, set)",
            lambda source: len(source.model_dump(exclude_none=True)) == 1,
            f"spec.model.source: several sources are set; set exactly one of {', '.join(_SOURCES)}",
        ),
    )

    builtin: BuiltinName | None = Field(
        default=None,
        description="Model that is part of the runtime image, such as smollm2-135m, for demos and tests.",
        max_length=63,
    )
    hugging_face: HuggingFaceSource | None = Field(default=None, description="Repository on the Hugging Face hub.")
    object_store: ObjectStoreSource | None = Field(
        default=None, description="Model in S3, Google Cloud Storage, Azure Blob Storage or on an HTTPS server."
    )
    persistent_volume_claim: ClaimSource | None = Field(
        default=None, description="Model directory or GGUF file on a volume."
    )
    image: ImageSource | None = Field(
        default=None,
        description="OCI image or artifact with the model, which engines mount as an image volume (experimental).",
    )

    @property
    def path(self) -> str | None:
        """The path in the volume, with `{revision}` not yet replaced. The value is None if the source has no path."""
        for source in (self.persistent_volume_claim, self.image):
            if source is not None:
                return source.path
        return None

    @property
    def location(self) -> tuple[str, str] | None:
        """Path and value of the source's field that can contain the placeholder `{revision}`.

        None if the source has no such field.
        """
        if self.object_store is not None:
            return "objectStore.url", self.object_store.url
        if self.path is None:
            return None
        return ("image.path" if self.image is not None else "persistentVolumeClaim.path"), self.path

    @property
    def downloads(self) -> bool:
        return self.hugging_face is not None or self.object_store is not None


CachePath = Annotated[
    str,
    Matches(
        rf"^(/{_URL_PART})+$",
        "an absolute path of letters, digits and _ . @ + = ~ - without . and .. parts; begin it with /",
    ),
]


class CacheSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.persistentVolumeClaim) != has(self.hostPath)",
            lambda cache: (cache.persistent_volume_claim is None) != (cache.host_path is None),
            "spec.model.cache: set exactly one of persistentVolumeClaim and hostPath",
        ),
    )

    persistent_volume_claim: Name | None = Field(
        default=None, description="PersistentVolumeClaim in the namespace of this resource, which all engines mount."
    )
    host_path: CachePath | None = Field(
        default=None,
        description="Directory on each node, which user 65532 must be able to write. The chart value "
        "podPolicy.modelCachePaths must allow it.",
        max_length=1024,
    )


AdapterPath = Annotated[
    str,
    Matches(
        r"^(/[\w@+=-][\w.@+=-]*)+$",
        "an absolute path of letters, digits and _ . @ + = - without . and .. parts; begin it with /",
    ),
]


class AdapterRepository(ApiModel):
    repo: Repository = Field(
        description="Name of the repository, as org/name. Engines use the access token of the model's source.",
        max_length=200,
    )
    revision: Commit | None = Field(
        default=None,
        description="Commit to load. Use a commit hash: a branch can change between the starts of two engines.",
        max_length=200,
    )


class AdapterSource(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.huggingFace) != has(self.path)",
            lambda source: (source.hugging_face is None) != (source.path is None),
            "spec.model.adapters: the source of each adapter is exactly one of huggingFace and path",
        ),
    )

    hugging_face: AdapterRepository | None = Field(default=None, description="Repository on the Hugging Face hub.")
    path: AdapterPath | None = Field(
        default=None,
        description="Absolute path of the adapter's directory in the volume of the model's source, without . and .. "
        "parts.",
        max_length=1000,
    )


class AdapterSpec(ApiModel):
    name: ModelName = Field(
        description="Name of the adapter in /v1/models and in requests.",
        min_length=1,
        max_length=MAX_ADAPTER_NAME_CHARACTERS,
    )
    source: AdapterSource = Field(description="Source of the adapter. Set exactly one field.")


class ModelSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "!has(self.adapters) || !has(self.name) || self.adapters.all(adapter, adapter.name != self.name)",
            lambda model: all(adapter.name != model.name for adapter in model.adapters or ()),
            "spec.model.adapters: an adapter has the name of the model; give it another one",
        ),
        SpecRule(
            "!has(self.adapters) || has(self.source.persistentVolumeClaim) || has(self.source.image) || "
            "self.adapters.all(adapter, !has(adapter.source.path))",
            lambda model: model.source.path or all(adapter.source.path is None for adapter in model.adapters or ()),
            "spec.model.adapters: source.path is in the volume of the model, so spec.model.source must be "
            "persistentVolumeClaim or image; use source.huggingFace",
        ),
        SpecRule(
            "!has(self.cache) || has(self.source.huggingFace) || has(self.source.objectStore)",
            lambda model: model.cache is None or model.source.downloads,
            "spec.model.cache: only downloaded models are cached; remove it, or set spec.model.source.huggingFace or "
            "objectStore",
        ),
    )

    name: ModelName | None = Field(
        default=None,
        description="Name of the model in /v1/models and in requests. Default: metadata.name.",
        min_length=1,
        max_length=256,
    )
    source: ModelSource = Field(description="Source of the weights. Set exactly one field.")
    cache: CacheSpec | None = Field(
        default=None,
        description="Volume that keeps a downloaded model, so that pods do not download it at each start. The first "
        "pod downloads the model, and the other pods wait. Engines mount the volume read-only.",
    )
    format: Format = Field(
        default=Format.AUTO,
        description="Format that the model files must have. Engines reject files of another format. Auto accepts "
        "every format.",
    )
    dtype: Dtype = Field(
        default=Dtype.AUTO,
        description="Data type of the weights and of the computation. Auto depends on the model and the device. "
        "Int8 and Int4 run on CPUs only; they need less memory and are faster, but less accurate.",
    )
    max_sequence_length: int | None = Field(
        default=None,
        description="Maximum length of a request, prompt plus answer, in tokens. Default: 4096 on CPUs; on GPUs, "
        "the model's limit, or less if the KV cache is too small for it. Lower it to save KV cache memory.",
        ge=1,
        le=16_777_216,
    )
    adapters: list[AdapterSpec] | None = Field(
        default=None,
        description="LoRA adapters of the model. Clients use each adapter as a model with its own name. Engines "
        "load and unload adapters without a restart.",
        max_length=MAX_ADAPTERS,
        json_schema_extra=list_by("name"),
    )

    @model_validator(mode="after")
    def _different_adapters(self) -> Self:
        """Reject two adapters with the same name. The API server rejects them too, because `name` is the list's key."""
        names = [adapter.name for adapter in self.adapters or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"spec.model.adapters: {twice!r} is listed twice; give each adapter a name of its own")
        return self


class TrainerPeer(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
            lambda peer: (peer.ip_block is None) is not (peer.pod_selector is peer.namespace_selector is None),
            "spec.weights.trainer.from: set ipBlock alone, or podSelector, namespaceSelector or both",
        ),
    )

    pod_selector: Selector | None = Field(
        default=None, description="Labels of the trainer's pods, in the namespaces that namespaceSelector selects."
    )
    namespace_selector: Selector | None = Field(
        default=None, description="Namespaces of the trainer's pods. Default: the namespace of this resource."
    )
    ip_block: Selector | None = Field(default=None, description="Address range of a trainer outside the cluster.")


DEFAULT_TRAINER_PORT = 7000


class TrainerSpec(ApiModel):
    peers: Annotated[list[TrainerPeer], Field(min_length=1, max_length=MAX_TRAINER_PEERS)] = Field(
        alias="from",
        description="NetworkPolicy peers that select the trainer's pods or addresses. NetworkPolicies let them "
        "connect to the coordinator, and let the engines connect to them.",
    )
    port: int | None = Field(
        default=None,
        description="Port of the trainer's WeightServer, to which the engines connect. Default: 7000.",
        ge=1,
        le=65535,
    )


class WeightsSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "has(self.revision) != has(self.trainer)",
            lambda weights: (weights.revision is None) != (weights.trainer is None),
            "spec.weights: set exactly one of revision and trainer",
        ),
    )

    revision: WeightsRevision | None = Field(
        default=None,
        description="Text that replaces {revision} in the path or URL of the model's source. Change it to update "
        "the weights without a restart.",
        min_length=1,
        max_length=63,
    )
    trainer: TrainerSpec | None = Field(
        default=None,
        description="Trainer that publishes weights over the network. Until the first publication, engines serve "
        "the weights of spec.model.source.",
    )
