"""The alert rules and the Grafana dashboard, as plain data. A test verifies that every metric in them exists.

Panels for a single metric of coordinator or engine are declared together with the metric, see
megatron_runtime.process.metrics.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, TypeAlias

from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.engine.engine_request import BackendStats
from megatron_runtime.process.metrics import declared

Object = dict[str, Any]


def _alert(name: str, expression: str, *, wait: str, severity: str, summary: str, action: str) -> Object:
    annotations = {"summary": summary, "action": action}
    labels = {"severity": severity}
    return {"alert": name, "expr": expression, "for": wait, "labels": labels, "annotations": annotations}


BY_RESOURCE = "namespace, app_kubernetes_io_instance"
"""Labels that the PodMonitor adds to the metrics of a resource's pods: its namespace and name."""
RESOURCE = "{{ $labels.namespace }}/{{ $labels.app_kubernetes_io_instance }}"
LEGEND = "{{namespace}}/{{app_kubernetes_io_instance}}"

ALERTS: list[Object] = [
    _alert(
        "MegatronOperatorAbsent",
        "absent(megatron_operator_leading == 1)",
        wait="2m",
        severity="critical",
        summary="No operator leads. Running resources keep serving; changes of resources have no effect.",
        action="Check the operator's pods and its Lease.",
    ),
    _alert(
        "MegatronReconcileFails",
        'rate(megatron_operator_reconcile_passes_total{outcome="error"}[5m]) > 0.1',
        wait="10m",
        severity="warning",
        summary="Passes over resources fail repeatedly.",
        action="Read the operator's log for 'pass failed': it names the resource and the request.",
    ),
    _alert(
        "MegatronWatchDenied",
        "megatron_operator_watch_denied == 1",
        wait="2m",
        severity="critical",
        summary="The operator cannot watch {{ $labels.resource }} in namespace {{ $labels.namespace }}. Resources that "
        "need it are not managed there.",
        action="Restore the operator's Role (helm upgrade), or remove the namespace from operator.namespaces. The "
        "readiness probe of the operator shows the API server's answer.",
    ),
    _alert(
        "MegatronOperatorIsolated",
        "megatron_operator_isolated == 1",
        wait="2m",
        severity="critical",
        summary="The operator has lost many coordinators at once and suspects its own network. It replaces none.",
        action="Check the network of the operator's pod and node, and the NetworkPolicies of its namespace.",
    ),
    _alert(
        "MegatronChildContested",
        "megatron_operator_contested_children > 0",
        wait="5m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.name }}: another program changes what the operator applies.",
        action="The condition Degraded or an Event names its field manager. Configure it to leave the object alone.",
    ),
    _alert(
        "MegatronManagedElsewhere",
        "megatron_operator_managed_elsewhere == 1",
        wait="10m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.name }}: two operators serve its namespace; the holder of Lease "
        "{{ $labels.lease }} manages it.",
        action="Stop one of the two, or give them different operator.namespaces.",
    ),
    _alert(
        "MegatronResourceDegraded",
        'megatron_operator_condition{type="Degraded",status="True"} == 1',
        wait="10m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.name }}: {{ $labels.reason }}.",
        action="kubectl megatron status NAME shows the error and the remedy.",
    ),
    _alert(
        "MegatronResourceFailed",
        'megatron_operator_resource_state{state="Failed"} == 1',
        wait="1m",
        severity="critical",
        summary="{{ $labels.namespace }}/{{ $labels.name }}: the restart budget of every engine is exhausted.",
        action="Remove the cause in the diagnosis of status.engines, then run kubectl megatron restart NAME.",
    ),
    _alert(
        "MegatronKeyRotationStuck",
        'megatron_operator_condition{type="Progressing",status="True",reason="RotatingKeys"} == 1',
        wait="15m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.name }}: its key rotation is stalled. Both generations work.",
        action="status.plan.waitingOn names the component without the new keys; check the kubelet of its node.",
    ),
    _alert(
        "MegatronStateUnknown",
        'megatron_operator_resource_state{state="Unknown"} == 1',
        wait="5m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.name }}: the operator cannot tell its state: the coordinator does "
        "not answer, or the operator may not watch what it needs, or its network is down.",
        action="Read the condition Ready. CoordinatorUnreachable: check the coordinator's pod, the NetworkPolicies "
        "between the two, and the operator's network if several resources have it. WatchDenied: its message names the "
        "permission or namespace.",
    ),
    _alert(
        "MegatronNoEngineServes",
        f"sum by ({BY_RESOURCE}) (megatron_coordinator_engine_serving) == 0 "
        f"and on ({BY_RESOURCE}) megatron_coordinator_queued_requests > 0",
        wait="2m",
        severity="critical",
        summary=f"{RESOURCE}: requests wait and no engine serves.",
        action="kubectl megatron status NAME; a suspended resource may lack wakeOnRequest.",
    ),
    _alert(
        "MegatronEnginesLost",
        "increase(megatron_coordinator_engines_lost_total[15m]) > 3",
        wait="0m",
        severity="warning",
        summary=f"{RESOURCE}: engines are lost repeatedly; their requests are replayed each time.",
        action="Read the termination messages of the engines in kubectl describe pod.",
    ),
    _alert(
        "MegatronQueueGrows",
        "megatron_coordinator_queued_requests > 100 and deriv(megatron_coordinator_queued_requests[10m]) > 0",
        wait="10m",
        severity="warning",
        summary=f"{RESOURCE}: requests arrive faster than the engines answer.",
        action="Raise spec.replicas, or let an autoscaler do it.",
    ),
    _alert(
        "MegatronVerbSlow",
        "histogram_quantile(0.99, sum by (le, verb) (rate(megatron_operator_verb_seconds_bucket"
        '{verb!="DRAIN",phase="Confirmed"}[30m]))) > 60',
        wait="0m",
        severity="warning",
        summary="{{ $labels.verb }} takes more than a minute to be confirmed.",
        action="status.plan.waitingOn names the rank that has not confirmed.",
    ),
]


