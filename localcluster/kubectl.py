"""Runs kubectl. The demo and the end-to-end tests change a cluster only through kubectl, as users do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_runtime.protocol import strict_json as json

PATIENCE_SECONDS = 600.0
"""Timeout of waits. It is long, because a loaded machine takes many times as long as an idle one."""

RESOURCE = "megatroninferences.inference.megatron.dev"


class CommandError(RuntimeError):
    """A command failed. The message contains its output."""

    def __init__(self, command: list[str], status: int, output: str) -> None:
        super().__init__(f"{' '.join(command)}\nexit status {status}\n{output.strip()}")
        self.output = output


@dataclass(frozen=True)
class Kubectl:
    """A caller of kubectl for one cluster and namespace.

    kubeconfig: file that names the cluster; None: the user's current context.
    """

    executable: str = "kubectl"
    kubeconfig: Path | None = None
    namespace: str = "default"
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def in_namespace(self, namespace: str) -> Kubectl:
        return Kubectl(self.executable, self.kubeconfig, namespace, self.environment)

    def command(self, *arguments: str) -> list[str]:
        kubeconfig = ["--kubeconfig", str(self.kubeconfig)] if self.kubeconfig else []
        return [self.executable, *kubeconfig, "--namespace", self.namespace, *arguments]

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = PATIENCE_SECONDS) -> str:
        """Run kubectl, and return its standard output. Raises CommandError with all output if it fails."""
        command = self.command(*arguments)
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, env=self.environment, check=False
        )
        if done.returncode:
            raise CommandError(command, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self("get", *arguments, "-o", "json"))

    def apply(self, manifest: Mapping[str, Any] | str) -> str:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        return self("apply", "-f", "-", stdin=text)

    def patch_spec(self, name: str, **spec: Any) -> str:
        return self("patch", "mi", name, "--type", "merge", "-p", json.dumps({"spec": spec}))

    def wait(self, what: str, condition: str, *, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait until the object `what` has a condition, and return kubectl's output.

        condition: as in `kubectl wait --for`.
        """
        return self("wait", what, f"--for={condition}", f"--timeout={seconds:g}s", timeout=seconds + 15)

    def wait_state(self, name: str, state: str, *, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """Wait until the custom resource `name` has the status.state `state`, and return its status."""
        self.wait(f"mi/{name}", f"jsonpath={{.status.state}}={state}", seconds=seconds)
        status: dict[str, Any] = self.json("mi", name)["status"]
        return status

    def cluster_ip(self, service: str) -> str:
        return str(self.json("service", service)["spec"]["clusterIP"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the Kubernetes events about the custom resource `name`, oldest first."""
        items = self.json(
            "events", "--field-selector", f"involvedObject.kind=MegatronInference,involvedObject.name={name}"
        )
        return sorted(items["items"], key=lambda event: event["metadata"]["creationTimestamp"])
