"""Trains a GPT, in one process or in several under torchrun, on a CPU or on GPUs:

    python train.py config/NAME.py --key=value ...
    torchrun --standalone --nproc_per_node=4 train.py config/NAME.py        (several machines, SLURM: docs/scale.md)

out_dir gets config.json, code/ (the source files of the run), metrics.jsonl (one object per line),
ckpt.pt (the last checkpoint) and best.pt (the one of lowest validation loss). The batch and the
dropout of a step depend on (seed, step) alone, and not on the number of processes, on evaluations
or on restarts.

--init_from=resume goes on with a run that was killed, to the same bits; it has the checkpoint's
keys, but for those that you give. --init_from=auto does so if there is a ckpt.pt and else starts
the run. --init_from=out/other starts a new run from the weights of another, with its keys of the
model, but for those that you give (docs/gates.md adds a gate). SIGTERM, Ctrl-C, SIGHUP and SIGUSR1
save first; the exit status is then 128 plus the signal's number. An evaluation begins with a save,
and is made again if it was stopped. A loss or a gradient that is not finite ends a run with status
1.
"""

import configurator
from keys import GPTConfig, TrainConfig

# imports no torch: a slip in the command line is told at once
configurator.begin(__name__, TrainConfig, __doc__)

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import signal
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from base.rules import DataError
from configurator import UserError
from data.shards import Dataset, open_dataset
from evaluate import evaluate, evaluation_rows
from model import GPT
from optim import Muon, matrices_of
from runs import memory, parallel
from runs.checkpoint import build_model, check_same_weights, check_vocabulary
from runs.hardware import SIGNAL_STEPS, Processes, Stopped, autocast, peak_flops, pick_dtype
from runs.health import bad_weight, first_bad_tensor, is_spike
from runs.notes import forms_that_ran, notes_on_keys
from runs.outdir import OutDir, check_same_start, code_sha256, versions
from runs.probe import first_rows, training_meters
from runs.resume import Start, restore, scale_new, take_weights, where_to_start

READ_AHEAD = 2  # the steps whose batches are read while a step computes


def main(argv: list[str]) -> None:
    start = where_to_start(configurator.read_words(TrainConfig, argv))
    with Processes(start.config.device, start.config.threads) as processes:
        run(start, processes)


def run(start: Start, processes: Processes) -> None:
    """Checks all that can be checked before anything is written, and trains."""
    dtype, dataset = check_start(start, processes)
    config = copy.copy(start.config)
    config.vocab_size = config.vocab_size or dataset.vocab_size
    processes.on_main(memory.check_training, config, dataset, processes)
    with (
        contextlib.ExitStack() as signals,
        OutDir(config, processes, start.resumed) as out,
        ThreadPoolExecutor(1) as reader,
    ):
        train(
            make_run(start._replace(config=config), processes, dtype, dataset, out, reader), signals
        )


def check_start(start: Start, processes: Processes) -> tuple[str, Dataset]:
    """(the dtype of matrix products, the data). UserError, on all processes, for what cannot be."""
    config, resumed, source = start.config, start.resumed, start.source
    place = None
    if resumed is not None:
        place = (resumed["run_id"], resumed["iter_num"])
    advice = "all machines must share out_dir, and init_from=auto makes them go on alike"
    processes.check_same(place, f"the ckpt.pt of {config.out_dir}", advice)
    paths = ["dataset", "out_dir"]
    if source is not None:
        paths.append("init_from")
    check_same_start(processes, config, paths)
    if config.gradient_accumulation_steps % processes.world_size:
        raise UserError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}: must be a multiple of the "
            f"{processes.world_size} processes that share the micro-steps"
        )
    dtype = processes.from_main(pick_dtype(config.dtype, processes.device_type))

    dataset = open_dataset(config.dataset, config.mask_documents)
    if config.mask_documents and not dataset.mask_documents:
        raise UserError(
            f"mask_documents=True: {dataset.folder} has rows and no documents; leave mask_documents out"
        )
    advice = "give all machines the same data"
    processes.check_same(dataset.sha256, f"dataset={config.dataset!r}", advice)
    if source is not None:
        check_same_weights(processes, config.init_from)
        check_vocabulary(math.inf, source, dataset)
    if resumed is not None and resumed["data"].get("sha256") != dataset.sha256:
        raise DataError(
            f"{config.dataset}: not the data that {Path(config.out_dir) / 'ckpt.pt'} was trained on"
        )
    # raises for wrong data before any work is done
    dataset.examples_per_epoch("train", config.block_size)
    is_row = dataset.kind == "examples" or dataset.mask_documents
    dataset.examples_per_epoch("val", config.block_size if is_row else 1)
    if config.vocab_size is not None and config.vocab_size < dataset.vocab_size:
        raise DataError(
            f"vocab_size={config.vocab_size}: {dataset.folder} has ids up to {dataset.vocab_size - 1}"
        )
    return dtype, dataset


