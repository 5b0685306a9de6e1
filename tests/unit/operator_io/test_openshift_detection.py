"""The operator asks the API server once whether the cluster is OpenShift."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.controller import main
from megatron_operator.controller.main import OperatorProcess, RunOptions
from megatron_operator.resource.settings import Settings

ABSENT, UNAVAILABLE = KubeApiError(404, "NotFound", "no such API"), KubeApiError(503, "ServiceUnavailable", "later")


class Api(KubeApi):
    """Answers requests for an API in turn. None: the API exists."""

    def __init__(self, *answers: KubeApiError | None) -> None:
        self.answers = list(answers)
        self.paths: list[str] = []

    async def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        self.paths.append(f"{method} {path}")
        error = self.answers.pop(0)
        if error is not None:
            raise error
        return {}


@pytest.mark.parametrize(
    ("option", "answers", "openshift"),
    [
        (None, [None], True),
        (None, [ABSENT], False),
        (None, [UNAVAILABLE, UNAVAILABLE, None], True),
        (None, [UNAVAILABLE, ABSENT], False),
        (True, [], True),
        (False, [], False),
    ],
)
async def test_only_an_answer_decides(
    monkeypatch: pytest.MonkeyPatch, option: bool | None, answers: list[KubeApiError | None], openshift: bool
) -> None:
    monkeypatch.setattr(main, "CRD_RETRY_SECONDS", 0.0)
    process, api = OperatorProcess(RunOptions(Settings(runtime_image="r:1", openshift=option))), Api(*answers)
    await process._detect_openshift(api)
    assert process._options.settings.openshift is openshift
    assert api.paths == ["GET /apis/security.openshift.io/v1"] * len(answers)
