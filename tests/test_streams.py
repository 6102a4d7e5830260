"""Standard streams that are closed, full or without a reader: no traceback, no lost run, no print into a file."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT
from test_resume import FORKS, check_same_run, end

import train
from base import configurator

SCRIPTS = [
    *(f"{name}.py" for name in ("train", "sample", "evaluate", "meters", "plot", "bench", "experiment")),
    "hub/export.py",
]
SCRIPTS += sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("data/*/prepare.py"))
CLOSED = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}
GONE, FULL = "a pipe without a reader", "/dev/full"


def shell(line, *words, cwd=ROOT):
    """A line of sh, in which "$@" are the words, run to its end."""
    command = ["sh", "-c", line, "sh", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


# -- A stream that is closed from the start ----------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_prints_its_help_with_no_stream_at_all(script):
    assert shell(f'"$@" --help {CLOSED["all"]}', sys.executable, script).returncode == 0


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_the_other_streams_have_their_text(stream):
    ended = shell(f'"$@" --help {CLOSED[stream]}', sys.executable, "sample.py")
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.startswith("usage: ") == (stream != "stdout")
    ended = shell(f'"$@" --no_such=1 {CLOSED[stream]}', sys.executable, "sample.py")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "error: unknown key 'no_such'\n" * (stream != "stderr")


def test_a_file_never_gets_the_number_of_a_closed_stream_and_children_have_all_three(tmp_path):
    code = """
        import os, sys
        from base import configurator
        def main(argv):
            with open(argv[0], "w") as file:
                print("printed")
                os.write(1, b"printed")
                os.system("echo printed; echo printed >&2")
                assert file.fileno() > 2 and sys.stdin.read() == ""
                file.write("written")
        configurator.run(main)
    """
    ended = shell(f'"$@" {CLOSED["all"]}', sys.executable, "-c", textwrap.dedent(code), tmp_path / "file")
    assert ended.returncode == 0 and (tmp_path / "file").read_text() == "written"


# -- A stream that fails later -----------------------------------------------------------------------------------------


def a_script(main, words, targets):
    """configurator.run(main) in this process, which was forked for it. targets: what is put in the place of the
    standard streams, None to close one."""
    for number, target in enumerate(targets):
        if target == GONE:
            reader, file = os.pipe()
            os.close(reader)
        else:
            file = os.open(target or os.devnull, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    for number, target in enumerate(targets):
        if target is None:
            os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # as Python has them when it starts
        stream = None if targets[number] is None else open(number, "rw"[number > 0], closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["script.py", *words]
    configurator.run(main, needs_stdout=False)


@pytest.mark.parametrize("target", [None, GONE, FULL])
def test_a_run_goes_on_to_its_end_without_a_reader_a_disk_for_its_log_or_any_stream(target, run, keys, helpers):
    silent = keys("silent")
    process = FORKS.Process(target=a_script, args=(train.main, helpers.words(**silent), [None, target, target]))
    process.start()
    assert end(process) == 0
    check_same_run(run("whole"), silent["out_dir"], helpers)


PRINTS = "import sys; from base import configurator; "
PRINTS += "configurator.run(lambda argv: [print(i, file={}) for i in range(99_999)])"


@pytest.mark.parametrize(
    "stream, rest, status, said",
    [
        ("sys.stdout", "| head -1", 141, ""),
        ("sys.stdout", "> /dev/full", 1, "error: [Errno 28] No space left on device\n"),
        ("sys.stderr", "2>&1 >/dev/null | head -1", 0, ""),
        ("sys.stderr", "2> /dev/full", 0, ""),
    ],
)
def test_a_script_whose_result_is_printed_ends_without_standard_output_and_none_without_standard_error(
    stream, rest, status, said
):
    ended = shell(f'exec 4>&2; ("$@"; echo status $? >&4) {rest}', sys.executable, "-c", PRINTS.format(stream))
    assert ended.stderr == f"{said}status {status}\n"


# -- Signals at which a script ends at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_ends_a_script_at_once_with_a_line(name):
    code = "import os; from base import configurator; "
    code += f"configurator.run(lambda argv: os.kill(os.getpid(), {getattr(signal, name)}))"
    ended = shell('"$@"', sys.executable, "-c", code)
    assert ended.returncode == 128 + getattr(signal, name)  # as a shell reports it
    assert f"\n{name}: ended at once\n" in ended.stderr and "Traceback" not in ended.stderr


def test_ctrl_c_while_torch_is_imported_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    (tmp_path / "a.pt").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = shell('"$@"', sys.executable, ROOT / "sample.py", "--checkpoint=a.pt", cwd=tmp_path)
    assert ended.returncode == 130 and ended.stderr == "\nSIGINT: ended at once\n"


def test_a_signal_before_the_first_step_ends_a_run_at_once(keys, helpers, tmp_path):
    case, said = keys("out"), tmp_path / "stderr"
    process = FORKS.Process(
        target=a_script, args=(signalled_before_step_0, helpers.words(**case), [None, None, str(said)])
    )
    process.start()
    assert end(process) == -signal.SIGTERM
    assert "SIGTERM: ended at once" in said.read_text() and not (case["out_dir"] / "ckpt.pt").exists()


def signalled_before_step_0(argv):
    train.make_model = lambda *words: os.kill(os.getpid(), signal.SIGTERM)
    train.main(argv)


def test_a_real_run_writes_what_it_always_does_with_no_stream_at_all(keys, helpers):
    case = keys("out", max_iters=1, n_layer=1)
    assert shell(f'"$@" {CLOSED["all"]}', sys.executable, "train.py", *helpers.words(**case)).returncode == 0
    assert helpers.metrics(case["out_dir"])[-1]["event"] == "end"
