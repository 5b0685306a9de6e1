"""The modules that are mutated, and the tests that must fail for it. The only place that names either."""

from __future__ import annotations

PLAN = "operator/megatron_operator/plan"
COORDINATOR = "runtime/megatron_runtime/data_parallel_inference_coordinator"
SCHEDULER = "runtime/megatron_runtime/engines"
KV = "runtime/megatron_runtime/contexts"

_PLAN_TESTS = ("tests/unit/operator",)
_COORDINATOR_TESTS = tuple(
    f"tests/unit/coordinator/test_{name}.py"
    for name in (
        "access",
        "bounds",
        "failover",
        "models",
        "pinned",
        "plain_peers",
        "poison_requests",
        "requests",
        "routing",
        "short_slices",
        "tenants",
        "verbs",
    )
)
_ENGINE_TESTS = tuple(
    f"tests/unit/engine_core/test_{name}.py"
    for name in (
        "block_allocator",
        "engine_machine",
        "lifecycle",
        "prefix_cache",
        "prefix_sharing",
        "priority",
        "random_requests",
        "scheduler",
        "tenant_shares",
    )
)
_CORE = (
    *("client_side", "clients", "dispatching", "engine_side", "engines", "health", "journal", "operations", "plain"),
    *("quarantine", "records", "recovery", "registration", "replies", "routing", "shares", "tenants", "verbs"),
    "waiting",
)

MODULES: dict[str, tuple[str, ...]] = {
    f"{PLAN}/**/*.py": _PLAN_TESTS,
    **{f"{COORDINATOR}/{name}.py": _COORDINATOR_TESTS for name in _CORE},
    f"{SCHEDULER}/scheduler.py": _ENGINE_TESTS,
    f"{KV}/*.py": _ENGINE_TESTS,
}
"""Paths or patterns of modules, from the root of the repository, to the test files whose tests may kill a mutant."""
