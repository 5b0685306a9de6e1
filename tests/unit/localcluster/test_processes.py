"""Identification and termination of the cluster's processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from machine import scaled

from localcluster import cgroups, processes
from localcluster.components import Component
from localcluster.errors import ClusterError
from localcluster.settings import Layout

STATE = Path("/repo/build/cluster")


@pytest.mark.parametrize(
    "argv",
    [
        ["/usr/bin/etcd", "--data-dir=/repo/build/cluster/etcd"],
        ["/cache/bin/coredns", "-conf", "/repo/build/cluster/config/Corefile"],
        ["/usr/bin/containerd-shim-runc-v2", "-id", "x", "-address", "/repo/build/cluster/containerd.sock"],
        ["kubelet", "--endpoint=unix:///repo/build/cluster/containerd.sock"],
    ],
)
def test_a_known_program_with_a_path_of_the_cluster_belongs(argv: list[str]) -> None:
    assert processes.belongs(argv, STATE)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["tail", "-f", "/repo/build/cluster/logs/etcd.log"],
        ["/usr/bin/etcd", "--data-dir=/var/lib/etcd"],
        ["/usr/bin/etcd", "--data-dir=/repo/build/cluster-two/etcd"],
        ["/usr/bin/etcd", "--comment=about /repo/build/cluster/etcd"],
        ["/usr/bin/containerd"],
    ],
)
def test_a_foreign_process_does_not_belong(argv: list[str]) -> None:
    assert not processes.belongs(argv, STATE)


def test_the_kubelets_of_two_nodes_are_different_components() -> None:
    first = ["/bin/kubelet", "--v=1", f"--config={STATE}/config/kubelet.yaml"]
    second = ["/bin/kubelet", "--v=1", f"--config={STATE}/node-2/config/kubelet.yaml"]
    assert processes.is_same_component(first, [*first, "--added"], STATE)
    assert not processes.is_same_component(first, second, STATE)
    assert not processes.is_same_component(first, ["/bin/kube-proxy", first[2]], STATE)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def stand_in(layout: Layout) -> Component:
    """A process that the launcher identifies as its etcd."""
    program = layout.state / "etcd"
    program.symlink_to(sys.executable)
    # A venv's python finds its home by its own path; with -S -E it needs none.
    return Component("etcd", (str(program), "-S", "-E", "-c", "import time; time.sleep(60)", f"{layout.state}/data"))


def test_a_component_is_started_once_and_restarted_after_sigkill(layout: Layout, stand_in: Component) -> None:
    assert processes.ensure(stand_in, layout)
    first = processes.running("etcd", layout)
    assert first is not None
    assert not processes.ensure(stand_in, layout)
    processes.terminate([first.pid], grace=0.0)
    assert processes.running("etcd", layout) is None
    assert processes.ensure(stand_in, layout)
    second = processes.running("etcd", layout)
    assert second is not None
    assert second.pid != first.pid
    processes.terminate([second.pid], grace=0.0)


def test_a_changed_command_line_restarts_and_a_lost_record_does_not_double(layout: Layout, stand_in: Component) -> None:
    processes.ensure(stand_in, layout)
    (layout.run / "etcd.json").unlink()
    changed = Component("etcd", (*stand_in.argv, "--more"))
    assert processes.ensure(changed, layout)
    owned = processes.owned_pids(layout.state)
    assert [argv[-1] for argv in owned.values()] == ["--more"]
    processes.terminate(owned, grace=0.0)
    assert not processes.owned_pids(layout.state)


def test_a_reused_pid_is_not_identified_as_the_component(layout: Layout) -> None:
    layout.run.mkdir()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (layout.run / "etcd.json").write_text(f'{{"pid": {stranger.pid}, "digest": "x"}}')
        assert processes.running("etcd", layout) is None
        stranger.kill()


def test_sigkill_follows_for_a_process_that_ignores_sigterm() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        processes.terminate([stubborn.pid], grace=0.2)
        assert stubborn.poll() in {-signal.SIGKILL, 0}
    assert not Path(f"/proc/{stubborn.pid}").exists()


def test_a_component_that_exits_at_once_is_reported_with_its_log(layout: Layout) -> None:
    program = layout.state / "etcd"
    program.symlink_to("/bin/sh")
    component = Component("etcd", (str(program), "-c", "echo no such flag >&2; exit 1", f"{layout.state}/x"))
    processes.ensure(component, layout)
    with pytest.raises(ClusterError, match=r"(?s)etcd exited at once.*no such flag"):
        processes.wait_ready(component, layout, lambda: False, seconds=scaled(60))


def test_the_clusters_processes_have_no_proxy_settings() -> None:
    inherited = {"HTTPS_PROXY": "http://p", "no_proxy": "x", "PATH": "/bin"}
    assert processes.environment(inherited) == {"PATH": "/bin"}


def test_a_group_that_goes_while_it_is_looked_at_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "cluster"
    group.mkdir()
    monkeypatch.setattr(cgroups, "folders", lambda _: [group])
    monkeypatch.setattr(cgroups, "_deepest_first", lambda folder: [folder / "of a pod that has just ended", folder])
    assert cgroups.remove("cluster") == 0
    assert not group.exists()


@pytest.mark.parametrize(("file", "value"), [("cpu.shares", "2048"), ("cpu.weight", "200")])
def test_cpu_weights_are_set_on_both_cgroup_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, value: str
) -> None:
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    cpu.mkdir()
    (cpu / file).touch()
    memory.mkdir()
    monkeypatch.setattr(cgroups, "folders", lambda _: [memory, cpu])
    cgroups.weigh("pods", 2)
    cgroups.gather("node", [17])
    assert (cpu / file).read_text() == value
    assert (cpu / "cgroup.procs").read_text() == "17"
    assert not any(memory.iterdir())
