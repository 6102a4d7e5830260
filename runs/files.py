"""Files: written whole or not at all, read with every field checked; folders with a kind, and one writer at a time."""

from configurator import UserError, read_regular, refuse_twice, show

import contextlib
import errno
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


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
            if fcntl is None:
                file.close()  # Windows renames no open file
            os.replace(file.name, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
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
        if fcntl is None:
            return file
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # remove_leftovers, in another process, was faster than the lock


def remove_leftovers(folder: Path | str, name: str | None = None) -> None:
    """Removes what kills have left of write_whole(folder / name), or of any file; what is being written is locked."""
    start = ".*" if name is None else re.escape(name[:50])
    with contextlib.suppress(OSError):
        for left in os.scandir(folder) if fcntl is not None else ():
            if re.fullmatch(rf"\.{start}\.[0-9a-f]{{16}}\.tmp", left.name):
                with contextlib.suppress(OSError), os.fdopen(os.open(left.path, os.O_RDWR | os.O_NOFOLLOW)) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(left.path)


def open_in_place(path: Path | str) -> IO:
    """open(path, "a+") for a file that is not written whole: rows, a log, a lock.

    Raises UserError for a link or a hard link, since what is appended would end up in somebody else's file, and for a
    pipe or a device.
    """
    try:
        # O_RDWR: to open a pipe for writing alone would wait for its reader
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(path, flags, 0o666)
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


MARKER = ".nanogate"  # in every folder that this project writes to: what kind it is


def claim(folder: Path | str, kind: str, overwrite: bool = False) -> bool:
    """Makes the folder and marks it as one of this kind ("run", "data set", "export" ...), before anything is written.

    Returns whether it was one already, whose files the caller may remove.
    Raises UserError for a folder that holds anything else. With overwrite it may hold strangers' files, but it may
    still not be a folder that is marked as another kind.
    """
    folder = Path(folder)
    marker = folder / MARKER
    try:
        # the marker is looked for last: a process that shares the folder makes it before anything else
        others = [file.name for file in folder.iterdir() if MARKER not in file.name] if folder.is_dir() else []
        found = marker.read_text(errors="replace").strip()[:40] if marker.is_file() else None
        if found == kind:
            return True
        if found is not None:
            raise UserError(f"{folder}: is the folder of another kind of output, {found!r}; name another folder")
        if others and not overwrite:
            article, some = "an" if kind[0] in "aeio" else "a", ", ".join(sorted(others)[:3])[:99]
            raise UserError(
                f"{folder}: holds what is not of {article} {kind} ({some}); name another folder, "
                "or add --overwrite=true: files of the same names are then replaced"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(marker, lambda file: file.write(f"{kind}\n".encode()))
        return False
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None


def check_output(name: str, path: Path | str, *marks: str) -> None:
    """Raises UserError, before any work, where a script may not write its output to `path`, which the key `name` gives.

    An output replaces nothing but an older output of its own kind: a .png of figures, or a .json that holds an object
    with all the names in `marks`.
    """
    path = Path(path)
    ending = ".json" if marks else ".png"
    if path.suffix != ending:
        raise UserError(f"{name}={show(str(path))}: must end in {ending}")
    check_can_write(name, path)
    if not os.path.lexists(path):
        return
    try:
        found = read_json(path, 1 << 30) if marks else {}
    except UserError:
        found = None
    if not os.path.isfile(path) or not isinstance(found, dict) or any(mark not in found for mark in marks):
        raise UserError(f"{name}={show(str(path))}: is something else already, which this would replace; name another")


def check_can_write(name: str, path: Path | str) -> None:
    """Raises UserError where write_output would: in a folder that is missing or closed, under too long a name."""
    try:
        with _new_file(Path(path)) as file:
            os.unlink(file.name)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
    except OSError as error:
        raise UserError(f"{name}={show(str(path))}: cannot be written ({error.strerror or error})") from None


def write_output(name: str, path: Path | str, write: Callable) -> None:
    """write_whole, for the output that the key `name` gives. Raises UserError."""
    try:
        write_whole(path, write)
    except OSError as error:
        raise UserError(f"{name}={show(str(path))}: cannot be written ({error.strerror or error})") from None


NEW = ".new"  # in a folder whose files are to be replaced: the new ones, until all of them are whole


@contextlib.contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Yields folder/.new for files that `switch` then moves to the folder; no other process writes there meanwhile.

    Raises UserError.
    """
    folder = Path(folder)
    new = folder / NEW
    try:
        if new.is_symlink():
            raise UserError(f"{new}: is a link, and what it leads to would be changed; remove it")
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
                settle(folder)
                shutil.rmtree(new, ignore_errors=True)
                raise
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None


def switch(folder: Path | str, names: Iterable[str]) -> None:
    """Replaces the files `names` of a folder by those of folder/.new, at one moment; it loses those that .new lacks.

    A kill leaves all the old files or all the new ones: each name becomes a link through .new/current, which one rename
    turns from the old files to the new ones, as Kubernetes does for its ConfigMaps. At last the names are files again.
    Where there are no old files the new ones come one by one, in this order, and no links are needed.
    """
    folder = Path(folder)
    new, old, names = folder / NEW, folder / NEW / "old", list(names)
    if there := [folder / name for name in names if os.path.lexists(folder / name)]:
        old.mkdir()
        for path in there:
            if path.is_symlink():
                os.symlink(os.path.realpath(path), old / path.name)
            else:
                os.link(path, old / path.name)
        _replace_by_link(new, new / "current", "old")
        for name in names:
            _replace_by_link(new, folder / name, f"{NEW}/current/{name}")
        _replace_by_link(new, new / "current", ".")
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


def _replace_by_link(new, path, target):
    os.symlink(target, new / "link")
    os.replace(new / "link", path)


def read_json(path: Path | str, most: int = 1 << 26) -> Any:
    """What a JSON file of at most `most` bytes holds.

    Raises UserError if it is missing, damaged, too large or a pipe, or if an object in it names a key twice.
    """

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    data = read_regular(path, most)
    try:
        return json.loads(data, parse_constant=refuse, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def wrong_field(value: object, rule, name: str = "") -> str | None:
    """Says in words what is wrong with a value that a file held, or returns None if it obeys the rule. A rule is one of

    (int, least, most)      a whole number; float: a finite number, or inf where that is the most; bool: of 0 to 1
    (str, least, most)      a text of that length; and so dict
    (kind, least, most, None)   the same, or None
    {"a", "b"}              one of these texts
    [rule, least, most]     a list of that length, every item by the rule
    {str: rule}             a dict of any names, every value by the rule
    {"a": rule, "b?": rule} a dict that has these names, and maybe others; b may be missing
    object                  anything
    """

    def wrong(allowed):
        return f"{name or 'it'}={show(value)}: must be {allowed}"

    if rule is object:
        return None
    if isinstance(rule, set):
        return None if isinstance(value, str) and value in rule else wrong(f"one of {', '.join(sorted(rule))}")
    if isinstance(rule, tuple):
        return None if _is_within(value, *rule) else wrong(_words_of(*rule))
    if isinstance(rule, list):
        inner, least, most = rule
        if type(value) is not list or not least <= len(value) <= most:
            return wrong(_words_of(list, least, most))
        parts = [(f"{name}[{i}]", part, inner) for i, part in enumerate(value)]
    else:
        if type(value) is not dict or any(type(key) is not str or len(key) > 99 for key in value):
            return wrong("a dict, its names texts of at most 99 characters")
        if str in rule:
            rules = dict.fromkeys(value, rule[str])
        else:
            rules = {key.rstrip("?"): inner for key, inner in rule.items() if key[-1] != "?" or key[:-1] in value}
        if missing := next((key for key in rules if key not in value), None):
            return f"{name or 'it'} has no {missing}"
        parts = [(f"{name}.{key}" if name else key, value[key], inner) for key, inner in rules.items()]
    return next((words for where, part, inner in parts if (words := wrong_field(part, inner, where))), None)


def _is_within(value, kind, least, most, *none):
    if none and value is None:
        return True
    if kind is float:  # an int of a thousand digits is no float
        return type(value) in (int, float) and (type(value) is float or abs(value) < 1 << 63) and least <= value <= most
    return type(value) is kind and least <= (value if kind in (int, bool) else len(value)) <= most


def _words_of(kind, least, most, *none):
    if none:
        return f"{_words_of(kind, least, most)}, or None"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        what = "a whole number" if kind is int else "a number"
        return f"{what} of at least {least}" + f" and at most {most}" * (most < 1 << 50)
    what = {str: "a text", list: "a list", dict: "a dict"}[kind]
    return f"{what} of length {least}" + (f" to {most}" if most < 1 << 50 else " or more") * (most > least)


def read_jsonl(file: Path | str, fields: dict[str, type] | None = None) -> list[dict]:
    """The objects of a file of JSON lines; none where there is no file. A last line that was cut short is left out.

    fields: {name: type} that each object has. UserError names a damaged line.
    """
    text, rows = read_regular(file, 1 << 30) if os.path.isfile(file) else b"", []
    end = text.rfind(b"\n") + 1
    for number, line in enumerate((text if is_object(text[end:]) else text[:end]).splitlines(), 1):
        try:
            row = json.loads(line, object_pairs_hook=refuse_twice)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or any(type(row.get(name)) is not kind for name, kind in (fields or {}).items()):
            raise UserError(f"{file} line {number}: damaged; remove the line")
        rows.append(row)
    return rows


def is_object(line: bytes) -> bool:
    """Whether a line is a whole JSON object; one that a kill has cut short is none."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def open_rows(path: Path | str) -> IO:
    """open_in_place of a file of JSON lines. Its last line is ended, or removed if a kill has cut it short."""
    file = open_in_place(path)
    text = Path(path).read_bytes()
    end = text.rfind(b"\n") + 1
    if is_object(text[end:]):
        file.write("\n")
    else:
        file.truncate(end)
    return file


class InUse(UserError):
    """Another process has the lock of a folder."""


def lock(folder: Path | str, wait: float = 0.0) -> IO:
    """Returns an open file that keeps other processes out of the folder until it is closed or this process dies.

    While another process holds the lock, this waits for so many seconds, and then raises InUse. On a system or a file
    system without such locks nobody is kept out. Raises UserError where the lock is no plain file.
    """
    file, deadline = open_in_place(Path(folder) / "lock"), time.monotonic() + wait
    if fcntl is None:
        return file
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
