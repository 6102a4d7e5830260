"""Standard input, output and error of a script: what happens where one is closed, or fails while
the script works.

    open_streams(needs_stdout=True)     # before a script opens a file
    tell("SIGTERM: ended")              # a line on standard error, from a handler of a signal, too

A stream that is closed from the start (`<&-`, `>&-`, `2>&-`) is /dev/null. A stream that fails
later, because its reader is gone (`| head`), its disk is full or its terminal is closed, becomes
/dev/null then, and the script goes on. There is one exception: a script whose result is what it
prints ends when standard output fails.
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
from typing import Any

from base.rules import escape

# 128 + SIGPIPE, the status that a shell reports for other programs. Python ignores the signal
READER_IS_GONE = 141


# what a terminal obeys and does not show, but for line ends and tabs; the last two ranges turn the
# direction of a text
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """The text with its control characters escaped, as errors have them."""
    return CONTROLS.sub(lambda found: escape(found[0]), text)


class Printed(io.TextIOWrapper):
    """Standard output, whose texts a terminal shows and does not obey: a name from somebody's file,
    or what a model has drawn, moves no cursor and changes no colour."""

    def write(self, text: str) -> int:
        return super().write(without_controls(text))


class Stream(io.FileIO):
    """The file below sys.stdout or sys.stderr. is_needed: what is printed is the result of the
    script."""

    is_needed = False

    def write(self, data: Any) -> int:
        """Raises the OSError of a stream that is needed, or SystemExit where its reader is gone."""
        try:
            written = super().write(data)
        except OSError as error:
            # whatever is printed from here on, at the exit of Python, too, goes nowhere and fails
            # no more
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.is_needed and error.errno == errno.EPIPE:
                raise SystemExit(READER_IS_GONE) from None
            if self.is_needed:
                raise
            if self.fileno() == 1:
                tell(
                    f"note: nothing can be printed on standard output ({error.strerror}); the work goes on without it"
                )
            return len(data)
        return len(data) if written is None else written  # None: a full pipe that lets nobody wait


def open_streams(needs_stdout: bool = True) -> None:
    """Opens the standard streams that are closed, and makes those for printing fail as said above.
    needs_stdout: what the script prints is its result. It may be called again."""
    # a file that is opened later would get the number of a closed stream, and be printed into
    for number in (0, 1, 2):
        if not is_open(number):
            # takes the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    # else somebody catches what is printed, as pytest does, or it is done already
    if sys.stdout is sys.__stdout__:
        sys.stdout = on_stream(sys.stdout, 1, Printed)
    if sys.stderr is sys.__stderr__:
        sys.stderr = on_stream(sys.stderr, 2, io.TextIOWrapper)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Stream):
        raw.is_needed = needs_stdout


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def on_stream(before: Any, number: int, kind: type) -> Any:
    """A text stream of this kind like the one before, that stands on a Stream. before: None for one
    that was closed."""
    if before is None:
        # not `number`: a library may have opened a file under it by now
        number = os.open(os.devnull, os.O_WRONLY)
        encoding = "utf-8"
    else:
        before.flush()
        encoding = before.encoding
    buffer = io.BufferedWriter(Stream(number, "w", closefd=False))
    # a character that the terminal lacks is printed escaped; a file gets each line at once
    return kind(buffer, encoding=encoding, errors="backslashreplace", line_buffering=True)


def tell(line: str) -> None:
    """A line of its own on standard error. It goes past sys.stderr, which a handler of a signal may
    not write to: the signal may have come while something else was printed."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode(errors="backslashreplace"))


def end_by(number: int) -> None:
    """Ends this process as the signal does by itself."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def end_at_once_by(*numbers: int) -> None:
    """These signals end the script at once, as they do by themselves, but with a line that says
    so."""
    own_process = os.getpid()

    def handler(number, frame):
        # a forked process is ended by the one that forked it, and torchrun's other processes say
        # the same
        if os.getpid() == own_process and os.environ.get("LOCAL_RANK", "0") == "0":
            tell(f"{signal.Signals(number).name}: ended at once")
        end_by(number)

    for number in numbers:
        # as under nohup, or in the background of a shell
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
