"""Text of peers and clients in the runtime's logs."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import subprocess
import sys

import pytest

from megatron_runtime.process.logs import REQUEST_ID, JsonFormatter, TextFormatter, of_request

HOSTILE = "a\x1b[2J\r\n12:00:00 INFO forged: line\u202e\u200b"


def test_a_record_is_one_line_and_its_traceback_is_indented() -> None:
    record = logging.makeLogRecord({"msg": "peer %s left", "args": (HOSTILE,), "levelname": "INFO", "name": "x"})
    formatter = TextFormatter()
    when, text = formatter.format(record).split(" ", 1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", when)
    assert text == r"INFO x: peer a\x1b[2J\r\n12:00:00 INFO forged: line\u202e\u200b left"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *others = formatter.format(record).split("\n")
    assert all(line.isprintable() for line in (first, *others))
    assert all(line.startswith("    ") for line in others)


def test_a_record_has_the_id_of_its_request() -> None:
    """By the call, or by the task that serves the request; the call has precedence."""
    plain = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "name": "x"})
    given = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "name": "x", **of_request("req-1")})
    assert "request_id" not in json.loads(JsonFormatter().format(plain))
    assert json.loads(JsonFormatter().format(given))["request_id"] == "req-1"
    assert TextFormatter().format(given).endswith("ERROR x: failed request_id=req-1")

    def within() -> tuple[str, str]:
        REQUEST_ID.set("req-2")
        return (
            json.loads(JsonFormatter().format(plain))["request_id"],
            json.loads(JsonFormatter().format(given))["request_id"],
        )

    assert contextvars.copy_context().run(within) == ("req-2", "req-1")
    assert of_request("") == {}


@pytest.mark.parametrize("arguments", [[], ["--log-format", "json"], ["--log-level", "info", "--log-format", "json"]])
def test_a_commands_log_is_escaped(arguments: list[str]) -> None:
    """The options of every command that logs set it up."""
    program = (
        "import click, logging; from megatron_runtime.cli.options import log_options; "
        f"click.command()(log_options(lambda: logging.getLogger('x').info({HOSTILE!r})))()"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    (line,) = done.stderr.rstrip("\n").split("\n")
    assert line.isprintable()
    assert "forged" in line
    if arguments:
        record = json.loads(line)
        assert (record["level"], record["logger"], record["msg"]) == ("info", "x", HOSTILE)
