"""The checks of a request that arrives: what each decides, and where their order matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_runtime.coordinator.core.admission import CHECKS, AdmissionCheck, AdmissionControl, Verdict
from megatron_runtime.coordinator.core.records import Entry
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import Control, Error, Submit, pack, tokens_to_bytes
from megatron_runtime.protocol.request_meta import RequestMeta

from .test_core import ADMIN, CLIENT, FIRST, Scene

NAMES = [
    "the engines are stopped",
    "its adapter is not in the list",
    "its only engine may not answer it",
    "no engine supports its parameters",
    "the queue is full",
    "the journal is full",
    "other requests wait, or no engine may be given one",
]


def stopped(scene: Scene) -> None:
    scene.say(ADMIN, Control(kind=Header.PAUSE, operation_id="pause", fence=1))


def has_adapters(scene: Scene) -> None:
    scene.core.verbs.adapters = AdapterList((Adapter("known", "s3://bucket/known"),), generation=1)


def lacking(scene: Scene) -> None:
    scene.core.engines.named("first").lacks = frozenset({"PRIORITY"})


def full_queue(scene: Scene) -> None:
    """Two tenants have a request more at the coordinator than a new one."""
    scene.core.engines.named("first").max_requests = 1
    scene.core.engines.load_changed(scene.core.engines.named("first"))
    for number in (101, 102, 103):
        scene.submit(number, tenant="other")


def full_journal(scene: Scene) -> None:
    scene.core.dispatcher.journal.limit_bytes = 100


def busy(scene: Scene) -> None:
    scene.core.engines.named("first").max_requests = 1
    scene.core.engines.load_changed(scene.core.engines.named("first"))
    scene.submit(101)


Outcome = ErrorCode | str
CASES: list[tuple[str, Callable[[Scene], None], dict[str, Any], dict[str, Any], Outcome]] = [
    ("the engines are stopped", stopped, {"pause_mode": "Reject"}, {}, ErrorCode.UNAVAILABLE),
    ("its adapter is not in the list", has_adapters, {}, {"adapter": "other"}, ErrorCode.ADAPTER_NOT_FOUND),
    ("its only engine may not answer it", lambda _: None, {}, {"engine": "second"}, ErrorCode.ENGINES_MISSING),
    ("no engine supports its parameters", lacking, {}, {"needs": "PRIORITY"}, ErrorCode.INVALID_REQUEST),
    ("the queue is full", full_queue, {"max_queued": 2}, {"tenant": "other"}, ErrorCode.QUEUE_FULL),
    ("the journal is full", full_journal, {}, {}, ErrorCode.QUEUE_FULL),
    (NAMES[-1], stopped, {}, {}, "waits"),
]


def outcome(scene: Scene, **meta: Any) -> Outcome:
    scene.take()
    uid = scene.submit(**meta)
    sent = [message for _, message in scene.take() if getattr(message, "uid", None) == uid]
    if not sent:
        assert scene.core.dispatcher.journal.get(uid).engine is None
        return "waits"
    [message] = sent
    return message.code if isinstance(message, Error) else "is dispatched"


def test_the_checks_are_in_this_order_and_each_has_a_case() -> None:
    assert [check.name for check in CHECKS] == NAMES
    assert [case[0] for case in CASES] == NAMES


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checks that decided, one for each request that is not dispatched at once."""
    names: list[str] = []

    def recorded(check: AdmissionCheck) -> AdmissionCheck:
        def look(admission: AdmissionControl, entry: Entry) -> Verdict | None:
            verdict = check.look(admission, entry)
            if verdict is not None:
                names.append(check.name)
            return verdict

        return AdmissionCheck(check.name, look)

    monkeypatch.setattr("megatron_runtime.coordinator.core.admission.CHECKS", tuple(map(recorded, CHECKS)))
    return names


@pytest.mark.parametrize(("name", "prepare", "settings", "meta", "decision"), CASES, ids=NAMES)
def test_each_check_decides_about_a_request_that_would_be_dispatched(
    decided: list[str], name: str, prepare: Any, settings: Any, meta: Any, decision: Outcome
) -> None:
    scene = Scene(**settings)
    scene.engine(FIRST)
    assert (outcome(scene), decided) == ("is dispatched", [])
    scene = Scene(**settings)
    scene.engine(FIRST)
    prepare(scene)
    decided.clear()
    assert (outcome(scene, **meta), decided) == (decision, [name])


