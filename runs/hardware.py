"""What a run computes on: device, dtype, threads, the processes that share it. A run prints them at
its start."""

import contextlib
import datetime
import functools
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from base import configurator
from base.configurator import UserError
from base.streams import end_by, tell

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOO_SLOW = {("float16", "cpu")}  # (dtype, device): nine times slower than float32
# how long processes wait for each other; rank 0 alone saves and runs the meters meanwhile. gloo's
# own are 30 minutes
MOST_WAIT = datetime.timedelta(minutes=10)
# several processes look for a signal every so many steps, at most: each look is a wait for all
SIGNAL_STEPS = 10


def autocast(device_type: str, dtype: str) -> torch.autocast:
    """The context in which a model computes its products in a dtype of DTYPES."""
    return torch.autocast(device_type, DTYPES[dtype], enabled=dtype != "float32")


def pick_device(name: str) -> str:
    """auto: a GPU where there is one. Raises UserError for a device this machine lacks."""
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if has[device])
    configurator.check_choice("device", name, ("auto", *has))
    if not has[name]:
        raise UserError(f"device={name!r}: this machine has none (device=auto takes what there is)")
    return name


def pick_dtype(name: str, device: str) -> str:
    """The name of the dtype of matrix products; for auto that of the device's fastest ones.

    Raises UserError for a dtype in which the device is far slower than in float32.
    """
    if (name, device) in TOO_SLOW:
        raise UserError(
            f"dtype={name}: on a {device} it is several times slower than float32; take float32, "
            "bfloat16, or a GPU"
        )
    return fastest_dtype(device) if name == "auto" else name


@functools.cache  # the probe of a CPU takes a while, and might not find the same twice
def fastest_dtype(device: str) -> str:
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device == "mps":
        return "float32"
    is_faster = gemm_rate(device, "bfloat16") > 1.3 * gemm_rate(device, "float32")
    return "bfloat16" if is_faster else "float32"


