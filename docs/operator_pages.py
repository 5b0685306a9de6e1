"""Generates three pages from the operator's code: the custom resource, the commands and the troubleshooting guide.

`docs/generate.py` writes these pages.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import click

from megatron_kubectl import cli as plugin
from megatron_operator import cli
from megatron_operator.decision.causes import CREATION, EXIT_CODES, SCHEDULING, TERMINATION_MESSAGE
from megatron_operator.resource.conditions import ConditionType, Documented, Reason
from megatron_operator.resource.crd import COLUMNS, SELECTABLE_FIELDS, custom_resource_definition, structural_schema
from megatron_operator.resource.names import API_VERSION, KIND
from megatron_operator.resource.remedies import REMEDIES, Symptom
from megatron_operator.resource.spec import SHORT_NAME, MegatronInferenceSpec
from megatron_operator.resource.status import MegatronInferenceStatus
from megatron_runtime.protocol import strict_json as json

WIDTH = 100


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("{", "&#123;")


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(_escape(text), WIDTH, break_long_words=False, break_on_hyphens=False)


# --- the resource ---------------------------------------------------------------------------------------------------

Schema = dict[str, Any]


def _rows(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        yield where, field, name in required
        if field.get("type") == "array":
            yield from _rows(field["items"], f"{where}[]")
        else:
            yield from _rows(field, where)


def _kind(field: Schema) -> str:
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "object"))
    low, high = field.get("minimum"), field.get("maximum")
    return f"{kind}, {low}–{high}" if low is not None and high is not None else kind


def _default_of_field(field: Schema, required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "" if default in (None, {}) else f"`{json.dumps(default)}`"


def _fields(schema: Schema, path: str) -> list[str]:
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for where, field, required in _rows(schema, path):
        cells = (f"`{where}`", _kind(field), _default_of_field(field, required), _escape(field.get("description", "")))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _vocabulary(members: Iterable[Documented]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| `{member.value}` | {_escape(member.doc)} |" for member in members)]


def _rules(schema: Schema) -> Iterator[str]:
    """Yield a line for each validation rule of a schema and of its fields, list items and map values."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from textwrap.wrap(f"- {_escape(rule['message'])}", 100, subsequent_indent="  ", break_on_hyphens=False)
    entries = (schema.get(name) for name in ("items", "additionalProperties"))
    for part in (*schema.get("properties", {}).values(), *entries):
        if isinstance(part, dict):
            yield from _rules(part)


def resource_page() -> str:
    """Return the page about the custom resource, in Markdown."""
    spec, status = (
        structural_schema(MegatronInferenceSpec, "spec"),
        structural_schema(MegatronInferenceStatus, "status"),
    )
    (version,) = custom_resource_definition()["spec"]["versions"]
    columns = ", ".join(f"{name.upper()}{' (wide)' if priority else ''}" for name, _, _, priority in COLUMNS)
    selectable = ", ".join(f"`{path.removeprefix('.')}`" for path in SELECTABLE_FIELDS)
    lines = [
        f"# {KIND}",
        "",
        f"`{API_VERSION}`, short name `{SHORT_NAME}`. Generated from the types by `make generate`.",
        "",
        *textwrap.wrap(f"Columns of `kubectl get {SHORT_NAME}`: {columns}.", 100),
        "",
        *textwrap.wrap(
            f"Fields of `kubectl get {SHORT_NAME} --field-selector`, on Kubernetes 1.31 or newer: {selectable}.", 100
        ),
        "",
        "## spec",
        "",
        *_fields(spec, "spec"),
        "",
        "Rules that the API server checks in addition:",
        "",
        *_rules(version["schema"]["openAPIV3Schema"]),
        "",
        "## status",
        "",
        *_fields(status, "status"),
        "",
        "## Conditions",
        "",
        *_vocabulary(ConditionType),
        "",
        "## Reasons",
        "",
        *_vocabulary(Reason),
    ]
    return "\n".join(lines) + "\n"


# --- command lines --------------------------------------------------------------------------------------------------

PROGRAMS: tuple[tuple[str, click.Group], ...] = (("megatron-operator", cli.main), ("kubectl megatron", plugin.main))


def _default_of_option(option: click.Option) -> str:
    if option.required:
        return "required"
    given = option.default
    if option.is_flag and option.secondary_opts:
        return f"`{(option.opts if given else option.secondary_opts)[0]}`"
    plain = isinstance(given, str | int | float) and not isinstance(given, bool)
    return f"`{given}`" if plain else ""


def _options(command: click.Command) -> Iterator[str]:
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        choices = f" ({', '.join(option.type.choices)})" if isinstance(option.type, click.Choice) else ""
        variable = f" Also `${option.envvar}`." if isinstance(option.envvar, str) else ""
        yield f"| {names} | {_default_of_option(option)} | {_escape((option.help or '') + choices + variable)} |"


