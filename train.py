"""Trains a GPT, in one process or in several under torchrun, on a CPU or on GPUs:

    python train.py config/NAME.py --key=value ...
    torchrun --standalone --nproc_per_node=4 train.py config/NAME.py        (several machines, SLURM: docs/scale.md)

out_dir gets config.json, code/ (the source files of the run), metrics.jsonl (one object per line),
ckpt.pt (the last checkpoint) and best.pt (the one of lowest validation loss). The batch and the
dropout of a step depend on (seed, step) alone, and not on the number of processes, on evaluations
or on restarts.

--init_from=resume goes on with a run that was killed, to the same bits; keys that are not given are the checkpoint's.
--init_from=auto does so if there is a ckpt.pt and else starts the run. --init_from=out/other starts a new run from the
weights of another, whose keys of the model it has, but for those that are given (docs/gates.md adds a gate). SIGTERM,
Ctrl-C, SIGHUP and SIGUSR1 save first; the exit status is then 128 plus the signal's number. An evaluation begins with a
save, and is made again if it was stopped. A loss or a gradient that is not finite ends a run with status 1.
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

from configurator import UserError
from data.shards import Dataset, open_dataset
from evaluate import evaluate, evaluation_rows
from model import GPT
from optim import Muon, keep_compiler_out, matrices_of
from runs import memory, parallel
from runs.checkpoint import build_model, check_same_weights, check_vocabulary
from runs.hardware import SIGNAL_STEPS, Processes, Stopped, autocast, peak_flops, pick_dtype
from runs.notes import notes_on_keys
from runs.outdir import OutDir, check_same_start, code_sha256, versions
from runs.probe import bad_weight, first_bad_tensor, first_rows, is_spike, training_meters
from runs.resume import restore, scale_new, take_weights, where_to_start
from runs.rules import DataError

READ_AHEAD = 2  # the steps whose batches are read while a step computes


def main(argv: list[str]) -> None:
    config, resumed, source, notes = where_to_start(configurator.read_words(TrainConfig, argv))
    with Processes(config.device, config.threads) as processes:
        run(config, processes, resumed, source, notes)


def run(
    config: TrainConfig,
    processes: Processes,
    resumed: dict | None,
    source: dict | None,
    notes: list[str],
) -> None:
    """Opens the data, checks all that can be checked before anything is written, and trains.

    resumed: the checkpoint that the run goes on from; source: the one whose weights it starts from;
    notes: to print
    """
    start = resumed and (resumed["run_id"], resumed["iter_num"])
    advice = "all machines must share out_dir, and init_from=auto makes them go on alike"
    processes.check_same(start, f"the ckpt.pt of {config.out_dir}", advice)
    check_same_start(
        processes, config, ["dataset", "out_dir"] + ["init_from"] * (source is not None)
    )
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
    processes.check_same(
        dataset.sha256, f"dataset={config.dataset!r}", "give all machines the same data"
    )
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
    config = copy.copy(config)
    config.vocab_size = config.vocab_size or dataset.vocab_size
    if config.vocab_size < dataset.vocab_size:
        raise DataError(
            f"vocab_size={config.vocab_size}: {dataset.folder} has ids up to {dataset.vocab_size - 1}"
        )
    processes.on_main(memory.check_training, config, dataset, processes)
    with (
        contextlib.ExitStack() as held,
        OutDir(config, processes, resumed) as out,
        ThreadPoolExecutor(1) as reader,
    ):
        train(config, processes, dtype, dataset, out, reader, held, resumed, source, notes)


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
    is_wsd, end = config.decay == "wsd", config.lr_decay_iters or config.max_iters
    start = (
        max(config.warmup_iters, end - (config.decay_iters or max(1, end // 5)))
        if is_wsd
        else config.warmup_iters
    )
    progress = max(0.0, min(1.0, (step - start) / max(1, end - start)))
    left = 1 - math.sqrt(progress) if is_wsd else 0.5 * (1 + math.cos(math.pi * progress))
    of_schedule = 0.0 if is_wsd else config.learning_rate / 10
    lowest = of_schedule if config.min_lr is None else config.min_lr
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
    parts = (
        matrices_of(model, with_gates=config.gate_optimizer != "adamw")
        if config.optimizer == "muon"
        else {}
    )
    of_muon = []
    of_adamw = []
    for group in groups:
        stepped_by_muon = [pair for pair in group["params"] if pair[1] in parts]
        others = [pair for pair in group["params"] if pair[1] not in parts]
        if stepped_by_muon:
            of_muon.append(
                group
                | {"params": stepped_by_muon, "lr_scale": config.muon_lr_scale * group["lr_scale"]}
            )
        if others:
            of_adamw.append(group | {"params": others})
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(
        of_adamw, lr=config.learning_rate, betas=betas, fused=device_type != "mps"
    )
    return [Muon(of_muon, parts, config.learning_rate), adamw] if of_muon else [adamw]


def numbers_of_groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    """What a checkpoint keeps of each parameter group: all but its parameters."""
    numbers = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            numbers.append({name: value for name, value in group.items() if name != "params"})
    return numbers


def make_model(
    config: TrainConfig, resumed: dict | None, source: dict | None
) -> tuple[GPT, list[str], list[str]]:
    """(the model that a run starts with, its parameters that the weights it started from lack,
    lines to print)"""
    model_config = GPTConfig(**model_args(config))
    torch.manual_seed(config.seed)
    if resumed is not None:
        return (
            build_model(model_config, resumed["model"], Path(config.out_dir) / "ckpt.pt"),
            resumed["new"],
            [],
        )
    model = GPT(model_config)
    return model, *(
        take_weights(model, source["model"], config.init_from) if source is not None else ([], [])
    )


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
        name: getattr(config, name)
        for name in ("seed", "batch_size", "block_size", "gradient_accumulation_steps")
    }
    micro_steps = range(processes.rank, config.gradient_accumulation_steps, processes.world_size)
    size = config.batch_size * config.gradient_accumulation_steps
    n_labels = dataset.count_labels(
        "train", step * size, (step + 1) * size, config.seed, config.block_size
    )
    batches = [
        dataset.batch("train", step, micro_step=m, same_length=same_length, **keys)
        for m in micro_steps
    ]
    return [
        (m, *map(processes.pin, batch), max(1, n_labels))
        for m, batch in zip(micro_steps, batches, strict=True)
    ]


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
    is_long = device_type == "cuda" and config.max_iters >= 500
    return is_long if config.compile == "auto" else config.compile == "true"


# -- The training loop -----------------------------------------------------------------------------


def train(
    config: TrainConfig,
    processes: Processes,
    dtype: str,
    dataset: Dataset,
    out: OutDir,
    reader: ThreadPoolExecutor,
    held: contextlib.ExitStack,
    resumed,
    source,
    notes,
) -> None:
    """Trains from the first step to max_iters, or until stop_above says that the task is solved.
    held: its end lets go of the signals, which are held from the first step on."""
    device, device_type, world_size = processes.device, processes.device_type, processes.world_size

    # model, optimizers
    model, new, notes_of_model = make_model(config, resumed, source)
    compiled = is_compiled(config, device_type)
    if not compiled:
        keep_compiler_out()
    step_model = parallel.share_out(model, config, processes, compiled, dtype)
    optimizers: list = make_optimizers(model, config, device_type)
    scale_new(optimizers, new, config.new_lr_scale)
    scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
    first_step, saved_step, best_val_loss, seconds_before, eval_seconds = (
        0,
        None,
        math.inf,
        0.0,
        0.0,
    )
    run_id = processes.from_main(uuid.uuid4().hex)
    if resumed is not None:
        restore(resumed, model, optimizers, out.path / "ckpt.pt", scaler)
        first_step = saved_step = resumed["iter_num"]
        best_val_loss, run_id = float(resumed["best_val_loss"]), resumed["run_id"]
        seconds_before, eval_seconds = float(resumed["seconds"]), float(resumed["eval_seconds"])
    elif source is not None and config.keep_moments:
        restore(source, model, optimizers, config.init_from)
    # main has the dicts: each process would keep these in RAM
    for checkpoint in filter(None, (resumed, source)):
        checkpoint.pop("model", None)
        checkpoint.pop("optimizer", None)

    # what the run prints, and what it writes to config.json
    row_length: Any = dataset.tokens_per_example("train", config.block_size)
    tokens_per_step = round(config.batch_size * config.gradient_accumulation_steps * row_length)
    peak, peak_source = peak_flops(device_type, dtype)
    mfu_of_speed = 3 * model.flops_per_token(row_length) / (peak * world_size)
    if processes.is_main:
        perfect = dataset.perfect_loss("val")
        lines = [
            *notes,
            *notes_of_model,
            f"model: {config.n_layer} x {config.n_embd}, {config.attention}, gate {config.gate}, "
            f"{model.n_params():,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOPs a token forward, "
            f"state {model.state_bytes():,} bytes a sequence",
            f"data: {dataset.folder}, {dataset.vocab_size:,} ids, {tokens_per_step:,} tokens a step"
            + (
                ""
                if perfect is None
                else f", the perfect predictor's validation loss is {perfect:.4f}"
            ),
            f"device: {device_type}, {dtype}, {world_size} process(es) of {processes.threads} threads"
            f"{f', {config.parallel}' * (world_size > 1)}, compile {compiled}, torch {torch.__version__}",
            f"MFU: against {peak / 1e12:.3g} TFLOP/s a process, {peak_source}",
        ]
        print("\n".join([*lines, *notes_on_keys(config, resumed is not None, new)]))
    code, code_files = code_sha256()  # read now: later edits do not change this run
    about = {"run_id": run_id, "config": dataclasses.asdict(config), "dtype": dtype}
    about |= {"code_sha256": code, "code_files": code_files}
    sizes: dict = {"n_params": model.n_params(), "state_bytes": model.state_bytes()}
    sizes |= {"flops_per_token": model.flops_per_token(), "tokens_per_step": tokens_per_step}
    out.start(about | {"device": device_type, "threads": processes.threads} | sizes, first_step)
    names = ["name", "sha256", "tokenizer", "vocab_size", "first_ids"]
    names += [name for name in ("alphabet", "mask_documents") if getattr(dataset, name)]
    data = {"path": str(dataset.parts[0].folder)} | {name: getattr(dataset, name) for name in names}
    data |= {"mixture": str(dataset.folder)} if len(dataset.parts) > 1 else {}

    def validate(tokens: int | None, with_meters: bool = False) -> dict:
        """The numbers of the validation split, or of a fixed sample of it of about so many tokens.
        A signal ends it before its next batch, on all processes: Stopped."""
        nonlocal eval_seconds
        start = time.perf_counter()
        with parallel.eager(model):
            numbers = evaluate(
                model,
                dataset,
                "val",
                batch_size=evaluation_rows(config, dataset),
                block_size=config.block_size,
                dtype=dtype,
                tokens=tokens,
                rank=processes.rank,
                world_size=world_size,
                before_batch=processes.stop_if_signalled,
            )
            if not math.isfinite(numbers["loss"]):
                stop(step, f"validation loss is {numbers['loss']}", bad_weight(model))
            numbers["seconds"] = time.perf_counter() - start
            if with_meters and (processes.is_main or parallel.is_fsdp(config, world_size)):
                # of a mixture, those of the first part
                numbers["meters"] = training_meters(
                    model, dataset.parts[0], config.block_size, dtype
                )
        eval_seconds += time.perf_counter() - start
        return {"val_loss": numbers.pop("loss")} | numbers

    def stop_if_not_finite() -> None:
        """Ends the run if a step so far was bad. The weights are those from before it."""
        if (bad := int(bad_step)) >= 0:
            losses = (micro_loss(model, config, dtype, bad, batch) for batch in next(read([bad])))
            with parallel.eager(model):
                tensors = processes.from_all(first_bad_tensor(model, losses))
            stop(bad, "the loss or its gradient is not finite", next(filter(None, tensors), None))
        if scaler.is_enabled() and scaler.get_scale() < 1:
            reason = "float16's loss scale fell below 1 and the gradient still overflows"
            stop(step, reason, bad_weight(model))

    def stop_if_it_overflows() -> None:
        """Ends the run if the output is not finite, before a save replaces the last good
        checkpoint: an update may make weights so large that only the next loss shows it."""
        inputs = first_rows(dataset.parts[0], "val", 1, config.block_size)[0].to(device)
        with parallel.eager(model), torch.no_grad(), autocast(device_type, dtype):
            model.eval()
            hidden, _ = model.features(inputs)
            model.train()
        if not processes.from_main(bool(hidden.isfinite().all())):
            stop(step, "the output on a row of validation is not finite", bad_weight(model))

    def save(is_best: bool) -> None:
        """Writes all that the rest of the run depends on, to best.pt, too, if it is the best."""
        nonlocal saved_step
        weights, moments = parallel.whole_state(model, optimizers)
        checkpoint = about | {
            "model": weights,
            "model_args": model_args(config),
            "new": new,
            "optimizer": {"state": moments, "param_groups": numbers_of_groups(optimizers)},
            "scaler": scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "iter_num": step,
            "best_val_loss": best_val_loss,
            "seconds": time.perf_counter() - started,
            "eval_seconds": eval_seconds,
            "data": data,
            "versions": versions(),
        }
        out.save(checkpoint, is_best)
        saved_step = step

    def end_by_signal(number: int) -> NoReturn:
        """Prints where the run goes on, and exits with the status that shells report for a process
        that the signal ended. All steps so far are saved."""
        if processes.is_main:
            name = signal.Signals(number).name
            print(
                f"\n{name}: saved at step {step} of {config.max_iters}; --init_from=resume goes on from there"
            )
        sys.exit(128 + number)

    def what_a_signal_does() -> str:
        """What is printed when a signal comes."""
        if is_in_step:
            steps = "this step" if world_size == 1 else f"at most {SIGNAL_STEPS} steps"
            return f"saving after {steps} (now {step}, last saved {saved_step}), then the run ends"
        if saved_step == step:
            return f"step {step} is saved and the run ends; --init_from=resume then does what it is doing now"
        return f"saving step {step}, then the run ends"

    def stop(bad_step: int, reason: str, tensor: str | None) -> NoReturn:
        """Logs and prints why and where the run ends, and exits with status 1."""
        out.log(event="stopped", step=bad_step)
        if processes.is_main:
            where = f"first bad tensor: {tensor}" if tensor else "all weights are still finite"
            saved = f"{out.path / 'ckpt.pt'} holds the last good step saved, {saved_step}"
            saved = "Nothing was saved" if saved_step is None else saved
            if saved_step == step and reason.startswith("validation"):
                saved = f"{out.path / 'ckpt.pt'} holds this step, and best.pt the one of the lowest validation loss"
            place = f"at step {bad_step}, learning rate {learning_rate(config, bad_step):.3g}"
            print(f"\nerror: {reason} {place}; {where}. {saved}", file=sys.stderr)
        sys.exit(1)

    logged_at = (first_step, time.perf_counter())
    started = logged_at[1] - seconds_before  # as if the run had never stopped
    # a resumed run has some already
    losses = [row["loss"] for row in out.kept if row["event"] == "train"]
    # rank 0 has read them, and every rank must come to the same end
    evaluations = processes.from_main([row for row in out.kept if row["event"] == "eval"])
    # the first step whose loss or gradient was not finite, or -1; on the device, so that nothing
    # waits for a GPU
    bad_step = torch.tensor(-1, device=device)
    load = functools.partial(load_batches, dataset, config, processes, compiled)
    read = functools.partial(read_ahead, reader, load, processes)
    batches_of_steps = read(range(first_step, config.max_iters))
    bar = tqdm(
        desc="training",
        total=config.max_iters,
        initial=first_step,
        unit="step",
        disable=not processes.is_main,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # a log file gets a line every 30 s
    )

    step = first_step
    is_in_step = False
    # before, a signal ends the run: nothing is lost
    held.enter_context(processes.signals_held(what_a_signal_does))
    for step in itertools.count(first_step):
        lr = learning_rate(config, step)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr * group["lr_scale"]

        # save, then evaluate: a kill during the evaluation loses nothing, and a signal need not
        # wait for its end. A run that goes on evaluates its first step unless it has done so before
        # it was stopped
        is_end = step == config.max_iters
        signal_number = processes.stop_signal(step, config.log_interval)
        is_due = is_end or step % config.eval_interval == 0
        is_evaluated = (
            is_due and step not in {row["step"] for row in evaluations} and not signal_number
        )
        if (is_evaluated or signal_number) and saved_step != step:
            stop_if_not_finite()
            stop_if_it_overflows()
            save(is_best=False)
        if signal_number:
            end_by_signal(signal_number)
        if is_evaluated:
            try:
                row = {"event": "eval", "step": step} | validate(
                    config.eval_tokens, with_meters=config.meters
                )
            except Stopped as stopped:
                end_by_signal(stopped.number)
            evaluations.append(row)
            out.log(**row)
            if row["val_loss"] < best_val_loss:
                best_val_loss = row["val_loss"]
                save(is_best=True)
            if signal_number := processes.any_signal():
                end_by_signal(signal_number)
            logged_at = (step, time.perf_counter())
        last_two = [row["accuracy"] for row in evaluations[-2:]]
        is_solved = (
            config.stop_above is not None
            and len(last_two) == 2
            and min(last_two) > config.stop_above
        )
        if is_due and (is_end or is_solved):
            break

        is_in_step = True
        # forward and backward. From here to the log nothing waits for a GPU: no tensor's value is
        # read, but for one number a step where an optimizer is not fused, as Muon and those of MPS
        batches, loss = next(batches_of_steps), torch.zeros((), device=device)
        for batch in batches:
            with parallel.no_sync(step_model, unless=batch is batches[-1]):
                part = micro_loss(step_model, config, dtype, step, batch)
                # DDP and FSDP take the mean over the processes; the loss is already divided by the
                # labels of all
                scaler.scale(part * world_size).backward()
            loss += part.detach()
        if world_size > 1:
            torch.distributed.all_reduce(loss)
        parameters = model.named_parameters() if step == first_step else ()
        if unused := [name for name, p in parameters if p.requires_grad and p.grad is None]:
            raise UserError(
                f"model.py: {len(unused)} parameters are built and never used, first {unused[0]}: the loss does not "
                "depend on them; apply what they belong to, or do not build it"
            )
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = parallel.clip_gradients(model, config.grad_clip)

        # update, unless the loss or the gradient is not finite in this step or in an earlier one.
        # In float16 an infinite gradient only means that the loss scale was too high: this step
        # alone is skipped
        is_bad = ~(loss + grad_norm).isfinite()
        ends_run = ~loss.isfinite() if scaler.is_enabled() else is_bad
        # torch.where(..., step, ...) would copy the number to the GPU and wait for it
        bad_step = bad_step.masked_fill((bad_step < 0) & ends_run, step)
        skip = is_bad | (bad_step >= 0)
        for optimizer in optimizers:
            if optimizer.defaults.get("fused"):
                optimizer.found_inf = skip.float()  # the fused kernel skips the step if it is 1
                optimizer.step()
            elif not skip:
                optimizer.step()
        scaler.update()
        # DDP's gradients stay views of its buckets
        model.zero_grad(set_to_none=not isinstance(step_model, DistributedDataParallel))

        is_in_step = False

        # log
        bar.update()
        if step % config.log_interval == 0 or step == config.max_iters - 1:
            stop_if_not_finite()
            # JSON has no inf, which is common in float16
            loss, grad_norm = float(loss), float(grad_norm) if math.isfinite(grad_norm) else None
            speed = (
                tokens_per_step * (step + 1 - logged_at[0]) / (time.perf_counter() - logged_at[1])
            )
            logged_at = (step + 1, time.perf_counter())
            spike, mfu = is_spike(loss, losses), speed * mfu_of_speed
            losses.append(loss)
            numbers = dict(
                loss=loss, lr=lr, grad_norm=grad_norm, spike=spike, tokens_per_second=speed, mfu=mfu
            )
            out.log(event="train", step=step, **numbers)
            bar.set_postfix(
                loss=f"{loss:.4f}", tok_s=f"{speed:,.0f}", mfu=f"{mfu:.1%}", refresh=False
            )

    # the end: the whole validation split, unless the evaluations have read all of it, or it takes
    # too long
    bar.close()
    counts, trained = dataset.counts("val"), time.perf_counter() - started - eval_seconds
    reads_a_sample = (config.eval_tokens or math.inf) < counts["tokens"]
    labels = counts.get("labels", counts["tokens"])  # of rows few tokens have one
    takes = evaluations[-1].get("seconds", 0.0) * labels / evaluations[-1]["labels"]
    is_asked = (
        processes.from_main(takes <= trained) if config.eval_whole is None else config.eval_whole
    )
    is_whole = not reads_a_sample or is_asked
    # of a finished run that was started again, maybe for more steps
    end = processes.from_main(out.ended)
    if end is None or end["step"] < step or is_whole and not end.get("whole", True):
        end = {name: x for name, x in evaluations[-1].items() if name not in ("meters", "seconds")}
        if reads_a_sample and is_whole:
            try:
                end |= validate(None)
            except Stopped as stopped:
                end_by_signal(stopped.number)
        seconds = time.perf_counter() - started
        end |= {"event": "end", "whole": is_whole, "seconds": seconds, "eval_seconds": eval_seconds}
    out.log(**end)
    if processes.is_main:
        accuracy = f", accuracy {end['accuracy']:.1%}" if dataset.kind == "examples" else ""
        steps = f"{step} steps" if is_end else f"{step} of {config.max_iters} steps (solved)"
        print(
            f"validation loss {end['val_loss']:.4f} nats{accuracy} after {steps} in {end['seconds']:.0f} s"
        )
        if not end.get("whole", True):
            print(
                f"  of {end['labels']:,} of {labels:,} labels: all take {takes:.1f} s, training took {trained:.1f};"
            )
            print(
                f"  python train.py --out_dir={config.out_dir} --init_from=resume --eval_whole=true reads them"
            )
        best = f"validation loss {best_val_loss:.4f}{' on the sample' if reads_a_sample else ''}"
        print(f"written to {out.path}/: metrics.jsonl, ckpt.pt, best.pt ({best})")


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
