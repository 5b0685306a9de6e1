"""Generated configuration files, and settings that are saved and read again."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from localcluster import cgroups, components, mounts, pki, processes, render
from localcluster import settings as config
from localcluster.errors import ClusterError
from localcluster.settings import Layout, Options, Settings

LAYOUT = Layout(Path("/repo/build/cluster"))
PORTS = {name: 20000 + index for index, name in enumerate(config.PORT_NAMES)}
SETTINGS = Settings("cluster", False, PORTS)
NODE = SETTINGS.nodes[0]
PAIR = Settings("cluster", False, PORTS, node_count=2)
POOR = render.Machine(may_lower_oom_score=False, cni_folder=Path("/usr/lib/cni"))
RICH = render.Machine(may_lower_oom_score=True, cni_folder=Path("/opt/cni/bin"))


def test_containerd_keeps_everything_private() -> None:
    rendered = tomllib.loads(render.containerd(LAYOUT, POOR))
    places = [rendered["root"], rendered["state"], rendered["grpc"]["address"]]
    assert all(place.startswith("/repo/build/cluster/") for place in places)
    cri = rendered["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["netns_mounts_under_state_dir"] is True
    assert cri["cni"]["bin_dir"] == "/usr/lib/cni"
    assert cri["containerd"]["runtimes"]["runc"]["options"]["Root"].startswith("/repo/build/cluster/")


@pytest.mark.parametrize(("machine", "restricted", "score"), [(POOR, True, 0), (RICH, False, -999)])
def test_oom_scores_follow_the_capability(machine: render.Machine, restricted: bool, score: int) -> None:
    cri = tomllib.loads(render.containerd(LAYOUT, machine))["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is restricted
    assert yaml.safe_load(render.kubelet(SETTINGS, NODE, LAYOUT, machine, pki=LAYOUT.pki))["oomScoreAdj"] == score


def test_kubelet_never_evicts_and_has_its_own_cgroup() -> None:
    rendered = yaml.safe_load(render.kubelet(SETTINGS, NODE, LAYOUT, POOR, pki=LAYOUT.pki))
    assert set(rendered["evictionHard"].values()) == {"0%"}
    assert rendered["cgroupRoot"] == "/megatron-cluster"
    assert rendered["clusterDNS"] == [rendered["address"]] == ["10.88.0.1"]
    assert rendered["authentication"]["anonymous"] == {"enabled": False}


def test_pods_get_addresses_from_the_bridge_network() -> None:
    rendered = json.loads(render.cni(SETTINGS, NODE, LAYOUT))
    bridge = rendered["plugins"][0]
    assert bridge["bridge"] == SETTINGS.bridge
    pods = {"rangeStart": "10.88.0.2", "rangeEnd": "10.88.63.254"}
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.88.0.0/16", **pods, "gateway": "10.88.0.1"}]]
    assert bridge["ipam"]["dataDir"].startswith("/repo/build/cluster/")


def test_nodes_share_a_subnet_and_no_address() -> None:
    ranges = [json.loads(render.cni(PAIR, node, LAYOUT))["plugins"][0]["ipam"]["ranges"][0][0] for node in PAIR.nodes]
    assert [found["subnet"] for found in ranges] == ["10.88.0.0/16"] * 2
    assert [found["gateway"] for found in ranges] == ["10.88.0.1", "10.88.64.1"]
    assert [(found["rangeStart"], found["rangeEnd"]) for found in ranges] == [
        ("10.88.0.2", "10.88.63.254"),
        ("10.88.64.2", "10.88.127.254"),
    ]


@pytest.mark.parametrize("count", range(1, config.MAX_NODES + 1))
def test_every_node_has_its_own_address_name_cgroup_certificate_and_interfaces(count: int) -> None:
    settings = Settings("a" * 30, False, PORTS, "192.168.240.0/24", node_count=count)
    nodes = settings.nodes
    assert len(nodes) == count
    for values in (
        {node.ip for node in nodes},
        {node.name for node in nodes},
        {node.cgroup for node in nodes},
        {node.namespace for node in nodes},
        {identity.subject for identity in pki.identities(settings) if identity.name.startswith("kubelet")},
    ):
        assert len(values) == count
    assert all(len(node.namespace or "") <= 15 for node in nodes)


def test_a_further_node_reaches_the_api_server_and_keeps_its_files_apart() -> None:
    node = PAIR.nodes[1]
    layout = LAYOUT.of_node(2)
    assert PAIR.api_url_for(node) == f"https://10.88.0.1:{PORTS['apiserver']}"
    rendered = yaml.safe_load(render.kubelet(PAIR, node, layout, POOR, pki=LAYOUT.pki))
    assert rendered["address"] == rendered["healthzBindAddress"] == "10.88.64.1"
    assert rendered["clusterDNS"] == ["10.88.0.1"]
    assert rendered["tlsCertFile"] == "/repo/build/cluster/pki/kubelet-2.crt"
    assert rendered["containerRuntimeEndpoint"] == "unix:///repo/build/cluster/node-2/containerd.sock"
    for first, second in zip(
        (components.containerd(PAIR.nodes[0], LAYOUT), components.kubelet(PAIR, PAIR.nodes[0], LAYOUT, Path("/bin"))),
        (components.containerd(node, layout), components.kubelet(PAIR, node, layout, Path("/bin"))),
        strict=True,
    ):
        assert not processes.is_same_component(first.argv, second.argv, LAYOUT.state)
        assert (first.namespace, second.namespace) == (None, node.namespace)


def test_interface_names_fit_the_kernel() -> None:
    assert len(Settings("a" * 30, False, PORTS).bridge) <= 15
    assert Settings("a", False, PORTS).bridge != Settings("b", False, PORTS).bridge


def test_the_api_server_is_named_by_every_way_to_reach_it() -> None:
    names = next(i for i in pki.identities(SETTINGS) if i.name == "apiserver").alternative_names
    assert {"IP:127.0.0.1", "IP:10.88.0.1", "IP:10.96.0.1", "DNS:kubernetes.default.svc"} <= set(names)


def test_a_control_plane_alone_listens_on_loopback() -> None:
    alone = Settings("x", True, PORTS)
    assert "--bind-address=127.0.0.1" in components.apiserver(alone, LAYOUT, Path("/bin")).argv
    assert "--bind-address=0.0.0.0" in components.apiserver(SETTINGS, LAYOUT, Path("/bin")).argv


def test_a_control_plane_alone_runs_only_controllers_that_need_no_node() -> None:
    """A full cluster runs all controllers."""
    argument = f"--controllers={','.join(components.CONTROLLERS)}"
    for settings, is_limited in ((Settings("x", True, PORTS), True), (SETTINGS, False)):
        assert (argument in components.controller_manager(settings, LAYOUT, Path("/bin")).argv) is is_limited


def test_settings_survive_writing_and_a_torn_file_reads_as_none(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert config.load(layout) is None
    config.save(SETTINGS, layout)
    assert config.load(layout) == SETTINGS
    layout.settings.write_text('{"name": "clu')
    assert config.load(layout) is None
    layout.settings.write_text('{"name": "x", "control_plane_only": true, "ports": {"apiserver": 1}}')
    assert config.load(layout) is None


def test_conflicts_with_an_existing_cluster_name_the_option() -> None:
    assert config.contradictions(SETTINGS, Options(), control_plane_only=False) == []
    found = config.contradictions(SETTINGS, Options(api_port=1, pod_subnet="10.88.0.0/16"), control_plane_only=True)
    assert found == ["--api-port is 20000, not 1", "--control-plane-only is False, not True"]
    assert config.contradictions(PAIR, Options(nodes=1), control_plane_only=False) == ["--nodes is 2, not 1"]
    assert config.contradictions(SETTINGS, Options(nodes=2), control_plane_only=False) == [], "a cluster may grow"
    assert PAIR.nodes[0] == NODE, "and node 1 keeps its address and those of its pods"


@pytest.mark.parametrize("name", ["", "Upper", "-x", "x-", "a/b", "a" * 31])
def test_an_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(ClusterError, match="lower-case letters"):
        config.layout_for(name)


def test_a_path_too_long_for_sockets_is_rejected() -> None:
    with pytest.raises(ClusterError, match="shorter --root"):
        config.layout_for("x", root=Path("/" + "d" * 80))


@pytest.mark.parametrize("value", ["nonsense", "10.0.0.0/28", "fd00::/64", "10.0.0.1/16"])
def test_an_invalid_subnet_is_rejected(value: str) -> None:
    with pytest.raises(ClusterError, match="--pod-subnet"):
        config.check_subnet("--pod-subnet", value)


def test_mounts_below_a_folder_are_found_latest_first() -> None:
    lines = [
        "/",
        "/repo/build/cluster/a",
        "/repo/build/cluster/a/b",
        "/repo/build/cluster-two/c",
        r"/repo/build/cluster/x\040y",
    ]
    mountinfo = "\n".join(f"1 2 0:1 / {point} rw - ext4 /dev/x rw" for point in lines)
    assert mounts.mounts_below(mountinfo, LAYOUT.state) == [
        "/repo/build/cluster/x y",
        "/repo/build/cluster/a/b",
        "/repo/build/cluster/a",
    ]


def test_both_cgroup_versions_are_found() -> None:
    text = "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\nx /sys/fs/cgroup/unified cgroup2 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n"
    assert cgroups.mount_points(text) == [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified")]
