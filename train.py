"""Trains a GPT, in one process or in several under torchrun, on a CPU or on GPUs:

    python train.py config/NAME.py --key=value ...
    torchrun --standalone --nproc_per_node=4 train.py config/NAME.py        (several machines, SLURM: docs/scale.md)

out_dir gets config.json, code/ (the source files of the run), metrics.jsonl (one object per line),
ckpt.pt (the last checkpoint) and best.pt (the one of lowest validation loss). Evaluations read a
fixed sample of the validation split, the end of a run all of it. The same seed gives
the same run: the batch and the dropout of a step depend on (seed, step) alone, and not on the
number of processes, on evaluations or on restarts.

--init_from=resume goes on with a run that was killed, to the same bits. A key that neither a config
file nor the command line gives is then the checkpoint's. --init_from=auto does the same if there is
a ckpt.pt and else starts the run, for jobs that are queued again. --init_from=out/other starts a new
run from the weights of another, and has its keys of the model but for those that are given: with
--gate=elementwise --gate_activation=sigmoid2 a model without a gate gets one (docs/gates.md).
SIGTERM, Ctrl-C, SIGHUP (a closed terminal) and SIGUSR1 (a cluster's warning) save first; the exit
status is then 128 plus the signal's number. A loss or a gradient that is not finite ends a run with
status 1; the checkpoint stays good.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out
# on a busy machine, OpenMP threads that spin are three times slower than ones that sleep; read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import configurator
from configurator import UserError, falls_silent

import contextlib
import dataclasses
import math
import signal
import time
import uuid
import zlib
from collections.abc import Iterator
from typing import NoReturn

import torch
from tqdm import tqdm

from data.shards import open_dataset
from evaluate import evaluate, evaluation_rows
from keys import GPTConfig, TrainConfig
from model import GPT
from ops import IGNORE
from runs import memory, parallel
from runs.checkpoint import check_same_weights
from runs.finite import bad_weight, first_bad_tensor
from runs.hardware import Processes, autocast, peak_flops, pick_dtype
from runs.notes import notes_on_keys
from runs.outdir import OutDir, check_same_start, code_sha256, versions, wait_for_lock
from runs.probe import first_rows, is_spike, training_meters, training_rows
from runs.resume import (
    check_data,
    is_started_again,
    load_optimizers,
    make_model,
    optimizer_state,
    scale_new,
    where_to_start,
)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step: linear warmup, then a cosine from learning_rate to min_lr."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    end = config.lr_decay_iters or config.max_iters
    lowest = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    progress = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - lowest)


def make_optimizers(model: GPT, config: TrainConfig, device_type: str) -> list[torch.optim.Optimizer]:
    """The optimizers of a run, each with parameter groups of its own: edit this function to take another one.

    The learning rate of a step is the schedule's times the group's lr_scale.
    """
    groups = model.parameter_groups(config.weight_decay)
    betas, is_fused = (config.beta1, config.beta2), device_type != "mps"
    return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=is_fused)]


def main(argv: list[str]) -> None:
    config = configurator.load(TrainConfig, argv, program="train.py", description=__doc__)
    if config.init_from == "auto" or is_started_again():
        wait_for_lock(config.out_dir)
    config, resumed, source, notes = where_to_start(config)
    with contextlib.redirect_stdout(falls_silent(sys.stdout)):  # the run goes on without a reader
        with Processes(config.device, config.threads) as processes:
            train(config, processes, resumed, source, notes)


def train(
    config: TrainConfig, processes: Processes, resumed: dict | None, source: dict | None, notes: list[str]
) -> None:
    start = resumed and (resumed.get("run_id"), resumed["iter_num"])
    advice = "out_dir must be on a file system that all machines share, and init_from=auto makes them go on alike"
    processes.check_same(start, f"the ckpt.pt of {config.out_dir}", advice)
    paths = ("dataset", "out_dir") if source is None else ("dataset", "out_dir", "init_from")
    check_same_start(processes, "train.py", config, paths)
    if config.gradient_accumulation_steps % processes.world_size:
        raise UserError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}: must be a multiple of the "
            f"{processes.world_size} processes that share the micro-steps"
        )
    parallel.shards_of(config, processes.world_size)  # raises for a number that does not fit
    if processes.device_type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 products would be slow without it
    dataset = open_dataset(config.dataset)
    processes.check_same(dataset.sha256, f"dataset={config.dataset!r}", "give all machines the same data")
    if source is not None:
        check_same_weights(processes, source["model"], config.init_from)
    check_data(resumed, source, dataset, config)
    dataset.examples_per_epoch("train", config.block_size)  # raises for wrong data before any work is done
    dataset.examples_per_epoch("val", config.block_size if dataset.kind == "examples" else 1)
    config.vocab_size = config.vocab_size or dataset.vocab_size
    if config.vocab_size < dataset.vocab_size:
        raise UserError(f"vocab_size={config.vocab_size}: {dataset.folder} has ids up to {dataset.vocab_size - 1}")
    with processes.signals_held():
        processes.on_main(lambda: notes.append(memory.check_training(config, resumed, dataset, processes)))
        with OutDir(config, processes, resumed) as out:
            run_steps(Run(config, processes, dataset, out, resumed, source, notes))


def run_steps(run: "Run") -> None:
    """Runs every step from run.first_step on, with evaluations, rows of metrics.jsonl and checkpoints.

    The run ends at max_iters, or before it where stop_above says that it is solved.
    """
    config, processes, out = run.config, run.processes, run.out
    bar = tqdm(
        range(run.first_step, config.max_iters), "training", config.max_iters, initial=run.first_step, unit="step",
        mininterval=0.1 if sys.stderr.isatty() else 30,  # a log file gets a line every 30 s
        disable=not processes.is_main,
    )  # fmt: skip
    logged_at = (run.first_step, time.perf_counter())
    losses = [row["loss"] for row in out.kept if row["event"] == "train"]  # a resumed run has some already
    # rank 0 has read them, and every rank must come to the same end
    evaluations = processes.from_main([row for row in out.kept if row["event"] == "eval"])
    # so it is in a resumed run, unless a signal stopped it there and another eval_interval now asks for that step
    is_evaluated = any(row["step"] == run.first_step for row in evaluations)
    end = config.max_iters
    for step in bar:
        if step % config.eval_interval == 0:
            if step > run.first_step or not is_evaluated:
                evaluations.append(run.evaluate_and_save(step))
            if is_solved(config, evaluations):
                end = step
                break
            logged_at = (step, time.perf_counter())
        if number := processes.stop_signal(step, config.log_interval):
            stop_for_signal(run, step, number)
        with run.compile_time_said(step):
            lr, loss, grad_norm = run.step(step)
        if step % config.log_interval == 0 or step == config.max_iters - 1:
            run.stop_if_not_finite(step)
            # JSON has no inf, which is common in float16
            loss, grad_norm = float(loss), float(grad_norm) if math.isfinite(grad_norm) else None
            now = time.perf_counter()
            speed = run.tokens_per_step * (step + 1 - logged_at[0]) / (now - logged_at[1])
            logged_at = (step + 1, now)
            spike = is_spike(loss, losses)
            losses.append(loss)
            if spike and processes.is_main:
                tqdm.write(f"step {step}: loss {loss:.4f} is a spike, gradient norm {grad_norm or math.inf:.3g}")
            mfu = speed * run.mfu_of_speed
            row = dict(loss=loss, lr=lr, grad_norm=grad_norm, spike=spike, tokens_per_second=speed, mfu=mfu)
            out.log(event="train", step=step, **row)
            shown = dict(loss=f"{loss:.4f}", tok_s=f"{speed:,.0f}", mfu=f"{mfu:.1%}")
            if evaluations:
                shown["val"] = f"{evaluations[-1]['val_loss']:.4f}"
            bar.set_postfix(shown, refresh=False)
    else:
        evaluations.append(run.evaluate_and_save(end))
    bar.close()
    result = run.score_whole(end, evaluations[-1])
    seconds = run.seconds()
    out.log(event="end", step=end, seconds=seconds, eval_seconds=run.eval_seconds, **result)
    accuracy = f", accuracy {result['accuracy']:.1%}" if run.dataset.kind == "examples" else ""
    steps = f"{end} steps" if end == config.max_iters else f"{end} of {config.max_iters} steps (solved)"
    run.say(f"validation loss {result['val_loss']:.4f} nats{accuracy} after {steps} in {seconds:.0f} s")
    scored = f"validation loss {run.best:.4f}{' on the sample' if run.reads_a_sample else ''}"
    run.say(f"written to {out.path}/: metrics.jsonl, ckpt.pt, best.pt ({scored})")


def is_solved(config: TrainConfig, evaluations: list[dict]) -> bool:
    """Whether the last two evaluations are above stop_above."""
    last = [row["accuracy"] for row in evaluations[-2:]]
    return config.stop_above is not None and len(last) == 2 and min(last) > config.stop_above


def stop_for_signal(run: "Run", step: int, number: int) -> NoReturn:
    """Saves, and exits with the status that shells report for a process that the signal ended."""
    if step % run.config.eval_interval:  # otherwise the evaluation has just saved
        run.stop_if_not_finite(step)
        run.save(step)
    name = signal.Signals(number).name
    run.say(f"\n{name}: saved at step {step} of {run.config.max_iters}; --init_from=resume goes on from there")
    sys.exit(128 + number)


# ----------------------------------------------------------------------------------------------------------------------
# A run


class Run:
    """A run and how far it has come; its methods take a step, evaluate, save, and end a run that is not finite."""

    def __init__(self, config, processes, dataset, out, resumed, source, notes):
        self.config, self.processes, self.dataset, self.out = config, processes, dataset, out
        self.say = print if processes.is_main else lambda *words: None
        self.dtype = processes.from_main(
            pick_dtype(resumed["dtype"] if resumed else config.dtype, processes.device_type)
        )
        self.model, self.new, notes_of_model = make_model(config, resumed, source)
        self.compiled, why = is_compiled(config, processes.device_type)
        self.step_model = parallel.share_out(self.model, config, processes, self.compiled)
        self.reads_a_sample = (config.eval_tokens or math.inf) < dataset.counts("val")["tokens"]
        self.optimizers = make_optimizers(self.model, config, processes.device_type)
        scale_new(self.optimizers, self.new, config.new_lr_scale)
        self.scaler = torch.amp.GradScaler(processes.device_type, enabled=self.dtype == "float16")
        self.first_step, self.best, self.seconds_before, self.saved_step = 0, math.inf, 0.0, None
        self.eval_seconds = 0.0  # of all evaluations with their meters, without the checkpoints that are saved then
        self.run_id = processes.from_main(uuid.uuid4().hex)
        self.code_sha256, self.code_files = code_sha256()  # read now: later edits do not change this run
        if resumed is not None:
            self.resume(resumed)
        for read in filter(None, (resumed, source)):  # main has the dicts: each process would keep these in RAM
            for part in ("model", "optimizer"):
                read.pop(part, None)
        # the first step whose loss or gradient was not finite, or -1; on the device, so that nothing waits for a GPU
        self.bad_step = torch.tensor(-1, device=processes.device)

        rows_per_step = config.batch_size * config.gradient_accumulation_steps
        length = dataset.tokens_per_example("train", config.block_size)
        self.tokens_per_step = round(rows_per_step * length)
        self.loaded = self.load(self.first_step)
        peak, peak_source = peak_flops(processes.device_type, self.dtype)
        self.mfu_of_speed = 3 * self.model.flops_per_token(length) / (peak * processes.world_size)
        mfu = f"MFU: against {peak / 1e12:.3g} TFLOP/s a process, {peak_source}"
        for line in [*notes, *notes_of_model, *describe(self, why), mfu, *notes_on_keys(config, self.new)]:
            self.say(line)
        about = {"run_id": self.run_id, "config": dataclasses.asdict(config), "dtype": self.dtype}
        about |= {"device": processes.device_type, "threads": processes.threads}
        about |= {"code_sha256": self.code_sha256, "code_files": self.code_files}
        about |= {"n_params": self.model.n_params(), "state_bytes": self.model.state_bytes()}
        about |= {"flops_per_token": self.model.flops_per_token(), "tokens_per_step": self.tokens_per_step}
        out.start(about, self.first_step, config.max_iters)
        self.started = time.perf_counter()

    def resume(self, resumed: dict) -> None:
        try:
            # betas and weight decay come from the config, where they may have changed
            load_optimizers(self.optimizers, resumed["optimizer"], self.model)
            self.scaler.load_state_dict(resumed["scaler"])
            torch.set_rng_state(resumed["rng"].cpu())
            self.first_step = self.saved_step = resumed["iter_num"]
            self.best = float(resumed["best_val_loss"])
            # a checkpoint of an older version has no seconds and no run_id
            self.seconds_before = float(resumed.get("seconds", 0.0))
            self.eval_seconds = float(resumed.get("eval_seconds", 0.0))
            self.run_id = resumed.get("run_id", self.run_id)
            self.set_learning_rate(max(0, self.first_step - 1))  # of the last step: a finished run takes no other
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if configurator.is_of_memory(error):
                raise
            file = self.out.path / "ckpt.pt"
            raise UserError(f"{file}: no run can go on from it ({str(error)[:200]})") from None

    def seconds(self) -> float:
        """Seconds of training and evaluation so far, without the work that a kill has undone."""
        return self.seconds_before + time.perf_counter() - self.started

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One update. Returns (learning rate, mean loss of the global batch, norm of its gradient), over all ranks.

        The last two are tensors. Nothing here waits for a GPU: no tensor's value is read, and copies do not block.
        """
        config, processes = self.config, self.processes
        lr = self.set_learning_rate(step)
        total = torch.zeros((), device=processes.device)
        for loss in self.micro_losses(step, self.step_model):
            # DDP and FSDP take the mean over the processes; the loss is already divided by the labels of all of them
            self.scaler.scale(loss * processes.world_size).backward()
            total += loss.detach()
        total = processes.total(total)
        if step == self.first_step:
            self.check_that_all_is_used()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip or math.inf)
        grad_norm = parallel.plain(grad_norm)
        self.update(step, total, grad_norm)
        self.model.zero_grad(set_to_none=True)
        self.loaded = self.load(step + 1)  # while a GPU still computes this step
        return lr, total, grad_norm

    def set_learning_rate(self, step: int) -> float:
        lr = learning_rate(self.config, step)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = lr * group["lr_scale"]
        return lr

    def check_that_all_is_used(self) -> None:
        """UserError for a parameter, such as that of a gate, which is built and which the loss does not depend on."""
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise UserError(
                f"model.py: {len(unused)} parameters are built and never used, first {unused[0]}: the loss does not "
                "depend on them; apply what they belong to, or do not build it"
            )

    @contextlib.contextmanager
    def compile_time_said(self, step: int) -> Iterator[None]:
        """Prints how long the first step took, in which torch.compile does its work."""
        is_said = self.compiled and step == self.first_step and self.processes.is_main
        start = time.perf_counter()
        if is_said:
            tqdm.write("compiling the model: the first step takes a while")
        yield
        if is_said:
            tqdm.write(f"compiled in {time.perf_counter() - start:.0f} s")

    def load(self, step: int) -> tuple[int, list, int]:
        """(step, [(micro-step, inputs, targets)] of this process, number of labels in the global batch).

        It depends on (seed, step) alone. Labels are counted before the copies to the device, which do not block.
        """
        config, processes = self.config, self.processes
        batches = [
            (m, *self.dataset.batch(
                "train", step, seed=config.seed, batch_size=config.batch_size, block_size=config.block_size,
                micro_step=m, gradient_accumulation_steps=config.gradient_accumulation_steps,
                same_length=self.compiled,
            ))
            for m in range(processes.rank, config.gradient_accumulation_steps, processes.world_size)
        ]  # fmt: skip
        n_labels = int(sum((targets != IGNORE).sum() for _, _, targets in batches))
        # the other processes' labels are counted here, too: to ask for them would be a wait for all in every step
        others = set(range(config.gradient_accumulation_steps)) - {m for m, _, _ in batches}
        n_labels += self.dataset.count_labels(
            "train", step, seed=config.seed, batch_size=config.batch_size, block_size=config.block_size,
            micro_steps=others, gradient_accumulation_steps=config.gradient_accumulation_steps,
        )  # fmt: skip
        on_device = [(m, processes.to_device(inputs), processes.to_device(targets)) for m, inputs, targets in batches]
        return step, on_device, max(1, n_labels)

    def micro_losses(self, step: int, model) -> Iterator[torch.Tensor]:
        """Yields this process's shares of the global batch's mean loss, one per micro-step."""
        config, processes = self.config, self.processes
        # divide by the labels of the global batch, not by those of a micro-step: rows may hold different numbers
        _, batches, n_labels = self.loaded if self.loaded[0] == step else self.load(step)
        for m, inputs, targets in batches:
            if config.dropout > 0:  # dropout depends on (seed, step, micro-step) alone
                torch.manual_seed(zlib.crc32(f"{config.seed} {step} {m}".encode()))
            with parallel.summed(model, is_last=m == batches[-1][0]):
                with autocast(processes.device_type, self.dtype):
                    loss = model(inputs, targets, reduction="sum") / n_labels
                yield loss  # the caller runs the backward pass here, inside summed

    def update(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """The optimizer's step, unless the loss or the gradient is not finite in this step or in an earlier one.

        In float16 an infinite gradient only means that the loss scale was too high: this step alone is skipped.
        """
        bad = ~(loss + grad_norm).isfinite()
        is_the_end = ~loss.isfinite() if self.scaler.is_enabled() else bad
        # torch.where(..., step, ...) would copy the number to the GPU and wait for it
        self.bad_step = self.bad_step.masked_fill((self.bad_step < 0) & is_the_end, step)
        skip = bad | (self.bad_step >= 0)
        for optimizer in self.optimizers:
            if optimizer.defaults.get("fused"):
                optimizer.found_inf = skip.float()  # the fused kernel skips the step if it is 1
                optimizer.step()
            elif not skip:
                optimizer.step()
        self.scaler.update()

    # -- evaluation, checkpoints ---------------------------------------------------------------------------------------

    def evaluate_and_save(self, step: int) -> dict:
        """Evaluates on the sample of eval_tokens; saves ckpt.pt, and best.pt if the loss is the lowest so far.

        Returns the row of metrics.jsonl, on ranks other than 0 without the meters. A run's rows are all of the same
        tokens, so that they can be compared; "labels" is how many.
        """
        self.stop_if_not_finite(step)
        model = parallel.whole(self.model)
        with self.timed_as_evaluation():
            # before the save: a loss that is not finite ends the run
            row = self.score(step, self.config.eval_tokens, model)
            if self.config.meters and self.processes.is_main:
                row["meters"] = self.meters(step, model)
        is_best = row["val_loss"] < self.best
        self.best = min(self.best, row["val_loss"])
        self.out.log(event="eval", step=step, **row)
        self.save(step, is_best, keep=True)
        return row

    @contextlib.contextmanager
    def timed_as_evaluation(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.eval_seconds += time.perf_counter() - start

    def score(self, step: int, tokens: int | None, model: GPT) -> dict:
        """The loss and the other numbers of the validation split, or of a fixed sample of about that many tokens."""
        result = evaluate(
            model,
            self.dataset,
            "val",
            batch_size=evaluation_rows(self.config, self.dataset),
            block_size=self.config.block_size,
            dtype=self.dtype,
            tokens=tokens,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
        )
        if not math.isfinite(result["loss"]):
            self.stop(step, f"validation loss is {result['loss']}", bad_weight(model))
        return {("val_loss" if name == "loss" else name): x for name, x in result.items()}

    def score_whole(self, step: int, last: dict) -> dict:
        """The numbers of the whole validation split, for the row of event "end". last: the last evaluation's row."""
        if self.reads_a_sample and self.config.eval_whole:
            with self.timed_as_evaluation():
                return self.score(step, None, parallel.whole(self.model))
        return {name: x for name, x in last.items() if name not in ("event", "step", "meters")}

    def meters(self, step: int, model: GPT) -> dict:
        """The cheap meters (runs/probe.py), on the first rows of the validation split."""
        rows = training_rows(memory.longest_row(self.dataset, "val", self.config.block_size))
        inputs, targets, _ = first_rows(self.dataset, "val", rows, self.config.block_size)
        inputs, targets = inputs.to(self.processes.device), targets.to(self.processes.device)
        found = training_meters(model, inputs, targets, self.dataset.kinds, self.dtype)
        if step > 0 and step >= self.config.warmup_iters:  # every gate starts collapsed: its weights are zero
            for line in found["collapsed"]:
                tqdm.write(f"step {step}: a gate has collapsed, {line}")
        return found

    def save(self, step: int, is_best: bool = False, keep: bool = False) -> None:
        self.out.save(self.state(step), is_best, keep)
        self.saved_step = step

    def state(self, step: int) -> dict:
        """The contents of ckpt.pt: all that the rest of the run depends on, on rank 0 with whole tensors."""
        state = {
            "model": self.model.state_dict(),
            "model_args": {f.name: getattr(self.config, f.name) for f in dataclasses.fields(GPTConfig)},
            "new": self.new,
            "optimizer": optimizer_state(self.optimizers),
            "scaler": self.scaler.state_dict(),
            "iter_num": step,
            "best_val_loss": self.best,
            "seconds": self.seconds(),
            "eval_seconds": self.eval_seconds,
            "rng": torch.get_rng_state(),
            "run_id": self.run_id,
            "config": dataclasses.asdict(self.config),
            "data": {
                "name": self.dataset.name,
                "path": str(self.dataset.folder),
                "sha256": self.dataset.sha256,
                "tokenizer": self.dataset.tokenizer,
                "vocab_size": self.dataset.vocab_size,
                "first_ids": self.dataset.first_ids,
                **({"alphabet": self.dataset.alphabet} if self.dataset.alphabet else {}),
            },
            "dtype": self.dtype,
            "code_sha256": self.code_sha256,
            "code_files": self.code_files,
            "versions": versions(),
        }
        return parallel.gathered(state, self.processes.is_main)

    # -- the end of a run that is not finite ---------------------------------------------------------------------------

    def stop_if_not_finite(self, step: int) -> None:
        """Ends the run with status 1 if a step up to this one was bad. The weights are those from before that step."""
        if (bad_step := int(self.bad_step)) >= 0:
            model = parallel.whole(self.model)
            found = self.processes.from_all(first_bad_tensor(model, self.micro_losses(bad_step, model)))
            self.stop(bad_step, "the loss or its gradient is not finite", next(filter(None, found), None))
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            self.stop(
                step,
                "float16's loss scale fell below 1 and the gradient still overflows",
                bad_weight(parallel.whole(self.model)),
            )

    def stop(self, step: int, what: str, bad: str | None) -> NoReturn:
        """Logs and prints why and where the run ends, and exits with status 1."""
        self.out.log(event="stopped", step=step)
        if self.processes.is_main:
            where = f"first bad tensor: {bad}" if bad else "all weights are still finite"
            saved = f"{self.out.path / 'ckpt.pt'} holds the last good step saved, {self.saved_step}"
            print(
                f"\nerror: {what} at step {step}, learning rate {learning_rate(self.config, step):.3g}; {where}. "
                f"{'Nothing was saved' if self.saved_step is None else saved}; "
                "try a lower learning_rate or a longer warmup",
                file=sys.stderr,
            )
        sys.exit(1)


def is_compiled(config: TrainConfig, device_type: str) -> tuple[bool, str]:
    """(whether torch.compile is used, the reason in words if compile is auto)."""
    if config.compile != "auto":
        return config.compile == "true", ""
    if device_type != "cuda":
        return False, f" (auto: {device_type} gains little)"
    if config.max_iters < 500:
        return False, " (auto: fewer than 500 steps)"
    return True, " (auto: a GPU, 500 steps or more)"


def describe(run: Run, why_compiled: str) -> list[str]:
    """The lines about the model, the data and the device that a run prints at its start."""
    config, model, processes = run.config, run.model, run.processes
    gated = (
        f", gate {config.gate} ({config.gate_activation})"
        if config.gate not in ("none", "native")
        else f", gate {config.gate}"
    )
    products = ", float32 products by TF32" if processes.device_type == "cuda" else ""
    floor = run.dataset.perfect_loss("val")
    lines = [
        f"model: {config.n_layer} x {config.n_embd}, {config.attention}{gated}, {model.n_params():,} parameters, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOPs a token forward, state {model.state_bytes():,} bytes a sequence",
        f"data: {run.dataset.folder}, {run.dataset.vocab_size:,} ids, {run.tokens_per_step:,} tokens a step"
        + ("" if floor is None else f", the perfect predictor's validation loss is {floor:.4f}"),
        f"device: {processes.device_type}, {run.dtype}{products}, {processes.world_size} process(es) of "
        f"{processes.threads} threads{parallel.in_words(config, processes.world_size)}, "
        f"compile {'on' if run.compiled else 'off'}{why_compiled}, "
        f"torch {torch.__version__}",
    ]
    if config.attention_softcap is not None:
        lines.append("attention_softcap: softmax layers run without the fused kernel, which is slower")
    if config.match_params:
        twin = GPT(dataclasses.replace(model.config, gate="none", match_params=False))
        lines.append(f"match_params: {model.n_params() - twin.n_params():+,} parameters against the ungated model")
    return lines


if __name__ == "__main__":
    configurator.run(main)
