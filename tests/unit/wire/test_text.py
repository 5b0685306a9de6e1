"""Text of peers and clients in the runtime's logs."""

from __future__ import annotations

import logging
import subprocess
import sys

from megatron_runtime.cli.options import LogFormatter

HOSTILE = "a\x1b[2J\r\n12:00:00 INFO forged: line\u202e\u200b"


def test_a_record_is_one_line_and_its_traceback_is_indented() -> None:
    record = logging.makeLogRecord({"msg": "peer %s left", "args": (HOSTILE,), "levelname": "INFO", "name": "x"})
    formatter = LogFormatter("%(levelname)s %(name)s: %(message)s")
    assert formatter.format(record) == r"INFO x: peer a\x1b[2J\r\n12:00:00 INFO forged: line\u202e\u200b left"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *others = formatter.format(record).split("\n")
    assert all(line.isprintable() for line in (first, *others))
    assert all(line.startswith("    ") for line in others)


def test_a_commands_log_is_escaped() -> None:
    """The option of every command that logs sets it up."""
    program = (
        "import click, logging; from megatron_runtime.cli.options import log_level; "
        f"click.command()(log_level(lambda: logging.getLogger('x').info({HOSTILE!r})))()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = done.stderr.rstrip("\n").split("\n")
    assert line.isprintable()
    assert "forged" in line
