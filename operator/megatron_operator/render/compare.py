"""Compares two specs and their renderings. Lists the fields that change in the spec and in each child, and the engines
that restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_operator.render.children import all_children
from megatron_operator.render.context import Manifest, RenderContext
from megatron_operator.render.context import RenderError as RenderError
from megatron_operator.render.engine import engine_revision
from megatron_operator.render.model_source import model_hash, weights_revision
from megatron_operator.render.pod import config_name
from megatron_operator.render.revision import KIND as REVISION_KIND
from megatron_operator.resource.names import (
    ANNOTATION_HASH,
    ANNOTATION_INPUTS,
    ANNOTATION_MODEL,
    ANNOTATION_RELEASE,
    LABEL_REVISION,
)
from megatron_runtime.protocol import strict_json as json

_DERIVED = (ANNOTATION_HASH, ANNOTATION_INPUTS, ANNOTATION_MODEL, ANNOTATION_RELEASE, LABEL_REVISION)
_DERIVED_FLAGS = ("--revision", "--model-hash")
"""Flags whose values are hashes of other fields. They are never reported as the field that differs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A child that a change of the spec creates, changes or deletes."""

    verb: str
    """`create`, `change` or `delete`."""
    child: str
    field: str = ""
    """The first field that differs, as `path: old -> new`."""
    restarts: bool = False
    """Whether the child's pods are replaced."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The effect of applying a changed spec."""

    fields: tuple[str, ...]
    """The fields of the spec that differ, as `spec.path: old -> new`."""
    changes: tuple[Change, ...]
    steps: tuple[str, ...]
    """Actions of the operator, in order."""


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield each field whose value differs, as `path: old -> new`, depth first and in the order of the manifest.

    If a field is an object in only one of `old` and `new`, yield each field of this object.
    """
    if isinstance(old, Mapping | None) and isinstance(new, Mapping | None) and (old or new):
        before, after = old or {}, new or {}
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in _DERIVED:
                yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif path.endswith("args") and _is_list(old) and _is_list(new):
        yield from _flags(old, new, path)
    elif _is_list(old) and _is_list(new) and any(isinstance(entry, Mapping) for entry in (*old, *new)):
        for index, (left, right) in enumerate(itertools.zip_longest(old, new)):
            named = [entry["name"] for entry in (left, right) if isinstance(entry, Mapping) and "name" in entry]
            yield from differences(left, right, f"{path}[{named[0] if named else index}]")
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _flags(old: Sequence[Any], new: Sequence[Any], path: str) -> Iterator[str]:
    """Yield each flag of a command line whose value differs.

    Flags whose values are hashes are ignored, because their values follow from other fields.
    """
    left, right = _parsed(old), _parsed(new)
    for flag in [*left, *(flag for flag in right if flag not in left)]:
        if flag not in _DERIVED_FLAGS and left.get(flag) != right.get(flag):
            yield f"{path} {flag}: {_values(left.get(flag))} -> {_values(right.get(flag))}"


def _parsed(args: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each flag. A flag that occurs several times has several values."""
    found: dict[str, list[str]] = {}
    flag = ""
    for arg in args:
        if str(arg).startswith("--"):
            flag = arg
            found.setdefault(flag, [])
        else:
            found.setdefault(flag, []).append(arg)
    return found


def _values(values: list[str] | None) -> str:
    """Return all values of a flag as text. Returns "set" for a flag without a value."""
    if values is None:
        return _short(None)
    return ", ".join(map(_short, values)) or "set"


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _by_name(ctx: RenderContext | None) -> dict[str, Manifest]:
    """Return the children by kind and name. Returns an empty mapping if `ctx` is None.

    Records of revisions are omitted, because they differ only if the engines differ. The ConfigMap is listed under its
    name without the hash.
    """
    if ctx is None:
        return {}
    text = json.dumps([manifest for manifest in all_children(ctx) if manifest["kind"] != REVISION_KIND])
    manifests = json.loads(text.replace(f'"{config_name(ctx)}"', f'"{ctx.name}-config"'))
    return {f"{manifest['kind']} {manifest['metadata']['name']}": manifest for manifest in manifests}


