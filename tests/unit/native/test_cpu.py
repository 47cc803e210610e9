from __future__ import annotations

import os

import pytest

from pellucid.native import cpu as cpu_module
from pellucid.native.cpu import available_memory, cpu, usable_cores


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A cgroup v2 tree in which this process is in /a/b, on a machine with plenty of memory."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   4194304 kB\n")
    monkeypatch.setattr(cpu_module, "_CGROUP", tmp_path)
    monkeypatch.setattr(cpu_module, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cpu_module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cpu.cache_clear()
    yield tmp_path
    cpu.cache_clear()


def test_without_limits_the_machine_counts(cgroups):
    assert available_memory() == 4 << 30 and usable_cores() == 8


def test_every_enclosing_cgroup_limits(cgroups):
    (cgroups / "a" / "cpu.max").write_text("250000 100000\n")
    (cgroups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (cgroups / "a" / "memory.max").write_text("1000000\n")
    (cgroups / "a" / "memory.current").write_text("900000\n")
    (cgroups / "a" / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    (cgroups / "a" / "b" / "memory.max").write_text("max\n")
    assert usable_cores() == 2 and available_memory() == 150_000 and cpu().memory == 1_000_000


def test_cgroups_of_version_1(cgroups):
    (cgroups / "membership").write_text("4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n")
    for controller in ("memory", "cpu"):
        (cgroups / controller / "job").mkdir(parents=True)
    (cgroups / "memory" / "job" / "memory.limit_in_bytes").write_text("2000000\n")
    (cgroups / "memory" / "job" / "memory.usage_in_bytes").write_text("500000\n")
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (cgroups / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (cgroups / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_memory() == 1_500_000 and usable_cores() == 3


def test_the_affinity_of_this_moment_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores() == 1
