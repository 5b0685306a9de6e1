"""Checks the wording of all files in the repository: `python tools/check_prose.py [FILE ...]`.

No text may match a rule of glossary.toml. No line of prose in Markdown may be longer than 100 columns. Tables, code
blocks and lines that a link makes long are not prose. The program prints `path:line: message` for each violation, and
exits with status 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = Path(__file__).with_name("glossary.toml")
DATA = {".json", ".svg", ".jsonl", ".gguf", ".bin"}
EXEMPT = {
    "tools/glossary.toml",
    "LICENSE",
    "CHANGELOG.md",  # names what was renamed
    "localcluster/go/pause/main.go",  # a change of a comment builds all programs of the cluster again
}
COLUMNS = 100
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Rule(NamedTuple):
    reject: re.Pattern[str]
    write: str
    exceptions: re.Pattern[str] | None
    candidate: re.Pattern[str]
    """Matches the lower-case text of each file that `reject` matches. `re` searches for a pattern ten times as fast if
    the pattern is case-sensitive and does not begin with an assertion.
    """


def read_rules(path: Path = GLOSSARY) -> list[Rule]:
    """Return the rules of a glossary file. Raises ValueError for a rule with upper case in `reject`."""

    def rule(entry: dict[str, str | list[str]]) -> Rule:
        reject, exceptions = str(entry["reject"]), "|".join(entry.get("except", ()))
        if reject != reject.lower():
            raise ValueError(f"{path}: reject = {reject!r}: write it in lower case; it matches any case")
        return Rule(
            re.compile(rf"(?<![a-z])(?:{reject})(?![a-z])", re.IGNORECASE),
            str(entry["write"]),
            re.compile(exceptions, re.IGNORECASE) if exceptions else None,
            re.compile(reject),
        )

    return [rule(entry) for entry in tomllib.loads(path.read_text())["rule"]]


def wording(text: str, rules: list[Rule]) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each match of a rule, except inside one of the rule's exceptions."""
    text = _CAMEL_CASE.sub("_", text)
    lower = text.lower()
    matching = [rule for rule in rules if rule.candidate.search(lower)]  # most files match no rule
    for number, line in enumerate(text.splitlines() if matching else (), 1):
        for reject, write, exceptions, _ in matching:
            allowed = [m.span() for m in exceptions.finditer(line)] if exceptions else []
            for match in reject.finditer(line):
                if not any(start <= match.start() and match.end() <= end for start, end in allowed):
                    yield number, f"'{match.group()}': write {write}"


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and message for each line of Markdown prose that exceeds the column limit."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        prose = not (in_code or line.lstrip().startswith(("|", "<", "[")) or line.startswith("    "))
        if prose and len(line) > COLUMNS and " " in line.strip()[:COLUMNS]:
            yield number, f"{len(line)} columns: wrap at {COLUMNS}"


def main(arguments: list[str]) -> int:
    rules = read_rules()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [str(Path(name).resolve().relative_to(ROOT)) for name in arguments] or listed.splitlines()
    findings = 0
    for name in names:
        path = ROOT / name
        if name in EXEMPT or path.suffix in DATA or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found = [*wording(text, rules), *(long_lines(text) if path.suffix == ".md" else ())]
        for number, message in found:
            print(f"{name}:{number}: {message}")
        findings += len(found)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
