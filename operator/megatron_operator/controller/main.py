"""The operator process. It logs in, becomes the leader, watches custom resources and runs one task for each.

The process runs until SIGTERM or until it loses its leadership. The exit code is 0 after a signal, and 1 after the loss
of leadership. The kubelet then restarts the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration
from prometheus_client import CollectorRegistry

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.auth import LoginError, load_configuration
from megatron_operator.cluster.cache import Key, ResourceCache
from megatron_operator.cluster.claims import Claims
from megatron_operator.cluster.informers import Informers
from megatron_operator.cluster.keys import KeyFormatError, ensure_admin_keys
from megatron_operator.cluster.kinds import OPENSHIFT_API, RESOURCE
from megatron_operator.cluster.lease import Elector, LeadershipLostError, LeaseSettings
from megatron_operator.cluster.projection import SeenResource, project_resource
from megatron_operator.cluster.watch_ages import FORBIDDEN, WatchAges, Watched
from megatron_operator.cluster.writer import Recorder, Writer
from megatron_operator.controller.act import Actor
from megatron_operator.controller.kopf_run import KopfRun, WatchesEndedError
from megatron_operator.controller.metrics import Metrics
from megatron_operator.controller.observe import Observer, ObserverSettings
from megatron_operator.controller.task import Parts, ResourceTask, TaskSupervisor, UpdateLimit
from megatron_operator.decision.decide import decide
from megatron_operator.link.address import AddressTemplateError, Resolver, service_address, template_resolver
from megatron_operator.link.connection import CoordinatorLink, LinkTimings
from megatron_operator.resource.names import FORMER_LEASE
from megatron_operator.resource.settings import Settings
from megatron_runtime.process.health import HealthServer
from megatron_runtime.process.listening import EVERY_ADDRESS
from megatron_runtime.transport.security import KeyPair


def default_identity() -> str:
    """Return the name by which the Lease identifies this process as its holder.

    In a pod, the name consists of the pod's name and UID, so that a restarted container takes over immediately. Outside
    a pod, it is a unique name.
    """
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return f"{name}_{uid}" if name and uid else f"{socket.gethostname()}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `megatron-operator run`."""

    settings: Settings
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all. Named namespaces need no cluster-wide permissions."""
    kubeconfig: Path | None = None
    """Path of the kubeconfig. None means the service account, or else $KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    lease_name: str = FORMER_LEASE
    lease_seconds: float = 10.0
    """Time after the death of a leader until its successor starts. The actual time is longer by at most a fifth."""
    identity: str = field(default_factory=default_identity)
    coordinator_address_template: str | None = None
    """Template of coordinators' addresses. None means the cluster IP of each coordinator's Service."""
    health_host: str | None = None
    """Address of probes and metrics; None means every address, IPv4 and IPv6."""
    health_port: int = 8080
    resync_seconds: float = 300.0
    """Interval at which each resource's objects are listed again, in case a watch missed a change."""
    watch_seconds: float = 40.0
    """Seconds after which a watch is renewed. This is also the maximum time for which a dead watch stays undetected."""
    max_concurrent_updates: int = 1
    "Maximum number of resources that are updated to this operator's release at the same time."
    link: LinkTimings = field(default_factory=LinkTimings)


logger = logging.getLogger(__name__)

STALLED_SECONDS = 120.0
"""Time after which a pass counts as hanging, because every request and wait in a pass has a much shorter deadline. A
watch is dead if it has not shown an existing object for this time, or if its renewal is overdue by this time.
"""
STALLS = ("oldest_pass_seconds", "watch_behind_seconds", "watch_silent_seconds")
CRD_RETRY_SECONDS = 2.0
RESTART_SECONDS = 1.0
AUDITS_AT_ONCE = 2


class OperatorStartError(RuntimeError):
    """An option of this process is unusable. The message names the option and the remedy."""