def command_lines(program: str, name: str, command: click.Command) -> list[str]:
    """Return the lines about one command: usage, help and a table of its options."""
    arguments = [param.human_readable_name for param in command.params if isinstance(param, click.Argument)]
    usage = " ".join([program, name, *arguments])
    rows = list(_options(command))
    table = ["", "| option | default | |", "|---|---|---|", *rows] if rows else []
    return ["", f"### `{usage}`", "", *_paragraph(command.help or ""), *table]


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group and of its subgroups, with their names."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def commands_page() -> str:
    """Return the page about the command-line programs, in Markdown."""
    lines = ["# Command lines of the operator", "", "Generated from the commands by `make generate`."]
    for program, group in PROGRAMS:
        lines += ["", f"## {program}", "", *_paragraph(group.help or "")]
        for name, command in _commands(group):
            lines += command_lines(program, name, command)
    return "\n".join(lines) + "\n"


# --- troubleshooting ------------------------------------------------------------------------------------------------

_FIELD = re.compile(r"(?<![`\w.])((?:spec|status|podPolicy)\.[A-Za-z._]+[A-Za-z])")

_INTRODUCTION = """\
# Troubleshooting

Generated from the operator's table of reasons by `make generate`.

## Find the reason

<!-- test: cluster -->
```sh
kubectl get mi                      # the REASON column is the reason of the condition Ready
kubectl megatron explain NAME       # from the resource down to the pod, the scheduler or the rank
kubectl describe mi NAME            # conditions, the plan and Events
```

While the resource is not settled, `status.plan` says what the operator does and what it waits for.
The condition `Degraded` is True if an error may need your action. Its message quotes the scheduler,
the kubelet or the container. Look up its reason below.

A rollout first waits for the pod `NAME-check-REVISION`
([Rollouts](../concepts/rollouts.md#check-of-a-new-revision)). If this pod fails, correct the spec
as the message says. If the cause is outside the spec, such as a token in a Secret, correct the
cause and delete the pod. `kubectl logs POD` shows the whole output.

If the resource has no status, no operator manages its namespace. Check `operator.namespaces` of the
chart, the operator's pods and its Lease. If `status.observedGeneration` stays lower than
`metadata.generation`, the operator has not processed the last change: read the operator's log.

[Errors](../reference/http-api-behaviour.md#errors) lists the errors that HTTP clients get. [Failures
and recovery](../concepts/failures-and-recovery.md) describes the loss of each component.
"""


def _wrapped(text: str, *, indent: str = "") -> str:
    """Return `text` wrapped at 100 columns, with field names as code."""
    marked = _FIELD.sub(r"`\1`", text)
    return textwrap.fill(
        marked,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _hints(reason: Reason) -> list[str]:
    """Return the hints that the operator can add to its message about `reason`.

    The hints are in the tables that classify the messages of schedulers, API servers and containers. If the tables have
    only one hint for the reason, the result is empty, because the reason's remedy has the same text.
    """
    causes = (*SCHEDULING, *CREATION, *TERMINATION_MESSAGE)
    remedies = [cause.remedy.format(pod_template="podTemplate") for cause in causes if cause.reason is reason]
    hints = list(dict.fromkeys(remedies))
    return hints if len(hints) > 1 else []


def _entry(reason: Reason) -> Iterator[str]:
    yield from ("", f"### {reason.value}", "", _wrapped(reason.doc), "")
    yield _wrapped(f"**Do:** {REMEDIES[reason].action}")
    hints = _hints(reason)
    if hints:
        yield from ("", "The message ends with one of these remedies:", "")
        yield from (_wrapped(_sentence(hint), indent="- ") for hint in hints)


def _exit_codes() -> Iterator[str]:
    yield from ("", "Exit codes that the message explains:", "", "| exit code | meaning |", "|---|---|")
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())


_TABLES = (Symptom.IN_PROGRESS, Symptom.SETTLED)
"""Sections whose entries are rows of a table, because each remedy is short."""


def _table(reasons: list[Reason]) -> Iterator[str]:
    yield from ("", "| reason | meaning | action |", "|---|---|---|")
    for reason in reasons:
        meaning, action = (_FIELD.sub(r"`\1`", text) for text in (reason.doc, REMEDIES[reason].action))
        yield f"| `{reason.value}` | {meaning} | {action} |"


def troubleshooting_page() -> str:
    """Return the troubleshooting page in Markdown.

    It has a section for each Symptom. A section has an entry for each Reason with this symptom in REMEDIES.
    """
    sections = {symptom: [reason for reason in REMEDIES if REMEDIES[reason].symptom is symptom] for symptom in Symptom}
    lines = [_INTRODUCTION, "## All reasons", "", "| symptom | reasons |", "|---|---|"]
    for symptom, reasons in sections.items():
        anchor = symptom.value.lower().replace(" ", "-")
        names = ", ".join(f"`{name}`" for name in sorted(reason.value for reason in reasons))
        lines.append(f"| [{symptom.value}](#{anchor}) | {names} |")
    for symptom, reasons in sections.items():
        lines += ["", f"## {symptom.value}"]
        if symptom in _TABLES:
            lines += _table(reasons)
            continue
        for reason in reasons:
            lines += _entry(reason)
            if reason is Reason.CRASH_LOOPING:
                lines += _exit_codes()
    return "\n".join(lines) + "\n"
