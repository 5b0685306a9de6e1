"""The list of policies. The first policy that applies decides, and its reason and message become the status."""

from __future__ import annotations

from megatron_operator.decision.policies.engines import engines_not_serving, scale_down, undrain
from megatron_operator.decision.policies.guards import (
    child_not_owned,
    child_rejected,
    deleting,
    restart_budget_exhausted,
    server_not_ready,
    settled,
    settled_quiet,
    stale_fence,
)
from megatron_operator.decision.policies.keys import rotate_keys, rotate_keys_meanwhile
from megatron_operator.decision.policies.lifecycle import operation_underway, pods_leaving, verb_path
from megatron_operator.decision.policies.rollout import replace_model, rollout
from megatron_operator.decision.policies.verdict import Policy
from megatron_operator.decision.policies.weights import refresh_weights, set_adapters, wrong_weights

POLICIES: tuple[Policy, ...] = (
    deleting,
    child_not_owned,
    restart_budget_exhausted,
    stale_fence,
    operation_underway,
    verb_path,
    pods_leaving,
    wrong_weights,
    refresh_weights,
    set_adapters,
    undrain,
    scale_down,
    rotate_keys_meanwhile,
    replace_model,
    rollout,
    rotate_keys,
    settled_quiet,
    child_rejected,
    server_not_ready,
    engines_not_serving,
    settled,
)
