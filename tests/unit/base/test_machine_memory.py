"""The memory that a process may use, in cgroups of both versions."""

from pathlib import Path

import pytest

from tokmill.base.bounds import machine_memory

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("line", "files", "wanted"),
    [
        ("0::/", {}, (1000, 600)),
        ("0::/", {"": (*V2, "max", 50 * MIB)}, (1000, 600)),
        ("0::/", {"": (*V2, 200 * MIB, 50 * MIB)}, (200, 150)),
        ("0::/job/step", {"job": (*V2, 300 * MIB, 0), "job/step": (*V2, "max", 0)}, (300, 300)),
        ("4:memory:/", {"memory": (*V1, 200 * MIB, 50 * MIB)}, (200, 150)),
        ("4:memory:/", {"memory": (*V1, (1 << 63) - 4096, 50 * MIB)}, (1000, 600)),
        ("4:memory:/a/b", {"memory/a": (*V1, 200 * MIB, 210 * MIB)}, (200, 0)),
        ("4:memory:/docker/12", {"memory": (*V1, 700 * MIB, 0)}, (700, 600)),
        ("4:cpu,memory:/", {"memory": (*V1, 200 * MIB, 50 * MIB)}, (200, 150)),
        ("4:cpu:/", {"cpu": (*V1, 200 * MIB, 0)}, (1000, 600)),
    ],
)
def test_the_least_limit_counts(
    tmp_path: Path,
    line: str,
    files: dict[str, tuple[str, str, object, object]],
    wanted: tuple[int, int],
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024000 kB\nMemAvailable: 614400 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    for folder, (limit, used, *values) in files.items():
        group = tmp_path / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        for name, value in zip((limit, used), values, strict=True):
            (group / name).write_text(f"{value}\n")
    total, free = machine_memory(tmp_path)
    assert (total // MIB, free // MIB) == wanted


def test_this_machine_has_memory() -> None:
    total, free = machine_memory()
    assert total >= free > 0
