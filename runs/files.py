"""Files: written whole or not at all, read with every field checked; folders with a kind, and one writer at a time."""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from rules import UserError, show, wrong_field

# ----------------------------------------------------------------------------------------------------------------------
# Reading


def read_regular(path: Path | str, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes. Raises UserError, also for a pipe or device, which may never end."""
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
        if is_file:  # opening a pipe would wait for its writer
            with open(path, "rb") as file:
                data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not is_file:
        raise UserError(f"{path}: is a folder, a pipe or a device, where a file is needed")
    if len(data) > most:
        raise UserError(f"{path}: has more than {most:,} bytes, which is too large for a file of this kind")
    return data


def read_json(path: Path | str, most: int = 1 << 26) -> Any:
    """What a JSON file of at most `most` bytes holds. Raises UserError for one that is missing, damaged or large."""
    return parse_json(read_regular(path, most), path)


def parse_json(text: str | bytes, name: Path | str) -> Any:
    """What a JSON text holds. Raises UserError, also for NaN and Infinity, which JSON lacks, and for a key twice."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: cannot be read as JSON ({error})") from None


def refuse_twice(pairs: Iterable[tuple]) -> dict:
    """The dict of the pairs. UserError for a name that occurs twice: the first value would be dropped in silence."""
    values: dict = {}
    for name, value in pairs:
        if name in values:
            raise UserError(f"the key {show(name)} stands there twice")
        values[name] = value
    return values


def read_jsonl(file: Path | str, fields: dict[str, type] | None = None) -> list[dict]:
    """The objects of a file of JSON lines; none where there is no file. A last line that was cut short is left out.

    fields: {name: type} that each object has. UserError names a damaged line.
    """
    text, rows = read_regular(file, 1 << 30) if os.path.isfile(file) else b"", []
    for number, line in enumerate(text[: _end_of_rows(text)].splitlines(), 1):
        row = _object_of(line)
        if row is None or any(type(row.get(name)) is not kind for name, kind in (fields or {}).items()):
            raise UserError(f"{file} line {number}: damaged; remove the line")
        rows.append(row)
    return rows


def _object_of(line):
    """The JSON object of a line, or None for anything else, such as one that a kill has cut short."""
    with contextlib.suppress(UserError):
        row = parse_json(line, "")
        return row if isinstance(row, dict) else None


def _end_of_rows(text):
    """Where the last row ends that is whole, though perhaps without the end of its line."""
    end = text.rfind(b"\n") + 1
    return end if _object_of(text[end:]) is None else len(text)


# ----------------------------------------------------------------------------------------------------------------------
# Writing


