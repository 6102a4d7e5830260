"""What a run computes on: device, dtype, threads, the processes that share it. A run says them at its start."""

import os
import sys
import time

import torch

from configurator import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name):
    """auto: a GPU where there is one. Raises UserError for a device this machine lacks."""
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if has[device])
    if not has[name]:
        raise UserError(f"device={name!r}: this machine has none (device=auto takes what there is)")
    return name


def pick_dtype(name, device):
    """The name of the dtype of matrix products. auto on a CPU: bfloat16 where a short probe finds it faster."""
    if name != "auto":
        return name
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    if device == "mps":
        return "float32"
    return "bfloat16" if matmul_seconds(torch.bfloat16) * 1.3 < matmul_seconds(torch.float32) else "float32"


def matmul_seconds(dtype, n=1024, repeats=5):
    """The fastest of a few n x n x n products on the CPU: a noisy neighbour can only make one slower."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def usable_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Processes:
    """This process among those that torchrun started: rank, world_size, device. One process without torchrun."""

    def __init__(self, device_name, threads):
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.device_type = pick_device(device_name)
        self.device = f"cuda:{local_rank}" if self.device_type == "cuda" else self.device_type
        # torchrun says OMP_NUM_THREADS=1 to every process: divide the cores instead
        self.threads = threads or max(1, usable_cores() // local_size)
        torch.set_num_threads(self.threads)
        if self.device_type == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise UserError(f"{local_size} processes for {torch.cuda.device_count()} GPUs: lower --nproc_per_node")
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            torch.distributed.init_process_group("nccl" if self.device_type == "cuda" else "gloo")

    def total(self, tensor):
        """The sum over all processes, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def from_main(self, value):
        """Rank 0's value, on every process."""
        box = [value]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(box)
        return box[0]

    def close(self):
        if self.world_size > 1:
            torch.distributed.destroy_process_group()

    def end(self):
        """The last call of a program that has used DDP: under torchrun the process ends here, with status 0.

        DDP keeps gloo's threads alive past destroy_process_group. One that lets go of its last tensor while Python
        shuts down aborts the process (pytorch issue 190489): so there is no shutdown.
        """
        if self.world_size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
