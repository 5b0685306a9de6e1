"""Writes the generated pages and parts of pages: `python docs/generate.py [--check]`.

Some pages in docs/reference, and the chart's README, contain prose and tables. Each table is generated from the code,
and lies between the lines `<!-- generated: NAME -->` and `<!-- end -->`. Whole pages come from operator_pages.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_runtime.protocol import strict_json as json

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
CHART = ROOT / "charts" / "megatron-inference"
RUNTIME = ROOT / "runtime" / "megatron_runtime"
_BLOCK = re.compile(r"<!-- generated: ([a-z-]+) -->\n.*?<!-- end -->", re.DOTALL)

Table = list[str]


def _cell(text: str) -> str:
    """Return a text as the content of a table cell. Prose gets an initial capital letter."""
    line = " ".join(str(text).split()).replace("|", "\\|")
    if "`" not in line:
        line = line.replace("{", "&#123;")
    return line[:1].upper() + line[1:] if " " in line else line


def _table(*header: str, rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> Table:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return [*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]


# --- command line ---------------------------------------------------------------------------------------------------


def commands() -> Table:
    """Return a table of all subcommands of `megatron`, with the descriptions in their help texts."""
    import click
    from operator_pages import command_lines

    from megatron_runtime.cli import main

    def walk(path: str, group: click.Group) -> Iterator[str]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from walk(f"{path} {name}", command)
            elif command is not None:
                yield from command_lines(path, name, command)

    return list(walk("megatron", main))


# --- metrics --------------------------------------------------------------------------------------------------------


def _families(registry: Any) -> list[tuple[str, ...]]:
    """Return name, type, labels and help text of every metric of a registry, sorted by name."""
    labels_by_name: dict[str, tuple[str, ...]] = {}
    for collector in registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            labels_by_name[collector._name] = collector._labelnames
    rows = []
    for family in registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        labels = getattr(family, "_labelnames", None) or labels_by_name.get(family.name, ())
        if not labels and family.samples:
            labels = [label for label in family.samples[0].labels if label != "le"]
        text = family.documentation.strip()
        rows.append((f"`{family.name}{suffix}`", family.type, ", ".join(f"`{label}`" for label in labels), text))
    return sorted(set(rows))


def _with_vllm(rows: list[tuple[str, ...]]) -> Table:
    """Return a table of metrics, with a column that says whether a metric also has vLLM's name.

    rows: the result of _families().
    """
    vllm = {row[0].removeprefix("`vllm:") for row in rows if row[0].startswith("`vllm:")}
    own = [row for row in rows if not row[0].startswith("`vllm:")]
    named = (
        (name, kind, labels, "yes" if name.removeprefix("`megatron_") in vllm else "", text)
        for name, kind, labels, text in own
    )
    return _table("metric", "type", "labels", "`vllm:`", "meaning", rows=list(named))


def server_metrics() -> Table:
    from megatron_runtime.server.metrics import ServerMetrics

    rows = _families(ServerMetrics(model="model", vllm=True).registry)
    shared = [row for row in rows if not row[0].startswith("`process_")]
    return _with_vllm(shared)


def engine_metrics() -> Table:
    from prometheus_client import CollectorRegistry

    from megatron_runtime.engine.engine_request import BackendStats
    from megatron_runtime.engine.lifecycle import Lifecycle
    from megatron_runtime.engine.metrics import EngineMetrics

    backend = SimpleNamespace(
        stats=lambda: BackendStats(last_step=0.0, queued_tokens=0, prefill_rate=1.0, decode_rate=1.0),
        metrics=lambda: None,
    )
    registry = CollectorRegistry()
    registry.register(EngineMetrics(Lifecycle(SimpleNamespace()), backend))
    return _with_vllm(_families(registry))


def coordinator_metrics() -> Table:
    from prometheus_client import CollectorRegistry

    from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
    from megatron_runtime.coordinator.core.settings import CoordinatorSettings
    from megatron_runtime.coordinator.metrics import CoordinatorMetrics

    core = CoordinatorCore(CoordinatorSettings(), now=0.0, randbits=lambda bits: 0)
    registry = CollectorRegistry()
    registry.register(CoordinatorMetrics(lambda: core))
    return _table("metric", "type", "labels", "meaning", rows=_families(registry))


def operator_metrics() -> Table:
    from megatron_operator.controller.metrics import Metrics

    metrics = Metrics()
    metrics.show(lambda: ())
    rows = [row for row in _families(metrics.registry) if not row[0].startswith("`process_")]
    return _table("metric", "type", "labels", "meaning", rows=rows)


# --- HTTP API -------------------------------------------------------------------------------------------------------


def _application() -> Any:
    """Return the server's application, with a tokenizer and a coordinator that are never called."""
    from megatron_runtime.server.app import create_app
    from megatron_runtime.server.settings import ServerSettings

    tokenizer = SimpleNamespace(
        context_length=None, chat_template=None, template_for=lambda tools: None, generation_config={}
    )
    settings = ServerSettings(tool_call_parser="none", vllm_metrics=False)
    return create_app(settings, backend=SimpleNamespace(), tokenizer=tokenizer)  # type: ignore[arg-type]