@contextlib.contextmanager
def named_if_it_fails(name: object = None) -> Iterator[None]:
    """An OSError inside becomes a UserError that says what cannot be written: `name`, or else the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name or error.filename}: cannot be written ({error.strerror or error})") from None


def write_text(path: Path | str, text: str) -> None:
    """write_whole of a text."""
    write_whole(path, lambda file: file.write(text.encode(errors="backslashreplace")))  # half a character is no UTF-8


def write_whole(path: Path | str, write: Callable) -> int:
    """write(file) under a temporary name in the same folder, fsync, rename: a kill leaves the old file or the new one.

    Returns the size in bytes. Raises what open and `write` raise. What a kill leaves under a temporary name is removed
    by the next write of the same file. A link at the path is replaced, and what it points to stays as it is.
    """
    path = Path(path)
    remove_leftovers(path.parent, path.name)
    with _new_file(path) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
            os.replace(file.name, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
    with contextlib.suppress(OSError):  # not every file system syncs a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)
    return size


def _new_file(path: Path) -> IO:
    """A new file beside `path`, under a name that nobody knows before. It is locked until it is closed."""
    while True:
        # "x" follows no link; the name is cut since it must not be too long where that of `path` is not
        file = open(path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp"), "xb")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # remove_leftovers, in another process, was faster than the lock


def remove_leftovers(folder: Path | str, name: str | None = None) -> None:
    """Removes what kills have left of write_whole(folder / name), or of any file; what is being written is locked."""
    start = ".*" if name is None else re.escape(name[:50])
    with contextlib.suppress(OSError):
        for left in os.scandir(folder):
            if re.fullmatch(rf"\.{start}\.[0-9a-f]{{16}}\.tmp", left.name):
                with contextlib.suppress(OSError), os.fdopen(os.open(left.path, os.O_RDWR | os.O_NOFOLLOW)) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(left.path)


def check_output(name: str, path: Path | str, *marks: str) -> None:
    """Raises UserError, before any work, where a script may not write its output to `path`, which the key `name` gives.

    An output replaces nothing but an older output of its own kind: a .png of figures, or a .json that holds an object
    with all the names in `marks`.
    """
    path, label = Path(path), f"{name}={show(str(path))}"
    ending = ".json" if marks else ".png"
    if path.suffix != ending:
        raise UserError(f"{label}: must end in {ending}")
    check_can_write(name, path)
    found = None
    with contextlib.suppress(UserError):
        found = read_json(path, 1 << 30) if marks else {}
    if os.path.lexists(path) and not (
        os.path.isfile(path) and wrong_field(found, dict.fromkeys(marks, object)) is None
    ):
        raise UserError(f"{label}: is something else already, which this would replace; name another")


def check_can_write(name: str, path: Path | str) -> None:
    """Raises UserError where write_output would: in a folder that is missing or closed, under too long a name."""
    with named_if_it_fails(f"{name}={show(str(path))}"):
        with _new_file(Path(path)) as file:
            os.unlink(file.name)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)


def write_output(name: str, path: Path | str, write: Callable) -> None:
    """write_whole, for the output that the key `name` gives. Raises UserError."""
    with named_if_it_fails(f"{name}={show(str(path))}"):
        write_whole(path, write)


# ----------------------------------------------------------------------------------------------------------------------
# Appending and locking


def open_in_place(path: Path | str) -> IO:
    """open(path, "a+") for a file that is not written whole: rows, a log, a lock.

    Raises UserError for a link or a hard link, since what is appended would end up in somebody else's file, and for a
    pipe or a device.
    """
    try:
        # O_RDWR: to open a pipe for writing alone would wait for its reader
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode) and about.st_nlink < 2:
            file: Any = os.fdopen(fd, "a+", encoding="utf-8")
            file.buffer.raw.name = os.fspath(path)  # file.name, which is else the number of the descriptor
            return file
        os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
    raise UserError(f"{path}: is a link, a pipe or a device, where a file of this project belongs; remove it")


def open_rows(path: Path | str) -> IO:
    """open_in_place of a file of JSON lines. Its last line is ended, or removed if a kill has cut it short."""
    file, text = open_in_place(path), Path(path).read_bytes()
    file.truncate(_end_of_rows(text))
    if text and _end_of_rows(text) == len(text) and not text.endswith(b"\n"):
        file.write("\n")
    return file


class InUse(UserError):
    """Another process has the lock of a folder."""


def lock(folder: Path | str, wait: float = 0.0) -> IO:
    """Returns an open file that keeps other processes out of the folder until it is closed or this process dies.

    While another process holds the lock, this waits for so many seconds, and then raises InUse. On a file system
    without such locks nobody is kept out. Raises UserError where the lock is no plain file.
    """
    file, deadline = open_in_place(Path(folder) / "lock"), time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            owner = os.pread(file.fileno(), 99, 0).decode(errors="replace").strip()
            file.close()
            owner = owner if owner.isprintable() and owner else "another process"
            raise InUse(f"{folder}: {owner} is running in it; wait, stop it, or take another out_dir") from None
        except OSError:
            return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


# ----------------------------------------------------------------------------------------------------------------------
# Folders

MARKER = ".nanogate"  # in every folder that this project writes to: what kind it is
NEW = ".new"  # in a folder whose files are to be replaced: the new ones, until all of them are whole


def claim(folder: Path | str, kind: str, overwrite: bool = False) -> bool:
    """Makes the folder and marks it as one of this kind ("run", "data set", "export" ...), before anything is written.

    Returns whether it was one already, whose files the caller may remove.
    Raises UserError for a folder that holds anything else. With overwrite it may hold strangers' files, but it may
    still not be a folder that is marked as another kind.
    """
    folder = Path(folder)
    with named_if_it_fails(folder):
        # the marker is looked for last: a process that shares the folder makes it before anything else
        others = [file.name for file in folder.iterdir() if MARKER not in file.name] if folder.is_dir() else []
        marker = folder / MARKER
        marked = marker.read_text(errors="replace").strip()[:40] if marker.is_file() else kind
        if marked != kind:
            raise UserError(f"{folder}: is the folder of another kind of output, {marked!r}; name another folder")
        if marker.is_file():
            return True
        if others and not overwrite:
            article, some = "an" if kind[0] in "aeio" else "a", ", ".join(sorted(others)[:3])[:99]
            raise UserError(
                f"{folder}: holds what is not of {article} {kind} ({some}); name another folder, "
                "or add --overwrite=true: files of the same names are then replaced"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(marker, f"{kind}\n")
        return False


@contextlib.contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Yields folder/.new for files that `switch` then moves to the folder; no other process writes there meanwhile.

    Raises UserError.
    """
    folder = Path(folder)
    new = folder / NEW
    if new.is_symlink():
        raise UserError(f"{new}: is a link, and what it leads to would be changed; remove it")
    with named_if_it_fails():
        new.mkdir(parents=True, exist_ok=True)
        with lock(new) as held:
            if not os.path.samestat(os.fstat(held.fileno()), os.stat(new / "lock")):
                raise UserError(f"{folder}: another process has just written here; try again")
            settle(folder)
            try:
                for left in new.iterdir():  # files of a process that was killed
                    if left.name != "lock":
                        left.unlink()
                yield new
            except BaseException:
                settle(folder)  # where it fails, .new stays: links may still lead to its files
                shutil.rmtree(new, ignore_errors=True)
                raise
            shutil.rmtree(new, ignore_errors=True)


