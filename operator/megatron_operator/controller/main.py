"""The operator process: log in, become the leader, watch, run tasks, until SIGTERM or the loss of leadership.

Exit codes: 0 stopped by a signal, 1 leadership lost. The kubelet restarts the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration
from prometheus_client import CollectorRegistry

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.auth import LoginError, load_configuration
from megatron_operator.cluster.cache import Index, Key, ResourceCache
from megatron_operator.cluster.keys import KeyFormatError, ensure_admin_keys
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.cluster.lease import Elector, LeadershipLostError, LeaseSettings
from megatron_operator.cluster.writer import Recorder, Writer
from megatron_operator.controller.act import Actor
from megatron_operator.controller.kopf_run import KopfRun, WatchesEndedError
from megatron_operator.controller.metrics import Metrics
from megatron_operator.controller.observe import Observer, ObserverSettings
from megatron_operator.controller.task import Parts, ResourceTask, TaskSupervisor, UpdateLimit
from megatron_operator.decision.decide import decide
from megatron_operator.link.address import AddressTemplateError, Resolver, service_address, template_resolver
from megatron_operator.link.connection import CoordinatorLink, LinkTimings
from megatron_operator.resource.settings import Settings
from megatron_runtime.process.health import HealthServer
from megatron_runtime.process.listening import EVERY_ADDRESS
from megatron_runtime.transport.security import KeyPair


def default_identity() -> str:
    """Return the identity of this process: in a pod its name and UID, so that a restarted container takes over at once;
    elsewhere a unique name."""
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return f"{name}_{uid}" if name and uid else f"{socket.gethostname()}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `run`."""

    settings: Settings
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all. Named ones need no cluster-wide permissions."""
    kubeconfig: Path | None = None
    """None: the service account in a pod, else $KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    lease_name: str = "megatron-operator"
    lease_seconds: float = 10.0
    """Time after the death of a leader until its successor starts, plus at most a fifth of it."""
    identity: str = field(default_factory=default_identity)
    coordinator_address_template: str | None = None
    """None: the cluster IP of each coordinator's Service."""
    health_host: str | None = None
    """Address of probes and metrics; None means every address, IPv4 and IPv6."""
    health_port: int = 8080
    resync_seconds: float = 300.0
    """Interval at which each resource's objects are listed again, in case a watch missed something."""
    watch_seconds: float = 40.0
    """Duration of a watch before it is renewed, which bounds how long a dead watch goes unnoticed."""
    max_concurrent_updates: int = 1
    """Resources that are updated to the release of this operator at the same time."""
    link: LinkTimings = field(default_factory=LinkTimings)


logger = logging.getLogger(__name__)

STALLED_SECONDS = 120.0
"""A longer pass hangs: every request and every wait in it has a much shorter deadline. A watch that has not shown an
existing object for so long, or whose renewal is overdue by as much, is dead."""
STALLS = ("oldest_pass_seconds", "watch_behind_seconds", "watch_silent_seconds")
CRD_RETRY_SECONDS = 2.0
RESTART_SECONDS = 1.0
AUDITS_AT_ONCE = 2


class OperatorStartError(RuntimeError):
    """An option of this process is unusable. The message names it and the remedy."""


def run(options: RunOptions) -> int:
    """Run the operator and return its exit code. The caller configures logging.

    Raises:
        OperatorStartError: no credentials, a port in use, or an invalid address template.
    """
    try:
        return asyncio.run(OperatorProcess(options).run())
    except (LoginError, AddressTemplateError, KeyFormatError) as error:
        raise OperatorStartError(str(error)) from error


