"""What each process holds and sends in a training step, by arithmetic on a model's sizes: an estimate, not measured.

    python -m runs.scale                                                   the table of docs/scale.md
    python -m runs.scale config/wikitext103/base.py --vocab_size=50257     the same for one config

What is held is what train.py's line about memory adds up (runs/memory.py), on GPUs with products in bfloat16. What is
sent is what a ring sends: (n - 1) / n of a tensor that n processes gather or scatter, and twice that of one that they
all sum. One micro-step a process; more of them gather the weights of an fsdp model as many times.
"""

import configurator
from configurator import UserError, key

import dataclasses
from dataclasses import dataclass

from runs.memory import sizes_of, stepping, weight_bytes
from runs.parallel import is_sharded, shards_of
from train import TrainConfig

# rows of 1,024 tokens; the widths of config/wikitext103/base.py, and a model of a billion parameters
SHARED: dict = dict(vocab_size=50_304, block_size=1024, batch_size=8)
MODELS = {
    "125M: 12 x 768": TrainConfig(**SHARED),
    "1B: 18 x 2048": TrainConfig(**SHARED, n_layer=18, n_head=16, n_embd=2048),
}
COLUMNS = ("parameters", "gradients", "optimizer", "gathered", "activations", "total")
RECOMPUTED = ("activations", "total")  # with activation_checkpointing


@dataclass
class ScaleConfig(TrainConfig):
    processes: list[int] = key([8, 64], "numbers of processes, each with a GPU", at_least=1)


def collectives(config: TrainConfig, world_size: int) -> dict[str, tuple[int, float]]:
    """{collective: (how many processes take part, bytes of the whole tensors that it makes in a step)}"""
    weights, shell, shards = weight_bytes(config), sizes_of(config)[1], shards_of(config, world_size)
    if not is_sharded(config, world_size):
        return {"all_reduce": (world_size, weights)}
    # blocks are gathered on the way forward and once more on the way back; what is no block's stays in between
    gathered = config.gradient_accumulation_steps // world_size * (2 * weights - shell)
    found: dict[str, tuple[int, float]] = {"all_gather": (shards, gathered), "reduce_scatter": (shards, weights)}
    found["all_reduce"] = (world_size // shards, weights / shards)
    return {name: (n, size) for name, (n, size) in found.items() if n > 1}


def sent(config: TrainConfig, world_size: int) -> float:
    """Bytes that each process sends in a step."""
    times = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    return sum(times[name] * (n - 1) / n * size for name, (n, size) in collectives(config, world_size).items())


def row(config: TrainConfig, world_size: int) -> list[float]:
    """Bytes of each of COLUMNS, of RECOMPUTED, and those sent."""
    plain, recomputed = (
        stepping(changed, "bfloat16", config.block_size, world_size, "cuda")
        for changed in (dataclasses.replace(config, activation_checkpointing=is_on) for is_on in (False, True))
    )
    found = [plain.get(name, 0.0) for name in COLUMNS] + [recomputed[name] for name in RECOMPUTED]
    return [*found, sent(config, world_size)]


def table(models: dict[str, TrainConfig], processes: list[int]) -> str:
    """A table in Markdown, in GB: every model, on every number of processes, under every way to share it."""
    titles = ["model", "processes", "parallel", *COLUMNS, *(f"{name}, recomputed" for name in RECOMPUTED), "sent"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model, config in models.items():
        for n in processes:
            ways = [("ddp", 0), ("fsdp", 0), ("fsdp", 8)]
            for parallel, shards in ways if n > 8 and n % 8 == 0 else ways[:2]:
                keys: dict = dict(parallel=parallel, shards=shards, gradient_accumulation_steps=n)
                cells = [f"{size / 1e9:.2f}" for size in row(dataclasses.replace(config, **keys), n)]
                way = f"{parallel}, {shards} shards" if shards else parallel
                lines.append(f"| {' | '.join([model, str(n), way, *cells])} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    config = configurator.load(ScaleConfig, argv, program="-m runs.scale", description=__doc__)
    if argv and config.vocab_size is None:
        raise UserError("vocab_size=None: give the number of token ids, which a run takes from its data")
    models = {f"{config.n_layer} x {config.n_embd}": config} if argv else MODELS
    print(table(models, config.processes))


if __name__ == "__main__":
    configurator.run(main)
