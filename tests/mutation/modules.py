"""The modules that are mutated, and the tests that must detect it."""

from __future__ import annotations

DECISION = "operator/megatron_operator/decision"
COORDINATOR = "runtime/megatron_runtime/coordinator/core"
NATIVE = "runtime/megatron_runtime/backends/native"

_DECISION_TESTS = ("tests/unit/operator",)
_COORDINATOR_TESTS = tuple(
    f"tests/unit/coordinator/test_{name}.py"
    for name in (
        "access",
        "bounds",
        "core",
        "failover",
        "models",
        "pinned",
        "plain_peers",
        "poison_requests",
        "requests",
        "routing",
        "tenants",
        "verbs",
    )
)
_ENGINE_TESTS = tuple(
    f"tests/unit/engine_core/test_{name}.py"
    for name in (
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
MODULES: dict[str, tuple[str, ...]] = {
    f"{DECISION}/**/*.py": _DECISION_TESTS,
    f"{COORDINATOR}/*.py": _COORDINATOR_TESTS,
    f"{NATIVE}/scheduler.py": _ENGINE_TESTS,
    f"{NATIVE}/kv/*.py": _ENGINE_TESTS,
}
"""Paths or patterns of modules, relative to the repository, to the test files whose tests may kill a mutant."""