def run(options: RunOptions) -> int:
    """Run the operator and return its exit code. The caller configures logging.

    Raises:
        OperatorStartError: there are no credentials, a port is in use, or an address template is invalid.
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
    """Start the HTTP server of the probes, and return it. Raises OperatorStartError if its address is in use.

    GET /livez, /healthz  200 with the heartbeat as JSON; 503 if a pass hangs or a watch is dead
    GET /readyz           200 if this process leads and watches, or is a standby; otherwise 503 with what is missing,
                          such as a kind or namespace that it may not watch
    GET /metrics          Prometheus metrics

    heartbeat: returns the fields of /livez; `oldest_pass_seconds` is the age of the longest running pass.
    missing:   returns the unmet conditions of readiness, one phrase each.
    host:      address to listen on; None means every address.
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
    """The operator process, from its login to its exit."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._phase = "logging in"
        self._supervisor: TaskSupervisor | None = None
        self._metrics.show(
            lambda: self._supervisor.readings() if self._supervisor else [],
            denied=lambda: self._denied,
            standby=lambda: self._elector.waits_for if self._elector else None,
        )
        self._informers: Informers | None = None
        self._elector: Elector | None = None
        self._run: KopfRun | None = None
        self._audits = asyncio.Semaphore(AUDITS_AT_ONCE)
        self._updates = UpdateLimit(
            options.max_concurrent_updates, lambda: self._informers.resources if self._informers is not None else {}
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
        """Install the signal handlers.

        Call this again after kopf has started, because kopf replaces them at its start.
        """
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
            former=FORMER_LEASE,
        )
        elector = self._elector = Elector(lease_api, lease)
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
        if not await self._unless_stopped(self._await_crd(api)):
            return 0
        if not await self._unless_stopped(self._detect_openshift(api)):
            return 0
        options = self._options
        own = f"{options.settings.operator_namespace}/{options.lease_name}"
        self._claims = Claims(api, own=own)
        writer = Writer(api, guard=elector.write_seconds, count=self._metrics.count_write)
        admin: KeyPair | None = None
        if options.settings.security:
            admin = await ensure_admin_keys(api, writer, namespace=options.settings.operator_namespace)
        informers = self._informers = Informers(
            api,
            namespaces=options.namespaces,
            watch_seconds=options.watch_seconds,
            wake=self._wake,
        )
        informing = asyncio.create_task(informers.run(), name="informers")
        try:
            while True:
                supervisor = self._supervisor = TaskSupervisor(
                    lambda uid, key, woken: self._make_task(uid, key, woken, api, writer, elector, admin)
                )
                try:
                    listing = self._list(api, informers, supervisor)
                    await self._serve(configuration, informers, supervisor, listing, others={hold, informing})
                    return 0
                except WatchesEndedError as error:
                    logger.warning("watches ended; restarting them", extra={"error": str(error)})
                finally:
                    await supervisor.stop()
                self._handle_signals()
                await asyncio.sleep(RESTART_SECONDS)
                if not await self._unless_stopped(self._await_crd(api)):
                    return 0
        finally:
            informing.cancel()
            await asyncio.gather(informing, return_exceptions=True)

    def _wake(self, key: Key | None) -> None:
        if self._supervisor is not None and key is None:
            self._supervisor.wake_all()
        elif self._supervisor is not None and key is not None:
            self._supervisor.wake_instance(key)

    async def _list(self, api: KubeApi, informers: Informers, supervisor: TaskSupervisor) -> None:
        """Read all children and resources, then start the tasks of the resources.

        No task starts before all resources are known.
        """
        self._phase = "listing"
        await informers.listed()
        found: list[SeenResource] = []
        for namespace in self._options.namespaces or (None,):
            found += await self._list_resources(api, namespace)
        informers.resources.clear()
        for seen in found:
            informers.resources[seen.uid] = (seen,)
        for seen in found:
            supervisor.wake_resource(seen.uid, (seen.namespace, seen.name))

    async def _list_resources(self, api: KubeApi, namespace: str | None) -> list[SeenResource]:
        """Return the resources of a namespace, or of all namespaces if `namespace` is None.

        Returns an empty list if this process may not list the resources. kopf then retries the listing.
        """
        while True:
            try:
                pages = api.pages(RESOURCE.path(namespace), {})
                return [project_resource(item) async for page in pages for item in page.get("items", ())]
            except KubeApiError as error:
                if error.code == FORBIDDEN:
                    return []
                logger.warning("resources cannot be listed", extra={"namespace": namespace, "error": str(error)})
            await asyncio.sleep(CRD_RETRY_SECONDS)

    async def _serve(
        self,
        configuration: Configuration,
        informers: Informers,
        supervisor: TaskSupervisor,
        listing: Coroutine[Any, Any, None],
        *,
        others: set[asyncio.Task[None]],
    ) -> None:
        """List and then watch the resources, and run their tasks, until the process is stopped.

        listing: coroutine that reads all children and resources (see _list()). kopf starts when it has completed.
        others:  further tasks of this process. If one of them ends, this method returns or raises the task's error.

        Raises:
            WatchesEndedError: kopf has ended and can be restarted.
            LeadershipLostError: this process must exit.
        """

        def show(seen: SeenResource, exists: bool) -> None:
            if exists:
                informers.resources[seen.uid] = (seen,)
            else:
                informers.resources.pop(seen.uid, None)
            supervisor.wake_resource(seen.uid, (seen.namespace, seen.name), exists=exists)

        run = self._run = KopfRun(
            configuration,
            supervisor,
            namespaces=self._options.namespaces,
            watch_seconds=self._options.watch_seconds,
            show=show,
            started=self._started,
        )
        listed = asyncio.create_task(listing, name="listing")

        async def watch() -> None:
            await listed
            await run.run()

        watching = asyncio.create_task(watch(), name="watching")
        stopping = asyncio.create_task(self._stop.wait())
        try:
            waited: set[asyncio.Future[Any]] = {watching, supervisor.failed, stopping, *others}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for ended in (supervisor.failed, *others, watching):
                if ended.done():
                    await ended
        finally:
            listed.cancel()
            run.end()
            stopping.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)

    def _started(self) -> None:
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
        informers = self._informers
        assert informers is not None, "informers run before tasks"
        options = self._options
        cache = ResourceCache(uid=uid, key=key, index=informers.index)
        link = CoordinatorLink(on_change=woken.set, timings=options.link)
        observing = ObserverSettings(
            settings=options.settings,
            admin=admin,
            resolve=self._resolve,
            resync_seconds=options.resync_seconds,
            audits=self._audits,
            denied=lambda: informers.denied(key[0]),
            manager=self._claims.own,
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
            claims=self._claims,
            updates=self._updates,
            decide=decide,
            isolated=lambda: self._supervisor is not None and self._supervisor.isolated,
            resync_seconds=options.resync_seconds,
        )
        return ResourceTask(uid=uid, key=key, woken=woken, parts=parts)

    async def _await_crd(self, api: KubeApi) -> None:
        """Wait until the API server serves the kind of the custom resource.

        kopf only watches kinds that exist at its start, unless kopf may watch CRDs.
        """
        self._phase = "waiting for the CRD"
        has_logged = False
        while True:
            try:
                served = await api.request("GET", f"/apis/{RESOURCE.api_version}")
                if any(entry.get("name") == RESOURCE.plural for entry in served.get("resources") or ()):
                    return
                why = f"{RESOURCE.api_version} has no {RESOURCE.plural}"
            except KubeApiError as error:
                why = str(error)
            if not has_logged:
                logger.warning(
                    "resource kind not served yet; install the CRD (megatron-operator crd | kubectl apply -f -)",
                    extra={"kind": RESOURCE.kind, "error": why},
                )
                has_logged = True
            await asyncio.sleep(CRD_RETRY_SECONDS)

    async def _detect_openshift(self, api: KubeApi) -> None:
        """Detect once whether the cluster has OpenShift's security API. Do nothing if an option gives the answer.

        The rendered pods depend on the result, so the detection is retried after an error.
        """
        self._phase = "detecting the platform"
        while self._options.settings.openshift is None:
            try:
                openshift = await api.serves(OPENSHIFT_API)
            except KubeApiError as error:
                logger.warning("cannot ask for OpenShift's API", extra={"api": OPENSHIFT_API, "error": str(error)})
                await asyncio.sleep(CRD_RETRY_SECONDS)
                continue
            self._options = replace(self._options, settings=replace(self._options.settings, openshift=openshift))
            if openshift:
                logger.info("OpenShift: the cluster assigns the user and group IDs of pods")

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Wait for `work`. Return True if it has completed, and False if the process is stopped first."""
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
        self._metrics.isolated.set(supervisor is not None and supervisor.isolated)
        return {
            "phase": self._phase or "leading",
            "resources": len(supervisor) if supervisor else 0,
            "oldest_pass_seconds": round(supervisor.oldest_pass_seconds, 3) if supervisor else 0.0,
            "watch_behind_seconds": round(supervisor.behind_seconds, 3) if supervisor else 0.0,
            "watch_silent_seconds": round(max((each.silent_seconds for each in self._watches()), default=0.0), 3),
        }

    def _watches(self) -> list[WatchAges]:
        return [each.watches for each in (self._informers, self._run) if each is not None]

    @property
    def _denied(self) -> dict[Watched, str]:
        """The watches that the API server denies, with the reason for each."""
        return {name: why for watches in self._watches() for name, why in watches.denied.items()}

    def _missing(self) -> list[str]:
        if self._phase not in ("", "standing by"):
            return [self._phase]
        return [
            f"cannot watch {plural} in {f'namespace {namespace}' if namespace else 'any namespace'}: {why}"
            for (plural, namespace), why in sorted(self._denied.items())
        ]
