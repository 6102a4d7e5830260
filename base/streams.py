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
import signal
import sys
from typing import Any

# 128 + SIGPIPE, the status that a shell reports for other programs. Python ignores the signal
READER_IS_GONE = 141


class Stream(io.FileIO):
    """The file below sys.stdout or sys.stderr."""

    stdout_is_needed = False  # whether what is printed is the result of the script

    def write(self, data: Any) -> int | None:
        """Raises the OSError of a stream that is needed, or SystemExit where its reader is gone."""
        try:
            return super().write(data)
        except OSError as error:
            # whatever is printed from here on, at the exit of Python, too, goes nowhere and fails
            # no more
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            is_needed = self.stdout_is_needed and self.fileno() == 1
            if is_needed and error.errno == errno.EPIPE:
                raise SystemExit(READER_IS_GONE) from None
            if is_needed:
                raise
            return len(data)


def open_streams(needs_stdout: bool = True) -> None:
    """Opens the standard streams that are closed, and makes those for printing fail as said above.
    needs_stdout: what the script prints is its result. It may be called again."""
    # a file that is opened later would get the number of a closed stream, and be printed into
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # takes the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    # else somebody catches what is printed, as pytest does, or it is done already
    if sys.stdout is sys.__stdout__:
        sys.stdout = on_stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = on_stream(2, sys.stderr)
    Stream.stdout_is_needed = needs_stdout


def on_stream(number: int, before: Any) -> io.TextIOWrapper:
    """A text stream on a Stream, with the encoding of the one before, which is None if closed."""
    encoding = before.encoding if before else "utf-8"
    buffer = io.BufferedWriter(Stream(number, "w", closefd=False))
    # a character that the terminal lacks is printed escaped; a file gets each line at once
    return io.TextIOWrapper(
        buffer, encoding=encoding, errors="backslashreplace", line_buffering=True
    )


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
