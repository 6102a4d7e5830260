"""Trains a GPT, in one process or in several under torchrun, on a CPU or on GPUs:

    python train.py config/NAME.py --key=value ...
    torchrun --standalone --nproc_per_node=4 train.py config/NAME.py

docs/scale.md has several machines and SLURM. out_dir gets config.json, code/ (the source files of
the run), metrics.jsonl (one object per line), ckpt.pt (the last checkpoint) and best.pt (the one of
lowest validation loss). The batch and the dropout of a step depend on (seed, step) alone, and not
on the number of processes, on evaluations or on restarts.

--init_from=resume goes on from out_dir/ckpt.pt, and ends with exactly the numbers of a run that was
never stopped. Keys that you do not give are the checkpoint's. --init_from=auto resumes if out_dir
has a ckpt.pt, and otherwise starts from scratch. --init_from=out/other starts a new run from the
weights and the model keys of another run (docs/gates.md adds a gate in this way).

--dry_run=true prints the memory, time and disk that the run takes, and does nothing else.

SIGTERM, Ctrl-C, SIGHUP and SIGUSR1 save, and exit with status 128 plus the signal's number. A
checkpoint is saved every save_interval steps, by default just before each evaluation. If the loss
or a gradient is not finite, the run exits with status 1 (in float16 a gradient that overflows only
skips its step).

The loop is `train`. To change the optimizer edit make_optimizers, the loss GPT.loss in model.py; to
log another number add it to `row` in the loop, and to log elsewhere see runs/loggers.py.
"""

from base import configurator
from keys import GPTConfig, TrainConfig, model_args

# before torch is imported, so that a mistake in the command line is reported at once
configurator.begin(__name__, TrainConfig)

import dataclasses
import itertools
import math
import signal
import sys
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import variants  # noqa: F401  adds its mixers to those of model.py
from base.configurator import UserError
from data.shards import Dataset
from evaluate import evaluate
from model import GPT
from ops import IGNORE
from runs import parallel
from runs.checkpoint import build_model
from runs.dry_run import print_plan
from runs.hardware import Processes, autocast, peak_flops, pick_dtype
from runs.health import bad_weight, closed_gates, first_bad_tensor
from runs.memory import check_training
from runs.muon import Muon, matrices_of
from runs.notes import forms_that_ran, print_start
from runs.outdir import OutDir, code_sha256
from runs.probe import first_rows, training_meters
from runs.resume import Start, check_same_start, open_data, restore, take_weights, where_to_start

READ_AHEAD = 2  # how many steps ahead batches are read
# the most tokens in a batch of an evaluation, unless batch_size rows are more; with twice as many a
# token took 1.1 to 1.3 times as long
EVALUATED_AT_ONCE = 8192

# -- What a step takes: its rate, the optimizers, its batches, its loss ----------------------------


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step: linear warmup, then what the key `schedule` says.

    wsd falls as 1 - sqrt(progress) over its last steps, which is better than a linear decay
    (Haegele et al. 2024). cosine falls to a tenth, as nanoGPT's.
    """
    highest = config.learning_rate
    warmup = config.warmup_iters
    end = config.max_iters
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return highest
    decay_start = warmup
    if config.schedule == "wsd":
        decay_start = max(warmup, end - (config.decay_iters or max(1, end // 5)))
    progress = max(0.0, min(1.0, (step - decay_start) / max(1, end - decay_start)))
    left = 0.5 * (1 + math.cos(math.pi * progress))
    lowest = highest / 10
    if config.schedule == "wsd":
        left = 1 - math.sqrt(progress)
        lowest = 0.0
    if config.min_lr is not None:
        lowest = config.min_lr
    return lowest + left * (highest - lowest)


def make_optimizers(
    model: GPT, config: TrainConfig, device_type: str
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run. Edit this function to use another one.

    Make them of model.parameter_groups(...): its (name, parameter) pairs are what checkpoints need,
    and the learning rate of a step is the schedule's times a group's lr_scale.
    """
    lr = config.learning_rate
    adamw: dict = {"lr": lr, "betas": (config.beta1, config.beta2), "fused": device_type != "mps"}
    groups = model.parameter_groups(
        config.weight_decay, config.gate_weight_decay, config.gate_lr_scale
    )
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(groups, **adamw)]
    with_gates = config.gate_optimizer != "adamw"
    # {weight: the rows of each matrix in it}; a FusedLinear's weight has several
    matrices = matrices_of(model, with_gates, config.muon_split)
    for_muon = []
    for_adamw = []
    for group in groups:
        of_muon = [(name, p) for name, p in group["params"] if p in matrices]
        of_adamw = [(name, p) for name, p in group["params"] if p not in matrices]
        if of_muon:
            lr_scale = config.muon_lr_scale * group["lr_scale"]
            for_muon.append(group | {"params": of_muon, "lr_scale": lr_scale})
        if of_adamw:
            for_adamw.append(group | {"params": of_adamw})
    optimizers: list[torch.optim.Optimizer] = []
    if for_muon:  # a model of embeddings alone has no matrix for it
        in_batches = config.muon_split == "head"  # many small ones
        optimizers.append(Muon(for_muon, matrices, lr, in_batches=in_batches))
    if for_adamw:  # gates that are trained alone may leave it nothing
        optimizers.append(torch.optim.AdamW(for_adamw, **adamw))
    return optimizers


