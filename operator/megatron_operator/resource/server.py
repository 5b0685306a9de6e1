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

    type: ServiceType = Field(
        default=ServiceType.CLUSTER_IP,
        description="Type of the Service. Set LoadBalancer or NodePort if clients outside the cluster connect "
        "without an Ingress or Gateway.",
    )
    annotations: Annotations | None = Field(default=None, description="Annotations of the Service.")
    load_balancer_class: Name | None = Field(
        default=None,
        description="Load balancer implementation of a Service of type LoadBalancer. Default: the cluster's "
        "implementation.",
    )


class IngressSpec(ApiModel):
    class_name: Name | None = Field(
        default=None, description="IngressClass of the Ingress. Default: the cluster's default class."
    )
    hosts: list[HostName] | None = Field(
        default=None, min_length=1, max_length=16, description="Host names of the Ingress. Default: every host name."
    )
    tls_secret_name: Name | None = Field(
        default=None,
        description="TLS Secret with the certificate for HTTPS at the ingress controller. Default: plain HTTP.",
    )
    annotations: Annotations | None = Field(default=None, description="Annotations of the Ingress.")


class ParentRef(ApiModel):
    name: Name = Field(description="Name of the Gateway.")
    namespace: Name | None = Field(
        default=None, description="Namespace of the Gateway. Default: the namespace of this resource."
    )
    section_name: Name | None = Field(
        default=None, description="Name of a listener of the Gateway. Default: all listeners."
    )


class HttpRouteSpec(ApiModel):
    parent_refs: list[ParentRef] = Field(
        min_length=1, max_length=16, description="Gateways to which the route attaches."
    )
    hostnames: list[HostName] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Host names of the route. Default: the host names of the Gateway's listeners.",
    )
    path_prefix: PathPrefix | None = Field(
        default=None,
        description="Path prefix before /v1, such as /models/demo, which the Gateway removes from requests. Set it "
        "if several resources share one host name.",
        max_length=256,
    )
    model_header: HeaderName | None = Field(
        default=None,
        description="Name of a request header, such as x-model. The Gateway sends requests to this resource if the "
        "header has the name of its model or of one of its adapters. Set it if several resources share one URL.",
        max_length=64,
    )


class FailureMode(StrEnum):
    OPEN = "FailOpen"
    CLOSE = "FailClose"


class EndpointPickerRef(ApiModel):
    name: Name = Field(description="Name of the picker's Service in the namespace of this resource.")
    port: int = Field(default=9002, ge=1, le=65535, description="Port of the picker's Service.")
    failure_mode: FailureMode = Field(
        default=FailureMode.CLOSE,
        description="What the Gateway does if the picker does not answer. FailClose drops the request. FailOpen "
        "sends the request to any server.",
    )


class InferencePoolSpec(ApiModel):
    endpoint_picker_ref: EndpointPickerRef = Field(
        description="Endpoint picker of the pool. You must deploy the picker yourself."
    )


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
        description="Secret of type kubernetes.io/tls in the namespace of this resource. The servers load a renewed "
        "certificate without a restart."
    )


class ServerSpec(ApiModel):
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Number of OpenAI servers. Set 2 or more so that requests continue if a server fails. If it is "
        "not set, the operator creates one server and does not change the number afterwards, so that an autoscaler "
        "can scale the Deployment.",
    )
    tls: TlsSpec | None = Field(
        default=None,
        description="Certificate for HTTPS, which the servers then offer on port 443 of the Service. Default: plain "
        "HTTP on port 80.",
    )
    service: ServiceSpec = section(
        ServiceSpec, "Service with the name of the resource, through which clients reach the servers."
    )
    ingress: IngressSpec | None = Field(
        default=None, description="Ingress that the operator creates for the servers. Default: none."
    )
    http_route: HttpRouteSpec | None = Field(
        default=None,
        description="HTTPRoute of the Gateway API that the operator creates for the servers. Default: none.",
    )
    inference_pool: InferencePoolSpec | None = Field(
        default=None,
        description="InferencePool of the Gateway API Inference Extension that the operator creates for the "
        "servers. The HTTPRoute then refers to the pool instead of the Service. Set it if your Gateway uses "
        "endpoint pickers. Default: none.",
    )
    api_keys_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret with the accepted API keys, either one key per line, or YAML with names, limits and "
        "models. If it is set, every request needs a key. Default: requests need no key.",
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="Share cached prefixes among all API keys. Set it only if the key holders trust each other, "
        "because response times and cached_tokens then reveal which prompts other keys have sent.",
    )
    allow_priority: bool = Field(
        default=False,
        description="Allow requests to set a priority. Otherwise, servers reject a priority other than 0 with 400. "
        "Enable it only if you trust all clients, because requests with a lower number run first.",
    )
    reserve_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Maximum number of generated tokens per choice that the server reserves when a request starts, "
        "for API keys with a token limit. Further tokens are charged as they are generated. Lower it if requests "
        "are rejected although their answers are short. Default: 1024.",
    )
    tool_call_parser: ParserName | None = Field(
        default=None,
        description="Format in which the model writes tool calls. auto detects it from the chat template. none "
        f"disables tools. Other values: {', '.join(TOOL_CALL_PARSERS[2:])}; with spec.engine.backend VLLM also the "
        "name of a tool parser of the installed vLLM. Default: auto.",
    )
    reasoning_parser: ParserName | None = Field(
        default=None,
        description="Format in which the model marks its reasoning, which the server returns as reasoning_content. "
        "auto detects the format from the chat template. none leaves the reasoning in the text. Other values: "
        f"{', '.join(REASONING_PARSERS[2:])}; with spec.engine.backend VLLM also the name of a reasoning parser of the "
        "installed vLLM. Default: auto.",
    )
    generation_config: GenerationConfig | None = Field(
        default=None,
        description="Source of the sampling parameters that a request does not set. auto uses the model's "
        "generation_config.json. none uses neutral values, such as temperature 1. Default: auto.",
    )
    model_aliases: list[ModelAlias] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Additional names of the model in requests. Set them for programs that send a fixed model name.",
    )
    any_model_name: bool | None = Field(
        default=None,
        description="Use this resource's model for requests that name an unknown model, as Megatron-Core's server "
        "does. Otherwise, the server rejects them with 404. Default: false.",
    )
    allowed_origins: list[Origin] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Origins of web pages that may use the servers (CORS). Default: none.",
    )
    allowed_media_hosts: list[MediaHost] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Hosts from which the servers may fetch images, audio and video that requests refer to. A host "
        "name must resolve to public addresses; an IP address may be private. Default: none, so requests can only "
        "contain data URLs. vLLM engines only.",
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Pod fields that the operator merges into each server's pod, such as resources and tolerations. "
        "The container is called server. The operator rejects fields that its pod policy does not allow.",
    )
