"""Taking a cluster off the machine, whatever state a previous run left it in."""

from __future__ import annotations

import shutil

from localcluster import processes
from localcluster.progress import Steps
from localcluster.settings import Layout

# Their data is removed a moment later: nothing is gained by letting them end politely, which takes a minute.
_NO_GRACE = frozenset({"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"})


def end_processes(layout: Layout, steps: Steps) -> None:
    """Ends every process of the cluster, recorded or not."""
    owned = processes.owned_pids(layout.state)
    if not owned:
        return
    with steps.step("end processes") as step:
        abrupt = {pid for pid, argv in owned.items() if argv[0].rpartition("/")[2] in _NO_GRACE}
        processes.terminate(owned.keys() - abrupt)
        processes.terminate(abrupt, grace=0.0)
        step.note(str(len(owned)))


def down(name: str, layout: Layout, steps: Steps, *, purge: bool) -> None:
    end_processes(layout, steps)
    keep = set() if purge else {layout.containerd_root, layout.logs}
    if layout.state.exists():
        for path in layout.state.iterdir():
            if path not in keep:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not any(layout.state.iterdir()):
            layout.state.rmdir()
    steps.say(f"cluster {name!r} is down")
