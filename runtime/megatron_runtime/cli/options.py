"""Shared code of the subcommands: lazily imported commands, readable errors, option types, and logging."""

from __future__ import annotations

import os
import re
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from megatron_runtime.process.environment import missing_package, output_is_closed
from megatron_runtime.process.logs import configure
from megatron_runtime.process.options import FiniteRange, environment_option
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.protocol.answer_formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from megatron_runtime.protocol.vllm_arguments import problem_of

_F = TypeVar("_F", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")


class LazyGroup(click.Group):
    """A group of commands that imports the module of a subcommand when the subcommand runs.

    If a command raises OSError or ValueError, or if a package is missing, the group prints the error in one line. With
    the variable MEGATRON_DEBUG=1, it also prints the traceback of an OSError or ValueError.

    commands: maps the name of a command to the module of `package` that defines it, and to its line on the help page.
              In the module, the command is a variable with the command's name, with or without `_` at its end.
    """

    def __init__(
        self, *args: Any, commands: Mapping[str, tuple[str, str]], package: str = __package__, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._lazy = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        names = vars(import_module(f"{self._package}.{self._lazy[cmd_name][0]}"))
        command: click.Command = names.get(cmd_name) or names[f"{cmd_name}_"]
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise click.ClickException(missing_package(error, extra="runtime")) from error
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) and output_is_closed():
                raise  # click exits the command without a message
            if os.environ.get("MEGATRON_DEBUG"):
                traceback.print_exception(error)
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])