async def serve_probes(
    *,
    heartbeat: Callable[[], Mapping[str, Any]],
    missing: Callable[[], list[str]],
    registry: CollectorRegistry,
    host: str | None,
    port: int,
) -> HealthServer:
    """Start to answer on one listening socket. Raises OperatorStartError if its address is in use.

    GET /livez, /healthz  200 with the heartbeat as JSON; 503 if a pass hangs or a watch is dead
    GET /readyz           200 if this process leads and watches, or is a standby; else 503 with what is missing
    GET /metrics          Prometheus

    heartbeat: fields of /livez; `oldest_pass_seconds` is the age of the longest running pass.
    missing:   unmet conditions of readiness, one phrase each.
    host:      None: every address.
    """

    def liveness() -> Mapping[str, object]:
        beat = heartbeat()
        return {"alive": max(beat.get(key, 0.0) for key in STALLS) < STALLED_SECONDS, **beat}

    server = HealthServer(
        missing=missing, liveness=liveness, registry=registry, host=EVERY_ADDRESS if host is None else host, port=port
    )
    try:
        await server.start()
    except OSError as error:
        raise OperatorStartError(error.strerror) from error
    return server


class OperatorProcess:
    """One operator process."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._phase = "logging in"
        self._supervisor: TaskSupervisor | None = None
        self._metrics.show(lambda: self._supervisor.readings() if self._supervisor else [])
        self._index: Index | None = None
        self._run: KopfRun | None = None
        self._audits = asyncio.Semaphore(AUDITS_AT_ONCE)
        self._updates = UpdateLimit(
            options.max_concurrent_updates, lambda: self._index.resources if self._index is not None else {}
        )
        self._resolve: Resolver = (
            template_resolver(options.coordinator_address_template)
            if options.coordinator_address_template
            else service_address
        )

    async def run(self) -> int:
        self._handle_signals()
        options = self._options
        probes = await serve_probes(
            heartbeat=self._heartbeat,
            missing=self._missing,
            registry=self._metrics.registry,
            host=options.health_host,
            port=options.health_port,
        )
        try:
            configuration = await load_configuration(kubeconfig=options.kubeconfig, context=options.context)
            # The Lease has its own connections, so that other pending requests do not delay its renewal.
            async with KubeApi(configuration) as api, KubeApi(configuration) as lease_api:
                return await self._run_with(api, lease_api, configuration)
        finally:
            await probes.stop()

    def _handle_signals(self) -> None:
        """Install the signal handlers, again after kopf has replaced them at its start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)

    async def _run_with(self, api: KubeApi, lease_api: KubeApi, configuration: Configuration) -> int:
        options = self._options
        lease = LeaseSettings(
            namespace=options.settings.operator_namespace,
            name=options.lease_name,
            identity=options.identity,
            duration=options.lease_seconds,
            namespaces=options.namespaces,
        )
        elector = Elector(lease_api, lease)
        self._phase = "standing by"
        if not await self._unless_stopped(elector.acquire()):
            return 0
        self._metrics.leading.set(1)
        self._metrics.term.set(elector.term)
        hold = asyncio.create_task(elector.hold(), name="hold lease")
        try:
            return await self._lead(api, configuration, elector, hold)
        except LeadershipLostError as error:
            logger.error("leadership lost; exiting", extra={"error": str(error)})
            return 1
        finally:
            hold.cancel()
            await asyncio.gather(hold, return_exceptions=True)
            await elector.release()

    async def _lead(
        self, api: KubeApi, configuration: Configuration, elector: Elector, hold: asyncio.Task[None]
    ) -> int:
        options = self._options
        if not await self._unless_stopped(self._await_crd(api)):
            return 0
        writer = Writer(api, guard=elector.write_seconds, count=self._metrics.count_write)
        admin: KeyPair | None = None
        if options.settings.security:
            admin = await ensure_admin_keys(api, writer, namespace=options.settings.operator_namespace)
        while True:
            supervisor = self._supervisor = TaskSupervisor(
                lambda uid, key, woken: self._make_task(uid, key, woken, api, writer, elector, admin)
            )
            try:
                await self._serve(configuration, supervisor, hold)
                return 0
            except WatchesEndedError as error:
                logger.warning("watches ended; restarting them", extra={"error": str(error)})
            self._handle_signals()
            await asyncio.sleep(RESTART_SECONDS)
            if not await self._unless_stopped(self._await_crd(api)):
                return 0

    async def _serve(self, configuration: Configuration, supervisor: TaskSupervisor, hold: asyncio.Task[None]) -> None:
        """Watch and run tasks until the process is stopped.

        Raises:
            WatchesEndedError: the watches may be restarted.
            LeadershipLostError: this process must end.
        """
        self._phase = "listing"
        options = self._options
        run = self._run = KopfRun(
            configuration,
            supervisor,
            namespaces=options.namespaces,
            watch_seconds=options.watch_seconds,
            started=self._started,
        )
        watching = asyncio.create_task(run.run(), name="watching")
        stopping = asyncio.create_task(self._stop.wait())
        try:
            anything: set[asyncio.Future[Any]] = {watching, hold, supervisor.failed, stopping}
            await asyncio.wait(anything, return_when=asyncio.FIRST_COMPLETED)
            for ended in (supervisor.failed, hold, watching):
                if ended.done():
                    await ended
        finally:
            run.end()
            stopping.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)
            await supervisor.stop()

    def _started(self, index: Index) -> None:
        self._index = index
        self._phase = ""
        self._handle_signals()

    def _make_task(
        self,
        uid: str,
        key: Key,
        woken: asyncio.Event,
        api: KubeApi,
        writer: Writer,
        elector: Elector,
        admin: KeyPair | None,
    ) -> ResourceTask:
        assert self._index is not None, "kopf runs no handler before its startup"
        options = self._options
        cache = ResourceCache(uid=uid, key=key, index=self._index)
        link = CoordinatorLink(on_change=woken.set, timings=options.link)
        observing = ObserverSettings(
            settings=options.settings,
            admin=admin,
            resolve=self._resolve,
            resync_seconds=options.resync_seconds,
            audits=self._audits,
        )
        observer = Observer(api, cache, link, options=observing)
        actor = Actor(
            cache=cache,
            writer=writer,
            observer=observer,
            recorder=Recorder(api, instance=options.identity),
            link=link,
            elector=elector,
            settings=options.settings,
            admin=admin,
            count_signal=self._metrics.count_signal,
        )
        parts = Parts(
            cache=cache,
            observer=observer,
            writer=writer,
            actor=actor,
            link=link,
            elector=elector,
            metrics=self._metrics,
            updates=self._updates,
            decide=decide,
            isolated=lambda: self._supervisor is not None and self._supervisor.isolated,
            resync_seconds=options.resync_seconds,
        )
        return ResourceTask(uid=uid, key=key, woken=woken, parts=parts)

    async def _await_crd(self, api: KubeApi) -> None:
        """Wait until the kind is served: kopf only watches kinds that exist at its start, unless it may watch CRDs."""
        self._phase = "waiting for the CRD"
        namespace = self._options.namespaces[0] if self._options.namespaces else None
        said = False
        while True:
            try:
                await api.request("GET", RESOURCE.path(namespace), query={"limit": 1})
                return
            except KubeApiError as error:
                if not said:
                    logger.warning(
                        "resource kind not served yet; install the CRD (megatron-operator crd | kubectl apply -f -)",
                        extra={"kind": RESOURCE.kind, "error": str(error)},
                    )
                    said = True
            await asyncio.sleep(CRD_RETRY_SECONDS)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Wait for `work`. Return False if the process is stopped first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            for pending in (task, stopped):
                pending.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def _heartbeat(self) -> dict[str, Any]:
        supervisor = self._supervisor
        self._metrics.resources.set(len(supervisor) if supervisor else 0)
        return {
            "phase": self._phase or "leading",
            "resources": len(supervisor) if supervisor else 0,
            "oldest_pass_seconds": round(supervisor.oldest_pass_seconds, 3) if supervisor else 0.0,
            "watch_behind_seconds": round(supervisor.behind_seconds, 3) if supervisor else 0.0,
            "watch_silent_seconds": round(self._run.watches.silent_seconds, 3) if self._run else 0.0,
        }

    def _missing(self) -> list[str]:
        return [] if self._phase in ("", "standing by") else [self._phase]