# -- What a step takes: its rate, the model, the optimizers, its batches, its loss -----------------


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step: linear warmup, then what `schedule` says.

    wsd falls as 1 - sqrt(progress) over its last steps, which did better than a line (Haegele et
    al. 2024).
    """
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if config.decay == "constant":
        return config.learning_rate
    end = config.lr_decay_iters or config.max_iters
    start = config.warmup_iters
    lowest = config.learning_rate / 10
    if config.decay == "wsd":
        start = max(start, end - (config.decay_iters or max(1, end // 5)))
        lowest = 0.0
    if config.min_lr is not None:
        lowest = config.min_lr
    progress = max(0.0, min(1.0, (step - start) / max(1, end - start)))
    if config.decay == "wsd":
        left = 1 - math.sqrt(progress)
    else:
        left = 0.5 * (1 + math.cos(math.pi * progress))
    return lowest + left * (config.learning_rate - lowest)


def make_optimizers(
    model: GPT, config: TrainConfig, device_type: str
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run, each with parameter groups of its own: edit this function to take
    another one.

    The learning rate of a step is the schedule's times the group's lr_scale.
    """
    groups = model.parameter_groups(
        config.weight_decay, config.gate_weight_decay, config.gate_lr_scale
    )
    parts = {}
    if config.optimizer == "muon":
        parts = matrices_of(model, with_gates=config.gate_optimizer != "adamw")
    of_muon = []
    of_adamw = []
    for group in groups:
        stepped_by_muon = [pair for pair in group["params"] if pair[1] in parts]
        others = [pair for pair in group["params"] if pair[1] not in parts]
        if stepped_by_muon:
            lr_scale = config.muon_lr_scale * group["lr_scale"]
            of_muon.append(group | {"params": stepped_by_muon, "lr_scale": lr_scale})
        if others:
            of_adamw.append(group | {"params": others})
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(
        of_adamw, lr=config.learning_rate, betas=betas, fused=device_type != "mps"
    )
    if of_muon:
        return [Muon(of_muon, parts, config.learning_rate), adamw]
    return [adamw]


def make_model(
    config: TrainConfig, resumed: dict | None, source: dict | None
) -> tuple[GPT, list[str], list[str]]:
    """(the model that a run starts with, its parameters that the weights it started from lack,
    lines to print)"""
    model_config = GPTConfig(**model_args(config))
    torch.manual_seed(config.seed)
    if resumed is not None:
        file = Path(config.out_dir) / "ckpt.pt"
        return build_model(model_config, resumed["model"], file), resumed["new"], []
    model = GPT(model_config)
    if source is None:
        return model, [], []
    new_parameters, notes = take_weights(model, source["model"], config.init_from)
    return model, new_parameters, notes


def model_args(config: TrainConfig) -> dict:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTConfig)}


def load_batches(
    dataset: Dataset, config: TrainConfig, processes: Processes, same_length: bool, step: int
) -> list[tuple]:
    """[(micro-step, inputs (B, T), targets (B, T), labels in the global batch)] of a step, the part
    of this process.

    It depends on (seed, step) alone. The tensors are on the CPU, pinned for a GPU.
    """
    keys = {
        "seed": config.seed,
        "batch_size": config.batch_size,
        "block_size": config.block_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }
    size = config.batch_size * config.gradient_accumulation_steps
    n_labels = dataset.count_labels(
        "train", step * size, (step + 1) * size, config.seed, config.block_size
    )
    batches = []
    for m in range(processes.rank, config.gradient_accumulation_steps, processes.world_size):
        inputs, targets = dataset.batch(
            "train", step, micro_step=m, same_length=same_length, **keys
        )
        batches.append((m, processes.pin(inputs), processes.pin(targets), max(1, n_labels)))
    return batches