class Parsed(click.types.FuncParamType):
    """The type of an option whose text is parsed.

    name:  placeholder for the value on the help page.
    parse: converts the text to a value. Raises click.BadParameter with the text and the allowed values.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        super().__init__(parse)
        self.name = name


def _memory(text: str) -> int:
    match = _QUANTITY.fullmatch(text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise click.BadParameter(f"{text!r} is not a size: use bytes or a number with Ki, Mi, Gi or Ti, such as 2Gi.")
    return size


def _address(text: str) -> str:
    if text.startswith("ipc:///"):
        return text
    bare = text.removeprefix("tcp://")
    host, _, port = bare.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(
            f"{text!r} is not an address: use host:port, such as demo-coordinator:5555, or ipc:///PATH."
        )
    return f"tcp://{bare}"


def _optional_port(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise click.BadParameter(f"{text!r} is not a port: use 0 to 65535 (0 picks a free one) or off.")
    return int(text)


def _api_keys_file(text: str) -> Path:
    from megatron_runtime.server.auth import ApiKeyFileError, read_keys

    try:
        read_keys(Path(text))
    except ApiKeyFileError as error:
        raise click.BadParameter(f"{error}.") from error
    except OSError as error:
        raise click.BadParameter(
            f"{text!r} cannot be read ({error}): name a text file with one key per line."
        ) from error
    return Path(text)


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r}: use numbers from 1 up with commas between, such as 1,8,32.")
    return tuple(map(int, parts))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON ({error}): give an object.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not an object: write {{...}}.")
    return value


def _vllm_arguments(text: str) -> dict[str, Any]:
    arguments = _json_object(text)
    problem = problem_of(arguments, allow_code=True)
    if problem is not None:
        raise click.BadParameter(f"{problem}.")
    return arguments


def _adapter(text: str) -> Adapter:
    name, separator, source = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r} is not an adapter: use NAME=SOURCE, such as sql=hf:org/sql-lora.")
    if not source.startswith("hf:"):
        source = str(Path(source).expanduser().resolve())  # engines may run in another directory than this process
    try:
        return Adapter(name, source)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def _media_host(text: str) -> str:
    host = text.lower()
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?|\[[0-9a-f:.]+\]|[0-9a-f]*:[0-9a-f]*:[0-9a-f:.]*", host):
        raise click.BadParameter(f"{text!r} is not a host: use a name or an address, without scheme and port.")
    return host


def _origin(text: str) -> str:
    from megatron_runtime.server.guards import origin_of

    try:
        return origin_of(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


MEDIA_HOST = Parsed("host", _media_host)
"""A hostname or IP address in URLs: `images.example.com`, `192.0.2.7` or `[2001:db8::7]`."""
ORIGIN = Parsed("origin", _origin)
"""The origin of a web page, such as `http://localhost:3000`, or `*` for all origins."""
ADAPTER = Parsed("name=source", _adapter)
"""A LoRA adapter: `sql=hf:org/sql-lora@REVISION` or `sql=DIRECTORY`."""
MEMORY = Parsed("size", _memory)
"""A number of bytes as a Kubernetes quantity: `2Gi`, `512Mi`, `1.5G`, `1073741824`."""
ADDRESS = Parsed("host:port", _address)
"""The address of a coordinator, with or without `tcp://`, or `ipc:///PATH`."""
OPTIONAL_PORT = Parsed("port|off", _optional_port)
"""A TCP port. The value is 0 to pick a free port, and None for `off`."""
API_KEYS_FILE = Parsed("file", _api_keys_file)
"""A file with API keys: one key per line, or YAML with names and limits."""
COUNTS = Parsed("n,n,…", _counts)
"""Positive integers separated by commas: `1,8,32`."""
VLLM_ARGUMENTS = Parsed("json", _vllm_arguments)
"""Engine arguments for vLLM as a JSON object."""
PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(min=1)
SECONDS = FiniteRange(min=0)
POSITIVE_SECONDS = FiniteRange(0, min_open=True)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
NEW_DIRECTORY = click.Path(file_okay=False, path_type=Path)
ROUTING_POLICIES = click.Choice(["LoadBalanced", "RoundRobin", "FirstPrefixBlock", "LongestPrefix", "LeastCost"])


def check_parsers(*, backend: str, tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise click.UsageError unless this project has both parsers. The vLLM backend accepts all names."""
    for flag, name, names in (
        ("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    ):
        if backend != "vllm" and name not in names:
            allowed = ", ".join(map(repr, names))
            raise click.UsageError(f"{flag} {name!r} is not a format: use one of {allowed}, or --backend vllm.")


def together(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Return a decorator that adds all `options` to a command. The help page shows them in the order of `options`."""

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


json_output = click.option(
    "-o",
    "--output",
    type=click.Choice(["json"]),
    help="Output format. json prints machine-readable output. Default: text.",
)


def say_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Each column is as wide as its longest cell."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        click.echo("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


model = click.option(
    "--model",
    default="builtin:smollm2-135m",
    help="Model to serve: builtin:NAME, hf:ORG/NAME[@REVISION], s3://BUCKET/PREFIX (or gs, az, https), a GGUF file "
    "or a directory.",
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def model_reference(name: str) -> str:
    """Return the model reference for a name that a user has entered.

    A name such as ORG/NAME is a repository of the hub, unless there is a file or directory with this path.
    """
    return f"hf:{name}" if _HUB_NAME.fullmatch(name) and not Path(name).exists() else name


PARALLEL = click.IntRange(1, 64)
tensor_parallel = environment_option(
    "--tensor-parallel",
    type=PARALLEL,
    default=1,
    envvar="TENSOR_PARALLEL_SIZE",
    help="Number of ranks that split each layer of an engine (tensor parallelism). Raise it if the model does not "
    "fit on one device.",
)


sequence_length = click.option(
    "--max-sequence-length",
    type=COUNT,
    help="Maximum length of a request, prompt plus answer, in tokens. Default: the model's limit. Lower it if the "
    "KV cache is too small for this limit.",
)
engine_options = together(
    model,
    environment_option(
        "--backend",
        type=click.Choice(["native", "vllm"]),
        default="native",
        envvar="MEGATRON_ENGINE_BACKEND",
        help="Engine implementation. native is the built-in engine; vllm runs vLLM, which must be installed.",
    ),
    environment_option(
        "--vllm-arguments",
        type=VLLM_ARGUMENTS,
        default="{}",
        envvar="MEGATRON_VLLM_ARGUMENTS",
        help='Engine arguments for vLLM as a JSON object, such as {"quantization": "fp8"}.',
    ),
    click.option(
        "--vllm-allow-code/--no-vllm-allow-code",
        default=False,
        help="Accept vLLM arguments that can load code, such as trust_remote_code. Set it only for models that you "
        "trust.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
        default="auto",
        help="Data type of the weights. auto depends on the model and the device. int8 and int4 run on CPUs only; "
        "they need less memory and are faster, but less accurate.",
    ),
    sequence_length,
    click.option(
        "--max-requests",
        type=COUNT,
        help="Maximum number of requests that an engine processes at the same time. Default: 64; on a GPU, vLLM "
        "chooses its own limit. Raise it for throughput if the KV cache has space.",
    ),
    click.option(
        "--max-tokens",
        type=COUNT,
        help="Maximum number of prompt and decode tokens per step. Default: 2048; on a GPU, vLLM chooses its own "
        "limit. Raise it for throughput, or lower it for latency.",
    ),
    click.option(
        "--kv-cache-memory",
        type=MEMORY,
        help="Memory for the KV cache of each rank. Default: 1Gi on a CPU; on a GPU, the memory that is free after "
        "the weights are loaded. Raise it if requests wait for KV blocks.",
    ),
    click.option(
        "--moe-enable-routing-replay/--no-moe-enable-routing-replay",
        default=False,
        help="Record which experts process each token, and return them as routing_indices of the answer. Use it to "
        "train mixture-of-experts models with the same routing.",
    ),
    click.option(
        "--prefix-caching/--no-prefix-caching",
        default=True,
        help="Reuse the KV blocks of earlier requests whose prompts begin with the same tokens. Disable it to "
        "compute every prompt completely, for example in benchmarks.",
    ),
    click.option(
        "--threads",
        type=COUNT,
        help="Number of CPU threads that all ranks of an engine on this machine use together. Default: PyTorch's "
        "default; with `megatron serve`, the number of CPUs divided by the number of engines.",
    ),
)
"""Options of an engine, shared by `megatron engine` and `megatron serve`."""
server_options = together(
    click.option(
        "--model-name",
        "model_names",
        multiple=True,
        help="Name of the model in /v1/models and in requests. Default: the last part of the model reference. "
        "Repeat the option to add aliases; answers contain the first name.",
    ),
    click.option(
        "--any-model-name/--no-any-model-name",
        default=False,
        help="Use this model for requests that name an unknown model, instead of rejecting them with 404.",
    ),
    click.option(
        "--allowed-origin",
        "allowed_origins",
        type=ORIGIN,
        multiple=True,
        help="Origin of web pages that may use the server (CORS), such as http://localhost:3000. * allows every "
        "origin. Default: none. Repeatable.",
    ),
    click.option(
        "--allowed-media-host",
        "allowed_media_hosts",
        type=MEDIA_HOST,
        multiple=True,
        help="Host from which the server may fetch images, audio and video that requests refer to, with --backend "
        "vllm. A host name must resolve to public addresses; an IP address may be private. Default: none, so "
        "requests can only contain data URLs. Repeatable.",
    ),
    click.option(
        "--api-keys-file",
        type=API_KEYS_FILE,
        help="File with the accepted API keys: one key per line, or YAML with names and limits. If it is not set, "
        "requests need no key.",
    ),
    click.option(
        "--share-prefix-cache/--no-share-prefix-cache",
        default=False,
        help="Share cached prefixes among all API keys. Set it only if the key holders trust each other, because "
        "response times and cached_tokens then reveal which prompts other keys have sent.",
    ),
    click.option(
        "--allow-priority/--no-allow-priority",
        default=False,
        help="Allow requests to set a priority other than 0. Enable it only if you trust all clients, because "
        "requests with a lower number run first.",
    ),
    click.option(
        "--reserve-tokens",
        type=COUNT,
        default=1024,
        help="Maximum number of generated tokens per choice that the server reserves when a request starts, for API "
        "keys with a token limit. Further tokens are charged as they are generated. Lower it if requests are "
        "rejected although their answers are short.",
    ),
    click.option(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help=f"Format in which the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; with --backend vllm also "
        "the name of a vLLM parser. auto detects the format from the chat template; none disables tools.",
    ),
    click.option(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help=f"Format in which the model marks its reasoning: {', '.join(REASONING_PARSERS)}; with --backend vllm "
        "also the name of a vLLM parser. auto detects the format from the chat template; none leaves reasoning in "
        "the text.",
    ),
    click.option(
        "--generation-config",
        type=click.Choice(["auto", "none"]),
        default="auto",
        help="Source of the sampling parameters that a request does not set. auto uses the model's "
        "generation_config.json. none uses neutral values, such as temperature 1.",
    ),
)
"""Options of the OpenAI server, shared by `megatron server` and `megatron serve`."""


def config_option() -> Callable[[_F], _F]:
    """Return a decorator that adds `--config FILE`, a TOML file whose keys are long option names without `--`.

    Command-line options and environment variables take precedence over the file.
    """

    def read(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise click.BadParameter(f"{str(path)!r} is not TOML: {error}; write lines such as port = 8000.") from error
        options = _long_options(context.command)
        defaults: dict[str, Any] = {}
        for key, value in content.items():
            option = options.get(key)
            if option is None:
                near = get_close_matches(key, options, 1)
                remedy = f"use {near[0]}" if near else f"see {context.command_path} --help"
                raise click.UsageError(f"{path}: {key} = {value!r}: no such option; {remedy}.")
            try:
                text = _option_value(option, value)
                option.type_cast_value(context, text)
            except click.BadParameter as error:
                raise click.UsageError(f"{path}: {key} = {value!r}: {error.message}") from error
            defaults[str(option.name)] = text
        context.default_map = defaults

    return click.option(
        "--config",
        type=FILE,
        is_eager=True,
        expose_value=False,
        callback=read,
        help="TOML file that sets options by their long names, such as port = 8000. Options on the command line "
        "have precedence.",
    )


def _long_options(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their names in a configuration file."""
    return {
        name.removeprefix("--"): option
        for option in command.params
        if isinstance(option, click.Option)
        for name in option.opts
        if name.startswith("--") and name != "--config"
    }


def _option_value(option: click.Option, value: Any) -> Any:
    """Convert a value of a configuration file to its command-line form.

    The result is a string or a list of strings. For a flag, the result is True if the flag is set.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("use true or false.")
        return value
    if option.multiple:
        if isinstance(value, bool):
            raise click.BadParameter("use a text, or a list, [...].")
        return [str(each) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool | list):
        raise click.BadParameter("use one value, a text or a number.")
    return json.dumps(value) if isinstance(value, dict) else str(value)


def arguments_of(command: click.Command, values: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments that set parameters of a command.

    values: values by parameter name. None means the default value, for which there is no argument.
    """
    arguments: list[str] = []
    for option in command.params:
        value = values.get(str(option.name))
        if value is None or not isinstance(option, click.Option):
            continue
        if option.is_flag:
            arguments += [option.opts[0]] if value else option.secondary_opts[:1]
            continue
        name = max(option.opts, key=len)
        for each in value if option.multiple else [value]:
            arguments += [name, json.dumps(each) if isinstance(each, dict) else str(each)]
    return arguments


def log_options(command: _F) -> _F:
    """Add the options `--log-level` and `--log-format` to a command, and configure logging."""

    def configure_logs(ctx: click.Context, param: click.Parameter, value: str) -> None:
        configure(style=ctx.params.pop("log_format"), level=value)

    level = environment_option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        envvar="MEGATRON_LOG_LEVEL",
        expose_value=False,
        callback=configure_logs,
        help="Lowest severity of the messages that the command logs.",
    )
    log_format = environment_option(
        "--log-format",
        type=click.Choice(["json", "text"]),
        default="text",
        envvar="MEGATRON_LOG_FORMAT",
        is_eager=True,  # parsed before the log level, whose callback configures logging
        help="Format of log lines. json prints one object per line, for log collectors.",
    )
    return level(log_format(command))
