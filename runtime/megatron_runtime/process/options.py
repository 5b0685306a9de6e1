"""Types of command-line options: finite numbers, and options that environment variables can set."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from megatron_runtime.process.secrets import HEADER, SecretError


class FiniteRange(click.FloatRange):
    """A click.FloatRange that rejects infinity and NaN, which FloatRange accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class EnvironmentOption(click.Option):
    """A command-line option that an environment variable can also set.

    The value of the variable may come from a Secret, so errors do not quote it.
    """

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter:
            raise
        except (click.BadParameter, ValueError):
            source = ctx.get_parameter_source(str(self.name))
            if source is not ParameterSource.ENVIRONMENT:
                raise
            if isinstance(self.type, click.Choice):
                want = f"one of {', '.join(self.type.choices)}"
            else:
                want = f"a value that {self.opts[0]} accepts (see --help)"
            message = f"the environment variable {self.envvar} does not have a valid value: give {want}, or unset it"
            raise click.BadParameter(message, ctx, self) from None


environment_option = partial(click.option, cls=EnvironmentOption)
"""`click.option` for an option that an environment variable can set."""


class _ApiKey(click.ParamType):
    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return HEADER.check("the API key", str(value))
        except SecretError as error:
            raise click.BadParameter(str(error), ctx, param) from None


API_KEY = _ApiKey()
"""An API key, which is sent in an HTTP header."""