def read_ahead(
    reader: ThreadPoolExecutor, load: Callable, processes: Processes, steps: Iterable[int]
) -> Iterator[list[tuple]]:
    """Yields load(step) of each step, its tensors on the device. While a step computes, the reader
    loads those of the next READ_AHEAD ones. What it raises is raised here, when the turn of that
    step has come."""
    futures = (reader.submit(load, step) for step in steps)
    waiting = collections.deque(itertools.islice(futures, READ_AHEAD))
    while waiting:
        waiting.extend(itertools.islice(futures, 1))
        batches = waiting.popleft().result()
        yield [
            (m, processes.to_device(x), processes.to_device(y), n_labels)
            for m, x, y, n_labels in batches
        ]


def micro_loss(
    model: torch.nn.Module, config: TrainConfig, dtype: str, step: int, batch: tuple
) -> torch.Tensor:
    """What a micro-step adds to the mean loss of the global batch.

    It is divided by the labels of the global batch, not by its own: rows may hold different numbers
    of them.
    """
    m, inputs, targets, n_labels = batch
    if config.dropout > 0:  # dropout depends on (seed, step, micro-step) alone
        torch.manual_seed(zlib.crc32(f"{config.seed} {step} {m}".encode()))
    with autocast(inputs.device.type, dtype):
        return model(inputs, targets, reduction="sum") / n_labels


def is_compiled(config: TrainConfig, device_type: str) -> bool:
    if config.compile == "auto":
        return device_type == "cuda" and config.max_iters >= 500
    return config.compile == "true"


# -- A run -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What the functions of a run share."""

    config: TrainConfig
    processes: Processes
    dtype: str
    dataset: Dataset
    out: OutDir
    model: GPT
    step_model: torch.nn.Module  # what a step calls: the model, compiled or DDP's
    compiled: bool
    optimizers: list
    scaler: torch.amp.GradScaler
    new_parameters: list[str]  # those that the weights it started from lacked
    read: Callable  # read(steps) yields the batches of each step
    peak: tuple[float, str]  # FLOP/s that a device can reach, how that is known
    run_id: str
    about: dict = dataclasses.field(
        default_factory=dict
    )  # what checkpoints and config.json have alike

    step: int = 0  # the step that comes next, or is being taken
    is_in_step: bool = False
    saved_step: int | None = None
    best_val_loss: float = math.inf
    evaluations: list[dict] = dataclasses.field(default_factory=list)
    seconds_before: float = 0.0  # of training, before it was stopped
    started: float = 0.0  # as if the run had never stopped
    eval_seconds: float = 0.0
    # the first step whose loss or gradient was not finite, or -1; on the device, so that nothing
    # waits for a GPU
    bad_step: torch.Tensor = None


def make_run(
    start: Start,
    processes: Processes,
    dtype: str,
    dataset: Dataset,
    out: OutDir,
    reader: ThreadPoolExecutor,
) -> Run:
    """A run at its first step, or at the one that it goes on from, with everything printed and
    written that comes before."""
    config, resumed, source = start.config, start.resumed, start.source
    model, new_parameters, notes_of_model = make_model(config, resumed, source)
    compiled = is_compiled(config, processes.device_type)
    step_model = parallel.share_out(model, config, processes, compiled, dtype)
    optimizers = make_optimizers(model, config, processes.device_type)
    scale_new(optimizers, new_parameters, config.new_lr_scale)
    scaler = torch.amp.GradScaler(processes.device_type, enabled=dtype == "float16")
    if resumed is not None:
        restore(resumed, model, optimizers, out.path / "ckpt.pt", scaler)
    elif source is not None and config.keep_moments:
        restore(source, model, optimizers, config.init_from)
    for checkpoint in (resumed, source):
        if checkpoint is not None:  # main has the dicts: each process would keep these in RAM
            checkpoint.pop("model", None)
            checkpoint.pop("optimizer", None)
    load = functools.partial(load_batches, dataset, config, processes, compiled)
    run = Run(
        config=config,
        processes=processes,
        dtype=dtype,
        dataset=dataset,
        out=out,
        model=model,
        step_model=step_model,
        compiled=compiled,
        optimizers=optimizers,
        scaler=scaler,
        new_parameters=new_parameters,
        read=functools.partial(read_ahead, reader, load, processes),
        peak=peak_flops(processes.device_type, dtype),
        run_id=processes.from_main(uuid.uuid4().hex),
        bad_step=torch.tensor(-1, device=processes.device),
    )
    if resumed is not None:
        run.run_id = resumed["run_id"]
        run.step = resumed["iter_num"]
        run.saved_step = run.step
        run.best_val_loss = float(resumed["best_val_loss"])
        run.eval_seconds = float(resumed["eval_seconds"])
        run.seconds_before = float(resumed["seconds"])
    if processes.is_main:
        print_start(run, start, notes_of_model)
    write_start(run)
    return run


