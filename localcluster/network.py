"""Creates and removes the bridge and the nodes' networks, and removes the cluster's iptables rules.

kube-proxy, the kubelet and the CNI plugins create the iptables rules. The pure function cleanup() selects the rules to
remove. It converts the output of `iptables-save` to the input of `iptables-restore`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from localcluster.errors import ClusterError
from localcluster.mounts import unmount_below
from localcluster.settings import Node, Settings
from localcluster.shell import run
from megatron_runtime.protocol import strict_json as json

PREFIXES = ("KUBE-", "CNI-HOSTPORT-", "CNI-DN-")
FAMILIES = ("iptables", "ip6tables")


def create_bridge(settings: Settings) -> None:
    """Create the bridge of node 1.

    Call this before the API server and the DNS server start, because they listen on the bridge's address.
    """
    if not Path(f"/sys/class/net/{settings.bridge}").exists():
        run(["ip", "link", "add", settings.bridge, "type", "bridge"])
    run(["ip", "address", "replace", settings.bridge_address(settings.nodes[0]), "dev", settings.bridge])
    run(["ip", "link", "set", settings.bridge, "up"])
    # A reply between pods crosses the bridge without being routed. It must pass iptables there, otherwise the
    # translation of a ClusterIP is not reversed.
    filtered = Path(f"/sys/class/net/{settings.bridge}/bridge/nf_call_iptables")
    if not filtered.exists():
        run(["modprobe", "br_netfilter"], check=False)
    if not filtered.exists():
        raise ClusterError("the kernel has no br_netfilter, without which pods cannot reach Services: load that module")
    filtered.write_text("1")


def join(settings: Settings, node: Node) -> None:
    """Create the network namespace of a node and connect it to the bridge of node 1.

    The namespace has a separate bridge in the same subnet, and no route to other networks.
    """
    assert node.namespace is not None
    if not namespace_path(node.namespace).exists():
        run(["ip", "netns", "add", node.namespace])
    inside = ["ip", "-netns", node.namespace]
    run([*inside, "link", "set", "lo", "up"])
    if not Path(f"/sys/class/net/{node.namespace}").exists():
        run(["ip", "link", "add", node.namespace, "type", "veth", "peer", "name", "uplink", "netns", node.namespace])
    if run([*inside, "link", "show", settings.bridge], check=False).returncode != 0:
        run([*inside, "link", "add", settings.bridge, "type", "bridge", "nf_call_iptables", "1"])
    run([*inside, "address", "replace", settings.bridge_address(node), "dev", settings.bridge])
    run([*inside, "link", "set", settings.bridge, "up"])
    run([*inside, "link", "set", "uplink", "master", settings.bridge, "up"])
    run(["ip", "link", "set", node.namespace, "master", settings.bridge, "up"])


def connect(node: Node, *, up: bool) -> None:
    """Connect a node to the other nodes if `up` is true. Otherwise disconnect the node, so that no packet passes."""
    assert node.namespace is not None
    run(["ip", "link", "set", node.namespace, "up" if up else "down"])


def namespace_path(namespace: str) -> Path:
    return Path("/run/netns") / namespace


def remove_namespaces(namespaces: Collection[str]) -> None:
    """Remove the network namespaces in `namespaces` that exist, with their interfaces and iptables rules."""
    for namespace in namespaces:
        if namespace_path(namespace).exists():
            run(["ip", "netns", "delete", namespace])
    folder = namespace_path("")
    # `ip` has mounted this folder onto itself.
    if folder.exists() and not any(folder.iterdir()):
        unmount_below(folder)
        folder.rmdir()


def admit(settings: Settings) -> None:
    """Add iptables rules that accept packets from the bridge to pods and to this machine.

    The machine's firewall may otherwise drop these packets.
    """
    bridge = settings.bridge
    for rule in (["FORWARD", "-i", bridge, "-o", bridge], ["INPUT", "-i", bridge]):
        _insert_rule([*rule, "-j", "ACCEPT"])


def keep_service_traffic(settings: Settings) -> None:
    """Add a rule that rejects connections to a Service while kube-proxy does not translate its address.

    Otherwise the packets would leave this machine by its default route, and another host might answer.
    """
    for chain in ("OUTPUT", "FORWARD"):
        _insert_rule([chain, "-d", settings.service_subnet, "!", "-o", settings.bridge, "-j", "REJECT"])


def _insert_rule(rule: list[str]) -> None:
    """Insert an iptables rule unless it exists."""
    if run(["iptables", "-w", "-C", *rule], check=False).returncode != 0:
        run(["iptables", "-w", "-I", *rule])


def remove_bridge(bridge: str) -> bool:
    """Remove the bridge and its interfaces, and return whether it existed."""
    if not Path(f"/sys/class/net/{bridge}").exists():
        return False
    for link in json.loads(run(["ip", "-json", "link", "show", "master", bridge]).stdout or "[]"):
        # This may fail, because the link vanishes if its network namespace is removed at this moment.
        run(["ip", "link", "delete", link["ifname"]], check=False)
    run(["ip", "link", "delete", bridge])
    return True


def chains(saved: str) -> dict[str, list[str]]:
    """Return the iptables chains of Kubernetes and CNI, by table. saved: the output of `iptables-save`."""
    by_table: dict[str, list[str]] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":") and line[1:].startswith(PREFIXES):
            by_table.setdefault(table, []).append(line[1:].split()[0])
    return by_table


def cleanup(saved: str, *, bridge: str, keep: Mapping[str, Collection[str]]) -> str:
    """Return the input for `iptables-restore --noflush` that removes the cluster's rules in `saved`.

    Args:
        saved:  output of `iptables-save`.
        bridge: interface of the cluster. Rules that name this interface are removed from all other chains too, because
                the launcher has created these rules.
        keep:   chains, by table, that existed before the cluster and are not removed.
    """
    doomed = {table: [c for c in names if c not in keep.get(table, ())] for table, names in chains(saved).items()}
    output: list[str] = []
    table = ""
    deletions: list[str] = []
    for line in [*saved.splitlines(), "*"]:
        if line.startswith("*"):
            names = doomed.get(table, [])
            if deletions or names:
                flush = [f"-F {name}" for name in names]
                output += [f"*{table}", *deletions, *flush, *(f"-X {name}" for name in names), "COMMIT"]
            table, deletions = line[1:].strip(), []
        elif line.startswith("-A "):
            words = shlex.split(line)
            names = doomed.get(table, [])
            if words[1] not in names and (_target(words) in names or _names_interface(words, bridge)):
                deletions.append("-D " + line.removeprefix("-A "))
    return "".join(line + "\n" for line in output)


def _target(words: list[str]) -> str | None:
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word in {"-j", "-g"}), None)


def _names_interface(words: list[str], bridge: str) -> bool:
    return any(word in {"-i", "-o"} and words[i + 1] == bridge for i, word in enumerate(words[:-1]))


def saved_rules() -> dict[str, str]:
    """Return the output of `iptables-save` for each address family."""
    return {family: run([f"{family}-save"]).stdout for family in FAMILIES}


def remove_rules(*, bridge: str, keep: Mapping[str, Mapping[str, Collection[str]]]) -> int:
    """Remove the cluster's chains and rules, and return the number of lines passed to `iptables-restore`."""
    count = 0
    for family, saved in saved_rules().items():
        script = cleanup(saved, bridge=bridge, keep=keep.get(family, {}))
        if script:
            run([f"{family}-restore", "--noflush", "--wait"], stdin=script)
            count += script.count("\n")
    return count