def alert_rules() -> Object:
    """Return the spec of a PrometheusRule."""
    return {"groups": [{"name": "megatron-inference", "rules": ALERTS}]}


Curve: TypeAlias = tuple[str, str]
"""Expression and legend of a curve."""
Panel: TypeAlias = tuple[str, str, tuple[Curve, ...]]
"""Title, unit and curves of a panel."""


def quantiles(histogram: str) -> tuple[Curve, ...]:
    """Return the curves of a histogram's median and 99th percentile over the last five minutes."""
    rate = f"sum by (le) (rate({histogram}_bucket[5m]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"p{int(q * 100)}") for q in (0.5, 0.99))


def declared_panels() -> tuple[Panel, ...]:
    """Return the panels that the declarations of metrics contain. Metrics with the same panel title share one panel."""
    units: dict[str, str] = {}
    curves: defaultdict[str, list[Curve]] = defaultdict(list)
    for record, prefix in ((Counters, "megatron_coordinator_"), (BackendStats, "megatron_")):
        for _, metric in declared(record):
            if metric.panel:
                name, legend = prefix + metric.name, metric.name.replace("_", " ")
                units[metric.panel] = "s" if metric.name.endswith("_seconds") else "short"
                if metric.kind == "histogram":
                    curves[metric.panel] += quantiles(name)
                elif metric.kind == "counter":
                    curves[metric.panel].append((f"sum(increase({name}_total[5m]))", legend))
                else:
                    curves[metric.panel].append((f"sum by (pod) ({name})", "{{pod}}"))
    return tuple((title, units[title], tuple(found)) for title, found in curves.items())


PANELS: tuple[Panel, ...] = (
    (
        "Tokens generated",
        "short",
        (("sum by (model_name) (rate(megatron_generation_tokens_total[1m]))", "{{model_name}}"),),
    ),
    ("Time to first token", "s", quantiles("megatron_time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("megatron_inter_token_latency_seconds")),
    ("Answers by status", "short", (("sum by (status) (rate(megatron_http_responses_total[1m]))", "{{status}}"),)),
    (
        "Waiting for an engine",
        "short",
        ((f"sum by ({BY_RESOURCE}) (megatron_coordinator_queued_requests)", LEGEND),),
    ),
    (
        "In flight by engine",
        "short",
        (("sum by (namespace, engine) (megatron_coordinator_in_flight_requests)", "{{namespace}}/{{engine}}"),),
    ),
    ("KV cache in use", "percentunit", (("megatron_kv_cache_usage_perc", "{{pod}}"),)),
    ("Epoch of the weights", "short", (("max by (namespace, pod) (megatron_generation_epoch)", "{{pod}}"),)),
    ("Resources by state", "short", (("sum by (state) (megatron_operator_resource_state)", "{{state}}"),)),
    (
        "Duration of verbs, p99",
        "s",
        (
            (
                "histogram_quantile(0.99, sum by (le, verb) (rate(megatron_operator_verb_seconds_bucket[30m])))",
                "{{verb}}",
            ),
        ),
    ),
    (
        "Duration of a pass, p99",
        "s",
        (("histogram_quantile(0.99, sum by (le) (rate(megatron_operator_reconcile_seconds_bucket[5m])))", "pass"),),
    ),
    (
        "Writes to the API server",
        "short",
        (("sum by (verb, kind) (rate(megatron_operator_api_writes_total[5m]))", "{{verb}} {{kind}}"),),
    ),
    (
        "Prefix cache hits",
        "percentunit",
        (
            (
                "sum(rate(megatron_prefix_cache_hits_total[5m])) / sum(rate(megatron_prefix_cache_queries_total[5m]))",
                "hits",
            ),
        ),
    ),
    *declared_panels(),
)


_ONE_RESOURCE = {
    f"megatron_operator_{name}"
    for name in ("resource_state", "condition", "queued_requests", "in_flight_requests", "contested_children")
}
"""Metrics of the operator that are about one resource."""
_METRIC = re.compile(r"\b(megatron_[a-z_]+)(?:\{([^}]*)\})?")


def selected(expression: str) -> str:
    """Return the query `expression`, limited to the custom resources that the dashboard's variables select."""

    def select(found: re.Match[str]) -> str:
        name, given = found[1], found[2]
        if not name.startswith("megatron_operator_"):
            chosen = 'namespace=~"$namespace",app_kubernetes_io_instance=~"$resource"'
        elif name in _ONE_RESOURCE:
            chosen = 'namespace=~"$namespace",name=~"$resource"'
        else:
            return found[0]
        return f"{name}{{{','.join(filter(None, (given, chosen)))}}}"

    return _METRIC.sub(select, expression)


def _variable(name: str, query: str) -> Object:
    """Return a dashboard variable whose values are the result of `query`. Initially, all values are selected."""
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> Object:
    """Return a Grafana dashboard (schema 39)."""
    return {
        "uid": "megatron-inference",
        "title": "Megatron inference",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "label_values(megatron_operator_resource_state, namespace)"),
                _variable("resource", 'label_values(megatron_operator_resource_state{namespace=~"$namespace"}, name)'),
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, curves: tuple[tuple[str, str], ...]) -> Object:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": selected(expression), "legendFormat": legend}
            for index, (expression, legend) in enumerate(curves)
        ],
    }


def expressions() -> list[str]:
    """Return all queries of alerts and dashboard."""
    return [alert["expr"] for alert in ALERTS] + [query for _, _, curves in PANELS for query, _ in curves]