def tokens_per_step(run: Run) -> int:
    row = run.dataset.tokens_per_example("train", run.config.block_size)
    return round(run.config.batch_size * run.config.gradient_accumulation_steps * row)


def print_start(run: Run, start: Start, notes_of_model: list[str]) -> None:
    """Prints what is trained, on what, and what of it may be a mistake."""
    config, model, dataset, processes = run.config, run.model, run.dataset, run.processes
    for note in start.notes + notes_of_model:
        print(note)
    print(
        f"model: {config.n_layer} x {config.n_embd}, {config.attention}, gate {config.gate}, "
        f"{model.n_params():,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOPs a token forward, "
        f"state {model.state_bytes():,} bytes a sequence"
    )
    perfect = dataset.perfect_loss("val")
    reached = (
        "" if perfect is None else f", the perfect predictor's validation loss is {perfect:.4f}"
    )
    print(
        f"data: {dataset.folder}, {dataset.vocab_size:,} ids, {tokens_per_step(run):,} tokens a step{reached}"
    )
    kind = f", {config.parallel}" if processes.world_size > 1 else ""
    print(
        f"device: {processes.device_type}, {run.dtype}, {processes.world_size} process(es) of "
        f"{processes.threads} threads{kind}, compile {run.compiled}, torch {torch.__version__}"
    )
    peak, source = run.peak
    print(f"MFU: against {peak / 1e12:.3g} TFLOP/s a process, {source}")
    resumes = start.resumed is not None
    for note in notes_on_keys(config, start.user_keys, resumes, run.new_parameters):
        print(note)


def write_start(run: Run) -> None:
    """Writes config.json and the code, and notes in run.about what checkpoints repeat of it."""
    model, dataset = run.model, run.dataset
    code, code_files = code_sha256()  # read now: later edits do not change this run
    run.about = {
        "run_id": run.run_id,
        "config": dataclasses.asdict(run.config),
        "dtype": run.dtype,
        "code_sha256": code,
        "code_files": code_files,
    }
    sizes = {
        "device": run.processes.device_type,
        "threads": run.processes.threads,
        "n_params": model.n_params(),
        "state_bytes": model.state_bytes(),
        "flops_per_token": model.flops_per_token(),
        "tokens_per_step": tokens_per_step(run),
    }
    run.out.start(run.about | sizes, run.step)
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
    run.about |= {"data": data, "versions": versions(), "model_args": model_args(run.config)}


# -- The training loop -----------------------------------------------------------------------------