@cache
def _described() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GET and HEAD of a probe share an operation id
        return _application().openapi()


def openapi() -> Table:
    """Return a table of the server's routes, with one row for each path and method in the OpenAPI description."""
    described = _described()
    rows = [
        (f"`{method.upper()} {path}`", (operation.get("requestBody") and "JSON") or "")
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        if method != "head"
    ]
    return _table("route", "body", rows=sorted(rows, key=lambda row: row[0].split(" ")[1]))


def _schema(path: str) -> dict[str, Any]:
    content = _described()["paths"][path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the type and the limits of a field in a JSON schema, in words."""
    if "$ref" in field:
        return _type(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        kinds = [_type(each, definitions) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type", "any")
    if kind == "array":
        item, _, limits = _type(field.get("items", {}), definitions).partition(", ")
        kind = f"array of {item} ({limits})" if limits else f"array of {item}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is not None and high is not None and abs(high) <= 100_000:
        above = "above " if "exclusiveMinimum" in field else ""
        kind += f", {above}{low:g} to {high:g}"
    elif low is not None and abs(low) <= 100_000:
        kind += f", at least {low:g}"
    maximum = field.get("maxItems", field.get("maxLength", field.get("maxProperties")))
    return f"{kind}, at most {maximum:,}" if maximum is not None else kind


def _meanings(path: str) -> dict[str, tuple[str, str]]:
    """Return the type and the meaning of every known field of a route's request body, by name.

    The schema of the body defines the served fields. The policy of the body lists the fields that are rejected or have
    no effect.
    """
    from megatron_runtime.server.app import BODIES

    schema, policy = _schema(path), BODIES[path.removeprefix("/v1/")].policy
    served = {
        name: (_type(field, schema.get("$defs", {})), field["description"])
        for name, field in schema["properties"].items()
    }
    rejected = {name: ("any", rule.text) for name, rule in sorted((policy.not_offered or {}).items())}
    return served | rejected | {name: ("any", "Accepted, without effect.") for name in sorted(policy.without_effect)}


def _rows(path: str, names: Iterable[str]) -> Table:
    required, meanings = _schema(path).get("required", ()), _meanings(path)
    rows: list[tuple[str, ...]] = [
        (f"`{name}`" + (" (required)" if name in required else ""), *meanings[name]) for name in names
    ]
    return _table("field", "type", "meaning", rows=rows)


def _common_names() -> list[str]:
    """Return the names of the fields that have the same meaning in completions and chat completions."""
    chat, completions = _meanings("/v1/chat/completions"), _meanings("/v1/completions")
    return [name for name, (_, text) in chat.items() if name in completions and completions[name][1] == text]


def _common_fields() -> Table:
    return _rows("/v1/chat/completions", _common_names())


def _fields(path: str, *, has_common: bool = False) -> Callable[[], Table]:
    """Return a function that returns a table of the request fields of a route.

    has_common: whether another table lists the fields in _common_names(), so that this table leaves them out.
    """
    return lambda: _rows(path, [name for name in _meanings(path) if not has_common or name not in _common_names()])


# --- chart ----------------------------------------------------------------------------------------------------------


def chart_values() -> Table:
    """Return a table of the chart's values with defaults and meanings. The meaning is the comment above the value."""
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text())
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    rows: list[tuple[str, ...]] = []
    path: list[tuple[int, str]] = []
    comments: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            comments = []
            continue
        if line.strip().startswith("#"):
            comments.append(line.strip().removeprefix("#").strip())
            continue
        match = re.match(r"( *)([A-Za-z]+):", line)
        if match is None:
            continue
        path = [(depth, name) for depth, name in path if depth < len(match[1])] + [(len(match[1]), match[2])]
        names = [name for _, name in path]
        value, described = values, schema
        for name in names:
            value, described = value[name], (described.get("properties") or {}).get(name, {})
            if "$ref" in described:
                described = schema[described["$ref"].split("/")[1]][described["$ref"].split("/")[2]]
        if not isinstance(value, dict) or not value or names[-1] == "resources":
            rows.append((f"`{'.'.join(names)}`", _default(value), _choices(described), " ".join(comments)))
        elif comments:
            rows.append((f"`{'.'.join(names)}`", "", "", " ".join(comments)))
        comments = []
    seen = [row for row in rows if not row[0].startswith("`operator.resources.")]
    return _table("value", "default", "type", "meaning", rows=seen)


