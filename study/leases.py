"""Who does what, where several workers share a folder: a lease is a file that only one of them can have created.

    with Leases(out_dir) as leases:
        if leases.take("none-seed0"):       # False: another worker has it
            ...
            leases.drop("none-seed0")       # it is done; leases that are left at the end are given back

The lease of a name is its file of the highest number in out_dir/leases, "none-seed0.0", "none-seed0.1", ... A lease is
stale if it was given back, if its process is gone from this machine, or if its heartbeat has stood still while this
worker looked at it for STALE seconds, for which no two clocks need to agree. It is taken over by creating the file of
the next number: one worker alone can do that, and none can remove what another one has just taken. Machines and
containers may have the same name: a process is only looked for where its number means something (machine).
"""

import contextlib
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BEAT = 5.0  # seconds between heartbeats, which set the time of the file
STALE = 60.0  # seconds without a heartbeat after which a lease is taken over


class Leases:
    def __init__(self, out_dir: Path | str):
        self.folder = Path(out_dir) / "leases"
        self.held = {}  # {name: (its file, what this worker wrote into it)}
        self.seen = {}  # {file of another worker: (its time, when this worker first saw that time)}
        self.held_lock, self.ended = threading.Lock(), threading.Event()

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        # a thread: the worker itself may wait minutes for its data
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        for name in list(self.held):
            self.give_back(name)
        with contextlib.suppress(OSError):  # others still have leases, or have removed the folder already
            self.folder.rmdir()

    def take(self, name: str, may_take_over: Callable[[], bool] = lambda: True) -> bool:
        """Takes a lease that nobody has, or that is stale if may_take_over() allows it. False: another worker has it.

        Whoever gets a lease must look again whether its work is done: the worker before may just have finished it.
        """
        number, newest = self._newest(name)
        if number >= 0 and not (self._is_stale(newest) and may_take_over()):
            return False
        file = self.folder / f"{name}.{number + 1}"
        text = json.dumps(about_this_process())
        try:
            self.folder.mkdir(exist_ok=True)  # a worker that has ended may have removed it
            with open(file, "x") as created:
                created.write(text)
        except (FileExistsError, FileNotFoundError):  # another one was faster, or has just removed the folder
            return False
        with self.held_lock:
            self.held[name] = file, text
        return True

    def is_mine(self, name: str) -> bool:
        """Whether this worker still has the lease: one that was suspended for long has lost it."""
        file, text = self.held[name]
        return self._newest(name)[1] == file and read_text(file) == text

    def drop(self, name: str) -> None:
        """Removes a lease whose work is done, and those before it. What another worker has taken over stays."""
        is_mine = self.is_mine(name)
        with self.held_lock:
            file, _ = self.held.pop(name)
        for number in range(int(file.name.rpartition(".")[2]) + 1 if is_mine else 0):
            self.folder.joinpath(f"{name}.{number}").unlink(missing_ok=True)

    def give_back(self, name: str) -> None:
        """Marks a lease whose work is not done as free."""
        with self.held_lock:
            file, _ = self.held.pop(name)
            with contextlib.suppress(OSError):
                os.utime(file, (0, 0))

    def holder(self, name: str) -> str:
        """Who has the lease, in words."""
        number, newest = self._newest(name)
        if number < 0 or self._is_stale(newest):
            return "its worker is gone, it still runs"
        about = about_of(newest)
        return f"process {about.get('pid')} on {about.get('host')}"

    def _newest(self, name: str) -> tuple[int, Path | None]:
        """The highest number of a lease of that name, and its file; (-1, None) if there is none."""
        try:
            parts = [file.rpartition(".") for file in os.listdir(self.folder)]
        except FileNotFoundError:
            parts = []
        number = max((int(end) for start, _, end in parts if start == name and end.isdecimal()), default=-1)
        return number, self.folder / f"{name}.{number}" if number >= 0 else None

    def _is_stale(self, file: Path) -> bool:
        try:
            changed = file.stat().st_mtime
        except FileNotFoundError:  # its work is done, or it has just been taken over
            return False
        about = about_of(file)
        if changed == 0 or about.get("machine") == machine() and is_gone(about.get("pid")):
            return True
        now = time.monotonic()
        if self.seen.get(file, (None, 0))[0] != changed:
            self.seen[file] = changed, now
        return now - self.seen[file][1] > STALE

    def _beat(self):
        while not self.ended.wait(BEAT):
            with self.held_lock:  # give_back must not be undone
                for file, _ in self.held.values():
                    with contextlib.suppress(OSError):
                        os.utime(file)


def about_this_process() -> dict:
    return {"host": socket.gethostname(), "machine": machine(), "pid": os.getpid(), "started": time.time()}


@functools.cache
def machine() -> str:
    """Names the place in which process ids are unique: this machine since it was started, and this container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def is_gone(pid: object) -> bool:
    """Whether no process of this machine has the number, or this one, which does not know the lease."""
    if os.name != "posix" or type(pid) is not int:  # elsewhere os.kill would end the process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return pid == os.getpid()


def about_of(file: Path) -> dict:
    """What the holder wrote into a lease; nothing if it has not done so yet."""
    try:
        return json.loads(read_text(file))
    except ValueError:
        return {}


def read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def alone(out_dir: Path | str, name: str) -> Iterator[None]:
    """Waits until no other worker is inside."""
    with Leases(out_dir) as leases:
        while not leases.take(name):
            time.sleep(0.2)
        yield
        leases.drop(name)