def train(run: Run, signals: contextlib.ExitStack) -> None:
    """Trains from run.step to max_iters, or until stop_above says that the task is solved.

    signals: its end lets go of the signals, which wait for the end of a step from here on.
    """
    config, processes, out = run.config, run.processes, run.out
    model, step_model, optimizers, scaler = run.model, run.step_model, run.optimizers, run.scaler
    device, world_size = processes.device, processes.world_size
    first_step = run.step
    # a resumed run has some already
    losses = [row["loss"] for row in out.kept if row["event"] == "train"]
    # rank 0 has read them, and every rank must come to the same end
    run.evaluations = processes.from_main([row for row in out.kept if row["event"] == "eval"])
    batches_of_steps = run.read(range(first_step, config.max_iters))
    bar = tqdm(
        desc="training",
        total=config.max_iters,
        initial=first_step,
        unit="step",
        disable=not processes.is_main,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # a log file gets a line every 30 s
    )
    logged_at = (first_step, time.perf_counter())
    run.started = logged_at[1] - run.seconds_before
    # before, a signal ends the run: nothing is lost
    signals.enter_context(processes.signals_held(lambda: what_a_signal_does(run)))

    for step in itertools.count(first_step):
        run.step = step
        lr = learning_rate(config, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]

        # save, then evaluate: a kill during the evaluation loses nothing. On a signal, save at
        # once: the resumed run then evaluates this step
        is_end = step == config.max_iters
        is_due = is_end or step % config.eval_interval == 0
        signal_number = processes.stop_signal(step, config.log_interval)
        is_evaluated = is_due and not signal_number and not was_evaluated(run)
        if (is_evaluated or signal_number) and run.saved_step != step:
            stop_if_not_finite(run)
            stop_if_it_overflows(run)
            save(run, is_best=False)
        if signal_number:
            end_by_signal(run, signal_number)
        if is_evaluated:
            evaluate_and_save_the_best(run)
            logged_at = (step, time.perf_counter())
        if is_due and (is_end or is_solved(run)):
            break

        # forward and backward. From here to the log nothing waits for a GPU: no tensor's value is
        # read, but for one number a step where an optimizer does not take found_inf, as AdamW on
        # MPS
        run.is_in_step = True
        batches = next(batches_of_steps)
        loss = torch.zeros((), device=device)
        for batch in batches:
            with parallel.no_sync(step_model, unless=batch is batches[-1]):
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
                for line in forms_that_ran(model):
                    print(line)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = parallel.clip_gradients(model, config.grad_clip)

        # update, unless the loss or the gradient is not finite in this step or in an earlier one.
        # In float16 an infinite gradient only means that the loss scale was too high: this step
        # alone is skipped
        is_bad = ~(loss + grad_norm).isfinite()
        ends_run = ~loss.isfinite() if scaler.is_enabled() else is_bad
        # torch.where(..., step, ...) would copy the number to the GPU and wait for it
        run.bad_step = run.bad_step.masked_fill((run.bad_step < 0) & ends_run, step)
        skip = is_bad | (run.bad_step >= 0)
        for optimizer in optimizers:
            if optimizer.defaults.get("fused") or isinstance(optimizer, Muon):
                # a fused kernel and Muon skip the step if it is 1
                optimizer.found_inf = skip.float()
                optimizer.step()
            elif not skip:
                optimizer.step()
        scaler.update()
        # DDP's gradients stay views of its buckets
        model.zero_grad(set_to_none=not isinstance(step_model, DistributedDataParallel))
        run.is_in_step = False

        # log: a number that you add to the row arrives in metrics.jsonl and in every logger
        bar.update()
        if step % config.log_interval == 0 or step == config.max_iters - 1:
            stop_if_not_finite(run)
            row: dict = {"event": "train", "step": step, "loss": float(loss), "lr": lr}
            # JSON has no inf, which is common in float16
            row["grad_norm"] = float(grad_norm) if math.isfinite(grad_norm) else None
            row["spike"] = is_spike(row["loss"], losses)
            steps = step + 1 - logged_at[0]
            speed = tokens_per_step(run) * steps / (time.perf_counter() - logged_at[1])
            row["tokens_per_second"] = speed
            row["mfu"] = speed * mfu_of_speed(run)
            logged_at = (step + 1, time.perf_counter())
            losses.append(row["loss"])
            out.log(row)
            shown = {"loss": f"{loss:.4f}", "tok_s": f"{speed:,.0f}", "mfu": f"{row['mfu']:.1%}"}
            bar.set_postfix(shown, refresh=False)

    bar.close()
    end(run)


def was_evaluated(run: Run) -> bool:
    """Whether the next step was evaluated before the run was stopped there."""
    return any(row["step"] == run.step for row in run.evaluations)


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
            "depend on them; apply what they belong to, or do not build it"
        )


