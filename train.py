"""Train a GPT. One process, or several under torchrun, on a CPU or on GPUs:

    python train.py config/NAME.py --key=value ...
    torchrun --standalone --nproc_per_node=4 train.py config/NAME.py

out_dir gets config.json, the files of the model as they were, metrics.jsonl (one object a line), ckpt.pt (the last)
and best.pt (the lowest validation loss). The same seed gives the same run: the batch and the dropout of a step depend
on (seed, step) alone, whatever the number of processes, the evaluations and the restarts.
"""

import os

# a busy neighbour makes spinning OpenMP threads three times slower; sleeping ones give way. Read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import contextlib
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from tqdm import tqdm

import checkpoint as checkpoints
import configurator
from configurator import UserError, key
from data.shards import open_dataset
from evaluate import evaluate
from hardware import DTYPES, Processes, pick_dtype
from loss import IGNORE
from meters import TRAINING_ROWS, first_rows, is_spike, training_meters
from model import GPT, GPTConfig

HERE = Path(__file__).resolve().parent
MODEL_FILES = ("model.py", "gate.py", "layers.py", "recurrence.py", "loss.py")  # a run keeps the code of its model


@dataclass
class TrainConfig(GPTConfig):
    """Every key of a run: the model's, and these."""

    dataset: str = key("data/pystdlib", "folder of the data, written by one of data/*/prepare.py")
    out_dir: str = key("out", "where the run is written")
    init_from: str = key(
        "scratch", "scratch; resume (out_dir's ckpt.pt); or a checkpoint whose weights start a new run"
    )
    seed: int = key(1337, "of the weights, the order of the data and the dropout", at_least=0)

    batch_size: int = key(12, "rows of one micro-step of one process", at_least=1)
    gradient_accumulation_steps: int = key(1, "micro-steps of one step, over all processes", at_least=1)
    max_iters: int = key(5000, "steps", at_least=1)
    learning_rate: float = key(6e-4, "peak of AdamW's learning rate", above=0)
    decay_lr: bool = key(True, "cosine decay to min_lr (false: constant after the warmup)")
    warmup_iters: int = key(100, "steps of linear warmup", at_least=0)
    lr_decay_iters: int | None = key(None, "step at which min_lr is reached (None: max_iters)", at_least=1)
    min_lr: float | None = key(None, "end of the decay (None: learning_rate / 10)", at_least=0)
    weight_decay: float = key(0.1, "of matrices; vectors have none", at_least=0)
    beta1: float = key(0.9, "of AdamW", at_least=0, below=1)
    beta2: float = key(0.95, "of AdamW", at_least=0, below=1)
    grad_clip: float | None = key(1.0, "largest norm of the gradient (None: any)", above=0)

    eval_interval: int = key(
        500, "steps between evaluations of the whole validation split, and checkpoints", at_least=1
    )
    eval_batch_size: int | None = key(None, "rows at a time in evaluation (None: batch_size)", at_least=1)
    log_interval: int = key(10, "steps between lines of metrics.jsonl", at_least=1)
    meters: bool = key(True, "gate, sink and activation meters at every evaluation (meters.py: training_meters)")

    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = key("auto", "of matrix products; weights stay float32", choices=("auto", *DTYPES))
    compile: str = key(
        "auto", "torch.compile; auto: on a GPU, for runs of 500 steps or more", choices=("auto", "true", "false")
    )
    threads: int = key(0, "CPU threads of a process (0: cores / processes)", at_least=0)