def _spec(ctx: RenderContext | None) -> dict[str, Any]:
    return {} if ctx is None else ctx.spec.model_dump(mode="json", by_alias=True)


def _change(name: str, old: Manifest | None, new: Manifest | None) -> Change | None:
    if old is None:
        return Change("create", name)
    if new is None:
        return Change("delete", name, restarts=False)
    field = next(differences(old, new), None)
    if field is None:
        return None
    if new["kind"] == "StatefulSet":
        restarts = engine_revision(old) != engine_revision(new)
    else:
        restarts = new["kind"] == "Deployment" and old["spec"]["template"] != new["spec"]["template"]
    return Change("change", name, field, restarts)


def preview(old: RenderContext | None, new: RenderContext) -> Preview:
    """Return the effect of a change from `old` to `new` while the resource runs.

    old: None if the resource does not exist yet.

    Raises:
        RenderError: one of the two specs cannot be rendered.
    """
    fields = () if old is None else tuple(differences(_spec(old), _spec(new), "spec"))
    refreshed = (
        old is not None and model_hash(old) == model_hash(new) and weights_revision(old) != weights_revision(new)
    )
    if old is not None and refreshed:
        old = replace(old, spec=old.spec.model_copy(update={"weights": new.spec.weights}))
    before, after = _by_name(old), _by_name(new)
    names = [*after, *(name for name in before if name not in after)]
    found = [_change(name, before.get(name), after.get(name)) for name in names]
    changes = tuple(change for change in found if change is not None)
    steps = _steps(old, new, changes)
    if refreshed:
        steps = (f"load weights {weights_revision(new)} into every engine in place, with the next epoch", *steps)
    return Preview(fields, changes, steps)


def _steps(old: RenderContext | None, new: RenderContext, changes: tuple[Change, ...]) -> tuple[str, ...]:
    steps = []
    if old is not None and old.spec.desired_state is not new.spec.desired_state:
        steps.append(f"{old.spec.desired_state.value} -> {new.spec.desired_state.value}, confirmed by every rank")
    restarted = {change.child.split()[-1] for change in changes if change.restarts}
    if new.coordinator_name in restarted and new.has_standby:
        steps.append("replace the two coordinators one after the other; each hands over to the other one")
    elif new.coordinator_name in restarted:
        steps.append("replace the coordinator: OpenAI servers hold requests until it is back after some seconds")
    another_model = old is not None and model_hash(old) != model_hash(new)
    if new.server_name in restarted and not another_model:
        steps.append("replace the OpenAI servers one after another; each finishes its requests")
    engines = [change for change in changes if change.child.startswith("StatefulSet ")]
    removed = [change.child.split()[-1] for change in engines if change.verb == "delete"]
    steps += [f"drain and remove {name}" for name in reversed(removed)]
    replaced = [change.child.split()[-1] for change in engines if change.restarts]
    if replaced:
        steps.append("check the model and the settings in a pod without GPUs; until it succeeds, nothing is drained")
    if replaced and another_model:
        steps.append(f"drain all engines, then replace {', '.join(replaced)} and the servers together: another model")
    else:
        limit = new.spec.rollout.unavailable
        steps += [
            f"drain and replace {name}, then verify it by a canary completion (at most {limit} at a time)"
            for name in reversed(replaced)
        ]
        if replaced:
            left = max(0, new.spec.num_engines - limit)
            steps.append(f"lowest capacity meanwhile: {left} of {new.spec.num_engines} engines")
    generation = new.spec.keys.generation
    if old is not None and generation > old.spec.keys.generation:
        steps.append(f"rotate the keys to generation {generation}; the coordinator restarts once")
    return tuple(steps)