def mfu_of_speed(run: Run) -> float:
    """The model FLOPs utilisation at one token a second: a step's FLOPs are three times those of
    its forward pass."""
    row: Any = run.dataset.tokens_per_example("train", run.config.block_size)
    return 3 * run.model.flops_per_token(row) / (run.peak[0] * run.processes.world_size)


# -- Evaluations and checkpoints -------------------------------------------------------------------


def validate(run: Run, tokens: int | None, with_meters: bool = False) -> dict:
    """The numbers of the validation split, or of a fixed sample of it of about so many tokens. A
    signal ends it before its next batch, on all processes, and then the run."""
    config, model, processes = run.config, run.model, run.processes
    start = time.perf_counter()
    with parallel.eager(model):
        try:
            numbers = evaluate(
                model,
                run.dataset,
                "val",
                batch_size=evaluation_rows(config, run.dataset),
                block_size=config.block_size,
                dtype=run.dtype,
                tokens=tokens,
                rank=processes.rank,
                world_size=processes.world_size,
                before_batch=processes.stop_if_signalled,
            )
        except Stopped as stopped:
            end_by_signal(run, stopped.number)
        if not math.isfinite(numbers["loss"]):
            reason = f"validation loss is {numbers['loss']}"
            stop(run, run.step, reason, bad_weight(model))
        numbers["seconds"] = time.perf_counter() - start
        if with_meters and (processes.is_main or parallel.is_fsdp(config, processes.world_size)):
            # of a mixture, those of the first part
            part = run.dataset.parts[0]
            numbers["meters"] = training_meters(model, part, config.block_size, run.dtype)
    run.eval_seconds += time.perf_counter() - start
    return {"val_loss": numbers.pop("loss")} | numbers


def evaluate_and_save_the_best(run: Run) -> None:
    """Evaluates the step, logs it, and saves it as best.pt if its loss is the lowest so far."""
    numbers = validate(run, run.config.eval_tokens, with_meters=run.config.meters)
    row = {"event": "eval", "step": run.step} | numbers
    run.evaluations.append(row)
    run.out.log(row)
    if row["val_loss"] < run.best_val_loss:
        run.best_val_loss = row["val_loss"]
        save(run, is_best=True)
    signal_number = run.processes.any_signal()
    if signal_number:
        end_by_signal(run, signal_number)


def save(run: Run, is_best: bool) -> None:
    """Writes all that the rest of the run depends on, to best.pt, too, if it is the best."""
    weights, moments = parallel.whole_state(run.model, run.optimizers)
    groups = []
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            groups.append({name: x for name, x in group.items() if name != "params"})
    checkpoint = run.about | {
        "model": weights,
        "optimizer": {"state": moments, "param_groups": groups},
        "new": run.new_parameters,
        "scaler": run.scaler.state_dict(),
        "rng": torch.get_rng_state(),
        "iter_num": run.step,
        "best_val_loss": run.best_val_loss,
        "seconds": time.perf_counter() - run.started,
        "eval_seconds": run.eval_seconds,
    }
    run.out.save(checkpoint, is_best)
    run.saved_step = run.step


# -- How a run ends --------------------------------------------------------------------------------


def stop_if_not_finite(run: Run) -> None:
    """Ends the run if a step so far was bad. The weights are those from before it."""
    bad_step = int(run.bad_step)
    if bad_step >= 0:
        batches = next(run.read([bad_step]))
        losses = (
            micro_loss(run.model, run.config, run.dtype, bad_step, batch) for batch in batches
        )
        with parallel.eager(run.model):
            found = run.processes.from_all(first_bad_tensor(run.model, losses))
        tensors = [tensor for tensor in found if tensor is not None]
        tensor = tensors[0] if tensors else None
        stop(run, bad_step, "the loss or its gradient is not finite", tensor)
    if run.scaler.is_enabled() and run.scaler.get_scale() < 1:
        reason = "float16's loss scale fell below 1 and the gradient still overflows"
        stop(run, run.step, reason, bad_weight(run.model))


