"""How much memory and disk this process may still take, and how many files it may open.

No torch is imported here: prepare.py starts without.
"""

import os
import shutil
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def ram_available() -> tuple[int, str]:
    """(bytes, words for whose limit it is): the least that machine, container and ulimit leave to this process."""
    return min(_of_machine() + _of_container() + _of_ulimit())


def disk_free(folder: Path | str) -> int:
    """Bytes free where the folder is, or will be."""
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def allow_open_files(more: int) -> None:
    """Raises this process's limit on open files for so many more, as far as the system lets it."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more + 512  # beside those that are open already
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _of_machine():
    available = _fields(PROC / "meminfo").get("MemAvailable")
    if available is None:  # not Linux: take all of the memory
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [(available, "this machine")]


def _of_container():
    """The limits of this process's control groups and of those around them, of version 2 and 1."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = root / path.lstrip("/")
        # inside a container its own group is mounted as the root, and the path may not exist
        for folder in [group, *group.parents]:
            if folder != root and root not in folder.parents:
                break
            limit, used = (_number(folder / name) for name in names)
            if limit is None or used is None or limit >= 1 << 60:  # "max"; version 1 writes a huge number
                continue
            # pages of files count as used, and are given back when they are wanted
            cached = _fields(folder / "memory.stat", 1).get("inactive_file", 0)
            found.append((max(0, limit - used + cached), "this container"))
    return found


def _of_ulimit():
    if resource is None or sys.platform != "linux":
        return []
    used, found = _fields(PROC / "self/status"), []
    for limit, name, words in (
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
    ):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            found.append((max(0, soft - used.get(name, 0)), words))
    return found


def _fields(file, unit=1024):
    """{name: bytes} of lines like `VmSize:  1234 kB`."""
    try:
        words = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) * unit for line in words if len(line) > 1 and line[1].isdigit()}


def _number(file):
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def show_bytes(size: float) -> str:
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}" if size < 1e6 * unit else "a million PB or more"
    return f"{size / 1e3:,.0f} kB"
