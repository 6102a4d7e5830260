"""How much memory this machine has left."""

import os
import re
from pathlib import Path


def ram_available() -> int:
    """Bytes of RAM that are left on this machine; where the system does not say, all of its RAM."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (line := re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text())):
        return 1024 * int(line[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def show_bytes(size: float) -> str:
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 1e3:,.0f} kB"
