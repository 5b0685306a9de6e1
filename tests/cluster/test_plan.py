"""`megatron-operator plan --against cluster`: what the API server stores of a file is not a change of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from soak import size

pytestmark = pytest.mark.cluster

ALL = sorted((Path(__file__).parents[2] / "manifests/samples").glob("*.yaml"))
SAMPLES = size(ALL[::3], soak=ALL)


async def test_an_unchanged_file_changes_nothing(
    operator: Any, make_resource: Any, kubectl: Any, control_plane: Any, namespace: str, tmp_path: Path
) -> None:
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))

    async def planned(path: Path) -> str:
        command = [sys.executable, "-m", "megatron_operator.cli", "plan", "-f", str(path), "--against", "cluster"]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    manifests = {sample: yaml.safe_load(sample.read_text()) for sample in SAMPLES}
    applied = kubectl("apply", *(argument for sample in SAMPLES for argument in ("-f", str(sample))))
    assert applied.returncode == 0, applied.stderr
    for sample, manifest in manifests.items():
        await make_resource(manifest["metadata"]["name"]).until(lambda status: "release" in status)
        assert await planned(sample) == "nothing changes\n", sample
    sample, manifest = next(iter(manifests.items()))
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({**manifest, "spec": {**manifest["spec"], "desiredState": "Stopped"}}))
    assert (await planned(changed)).startswith("set     spec.desiredState: ")