def switch(folder: Path | str, names: Iterable[str]) -> None:
    """Replaces the files `names` of a folder by those of folder/.new, at one moment; it loses those that .new lacks.

    A kill leaves all the old files or all the new ones: each name becomes a link through .new/current, which one rename
    turns from the old files to the new ones, as Kubernetes does for its ConfigMaps. At last the names are files again.
    Where there are no old files the new ones come one by one, in this order, and no links are needed.
    """
    folder, names = Path(folder), list(names)
    new, old = folder / NEW, folder / NEW / "old"

    def replace_by_link(path, target):
        os.symlink(target, new / "link")
        os.replace(new / "link", path)

    if there := [folder / name for name in names if os.path.lexists(folder / name)]:
        old.mkdir()
        for path in there:
            if path.is_symlink():
                os.symlink(os.path.realpath(path), old / path.name)
            else:
                os.link(path, old / path.name)
        replace_by_link(new / "current", "old")
        for name in names:
            replace_by_link(folder / name, f"{NEW}/current/{name}")
        replace_by_link(new / "current", ".")
    else:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.replace(new / name, folder / name)
    settle(folder)


def settle(folder: Path) -> None:
    """Makes files of the links of `switch`, also of one that was killed: the old files or the new, as it had come."""
    new = folder / NEW
    for path in folder.iterdir():
        if path.is_symlink() and os.readlink(path) == f"{NEW}/current/{path.name}":
            if os.path.lexists(new / "current" / path.name):
                os.replace(new / "current" / path.name, path)
            else:
                path.unlink()
    for name in ("current", "link"):
        (new / name).unlink(missing_ok=True)
    shutil.rmtree(new / "old", ignore_errors=True)
