"""The troubleshooting guide, generated from the reasons, their remedies and the table of causes. Pure text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from megatron_operator.model.conditions import Reason
from megatron_operator.model.remedies import REMEDIES, Symptom
from megatron_operator.plan.causes import CREATION, EXIT_CODES, SCHEDULING, TERMINATION_MESSAGE

_WIDTH = 100
_FIELD = re.compile(r"(?<![`\w.])((?:spec|status|podPolicy)\.[A-Za-z.]+[A-Za-z])")

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

`status.plan` says in one sentence what the operator does and what it waits for, whenever the
resource is not settled. The condition `Degraded` is True when waiting alone may not help. Its
message quotes the scheduler, the kubelet or the container. Look up its reason below.

A rollout waits for the pod `NAME-check-REVISION`, which checks the model and the settings before
engines are drained. If it fails, the engines of the previous revision serve on. Correct the spec as
the message says. If the cause is outside of the spec, such as a token in a Secret or a file in a
volume, correct that and delete the pod, and the operator checks again. `kubectl logs POD` has the
whole output ([Rollouts](../concepts/rollouts.md#check-of-a-new-revision)).

If the resource has no status at all, no operator serves its namespace: check `operator.namespaces`
of the chart, the operator's pods and its Lease. If the status is that of an earlier change
(`status.observedGeneration`), read the operator's log.

For errors that HTTP clients get, see
[Errors](../reference/http-api-behaviour.md#errors). What each loss of a part costs is in
[Failures and recovery](../concepts/failures-and-recovery.md).
"""


def _wrapped(text: str, *, indent: str = "") -> str:
    """`text` at 100 columns, with field names as code."""
    marked = _FIELD.sub(r"`\1`", text)
    return textwrap.fill(
        marked,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _hints(reason: Reason) -> list[str]:
    """What the message may add, from the tables by which the operator reads schedulers, API servers and containers.

    A reason with one hint needs none here: its remedy says the same.
    """
    found = [cause.remedy for cause in (*SCHEDULING, *CREATION, *TERMINATION_MESSAGE) if cause.reason is reason]
    return found if len(found) > 1 else []


def _entry(reason: Reason) -> Iterator[str]:
    yield from ("", f"### {reason.value}", "", _wrapped(reason.doc), "")
    yield _wrapped(f"**Do:** {REMEDIES[reason].action}")
    hints = _hints(reason)
    if hints:
        yield from ("", "The message ends with the remedy that fits:", "")
        yield from (_wrapped(_sentence(hint), indent="- ") for hint in hints)


def _exit_codes() -> Iterator[str]:
    yield from ("", "Exit codes that the message explains:", "", "| exit code | meaning |", "|---|---|")
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())


def troubleshooting_page() -> str:
    """The whole page, in Markdown: a section for each symptom, an entry for each reason."""
    lines = [_INTRODUCTION, "## All reasons", "", "| reason | symptom |", "|---|---|"]
    lines += [
        f"| [`{reason.value}`](#{reason.value.lower()}) | {REMEDIES[reason].symptom.value} |"
        for reason in sorted(Reason, key=lambda reason: reason.value)
    ]
    for symptom in Symptom:
        lines += ["", f"## {symptom.value}"]
        for reason in (reason for reason in REMEDIES if REMEDIES[reason].symptom is symptom):
            lines += _entry(reason)
            if reason is Reason.CRASH_LOOPING:
                lines += _exit_codes()
    return "\n".join(lines) + "\n"