class Batch(NamedTuple):
    """What a process reads for one micro-step of gradient accumulation."""

    micro_step: int
    inputs: torch.Tensor  # (B, T)
    targets: torch.Tensor  # (B, T)
    n_labels: int  # of the global batch
    document: torch.Tensor | None = None  # (B, T), of packed documents (data/shards.py)


def step_if(optimizer: Any, is_good: torch.Tensor) -> None:
    """A step of the optimizer, if is_good. A fused AdamW and Muon skip it on the device where
    found_inf is 1, as torch.amp.GradScaler tells them to; for another one, such as AdamW on MPS,
    the host reads the number."""
    if optimizer.defaults.get("fused") or isinstance(optimizer, Muon):
        optimizer.found_inf = (~is_good).float()
        optimizer.step()
    elif is_good:
        optimizer.step()


def load_batches(
    dataset: Dataset, config: TrainConfig, processes: Processes, same_length: bool, step: int
) -> list[Batch]:
    """The batches of a step that this process computes, on the CPU, pinned for a GPU. They depend
    on (seed, step) alone. same_length: pad rows of several lengths, so that compiled code serves
    all."""
    micro_steps = config.gradient_accumulation_steps
    n_labels = 0
    own = []
    for m in range(micro_steps):  # every process counts the labels of all
        inputs, targets, document = dataset.batch(
            "train",
            step,
            seed=config.seed,
            batch_size=config.batch_size,
            block_size=config.block_size,
            gradient_accumulation_steps=micro_steps,
            micro_step=m,
            same_length=same_length,
        )
        n_labels += int((targets != IGNORE).sum())
        if m % processes.world_size == processes.rank:
            pin = processes.pin
            own.append((m, pin(inputs), pin(targets), pin(document)))
    n_labels = max(1, n_labels)
    return [Batch(m, x, y, n_labels, document) for m, x, y, document in own]


def read_ahead(run: "Run", steps: Iterable[int]) -> Iterator[list[Batch]]:
    """Yields the batches of each step on the device. While a step computes, a thread reads those of
    the next READ_AHEAD ones. An error in reading is raised when its step is reached."""
    given = (run.dataset, run.config, run.processes, run.compiled)  # the last is same_length
    to_device = run.processes.to_device
    steps = iter(steps)
    waiting: deque = deque()
    while True:
        for step in itertools.islice(steps, READ_AHEAD + 1 - len(waiting)):
            waiting.append(run.reader.submit(load_batches, *given, step=step))
        if not waiting:
            return
        batches = []
        for m, inputs, targets, n_labels, document in waiting.popleft().result():
            moved = (to_device(inputs), to_device(targets), n_labels, to_device(document))
            batches.append(Batch(m, *moved))
        yield batches


