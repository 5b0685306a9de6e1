"""The number of threads of a process: physical cores, within the CPU limit of its container."""

from pathlib import Path

import pytest

from megatron_kernels.cpu.cores import default_threads


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A sysfs of eight CPUs, two of which share each core."""
    for cpu in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


@pytest.mark.parametrize(("cpus", "threads"), [(range(8), 4), ((0, 4), 1), ((0, 1, 5), 2), ((100, 101), 2)])
def test_one_thread_for_each_core_that_the_process_may_use(system: Path, cpus: range, threads: int) -> None:
    assert default_threads(system, set(cpus)) == threads


@pytest.mark.parametrize(("limit", "threads"), [("max", 4), ("150000", 1), ("50000", 1), ("250000", 2), ("800000", 4)])
@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_is_rounded_down_to_whole_cpus(
    system: Path, version: int, limit: str, threads: int
) -> None:
    groups = system / "fs/cgroup"
    (groups / "cpu").mkdir(parents=True)
    if version == 2:
        (groups / "cpu.max").write_text(f"{limit} 100000\n")
    else:
        (groups / "cpu/cpu.cfs_quota_us").write_text("-1\n" if limit == "max" else f"{limit}\n")
        (groups / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert default_threads(system, set(range(8))) == threads