def learning_rate(config, step):
    """Linear warmup, then a cosine from learning_rate to min_lr."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    end = config.lr_decay_iters or config.max_iters
    lowest = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    progress = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - lowest)


def main(argv):
    config = configurator.load(TrainConfig, argv, program="train.py", description=__doc__)
    processes = Processes(config.device, config.threads)
    try:
        train(config, processes)
    finally:
        processes.close()
    processes.end()


def train(config, processes):
    say = print if processes.is_main else lambda *words: None
    if config.gradient_accumulation_steps % processes.world_size:
        raise UserError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}: must be a multiple of the "
            f"{processes.world_size} processes that share the micro-steps"
        )
    dataset, out_dir, resumed = open_dataset(config.dataset), Path(config.out_dir), None
    if config.init_from == "resume":
        file = out_dir / "ckpt.pt"
        resumed = checkpoints.load(file)
        if resumed["data"]["sha256"] != dataset.sha256:
            raise UserError(f"{config.dataset}: not the data that {file} was trained on")
        if resumed["iter_num"] > config.max_iters:
            raise UserError(f"max_iters={config.max_iters}: {file} is at step {resumed['iter_num']} already")
        model_config = configurator.build(GPTConfig, resumed["model_args"], source=str(file))
        config = dataclasses.replace(config, **dataclasses.asdict(model_config))
    dataset.examples_per_epoch("train", config.block_size)  # what is wrong with the data is said before any work
    dataset.examples_per_epoch("val", config.block_size if dataset.kind == "examples" else 1)
    config.vocab_size = config.vocab_size or dataset.vocab_size
    if config.vocab_size < dataset.vocab_size:
        raise UserError(f"vocab_size={config.vocab_size}: {dataset.folder} has ids up to {dataset.vocab_size - 1}")

    dtype = processes.from_main((resumed or {}).get("dtype") or pick_dtype(config.dtype, processes.device_type))
    model, notes = make_model(config, resumed)
    model.to(processes.device)
    optimizer = torch.optim.AdamW(
        model.parameter_groups(config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=processes.device_type != "mps",
    )
    scaler = torch.amp.GradScaler(processes.device_type, enabled=dtype == "float16")
    first_step, best = 0, math.inf
    if resumed is not None:
        optimizer.load_state_dict(resumed["optimizer"])
        scaler.load_state_dict(resumed["scaler"])
        first_step, best = resumed["iter_num"], resumed["best_val_loss"]
        torch.set_rng_state(resumed["rng"])

    compiled = config.compile == "true" or (
        config.compile == "auto" and processes.device_type == "cuda" and config.max_iters >= 500
    )
    step_model = torch.compile(model) if compiled else model
    if processes.world_size > 1:
        step_model = torch.nn.parallel.DistributedDataParallel(step_model)

    rows_per_step = config.batch_size * config.gradient_accumulation_steps
    tokens_per_step = round(rows_per_step * dataset.tokens_per_example("train", config.block_size))
    for line in notes + describe(config, model, dataset, processes, dtype, compiled, tokens_per_step):
        say(line)
    metrics, losses = None, []
    if processes.is_main:
        metrics = open_run(out_dir, config, model, first_step, dtype)
        rows = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
        losses = [row["loss"] for row in rows if row["event"] == "train"]  # a run that goes on has some already

    def log(**row):
        if metrics is not None:
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()

    def stop_if_not_finite(name, value, step, lr):
        """Ends the run, with status 1: no later step could be trusted."""
        if not math.isfinite(value):
            log(event="stopped", step=step)
            if processes.is_main:
                say_what_is_not_finite(model, f"{name} is {value} at step {step}, learning rate {lr:.3g}", out_dir)
            sys.exit(1)

    def evaluate_and_save(step):
        nonlocal best
        result = evaluate(
            model,
            dataset,
            "val",
            batch_size=config.eval_batch_size or config.batch_size,
            block_size=config.block_size,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        # before the save, which would overwrite the last good checkpoint
        stop_if_not_finite("validation loss", result["loss"], step, learning_rate(config, step))
        is_best = result["loss"] < best
        best = min(best, result["loss"])
        row = {("val_loss" if name == "loss" else name): x for name, x in result.items()}
        if config.meters and processes.is_main:
            inputs, _, _ = first_rows(dataset, "val", TRAINING_ROWS, config.block_size)
            row["meters"] = training_meters(model, inputs.to(processes.device), dtype)
            if step > 0:  # every gate starts collapsed: its weights are zero
                for line in row["meters"]["collapsed"]:
                    tqdm.write(f"step {step}: a gate has collapsed, {line}")
        log(event="eval", step=step, **row)
        if processes.is_main:
            state = {
                "model": model.state_dict(),
                "model_args": {f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)},
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "iter_num": step,
                "best_val_loss": best,
                "rng": torch.get_rng_state(),
                "config": dataclasses.asdict(config),
                "data": {
                    "name": dataset.name,
                    "path": str(dataset.folder),
                    "sha256": dataset.sha256,
                    "tokenizer": dataset.tokenizer,
                    "vocab_size": dataset.vocab_size,
                },
                "dtype": dtype,
                "versions": describe_versions(),
            }
            if is_best:  # first: ckpt.pt says which loss was the best
                checkpoints.save(out_dir / "best.pt", state)
            checkpoints.save(out_dir / "ckpt.pt", state)
        return result

    steps = range(first_step, config.max_iters)
    often = 0.1 if sys.stderr.isatty() else 30  # a log file wants a line now and then
    bar = tqdm(
        steps, "training", config.max_iters, initial=first_step, unit="step", mininterval=often, disable=metrics is None
    )
    result, started, logged_at = None, time.perf_counter(), (first_step, time.perf_counter())
    for step in bar:
        if step % config.eval_interval == 0:
            result = evaluate_and_save(step) if step > first_step or first_step == 0 else None
            logged_at = (step, time.perf_counter())
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss, grad_norm = train_step(config, processes, step_model, model, optimizer, scaler, dataset, step, dtype)
        if step % config.log_interval == 0 or step == config.max_iters - 1:
            loss, grad_norm = float(processes.total(loss)), float(grad_norm)
            stop_if_not_finite("loss", loss, step, lr)
            grad_norm = grad_norm if math.isfinite(grad_norm) else None  # JSON has no inf, and float16 has it often
            now = time.perf_counter()
            speed = tokens_per_step * (step + 1 - logged_at[0]) / (now - logged_at[1])
            logged_at = (step + 1, now)
            spike = is_spike(loss, losses)
            losses.append(loss)
            if spike and processes.is_main:
                tqdm.write(f"step {step}: loss {loss:.4f} is a spike, gradient norm {grad_norm or math.inf:.3g}")
            log(event="train", step=step, loss=loss, lr=lr, grad_norm=grad_norm, spike=spike, tokens_per_second=speed)
            shown = dict(loss=f"{loss:.4f}", tok_s=f"{speed:,.0f}")
            if result is not None:
                shown["val"] = f"{result['loss']:.4f}"
            bar.set_postfix(shown, refresh=False)
    result = evaluate_and_save(config.max_iters)
    seconds = time.perf_counter() - started
    log(event="end", step=config.max_iters, seconds=seconds)
    accuracy = f", accuracy {result['accuracy']:.1%}" if dataset.kind == "examples" else ""
    say(f"validation loss {result['loss']:.4f} nats{accuracy} after {config.max_iters} steps in {seconds:.0f} s")
    say(f"written to {out_dir}/: metrics.jsonl, ckpt.pt, best.pt (validation loss {best:.4f})")


def train_step(config, processes, step_model, model, optimizer, scaler, dataset, step, dtype):
    """One update. Returns this process's share of the mean loss of the global batch, and the gradient's norm."""
    batches = [
        (m, *(dataset.batch(
            "train", step, seed=config.seed, batch_size=config.batch_size, block_size=config.block_size, micro_step=m,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )))
        for m in range(processes.rank, config.gradient_accumulation_steps, processes.world_size)
    ]  # fmt: skip
    # divide by the labels of the whole global batch, not by those of a micro-step: rows may hold different numbers
    n_labels = torch.tensor(float(sum((targets != IGNORE).sum() for _, _, targets in batches)), device=processes.device)
    n_labels = processes.total(n_labels).clamp(min=1)
    total = torch.zeros((), device=processes.device)
    for i, (m, inputs, targets) in enumerate(batches):
        if config.dropout > 0:  # dropout, too, is a function of (seed, step, micro-step)
            torch.manual_seed(zlib.crc32(f"{config.seed} {step} {m}".encode()))
        is_last = i == len(batches) - 1
        waits = processes.world_size > 1 and not is_last
        with step_model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast(processes.device_type, DTYPES[dtype], enabled=dtype != "float32"):
                inputs, targets = inputs.to(processes.device), targets.to(processes.device)
                loss = step_model(inputs, targets, reduction="sum") / n_labels
            # DDP takes the mean over the processes, and the loss is already divided by the labels of all of them
            scaler.scale(loss * processes.world_size).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total, grad_norm


def make_model(config, resumed):
    """The model a run starts from, and what to say about it."""
    model_args = {f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)}
    torch.manual_seed(config.seed)
    model = GPT(configurator.build(GPTConfig, model_args))
    if resumed is not None:
        model.load_state_dict(resumed["model"])
        return model, [f"resuming {config.out_dir} at step {resumed['iter_num']}"]
    if config.init_from == "scratch":
        return model, []
    weights, own = checkpoints.load(config.init_from)["model"], model.state_dict()
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise UserError(f"init_from={config.init_from!r}: none of its weights fit this model")
    model.load_state_dict(own | fitting)
    fresh, unused = [n for n in own if n not in fitting], [n for n in weights if n not in fitting]
    notes = [f"starting from {config.init_from}: {len(fitting)} of {len(own)} tensors taken"]
    notes += [f"  not there, or of another shape, and so as at a fresh start: {', '.join(fresh)}"] if fresh else []
    notes += [f"  left out: {', '.join(unused)}"] if unused else []
    return model, notes


def describe(config, model, dataset, processes, dtype, compiled, tokens_per_step):
    """What a run says at its start."""
    gated = (
        f", gate {config.gate} ({config.gate_activation})"
        if config.gate not in ("none", "native")
        else f", gate {config.gate}"
    )
    lines = [
        f"model: {config.n_layer} x {config.n_embd}, {config.attention}{gated}, {model.n_params():,} parameters, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOPs a token forward, state {model.state_bytes():,} bytes a sequence",
        f"data: {dataset.folder}, {dataset.vocab_size:,} ids, {tokens_per_step:,} tokens a step",
        f"device: {processes.device_type}, {dtype}, {processes.world_size} process(es) of {processes.threads} threads, "
        f"compile {'on' if compiled else 'off'}, torch {torch.__version__}",
    ]
    if config.attention_softcap is not None:
        lines.append("attention_softcap: softmax layers take the manual path, slower than the fused one")
    if config.match_params:
        twin = GPT(dataclasses.replace(model.config, gate="none", match_params=False))
        lines.append(f"match_params: {model.n_params() - twin.n_params():+,} parameters against the ungated model")
    return lines


def describe_versions():
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "numpy": numpy.__version__}


def open_run(out_dir, config, model, first_step, dtype):
    """Makes out_dir, config.json and the copy of the model. Returns metrics.jsonl, open, without later rows."""

    def git(*words):
        try:
            return subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    about = {"config": dataclasses.asdict(config), "command": sys.argv, "versions": describe_versions(), "dtype": dtype}
    about |= {"n_params": model.n_params(), "state_bytes": model.state_bytes()}
    about |= {"flops_per_token": model.flops_per_token()}
    about |= {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    file, kept = out_dir / "metrics.jsonl", []
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if first_step and file.is_file():
            # a run that goes on from step n has lost what came after it; the evaluation at n itself was before the save
            text = file.read_text()
            rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # a kill cuts a line short
            kept = [row for row in rows if row["step"] < first_step]
            if first_step < config.max_iters:
                kept += [row for row in rows if row["step"] == first_step and row["event"] == "eval"]
        (out_dir / "config.json").write_text(json.dumps(about, indent=2))
        for name in MODEL_FILES:
            shutil.copyfile(HERE / name, out_dir / name)
        metrics = open(file, "w")
        metrics.writelines(json.dumps(row) + "\n" for row in kept)
        metrics.flush()
        return metrics
    except OSError as error:
        raise UserError(f"out_dir={str(out_dir)!r}: cannot be written ({error.strerror})") from None


def say_what_is_not_finite(model, what, out_dir):
    bad = next((name for name, p in model.named_parameters() if not p.isfinite().all()), None)
    where = f"first bad tensor: {bad}" if bad else "all weights are still finite"
    print(
        f"\nerror: {what}; {where}. "
        f"{out_dir / 'ckpt.pt'} holds the last good step; try a lower learning_rate or a longer warmup",
        file=sys.stderr,
    )


if __name__ == "__main__":
    configurator.run(main)