def micro_loss(
    model: torch.nn.Module, config: TrainConfig, dtype: str, step: int, batch: Batch
) -> torch.Tensor:
    """What a micro-step adds to the mean loss of the global batch.

    It is divided by the labels of the global batch, not by its own: rows may hold different numbers
    of them.
    """
    if config.dropout > 0:  # dropout depends on (seed, step, micro-step) alone
        torch.manual_seed(zlib.crc32(f"{config.seed} {step} {batch.micro_step}".encode()))
    with autocast(batch.inputs.device.type, dtype):
        loss = model(batch.inputs, batch.targets, reduction="sum", document=batch.document)
        return loss / batch.n_labels


# -- The training loop -----------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What the functions of a run share."""

    config: TrainConfig
    processes: Processes
    dtype: str  # of matrix products
    dataset: Dataset
    reader: ThreadPoolExecutor  # of the batches
    out: OutDir
    model: GPT
    compiled: bool
    step_model: torch.nn.Module  # what a step calls: the model, compiled or DDP's
    optimizers: list
    scaler: torch.amp.GradScaler
    tokens_per_step: int  # the mean, where rows differ in length
    flops_per_token: float  # of training: three times those of the forward pass
    peak: tuple[float, str]  # FLOP/s that a device can reach, how that is known
    # the first step whose loss or gradient (in float16: whose loss) was not finite; -1 if none. A
    # tensor on the device, so that setting it waits for nothing
    bad_step: torch.Tensor
    about: dict = dataclasses.field(default_factory=dict)  # the same in every checkpoint

    step: int = 0  # the step that comes next, or is being taken
    saved_step: int | None = None
    eval_tokens: int | None = None  # that an evaluation reads; None: all
    best_val_loss: float = math.inf
    evaluations: list[dict] = dataclasses.field(default_factory=list)
    seconds_before: float = 0.0  # of earlier starts, evaluations included
    started: float = 0.0  # perf_counter() when this start began, less seconds_before
    eval_seconds: float = 0.0  # of evaluations, over all starts; a part of perf_counter() - started


class Stopped(Exception):
    """A signal has come to one of the processes; its number is the argument."""


