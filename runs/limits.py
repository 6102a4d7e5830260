"""How much memory this process may still take."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def ram_available() -> tuple[int, str]:
    """(bytes, words for whose limit it is): the least that machine and container leave to this process."""
    return min([_of_machine(), *_of_container()])


def _of_machine():
    available = _fields(PROC / "meminfo").get("MemAvailable")
    if available is None:  # not Linux: take all of the memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    return 1024 * available, "this machine"


def _of_container():
    """The limits of this process's control group and of those around it (version 2)."""
    path = next((line[3:] for line in _lines(PROC / "self/cgroup") if line.startswith("0::")), None)
    group, limits = CGROUPS / (path or "").lstrip("/"), []
    # inside a container its own group is mounted as the root, and the path may not exist
    for folder in (group, *group.parents) if path else ():
        limit, used = ("".join(_lines(folder / name)) for name in ("memory.max", "memory.current"))
        if limit.isdecimal() and used.isdecimal():  # else "max", or no group
            # pages of files count as used, and are given back when they are wanted
            cached = _fields(folder / "memory.stat").get("inactive_file", 0)
            limits.append((max(0, int(limit) - int(used) + cached), "this container"))
    return limits


def _fields(file):
    """{name: number} of lines like `MemAvailable:  1234 kB`."""
    words = [line.replace(":", " ").split() for line in _lines(file)]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _lines(file):
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def show_bytes(size: float) -> str:
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 1e3:,.0f} kB"