def stop_if_it_overflows(run: Run) -> None:
    """Ends the run if the output is not finite, before a save replaces the last good checkpoint: an
    update may make weights so large that only the next loss shows it."""
    model, processes = run.model, run.processes
    inputs, _ = first_rows(run.dataset.parts[0], "val", 1, run.config.block_size)
    inputs = inputs.to(processes.device)
    with parallel.eager(model), torch.no_grad(), autocast(processes.device_type, run.dtype):
        model.eval()
        hidden, _ = model.features(inputs)
        model.train()
    is_finite = processes.from_main(bool(hidden.isfinite().all()))
    if not is_finite:
        reason = "the output on a row of validation is not finite"
        stop(run, run.step, reason, bad_weight(model))


def stop(run: Run, bad_step: int, reason: str, tensor: str | None) -> NoReturn:
    """Logs and prints why and where the run ends, and exits with status 1."""
    run.out.log({"event": "stopped", "step": bad_step})
    if run.processes.is_main:
        file = run.out.path / "ckpt.pt"
        where = f"first bad tensor: {tensor}" if tensor else "all weights are still finite"
        if run.saved_step is None:
            saved = "Nothing was saved"
        elif run.saved_step == run.step and reason.startswith("validation"):
            saved = f"{file} holds this step, and best.pt the one of the lowest validation loss"
        else:
            saved = f"{file} holds the last good step saved, {run.saved_step}"
        place = f"at step {bad_step}, learning rate {learning_rate(run.config, bad_step):.3g}"
        print(f"\nerror: {reason} {place}; {where}. {saved}", file=sys.stderr)
    sys.exit(1)


def what_a_signal_does(run: Run) -> str:
    """What is printed when a signal comes."""
    step = run.step
    if run.is_in_step:
        steps = "this step" if run.processes.world_size == 1 else f"at most {SIGNAL_STEPS} steps"
        return f"saving after {steps} (now {step}, last saved {run.saved_step}), then the run ends"
    if run.saved_step == step:
        return f"step {step} is saved and the run ends; --init_from=resume then does what it is doing now"
    return f"saving step {step}, then the run ends"


def end_by_signal(run: Run, number: int) -> NoReturn:
    """Prints where the run goes on, and exits with the status that shells report for a process that
    the signal ended. All steps so far are saved."""
    if run.processes.is_main:
        name = signal.Signals(number).name
        steps = f"step {run.step} of {run.config.max_iters}"
        print(f"\n{name}: saved at {steps}; --init_from=resume goes on from there")
    sys.exit(128 + number)


def end(run: Run) -> None:
    """Reads the whole validation split, unless the evaluations have read all of it or it takes
    longer than training took, logs the last row, and prints it."""
    config, processes = run.config, run.processes
    counts = run.dataset.counts("val")
    n_labels = counts.get("labels", counts["tokens"])  # of rows few tokens have one
    last = run.evaluations[-1]
    reads_a_sample = config.eval_tokens is not None and config.eval_tokens < counts["tokens"]
    seconds_of_all = last.get("seconds", 0.0) * n_labels / last["labels"]
    seconds_of_training = time.perf_counter() - run.started - run.eval_seconds
    is_asked = config.eval_whole
    if is_asked is None:
        is_asked = processes.from_main(seconds_of_all <= seconds_of_training)
    is_whole = is_asked or not reads_a_sample

    # of a finished run that was started again, maybe for more steps
    row = processes.from_main(run.out.ended)
    if row is None or row["step"] < run.step or is_whole and not row.get("whole", True):
        row = {name: x for name, x in last.items() if name not in ("meters", "seconds")}
        if reads_a_sample and is_whole:
            row |= validate(run, None)
        row |= {"event": "end", "whole": is_whole, "seconds": time.perf_counter() - run.started}
        row["eval_seconds"] = run.eval_seconds
    run.out.log(row)
    if processes.is_main:
        print_end(run, row)
        if not row.get("whole", True):
            print(
                f"  of {row['labels']:,} of {n_labels:,} labels: all take {seconds_of_all:.1f} s, "
                f"training took {seconds_of_training:.1f};"
            )
            print(
                f"  python train.py --out_dir={config.out_dir} --init_from=resume --eval_whole=true reads them"
            )
        sample = " on the sample" if reads_a_sample else ""
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


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