def train(run: Run) -> None:
    """Trains from run.step to max_iters, or until stop_above says that the task is solved."""
    config, processes, out = run.config, run.processes, run.out
    model, step_model, optimizers, scaler = run.model, run.step_model, run.optimizers, run.scaler
    device, world_size = processes.device, processes.world_size
    first_step = run.step
    # what was logged before the run was resumed; nothing in a new run
    logged_losses = [row["loss"] for row in out.kept if row["event"] == "train"]
    evaluations = [row for row in out.kept if row["event"] == "eval"]
    run.evaluations = processes.from_main(evaluations)  # only rank 0 has read metrics.jsonl
    batches_of_steps = read_ahead(run, range(first_step, config.max_iters))
    bar = tqdm(
        desc="training",
        total=config.max_iters,
        initial=first_step,
        unit="step",
        disable=not processes.is_main,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # a log file gets a line every 30 s
    )
    log_step = first_step
    log_time = time.perf_counter()
    run.started = log_time - run.seconds_before

    for step in range(first_step, config.max_iters + 1):
        run.step = step
        lr = learning_rate(config, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)

        # on a signal, save and exit
        signal_number = processes.stop_signal(step, config.log_interval)
        if signal_number:
            exit_by_signal(run, signal_number)

        # save and evaluate, each in its interval and after the last step; save first, so that a kill
        # during the evaluation loses nothing
        is_last = step == config.max_iters  # after the last update: saves, evaluates, and ends
        evaluates_now = is_last or step % config.eval_interval == 0
        if saves_now(run):
            check_and_save(run)
        # a resumed run may have the row of this step
        if evaluates_now and step not in [row["step"] for row in run.evaluations]:
            evaluate_and_save_the_best(run)
        if evaluates_now and (is_last or is_solved(run)):
            check_and_save(run)  # a task may be solved at a step that does not save
            break
        if saves_now(run) or evaluates_now:  # these are no part of the speed of a step
            log_step = step
            log_time = time.perf_counter()

        # forward and backward. From here to the log nothing waits for a GPU: no tensor's value is
        # read
        batches = next(batches_of_steps)
        loss = torch.zeros((), device=device)
        for batch in batches:
            with parallel.sync_gradients(step_model, batch is batches[-1]):
                part = micro_loss(step_model, config, run.dtype, step, batch)
                # DDP and FSDP take the mean over the processes; the loss is already divided by the
                # labels of all
                scaler.scale(part * world_size).backward()
            loss += part.detach()
        if world_size > 1:
            torch.distributed.all_reduce(loss)
        if step == first_step:
            check_all_are_used(model)
            if processes.is_main:
                for line in forms_that_ran(model):  # of the recurrence: fla's kernels or PyTorch
                    print(line)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = parallel.clip_gradients(model, config.grad_clip)

        # update, unless this step or an earlier one is bad. run.bad_step keeps the first bad step,
        # and the next log ends the run. In float16 an infinite gradient of a finite loss is not bad,
        # the loss scale was too high: this step alone is skipped, and scaler.update lowers the scale,
        # since unscale_ found the overflow. step_if is scaler.step without its wait for the GPU
        is_good = (loss + grad_norm).isfinite()
        is_bad = ~loss.isfinite() if scaler.is_enabled() else ~is_good
        run.bad_step = torch.where((run.bad_step < 0) & is_bad, step, run.bad_step)
        for optimizer in optimizers:
            step_if(optimizer, is_good & (run.bad_step < 0))
        scaler.update()
        # DDP's gradients stay views of its buckets
        model.zero_grad(set_to_none=not isinstance(step_model, DistributedDataParallel))

        # log: a number that you add to the row arrives in metrics.jsonl and in every logger
        bar.update()
        if step % config.log_interval == 0 or step == config.max_iters - 1:
            fail_if_not_finite(run)
            row: dict = {"event": "train", "step": step, "loss": float(loss), "lr": lr}
            # JSON has no inf, which is common in float16
            row["grad_norm"] = float(grad_norm) if math.isfinite(grad_norm) else None
            row["spike"] = is_spike(row["loss"], logged_losses)
            seconds = time.perf_counter() - log_time
            row["tokens_per_second"] = run.tokens_per_step * (step + 1 - log_step) / seconds
            row["mfu"] = mfu(run, row["tokens_per_second"])
            log_step = step + 1
            log_time = time.perf_counter()
            logged_losses.append(row["loss"])
            out.log(row)
            speed = f"{row['tokens_per_second']:,.0f}"
            shown = {"loss": f"{loss:.4f}", "tok_s": speed, "mfu": f"{row['mfu']:.1%}"}
            bar.set_postfix(shown, refresh=False)

    bar.close()
    finish(run)


def saves_now(run: Run) -> bool:
    """Whether this step saves a checkpoint."""
    is_last = run.step == run.config.max_iters
    return is_last or run.step % run.config.save_every == 0


def is_solved(run: Run) -> bool:
    """Whether the last two evaluations were above stop_above."""
    if run.config.stop_above is None or len(run.evaluations) < 2:
        return False
    return all(row["accuracy"] > run.config.stop_above for row in run.evaluations[-2:])