def all_at_once(**settings: Any) -> Scene:
    scene = Scene(**settings)
    scene.engine(FIRST)
    has_adapters(scene)
    lacking(scene)
    return scene


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"frequency_penalty": "0.5"}, "presence_penalty"),
        (["malformed"], "presence_penalty"),
    ],
    ids=str,
)
def test_a_rejection_names_the_parameter_that_the_request_uses(params: Any, field: str) -> None:
    """Several parameters may need one capability. Of a request that cannot be read, the first of them is named."""
    scene = Scene()
    scene.engine(FIRST)
    scene.core.engines.named("first").lacks = frozenset({"PENALTIES"})
    scene.take()
    meta = RequestMeta(True, 1, needs="PENALTIES")
    scene.say(CLIENT, Submit(bytes(16), meta, tokens_to_bytes([1]), b"", pack(params)))
    [error] = [message for _, message in scene.take() if isinstance(message, Error)]
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, field)
    assert f"sampling parameter {field} needs presence and frequency penalties" in error.message


def test_stopped_engines_come_before_what_is_wrong_with_the_request() -> None:
    """The list of adapters and the engines may be others afterwards."""
    scene = all_at_once(pause_mode="Reject")
    stopped(scene)
    assert outcome(scene, adapter="other", needs="PRIORITY") == ErrorCode.UNAVAILABLE


def test_an_adapter_that_no_engine_has_comes_before_the_engine_that_a_request_names() -> None:
    assert outcome(all_at_once(), adapter="other", engine="second") == ErrorCode.ADAPTER_NOT_FOUND


@pytest.mark.parametrize(
    ("meta", "decision"),
    [
        ({"needs": "PRIORITY"}, ErrorCode.INVALID_REQUEST),
        ({"adapter": "other"}, ErrorCode.ADAPTER_NOT_FOUND),
        ({"engine": "second"}, ErrorCode.ENGINES_MISSING),
    ],
)
def test_a_request_that_cannot_be_answered_takes_no_place_of_another_tenant(meta: Any, decision: ErrorCode) -> None:
    """A full queue and journal are looked at last: they end the last request of the tenant that has the most."""
    scene = all_at_once(max_queued=2)
    full_queue(scene)
    assert scene.core.dispatcher.waiting == 2
    assert outcome(scene, tenant="new", **meta) == decision
    assert scene.core.dispatcher.waiting == 2
    assert len(scene.core.dispatcher.journal) == 3
    assert outcome(scene, number=2, tenant="new") == "waits", "one that can be answered gets a place"
    assert scene.core.dispatcher.waiting == 2


def test_a_request_that_no_engine_supports_is_rejected_while_the_engines_are_busy() -> None:
    scene = all_at_once()
    busy(scene)
    assert outcome(scene, needs="PRIORITY") == ErrorCode.INVALID_REQUEST


def test_a_request_waits_for_an_engine_that_has_no_room(decided: list[str]) -> None:
    scene = all_at_once()
    busy(scene)
    assert (outcome(scene), decided) == ("waits", []), "no check decides: no engine could be chosen"
    assert (outcome(scene, number=2), decided) == ("waits", [NAMES[-1]])


def test_a_full_queue_comes_before_waiting() -> None:
    scene = Scene(max_queued=1)
    scene.engine(FIRST)
    busy(scene)
    assert outcome(scene) == "waits"
    scene.take()
    scene.submit(2)
    assert [message.code for peer, message in scene.take() if peer == CLIENT] == [ErrorCode.QUEUE_FULL]


def test_a_rejected_request_leaves_no_trace_in_the_tables() -> None:
    scene = all_at_once()
    outcome(scene, needs="PRIORITY")  # take() checks the tables
    assert not len(scene.core.dispatcher.journal)
    assert not len(scene.core.dispatcher.tenants)
    assert not scene.core.clients.at(CLIENT).open