def _default(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _choices(described: dict[str, Any]) -> str:
    if "enum" in described:
        return ", ".join(f"`{value}`" for value in described["enum"])
    kind = described.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else kind


# --- Python ---------------------------------------------------------------------------------------------------------

_FIELD_TEXT = re.compile(r"^([a-z_A-Z][\w, ]*):\s+(.*)$")


def _class(module: str, name: str) -> ast.ClassDef:
    tree = ast.parse((RUNTIME / module).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _texts(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the prose of a docstring, and the text of each argument that the docstring describes as `name: text`."""
    prose: list[str] = []
    texts: dict[str, str] = {}
    current: list[str] = []
    for line in docstring.splitlines():
        match = _FIELD_TEXT.match(line)
        if match and all(part.isidentifier() for part in match[1].replace(" ", "").split(",")):
            current = match[1].replace(" ", "").split(",")
            for field in current:
                texts[field] = match[2]
        elif current and line.startswith(" "):
            for field in current:
                texts[field] += " " + line.strip()
        else:
            current = []
            prose.append(line)
    return "\n".join(prose).strip(), texts


def _attributes(module: str, name: str) -> Callable[[], Table]:
    """Return a function that returns a table of a dataclass's fields, with types, defaults and meanings."""

    def write() -> Table:
        node = _class(module, name)
        _, texts = _texts(ast.get_docstring(node) or "")
        rows = []
        body = node.body
        for place, item in enumerate(body):
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            field = item.target.id
            if field.startswith("_"):
                continue
            after = body[place + 1] if place + 1 < len(body) else None
            text = texts.get(field, "")
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = text or str(after.value.value)
            default = f"`{ast.unparse(item.value)}`" if item.value is not None else ""
            rows.append((f"`{field}`", f"`{ast.unparse(item.annotation)}`", default, text))
        return _table("field", "type", "default", "meaning", rows=rows)

    return write


def sampling_parameters() -> Table:
    """Return a table of the sampling parameters, with types, defaults, meanings and allowed values."""
    import dataclasses

    from megatron_runtime.requests.sampling_params import PARAMETERS, SamplingParams

    rows: list[tuple[str, ...]] = []
    for field in dataclasses.fields(SamplingParams):
        item = PARAMETERS[field.name]
        rows.append((f"`{field.name}`", f"`{field.type}`", f"`{field.default!r}`", item.text, item.rule.allowed))
    return _table("field", "type", "default", "meaning", "allowed", rows=rows)


def _methods(*classes: tuple[str, str]) -> Callable[[], Table]:
    """Return a function that returns a table of the public methods and properties of classes.

    classes: (module, name).
    """

    def write() -> Table:
        rows = []
        for module, name in classes:
            for node in _class(module, name).body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                    continue
                is_property = any(ast.unparse(item).endswith("property") for item in node.decorator_list)
                arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
                arguments = "" if arguments in ("self", "cls") else arguments
                call = node.name if is_property else f"{node.name}({arguments})"
                prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
                rows.append((f"`{prefix}{call}`", (ast.get_docstring(node) or "").split("\n\n")[0]))
        return _table("member", "meaning", rows=rows)

    return write


def _arguments(module: str, name: str) -> Callable[[], Table]:
    """Return a function that returns a table of the arguments of a class's constructor."""

    def write() -> Table:
        node = _class(module, name)
        _, texts = _texts(ast.get_docstring(node) or "")
        init = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
        rows = []
        positional = init.args.args[1:]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(init.args.defaults))
        defaults += init.args.defaults
        pairs = [
            *zip(positional, defaults, strict=True),
            *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            kind = f"`{ast.unparse(argument.annotation)}`" if argument.annotation else ""
            given = f"`{ast.unparse(default)}`" if default is not None else "required"
            rows.append((f"`{argument.arg}`", kind, given, texts.get(argument.arg, "")))
        return _table("argument", "type", "default", "meaning", rows=rows)

    return write


def errors() -> Table:
    tree = ast.parse((RUNTIME / "client" / "rejection.py").read_text())
    rows = [
        (f"`{node.name}`", (ast.get_docstring(node) or "").split("\n\n")[0])
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    return _table("error", "meaning", rows=rows)


# --- environment ----------------------------------------------------------------------------------------------------

_VARIABLE = re.compile(r"MEGATRON_[A-Z0-9_]*[A-Z0-9]")
_NO_VARIABLES = {"MEGATRON_KERNEL", "MEGATRON_PORTABLE", "MEGATRON_VARIANT"}
"""Names that match _VARIABLE but are not environment variables: a prefix, and macros of the C++ kernels."""


def check_environment() -> list[str]:
    """Return a message for each environment variable that is only in the code or only in reference/environment.md."""
    command = [
        "git",
        "grep",
        "-ohE",
        "MEGATRON_[A-Z0-9_]+",
        "--",
        "*.py",
        "*.yaml",
        "Makefile",
        ":!docs",
        ":!tests/unit",
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    code = set(_VARIABLE.findall(found)) - _NO_VARIABLES
    page = set(_VARIABLE.findall((PAGES / "environment.md").read_text()))
    operations = {name for name in page if name.startswith("MEGATRON_KERNEL_")}
    missing = [f"docs/reference/environment.md lacks {name}" for name in sorted(code - page)]
    return missing + [f"docs/reference/environment.md has {name}" for name in sorted(page - code - operations)]


def pod_variables() -> Table:
    """Return a table of the environment variables that the operator's pod policy allows in a podTemplate."""
    from megatron_operator.render.allowed_names import ENVIRONMENT, PROTECTED, SECRETS

    rows = [
        (title, group.reason, _names(group.names) + (f"; values: `{group.value}`" if group.value else ""))
        for title, group in ENVIRONMENT.items()
    ]
    rows.append(("secrets", "take a value of a Secret that the spec names, and no other one", _names(SECRETS)))
    rows.append(("protected, in both profiles", "the operator sets them itself", _names(PROTECTED)))
    return _table("group", "why", "names", rows=rows)


def pod_keys() -> Table:
    """Return a table of the labels and annotations that the operator's pod policy allows in a podTemplate."""
    from megatron_operator.render.allowed_names import ANNOTATIONS, LABELS
    from megatron_operator.render.pod_policy import OWN_KEYS

    rows = [
        (
            title,
            group.reason,
            "annotations and labels" if title in LABELS else "annotations",
            _names(group.names) + (f"; values: `{group.value}`" if group.value else ""),
        )
        for title, group in ANNOTATIONS.items()
    ]
    rows.append(("protected, in both profiles", "the operator sets them itself", "never", _names(OWN_KEYS)))
    return _table("group", "why", "allowed as", "keys", rows=rows)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tool_formats() -> Table:
    """Return a table of the formats of tool calls that the server can parse."""
    from megatron_runtime.protocol.answer_formats import TOOL_FORMATS
    from megatron_runtime.server.formats.table import PARSERS

    rows = [
        (f"`{name}`", ", ".join(map(_code, PARSERS[name].starts)) or "the whole answer", models)
        for name, models in TOOL_FORMATS.items()
    ]
    return _table("parser", "a call begins with", "models", rows=rows)


def reasoning_formats() -> Table:
    """Return a table of the formats of reasoning that the server can parse."""
    from megatron_runtime.protocol.answer_formats import REASONING_FORMATS
    from megatron_runtime.server.formats.reasoning import FORMATS

    rows = [
        (f"`{name}`", _code(FORMATS[name].opening) or "the answer", _code(FORMATS[name].closing), models)
        for name, models in REASONING_FORMATS.items()
    ]
    return _table("parser", "begins with", "ends with", "models", rows=rows)


def _code(text: str) -> str:
    """Return a text as inline code. An empty text is returned unchanged."""
    visible = text.strip(" ").replace("\n", "\\n")
    fence = "````" if "`" in visible else "`"
    return f"{fence}{visible}{fence}" if visible else ""


BLOCKS: dict[str, Callable[[], Table]] = {
    "pod-variables": pod_variables,
    "pod-keys": pod_keys,
    "commands": commands,
    "server-metrics": server_metrics,
    "engine-metrics": engine_metrics,
    "coordinator-metrics": coordinator_metrics,
    "operator-metrics": operator_metrics,
    "openapi": openapi,
    "tool-formats": tool_formats,
    "reasoning-formats": reasoning_formats,
    "common-fields": _common_fields,
    "completion-fields": _fields("/v1/completions", has_common=True),
    "chat-fields": _fields("/v1/chat/completions", has_common=True),
    "responses-fields": _fields("/v1/responses"),
    "messages-fields": _fields("/v1/messages"),
    "count-tokens-fields": _fields("/v1/messages/count_tokens"),
    "embeddings-fields": _fields("/v1/embeddings"),
    "classify-fields": _fields("/v1/classify"),
    "pooling-fields": _fields("/v1/pooling"),
    "score-fields": _fields("/v1/score"),
    "rerank-fields": _fields("/v1/rerank"),
    "tokenize-fields": _fields("/v1/tokenize"),
    "detokenize-fields": _fields("/v1/detokenize"),
    "chart-values": chart_values,
    "llm-arguments": _arguments("megatron_core/apis/_llm_base.py", "_MegatronLLMBase"),
    "llm-methods": _methods(
        ("megatron_core/apis/_llm_base.py", "_MegatronLLMBase"), ("megatron_core/apis/llm.py", "MegatronLLM")
    ),
    "async-llm-methods": _methods(("megatron_core/apis/async_llm.py", "MegatronAsyncLLM")),
    "serve-config": _attributes("in_process/front_end.py", "ServeConfig"),
    "generation-chunk": _attributes("in_process/streams.py", "GenerationChunk"),
    "sampling-params": sampling_parameters,
    "inference-config": _attributes("requests/config.py", "InferenceConfig"),
    "client-methods": _methods(("megatron_core/inference_client.py", "InferenceClient")),
    "errors": errors,
}


def pages() -> Iterator[tuple[Path, str]]:
    """Yield path and up-to-date text of each page that is generated or has generated parts."""
    from operator_pages import commands_page, resource_page, troubleshooting_page

    yield PAGES / "megatroninference.md", resource_page()
    yield PAGES / "megatron-operator.md", commands_page()
    yield ROOT / "docs" / "guides" / "troubleshooting.md", troubleshooting_page()

    def block(match: re.Match[str]) -> str:
        return "\n".join((f"<!-- generated: {match[1]} -->", "", *BLOCKS[match[1]](), "", "<!-- end -->"))

    for page in (*sorted(PAGES.glob("*.md")), CHART / "README.md"):
        text = page.read_text()
        if _BLOCK.search(text):
            yield page, _BLOCK.sub(block, text)


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for page, current in pages():
        if page.exists() and page.read_text() == current:
            continue
        stale.append(page.relative_to(ROOT))
        if not check:
            page.write_text(current)
    for name in stale:
        print(f"{'out of date' if check else 'wrote'}: {name}")
    wrong = check_environment()
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    if check and stale:
        print("run `make generate`", file=sys.stderr)
    return int(bool(wrong) or (check and bool(stale)))


if __name__ == "__main__":
    sys.exit(main())