def check_all_are_used(model: GPT) -> None:
    """UserError for parameters that the loss of the first step does not depend on."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise UserError(
            f"model.py: {len(unused)} parameters are built and never used, first {unused[0]}: the loss does not "
            "depend on them; use them in forward, or do not build them"
        )


def is_spike(loss: float, earlier: list[float]) -> bool:
    """Whether loss is over 5 standard deviations above the mean of the last 100 logged losses (at
    least 20)."""
    window = earlier[-100:]
    return len(window) >= 20 and loss > fmean(window) + 5 * pstdev(window)


def mfu(run: Run, tokens_per_second: float) -> float:
    """The model FLOPs utilisation."""
    peak_of_all = run.peak[0] * run.processes.world_size
    return tokens_per_second * run.flops_per_token / peak_of_all


# -- Evaluations and checkpoints -------------------------------------------------------------------


def sample_size(run: Run, max_iters: int, eval_interval: int) -> int | None:
    """eval_tokens, how many tokens of the validation split an evaluation reads (None: all). A run of
    fewer steps than eval_interval is a trial, and reads at most a tenth as many as it trains on. The
    two numbers are arguments since make_run also asks for those of the checkpoint."""
    tokens = run.config.eval_tokens
    if tokens is None or max_iters >= eval_interval:
        return tokens
    return min(tokens, max(1, max_iters * run.tokens_per_step // 10))


def validate(run: Run, tokens: int | None, with_meters: bool = False) -> dict:
    """The numbers of the validation split: val_loss (nats a label), seconds, and what else `evaluate`
    gives. tokens: read a fixed sample of about so many (None: all). A signal ends it before its next
    batch, on all processes, and then the run."""
    config, model, processes = run.config, run.model, run.processes
    start = time.perf_counter()
    all_tokens = run.dataset.counts("val")["tokens"]
    bar = tqdm(
        desc="evaluating",
        total=min(tokens or all_tokens, all_tokens) // processes.world_size,
        unit="token",
        unit_scale=True,
        leave=False,
        disable=None if processes.is_main else True,  # None: shown in a terminal alone
    )
    # n_layer times batch_size, if that is not too many tokens: a step keeps the activations of every
    # layer, and an evaluation those of one
    most = EVALUATED_AT_ONCE // run.dataset.longest("val", config.block_size)
    rows = max(config.batch_size, min(config.batch_size * config.n_layer, most))

    def before_batch():
        number = processes.any_signal()
        if number:
            raise Stopped(number)
        bar.update(rows * config.block_size)

    try:
        with bar, parallel.eager(model):
            numbers = evaluate(
                model,
                run.dataset,
                "val",
                batch_size=rows,
                block_size=config.block_size,
                dtype=run.dtype,
                tokens=tokens,
                rank=processes.rank,
                world_size=processes.world_size,
                before_batch=before_batch,
            )
            if not math.isfinite(numbers["loss"]):
                reason = f"validation loss is {numbers['loss']}"
                fail(run, run.step, reason, bad_weight(model))
            numbers["seconds"] = time.perf_counter() - start
            # a sharded model needs every process in each pass
            if with_meters and (processes.is_main or parallel.is_sharded(model)):
                # a mixture has those of its first part
                given = (run.dataset.parts[0], config.block_size, run.dtype, tokens or all_tokens)
                numbers["meters"] = training_meters(model, *given)
    except Stopped as stopped:
        exit_by_signal(run, stopped.args[0])
    run.eval_seconds += time.perf_counter() - start
    return {"val_loss": numbers.pop("loss")} | numbers


def evaluate_and_save_the_best(run: Run) -> None:
    """Evaluates the step, logs it, and saves it as best.pt if its loss is the lowest so far of the
    steps that save."""
    numbers = validate(run, run.eval_tokens, with_meters=run.config.meters)
    row = {"event": "eval", "step": run.step} | numbers
    if "meters" in row:
        row["gate_closed"], notes = closed_gates(row, run.evaluations)
        if run.processes.is_main:
            for note in notes:
                print(note)
    run.evaluations.append(row)
    run.out.log(row)
    if saves_now(run) and row["val_loss"] < run.best_val_loss:
        run.best_val_loss = row["val_loss"]
        save(run, is_best=True)
    signal_number = run.processes.any_signal()
    if signal_number:
        exit_by_signal(run, signal_number)


def check_and_save(run: Run) -> None:
    """Saves the step, if that is not done yet. Ends the run instead if the weights are not fit to
    replace the last good checkpoint: an update may make them so large that only the output of the
    next pass shows it."""
    if run.saved_step == run.step:
        return
    fail_if_not_finite(run)
    model, processes = run.model, run.processes
    inputs, _ = first_rows(run.dataset.parts[0], "val", 1, run.config.block_size)
    with parallel.eager(model), torch.no_grad(), autocast(processes.device_type, run.dtype):
        model.eval()
        hidden, _ = model.features(inputs.to(processes.device))
        model.train()
    if not processes.from_main(bool(hidden.isfinite().all())):
        reason = "the output on a row of validation is not finite"
        fail(run, run.step, reason, bad_weight(model))
    save(run, is_best=False)


def save(run: Run, is_best: bool) -> None:
    """Writes ckpt.pt, with all that the rest of the run depends on; if is_best, best.pt, too."""
    weights, moments = parallel.whole_state(run.model, run.optimizers)
    groups = []
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            groups.append({name: x for name, x in group.items() if name != "params"})
    checkpoint = run.about | {
        "model": weights,
        "optimizer": {"state": moments, "param_groups": groups},
        "scaler": run.scaler.state_dict(),
        "rng": torch.get_rng_state(),
        "iter_num": run.step,
        "best_val_loss": run.best_val_loss,
        "seconds": time.perf_counter() - run.started,
        "eval_seconds": run.eval_seconds,
    }
    run.processes.on_main(run.out.save, checkpoint, is_best)
    run.saved_step = run.step


# -- How a run ends --------------------------------------------------------------------------------


def fail_if_not_finite(run: Run) -> None:
    """Ends the run if a step so far was bad. The weights are still those from before it, so that
    the step can be computed once more to name the first tensor that is not finite."""
    bad_step = int(run.bad_step)
    if bad_step >= 0:
        batches = next(read_ahead(run, [bad_step]))
        with parallel.eager(run.model):
            losses = (  # a generator: first_bad_tensor computes each loss with its hooks in place
                micro_loss(run.model, run.config, run.dtype, bad_step, batch) for batch in batches
            )
            found = run.processes.from_all(first_bad_tensor(run.model, losses))
        name = next(filter(None, found), None)
        fail(run, bad_step, "the loss or its gradient is not finite", name)
    if run.scaler.is_enabled() and run.scaler.get_scale() < 1:
        reason = "float16's loss scale fell below 1 and the gradient still overflows"
        fail(run, run.step, reason, bad_weight(run.model))


def fail(run: Run, bad_step: int, reason: str, tensor: str | None) -> NoReturn:
    """Logs and prints why and where the run ends, and exits with status 1."""
    run.out.log({"event": "stopped", "step": bad_step})
    if run.processes.is_main:
        where = f"first bad tensor: {tensor}" if tensor else "all weights are still finite"
        saved = "Nothing was saved"
        if run.saved_step is not None:
            saved = f"{run.out.path / 'ckpt.pt'} holds step {run.saved_step}"
        place = f"at step {bad_step}, learning rate {learning_rate(run.config, bad_step):.3g}"
        print(f"\nerror: {reason} {place}; {where}. {saved}", file=sys.stderr)
    sys.exit(1)


def exit_by_signal(run: Run, number: int) -> NoReturn:
    """Saves the step, prints where the run goes on, and exits with the status that shells report for
    a process that the signal ended."""
    check_and_save(run)
    if run.processes.is_main:
        name = signal.Signals(number).name
        steps = f"step {run.step} of {run.config.max_iters}"
        print(f"\n{name}: saved at {steps}; --init_from=resume goes on from there")
    sys.exit(128 + number)


def finish(run: Run) -> None:
    """Logs the row of the end, and prints it."""
    counts = run.dataset.counts("val")
    # in rows of a task only a few of the tokens have a label
    n_labels = counts.get("labels", counts["tokens"])
    last = run.evaluations[-1]
    was_sampled = run.eval_tokens is not None and run.eval_tokens < counts["tokens"]
    # an estimate of what all of the split takes
    seconds_of_whole = last.get("seconds", 0.0) * n_labels / last["labels"]
    seconds_of_training = time.perf_counter() - run.started - run.eval_seconds
    read_whole = run.config.eval_whole
    if read_whole is None:  # all of it, if that takes no longer than the training did
        is_quick = seconds_of_whole <= seconds_of_training
        read_whole = run.processes.from_main(is_quick)
    is_whole = read_whole or not was_sampled

    # a finished run that is started again has its end row already (out.ended). A new one is made if
    # steps were added, or if the old one is of a sample and the whole split is wanted. A row of an
    # older version, without "whole", counts as whole
    row = run.processes.from_main(run.out.ended)
    if row is None or row["step"] != run.step or (is_whole and not row.get("whole", True)):
        left_out = ("meters", "gate_closed", "seconds")
        row = {name: x for name, x in last.items() if name not in left_out}
        if was_sampled and is_whole:
            row |= validate(run, None)
        row |= {"event": "end", "whole": is_whole, "seconds": time.perf_counter() - run.started}
        row["eval_seconds"] = run.eval_seconds
    run.out.log(row)  # an old one, too: a resumed run writes metrics.jsonl anew, without it
    if run.processes.is_main:
        print_end(run, row)
        if not row.get("whole", True):
            print(
                f"  measured on {row['labels']:,} of {n_labels:,} labels; all of them take about "
                f"{seconds_of_whole:.0f} s:"
            )
            print(
                f"  python train.py --out_dir={run.config.out_dir} --init_from=resume --eval_whole=true"
            )
        sample = " on the sample" if was_sampled else ""
        best = f"validation loss {run.best_val_loss:.4f}{sample}"
        print(f"written to {run.out.path}/: metrics.jsonl, ckpt.pt, best.pt ({best})")


def print_end(run: Run, row: dict) -> None:
    steps = f"{run.step} steps"
    if run.step < run.config.max_iters:
        steps = f"{run.step} of {run.config.max_iters} steps (solved)"
    accuracy = ""
    if run.dataset.kind == "examples":
        accuracy = f", accuracy {row['accuracy']:.1%}"
    loss = f"validation loss {row['val_loss']:.4f} nats{accuracy}"
    print(f"{loss} after {steps} in {row['seconds']:.0f} s")


# -- How a run starts ------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Reads the keys and the checkpoint (where_to_start), checks (train_from), builds (make_run), and
    trains (train)."""
    start = where_to_start(configurator.read_words(TrainConfig, argv))
    if start.config.dry_run:
        print_plan(start)
        return
    with Processes(start.config.device, start.config.threads) as processes:
        train_from(start, processes)


