"""`spec.server`: the OpenAI servers, and how clients outside the cluster reach them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from megatron_operator.resource.base import ApiModel, Matches, Name, PodTemplate, SpecRule, section
from megatron_operator.resource.source import SecretKeyRef
from megatron_runtime.protocol.answer_formats import REASONING_PARSERS, TOOL_CALL_PARSERS

Annotations = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]
HostName = Annotated[
    str,
    Field(max_length=253),
    Matches(
        r"^([*][.])?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "a host name in lower case, such as models.example.com or *.example.com",
    ),
]
PathPrefix = Annotated[
    str,
    Matches(
        r"^(/[-A-Za-z0-9._~]+)+$",
        "a path that begins with / and does not end with /, such as /models/demo",
    ),
]
Origin = Annotated[
    str,
    Field(max_length=261),
    Matches(
        r"^([*]|https?://[-A-Za-z0-9.:\[\]]+)$",
        "the origin of a web page, such as https://chat.example.com, or * for all",
    ),
]
MediaHost = Annotated[
    str,
    Field(max_length=253),
    Matches(
        r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*|\[[0-9A-Fa-f:.]+\])$",
        "a host of URLs without a port, such as images.example.com or 192.0.2.7",
    ),
]
ModelAlias = Annotated[
    str,
    Field(max_length=256),
    Matches(r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$", "a name of a model, such as gpt-3.5-turbo"),
]
HeaderName = Annotated[str, Matches(r"^[A-Za-z0-9-]+$", "the name of an HTTP header, such as x-model")]


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ServiceSpec(ApiModel):
    RULES: ClassVar = (
        SpecRule(
            "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
            lambda service: service.load_balancer_class is None or service.type is ServiceType.LOAD_BALANCER,
            "spec.server.service.loadBalancerClass: not allowed without spec.server.service.type LoadBalancer; set the "
            "type, or remove the class",
        ),
    )

    type: ServiceType = Field(default=ServiceType.CLUSTER_IP, description="Type of the Service.")
    annotations: Annotations | None = Field(default=None, description="Annotations of the Service.")
    load_balancer_class: Name | None = Field(
        default=None, description="Implementation of the load balancer; that of the cluster if absent."
    )


class IngressSpec(ApiModel):
    class_name: Name | None = Field(default=None, description="IngressClass; that of the cluster if absent.")
    hosts: list[HostName] | None = Field(
        default=None, min_length=1, max_length=16, description="Host names; every host if absent."
    )
    tls_secret_name: Name | None = Field(
        default=None, description="Secret with the certificate that the ingress controller serves; HTTP if absent."
    )
    annotations: Annotations | None = Field(default=None, description="Annotations of the Ingress.")


class ParentRef(ApiModel):
    name: Name = Field(description="Name of a Gateway.")
    namespace: Name | None = Field(default=None, description="Its namespace; that of the resource if absent.")
    section_name: Name | None = Field(default=None, description="Listener of the Gateway; all listeners if absent.")


class HttpRouteSpec(ApiModel):
    parent_refs: list[ParentRef] = Field(
        min_length=1, max_length=16, description="Gateways that the route attaches to."
    )
    hostnames: list[HostName] | None = Field(
        default=None, min_length=1, max_length=16, description="Host names; those of the Gateway's listeners if absent."
    )
    path_prefix: PathPrefix | None = Field(
        default=None,
        description="Path before /v1, which the Gateway removes. It tells the resources of one host name apart.",
        max_length=256,
    )
    model_header: HeaderName | None = Field(
        default=None,
        description="Header whose value must be the name of the model or of one of its adapters, so that several "
        "resources share one URL.",
        max_length=64,
    )


class FailureMode(StrEnum):
    OPEN = "FailOpen"
    CLOSE = "FailClose"


class EndpointPickerRef(ApiModel):
    name: Name = Field(description="Name of the picker's Service, in the namespace of the resource.")
    port: int = Field(default=9002, ge=1, le=65535, description="Port of the Service.")
    failure_mode: FailureMode = Field(
        default=FailureMode.CLOSE,
        description="What the Gateway does without an answer of the picker: FailClose drops the request, FailOpen "
        "sends it to any server.",
    )


class InferencePoolSpec(ApiModel):
    endpoint_picker_ref: EndpointPickerRef = Field(description="The endpoint picker, which you run.")


ParserName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Matches(r"^[a-z0-9][a-z0-9_-]*$", "the name of a parser, such as hermes"),
]


class GenerationConfig(StrEnum):
    AUTO = "auto"
    NONE = "none"


class TlsSpec(ApiModel):
    secret_name: Name = Field(
        description="Secret of type kubernetes.io/tls in the resource's namespace. A renewed certificate is loaded "
        "without a restart."
    )


class ServerSpec(ApiModel):
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Number of OpenAI servers. If absent, 1 is created, and the operator does not change the number "
        "afterwards, so that an autoscaler may set that of the Deployment.",
    )
    tls: TlsSpec | None = Field(
        default=None, description="Serve HTTPS on port 443 of the Service; plain HTTP on port 80 if absent."
    )
    service: ServiceSpec = section(ServiceSpec, "The Service NAME, the address of the servers.")
    ingress: IngressSpec | None = Field(
        default=None, description="An Ingress to the servers; the operator creates none if absent."
    )
    http_route: HttpRouteSpec | None = Field(
        default=None, description="An HTTPRoute of the Gateway API to the servers; the operator creates none if absent."
    )
    inference_pool: InferencePoolSpec | None = Field(
        default=None,
        description="An InferencePool of the Gateway API Inference Extension with the servers, to which the HTTPRoute "
        "then refers instead of the Service. The operator creates none if absent.",
    )
    api_keys_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="File of accepted API keys, one per line or YAML with names, limits and models. If set, every "
        "request needs one.",
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="API keys share cached prefixes. Response times and cached_tokens then reveal to the holder of one "
        "key which prompts others have sent.",
    )
    allow_priority: bool = Field(
        default=False, description="Requests may set a priority; otherwise one other than 0 is answered with 400."
    )
    reserve_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Generated tokens that a request of an API key with a limit of tokens reserves for each choice, at "
        "most; 1024 if absent. Tokens beyond that are charged as they are generated.",
    )
    tool_call_parser: ParserName | None = Field(
        default=None,
        description="Parser of tool calls in completions; auto chooses by the chat template, none offers no tools. "
        f"Others: {', '.join(TOOL_CALL_PARSERS[2:])}; with spec.engine.backend VLLM also the name of a tool parser of "
        "the installed vLLM.",
    )
    reasoning_parser: ParserName | None = Field(
        default=None,
        description="How the model marks its reasoning, which is returned as reasoning_content; auto chooses by the "
        f"chat template, none leaves it in the text. Others: {', '.join(REASONING_PARSERS[2:])}; with "
        "spec.engine.backend VLLM also the name of a reasoning parser of the installed vLLM.",
    )
    generation_config: GenerationConfig | None = Field(
        default=None,
        description="Defaults of sampling: those of the model's generation_config.json (auto, also if absent), or "
        "neutral ones (none).",
    )
    model_aliases: list[ModelAlias] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Further names under which requests may ask for the model, for programs that send a fixed one.",
    )
    any_model_name: bool | None = Field(
        default=None,
        description="Requests with the name of no model or adapter of the resource are answered by the model, as "
        "Megatron-Core's server does; with 404 if absent.",
    )
    allowed_origins: list[Origin] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Origins of web pages that may use the servers (CORS); none if absent.",
    )
    allowed_media_hosts: list[MediaHost] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Hosts from which servers of spec.engine.backend VLLM fetch images, audio and video of requests; "
        "data URLs only if absent. A name leads to public addresses only; an address may be private.",
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Merged into the rendered pod, containers by name (the container is server), as far as the "
        "operator's pod policy allows.",
    )
