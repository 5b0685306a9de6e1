"""Read the progress of a download from the init container `fetch` of a pod."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException

from megatron_operator.plan.world import Download, PodView
from megatron_operator.render.context import PORT_HEALTH
from megatron_runtime.protocol import strict_json as json

MOST_DOWNLOADS = 4
"""Limit of the pods that are asked at a time."""
_SECONDS = 2.0
_MOST_BYTES = 4096
_LARGEST = 1 << 60


def read_progress(pod: PodView, *, port: int = PORT_HEALTH) -> Download | None:
    """Return the progress that a pod reports; None if it cannot be read, or if the pod waits for another one.

    The pods of an operator outside of the cluster cannot be reached. The download does not depend on it.
    """
    connection = HTTPConnection(pod.fetching_at, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/progress")
        values = json.loads(connection.getresponse().read(_MOST_BYTES))
        numbers = [values[name] for name in ("bytes", "totalBytes", "bytesPerSecond")]
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        connection.close()
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        return None
    return Download(pod.name, *numbers)