def train_from(start: Start, processes: Processes) -> None:
    """Checks all that can be checked before anything is written, and trains."""
    config = start.config
    if processes.world_size > 1:
        check_same_start(start, processes)
    dtype = processes.from_main(pick_dtype(config.dtype, processes.device_type))
    dataset = open_data(start, processes)
    config.vocab_size = config.vocab_size or dataset.vocab_size
    processes.on_main(check_training, config, dataset, processes)
    with OutDir(config, start.resumed) as out, ThreadPoolExecutor(1) as reader:
        processes.on_main(out.take)  # marks and locks the folder
        run = make_run(start, processes, dtype, dataset, out, reader)
        # from here on a signal waits for the end of a step, and the run is saved first
        with processes.signals_held(
            lambda: f"the run saves and ends; it is at step {run.step}, last saved {run.saved_step}"
        ):
            train(run)


def make_run(
    start: Start,
    processes: Processes,
    dtype: str,
    dataset: Dataset,
    out: OutDir,
    reader: ThreadPoolExecutor,
) -> Run:
    """Builds the model and the optimizers, restores a checkpoint, prints and writes what comes
    before the first step."""
    config, resumed, source = start.config, start.resumed, start.source
    model, notes_of_model = make_model(config, resumed, source)
    if config.gates_only:
        model.train_gates_only()
    compiled = is_compiled(config, processes.device_type)
    step_model = parallel.share_out(model, config, processes, compiled, dtype)
    optimizers = make_optimizers(model, config, processes.device_type)
    scaler = torch.amp.GradScaler(processes.device_type, enabled=dtype == "float16")
    if resumed is not None:
        restore(resumed, model, optimizers, out.path / "ckpt.pt", scaler)
    elif source is not None and config.keep_moments:
        restore(source, model, optimizers, config.init_from)
    for checkpoint in (resumed, source):
        # the caller keeps the dict: without this its tensors, copied by now, would stay in memory
        if checkpoint is not None:
            checkpoint.pop("model", None)
            checkpoint.pop("optimizer", None)
    tokens_per_row: Any = dataset.tokens_per_example("train", config.block_size)
    rows_per_step = config.batch_size * config.gradient_accumulation_steps
    run = Run(
        config=config,
        processes=processes,
        dtype=dtype,
        dataset=dataset,
        reader=reader,
        out=out,
        model=model,
        compiled=compiled,
        step_model=step_model,
        optimizers=optimizers,
        scaler=scaler,
        tokens_per_step=round(rows_per_step * tokens_per_row),
        flops_per_token=3 * model.flops_per_token(tokens_per_row),
        peak=peak_flops(processes.device_type, dtype),
        bad_step=torch.tensor(-1, device=processes.device),
    )
    run.eval_tokens = sample_size(run, config.max_iters, config.eval_interval)
    run_id = processes.from_main(uuid.uuid4().hex)
    if resumed is not None:
        run_id = resumed["run_id"]
        run.step = resumed["iter_num"]
        run.saved_step = run.step
        before = resumed["config"]
        # a best loss on a sample of another size is not comparable, and is forgotten
        if run.eval_tokens == sample_size(run, before["max_iters"], before["eval_interval"]):
            run.best_val_loss = float(resumed["best_val_loss"])
        run.eval_seconds = float(resumed["eval_seconds"])
        run.seconds_before = float(resumed["seconds"])
    if processes.is_main:
        print_start(run, start, notes_of_model)
    write_start(run, run_id)
    return run


