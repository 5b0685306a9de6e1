"""Options that the operator passes to the runtime's commands, against the commands themselves."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import click
import pytest
from pydantic import BaseModel

from megatron_operator.render import coordinator, engine, server
from megatron_operator.render.options import Option
from megatron_operator.resource.spec import MegatronInferenceSpec
from megatron_runtime.cli import main

OPTIONS: dict[str, Sequence[Option]] = {
    "coordinator": coordinator.OPTIONS,
    "engine": engine.OPTIONS,
    "server": server.OPTIONS,
}
EACH = [
    pytest.param(command, option, id=f"{command} {option.flag}") for command in OPTIONS for option in OPTIONS[command]
]


def parameter(command: str, flag: str) -> click.Option:
    """Return the option of a command of the runtime."""
    found = main.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    options = [each for each in found.params if isinstance(each, click.Option)]
    return next(each for each in options if flag in (*each.opts, *each.secondary_opts))


def type_in(model: type[BaseModel], name: str) -> Any:
    """Return the type of a field of a model, without None."""
    found: Any = model.model_fields[name].annotation
    if isinstance(found, types.UnionType) or typing.get_origin(found) is typing.Union:
        (found,) = [each for each in typing.get_args(found) if each is not type(None)]
    return typing.get_args(found)[0] if typing.get_origin(found) is typing.Annotated else found


def type_of(field: str) -> Any:
    """Return the type of a field of the spec, by its path."""
    found: Any = MegatronInferenceSpec
    for name in field.split("."):
        found = type_in(found, name)
    return found


@pytest.mark.parametrize("command", OPTIONS)
def test_an_option_is_declared_once(command: str) -> None:
    flags = [option.flag for option in OPTIONS[command]]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(("command", "option"), EACH)
def test_the_command_has_each_option_that_the_operator_passes(command: str, option: Option) -> None:
    declared = parameter(command, option.flag)
    if not option.field:
        return
    field = type_of(option.field)
    assert declared.is_flag == (field is bool)
    if declared.is_flag:
        assert option.flag in (declared.secondary_opts if option.flag.startswith("--no-") else declared.opts)


@pytest.mark.parametrize(("command", "option"), EACH)
def test_the_crd_and_the_command_line_have_the_same_choices(command: str, option: Option) -> None:
    declared, field = parameter(command, option.flag), type_of(option.field) if option.field else None
    is_enum = isinstance(field, type) and issubclass(field, StrEnum)
    assert isinstance(declared.type, click.Choice) == (is_enum or option.flag in ("--backend", "--role"))
    if isinstance(declared.type, click.Choice) and is_enum:
        assert {option.write(member) for member in field} == set(declared.type.choices)


def test_every_enum_of_the_spec_that_the_runtime_reads_has_an_option() -> None:
    passed = {option.field for options in OPTIONS.values() for option in options}
    enums = {path for path, annotation in _fields(MegatronInferenceSpec) if issubclass(annotation, StrEnum)}
    only_the_operator = {
        "desired_state",
        "engine.speculative.method",  # as a part of --vllm-arguments
        "engine.backend",  # as --backend vllm, or nothing
        "lifecycle.suspend.level",
        "server.inference_pool.endpoint_picker_ref.failure_mode",
        "server.service.type",
    }
    assert enums - passed == only_the_operator


def _fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, type]]:
    """Return path and class of each field that holds an object of one class, at every depth."""
    found: list[tuple[str, type]] = []
    for name in model.model_fields:
        path = f"{prefix}{name}"
        annotation = type_in(model, name)
        if not isinstance(annotation, type) or isinstance(annotation, types.GenericAlias):
            continue
        found.append((path, annotation))
        if issubclass(annotation, BaseModel):
            found += _fields(annotation, f"{path}.")
    return found