# FLOP/s of dense matrix products in bfloat16 (V100, T4: float16), by the data sheets. A pattern is
# looked for in the name that the driver gives; the first one found counts
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "G?H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090$": 165e12,
    "RTX 3090$": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def peak_flops(device: str, dtype: str) -> tuple[float, str]:
    """(FLOP/s that one device can reach, how it is known): by its data sheet, or measured, where it
    is in no table."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    if "MIG" not in name:  # a part of a GPU
        for pattern, flops in PEAK_FLOPS.items():
            if re.search(rf"\b{pattern}\b", name):
                return flops, f"the data sheet's for {name}"
    # what stays in float32, such as the loss, is not slower than this either, where dtype itself is
    rates = {name: gemm_rate(device, name) for name in {dtype, "float32"}}
    fastest = max(rates, key=rates.get)
    return rates[fastest], f"a matrix product in {fastest}, measured"


def gemm_rate(device: str, dtype: str) -> float:
    """FLOP/s of a matrix product, the fastest of 0.05 s of them: a noisy neighbour can only make
    one slower."""
    # on a CPU about a millisecond, whatever the number of threads: some are then measured between a
    # neighbour's turns
    n = 256 * round((2 * torch.get_num_threads()) ** (1 / 3)) if device == "cpu" else 4096
    # a run's random state stays its own
    a = torch.linspace(-1, 1, n * n, device=device).view(n, n).to(DTYPES[dtype])
    seconds_of(lambda: a[:64] @ a, device)  # warms up
    seconds = []
    while sum(seconds) < 0.05:
        seconds.append(seconds_of(lambda: a @ a, device))
    return 2 * n**3 / min(seconds)


def seconds_of(call: Callable, device: str) -> float:
    """The seconds that one call takes, with the device synchronised."""
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_threads(threads: int, processes: int = 1) -> int:
    """CPU threads of each of the processes of this machine: as many as are asked for, in the key or
    in OMP_NUM_THREADS, or the cores divided. torchrun sets OMP_NUM_THREADS=1 by itself, so that its
    1 asks for nothing."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not threads and asked.isdecimal() and int(asked) > (processes > 1):
        return int(asked)
    return threads or max(1, usable_cores() // processes)


def places_of_torchrun() -> tuple[int, ...]:
    """(rank, world size, local rank, local world size): what torchrun has set, or those of one
    process alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1, 0, 1
    needed = (*names, "MASTER_ADDR", "MASTER_PORT")
    lacking = [name for name in needed if name not in os.environ]
    if lacking:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, and {', '.join(lacking)} is not: start "
            "several processes with torchrun, or `unset WORLD_SIZE`"
        )
    return tuple(int(os.environ[name]) for name in names)


@contextlib.contextmanager
def signals_to(handler: Callable, is_alone: bool = True) -> Iterator[None]:
    """Inside, the first SIGTERM, Ctrl-C, SIGHUP or SIGUSR1 calls handler(number).

    A second SIGTERM or Ctrl-C ends a process that is alone at once, and says so; one within a
    second is the same, sent twice, as by systemd to all processes. Under nohup SIGHUP stays
    ignored.
    """
    # a shell starts what is in the background deaf to SIGINT: not any more
    asks = [signal.SIGTERM, signal.SIGINT]
    tells = [signal.SIGHUP, signal.SIGUSR1]
    since: dict = {}  # when each came first

    def call(number, frame):
        if number not in since:
            since[number] = time.monotonic()
            handler(number)
        elif is_alone and number in asks and time.monotonic() > since[number] + 1:
            tell(f"{signal.Signals(number).name} again: ended at once")
            end_by(number)

    signals = asks + [number for number in tells if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, call) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


class Processes(contextlib.AbstractContextManager):
    """This process among those that torchrun started, or one alone: rank, world_size, device. In a
    script, `with Processes(device, threads) as processes:` is the whole of the program."""

    def __init__(self, device_name, threads):
        self.rank, self.world_size, local_rank, self.local_size = places_of_torchrun()
        self.is_main = self.rank == 0
        self.signal = 0
        self.device = self.device_type = pick_device(device_name)
        # gloo, which joins the processes, does not know it
        if self.device == "mps" and self.world_size > 1:
            raise UserError("device='mps': is for one process; with torchrun add --device=cpu")
        self.threads = cpu_threads(threads, self.local_size)
        torch.set_num_threads(self.threads)
        is_cuda = self.device == "cuda"
        if is_cuda:
            n = torch.cuda.device_count()
            if self.local_size > n:
                raise UserError(f"{self.local_size} processes for {n} GPUs: lower --nproc_per_node")
            self.device = f"cuda:{local_rank}"
            torch.cuda.set_device(self.device)
            # TF32: float32 products would be slow without it
            torch.set_float32_matmul_precision("high")
        if self.world_size == 1:
            return
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=MOST_WAIT))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's own store lives through restarts, and has the addresses of the dead: every
            # attempt has names of its own. A store that is not torchrun's is new for each attempt, and
            # a torchrun that was started later has another count
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = torch.distributed.PrefixStore(f"attempt {attempt}", store)
        torch.distributed.init_process_group(
            # gloo for what is on the CPU: the processes can agree there without a wait for the GPU
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=MOST_WAIT,
            device_id=torch.device(self.device) if is_cuda else None,
        )

    def pin(self, tensor: Any) -> Any:
        """A tensor of the CPU, or None, in memory from which a GPU copies while nobody waits; any
        thread may call it."""
        if tensor is None or self.device_type != "cuda":
            return tensor
        torch.cuda.set_device(self.device)  # a new thread's is the first GPU
        return tensor.pin_memory()

    def to_device(self, tensor: Any) -> Any:
        """A tensor of the CPU, or None, on the device. Nobody waits for one that `pin` has
        returned."""
        if tensor is None:
            return None
        return tensor.to(self.device, non_blocking=self.device_type == "cuda")

    def from_main(self, value: object) -> Any:
        """Rank 0's value, on every process."""
        return self.from_all(value)[0]

    def from_all(self, value: object) -> list:
        """The values of all processes, in the order of their ranks, on every process."""
        values = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def check_same(self, value: object, what: str, advice: str) -> None:
        """Raises UserError, on every process, unless the value is the same on all: machines may see
        other files. Of a dict the message names the first entry that differs, in place of `what`."""
        (first, first_host), *others = self.from_all((value, socket.gethostname()))
        for rank, (other, host) in enumerate(others, 1):
            if other != first:
                if isinstance(other, dict):
                    differing = [x for x in first | other if first.get(x) != other.get(x)]
                    what = differing[0]
                raise UserError(
                    f"{what} is another one for rank {rank} on {host} than for rank 0 on "
                    f"{first_host}: {advice}"
                )

    def on_main(self, function: Callable, *args: object) -> None:
        """Calls it on rank 0, for which the others wait. A UserError there is raised on every
        process."""
        error = None
        if self.is_main:
            try:
                function(*args)
            except UserError as caught:
                error = caught
        error = self.from_main(error)
        if error is not None:
            raise error

    def signals_held(self, what_happens: Callable[[], str]) -> contextlib.AbstractContextManager:
        """Inside, SIGTERM, Ctrl-C, SIGHUP and SIGUSR1 wait until one of the next two methods is
        called. What happens then is printed at once, and what a second one does."""
        # torchrun tells it once more
        is_alone = self.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ

        def handler(number):
            self.signal = number
            second = ". A second SIGTERM or Ctrl-C ends the run at once" if is_alone else ""
            if self.is_main:
                tell(f"{signal.Signals(number).name}: {what_happens()}{second}")

        return signals_to(handler, is_alone)

    def any_signal(self) -> int:
        """The number of the signal that any of the processes has got by now, or 0: the same answer
        on all."""
        if self.world_size == 1:
            return self.signal
        number = torch.tensor(self.signal)  # on the CPU: nobody waits for a GPU
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return int(number)

    def stop_signal(self, step: int, log_interval: int) -> int:
        """any_signal before this step; several processes ask in some of the steps only, and else
        find 0."""
        if self.world_size > 1 and step % min(log_interval, SIGNAL_STEPS):
            return 0
        return self.any_signal()

    def __exit__(self, kind, error, trace):
        """Under torchrun the process ends here, with the status of the error, or 0.

        DDP keeps gloo's threads alive past destroy_process_group. One that lets go of its last
        tensor while Python shuts down aborts the process (pytorch issue 190489): so there is no
        shutdown.
        """
        if self.world_size == 1:
            return
        status = 0
        if error is None:
            torch.distributed.destroy_process_group()
        elif isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error):
            status = 1
            minutes = MOST_WAIT.total_seconds() / 60
            print(
                f"error: rank {self.rank} has lost the others: one of them was killed, has ended and "
                f"printed why, or has not answered for {minutes:g} minutes",
                file=sys.stderr,
            )
        else:
            status = configurator.report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