def make_model(
    config: TrainConfig, resumed: dict | None, source: dict | None
) -> tuple[GPT, list[str]]:
    """The model that a run starts with, and lines to print. resumed: the checkpoint that the run goes
    on from; source: one whose weights it starts from; None: there is none."""
    model_config = GPTConfig(**model_args(config))
    torch.manual_seed(config.seed)
    if resumed is not None:
        file = Path(config.out_dir) / "ckpt.pt"
        return build_model(model_config, resumed["model"], file), []
    model = GPT(model_config)
    if source is None:
        return model, []
    return model, take_weights(model, source["model"], config.init_from)


def is_compiled(config: TrainConfig, device_type: str) -> bool:
    """Whether the step is compiled. Under auto it is not in short runs and on CPUs, which do not
    earn back the minute that it takes, nor with mask_documents, where each batch would be compiled
    anew."""
    if config.compile == "auto":
        is_long = config.max_iters >= 500
        return device_type == "cuda" and is_long and not config.mask_documents
    return config.compile == "true"


def write_start(run: Run, run_id: str) -> None:
    """Writes config.json and the code, and sets run.about, what is the same in every checkpoint."""
    model, dataset = run.model, run.dataset
    code, code_files = code_sha256()  # read now: later edits do not change this run
    about: dict = {
        "run_id": run_id,
        "config": dataclasses.asdict(run.config),
        "dtype": run.dtype,
        "code_sha256": code,
        "code_files": code_files,
        "versions": {
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
        },
    }
    data = {
        "path": str(dataset.parts[0].folder),
        "name": dataset.name,
        "sha256": dataset.sha256,
        "tokenizer": dataset.tokenizer,
        "vocab_size": dataset.vocab_size,
        "first_ids": dataset.first_ids,
    }
    if dataset.alphabet:
        data["alphabet"] = dataset.alphabet
    if dataset.mask_documents:
        data["mask_documents"] = dataset.mask_documents
    if len(dataset.parts) > 1:
        data["mixture"] = str(dataset.folder)
    run.about = about | {"data": data, "model_args": model_args(run.config)}  # of every checkpoint
    for_config_json = about | {  # without `data` and `model_args`
        "device": run.processes.device_type,
        "threads": run.processes.threads,
        "n_params": model.n_params(),
        "state_bytes": model.state_bytes(),
        "flops_per_token": model.flops_per_token(),  # forward; run.flops_per_token: of training
        "tokens_per_step": run.tokens_per_step,
    }
    run.processes.on_main(run.out.start, for_config_json, run.step)


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
