"""
What is known of a GPU without one: counts of kernels, FLOPs and bytes, no wait in a step, and the part gpu on a CPU.

    python -m pytest tests/test_gpu.py
"""

import pytest
import torch

import bench
from model import GLA, MIXERS
from speed import gpu
from speed.report import BenchConfig, Report

SMALL = dict(n_layer=1, n_head=2, n_embd=32, block_size=140, vocab_size=64, state_size=8)


def gate_of(name):
    return "native" if MIXERS[name].native_gate else "elementwise"


@pytest.mark.parametrize("name", MIXERS)
def test_a_training_step_and_a_decoded_token_never_make_the_host_wait(name):
    keys = SMALL | dict(attention=name, gate=gate_of(name))
    assert gpu.training_counts(2, 130, **keys).kernels > gpu.decoding_counts(1, 130, **keys).kernels > 10


def test_a_step_that_reads_a_value_is_found(monkeypatch):
    project = GLA.project
    monkeypatch.setattr(GLA, "project", lambda self, x, *rest: float(x.detach().sum()) and project(self, x, *rest))
    with pytest.raises(RuntimeError, match="meta"):
        gpu.training_counts(2, 130, **SMALL, attention="gla")


def test_a_product_counts_its_flops_and_bytes_and_views_count_nothing():
    a, b = torch.zeros(4, 8, device="meta"), torch.zeros(8, 16, device="meta")
    with gpu.Counting() as counting:
        (a.view(8, 4).T.reshape(4, 8).contiguous()[:, :, None].expand(4, 8, 3)).detach()
        before = counting.found.kernels
        (a @ b).relu_()
    assert before == 1  # the reshape of a transposed view is a copy
    moved, copied = 4 * (4 * 8 + 8 * 16 + 4 * 16), 4 * 2 * 4 * 8
    relu = 4 * 2 * 4 * 16
    assert counting.found == gpu.Counts(3, 2 * 4 * 8 * 16, copied + moved + relu, moved)


def test_the_products_of_a_step_are_the_flops_that_the_model_declares():
    keys = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=512, block_size=64)
    with torch.device("meta"):
        declared = 3 * gpu.GPT(gpu.GPTConfig(**keys)).flops_per_token(64) * 4 * 64
    # it declares a causal half of softmax attention, of which the kernel's count has the whole and a recomputation
    assert declared < gpu.training_counts(4, 64, **keys).flops < 1.1 * declared


def test_the_roofline_is_the_slower_of_compute_and_memory():
    by_compute = gpu.Counts(kernels=9, flops=2000, bytes=400, product_bytes=100)
    assert gpu.roofline(by_compute, peak=100.0, bandwidth=10.0) == (20.0, 60.0)
    by_memory = gpu.Counts(kernels=9, flops=100, bytes=400, product_bytes=100)
    assert gpu.roofline(by_memory, peak=100.0, bandwidth=10.0) == (10.0, 41.0)


# ----------------------------------------------------------------------------------------------------------------------
# The part gpu, as far as a CPU goes


@pytest.fixture
def cpu():
    return BenchConfig(device="cpu", dtype="float32", threads=1, pairs=6, long_pairs=6)


def test_without_a_gpu_the_part_is_one_line_and_all_leaves_it_out(tmp_path, helpers):
    message = helpers.error_of(bench.main, ["gpu", "--device=cpu", f"--out_dir={tmp_path / 'none'}"])
    assert "what=gpu: measures on a GPU, and the device is cpu" in message and not (tmp_path / "none").exists()
    assert bench.parts_of(["all"]) == [name for name in bench.PARTS if name != "gpu"]
    assert bench.parts_of(["all", "gpu"]) == list(bench.PARTS)


def test_kernels_are_compared_on_what_every_mixer_asks_of_them(cpu):
    """plain_chunked stands in for fla; with a wrong form every claim is missed."""
    part = Report("gpu")
    gpu.compare_kernels(cpu, part, T=70, form=gpu.recurrence.plain_chunked)
    assert [row["mixer"] for row in part.rows] == [name for name in MIXERS if name != "softmax"]
    assert all(claim["ratio"] < 1e-4 and claim["met"] == "met" for claim in part.claims)

    def wrong(*args, **keys):
        o, S = gpu.chunked(*args, **keys)
        return o, 1.1 * S

    part = Report("gpu")
    gpu.compare_kernels(cpu, part, T=70, form=wrong)
    assert {claim["met"] for claim in part.claims} == {"missed"}


def test_the_other_numbers_of_the_part_come_out_of_a_tiny_model(cpu, monkeypatch):
    monkeypatch.setattr(gpu, "MIXERS", {name: MIXERS[name] for name in ("softmax", "gla")})
    small, part = SMALL | dict(block_size=16), Report("gpu")
    gpu.gate_overhead(cpu, part, B=2, **small)
    assert len(part.claims) == 6 and {claim["target"] for claim in part.claims} == {1.03}
    gpu.long_run(cpu, part, steps=2, B=2, **small)
    assert [row["run"] for row in part.rows if "mfu" in row] == ["softmax", "gla"]


@pytest.mark.slow
def test_the_kernels_of_a_fused_step_are_counted_each_way():
    found = gpu.fused("softmax", T=64)
    assert found.operations > found.forward + found.backward and found.forward > found.backward > 10
    # forward and backward read the embedding, the four matrices of the layer and write the latter's gradients
    weights = 4 * (256 * 128 + 12 * 128 * 128)
    assert weights < found.forward_bytes < found.backward_bytes < 20 * weights
    shorter = gpu.fused("softmax", T=32)
    assert (shorter.forward, shorter.backward) == (found.forward, found.backward)  # no loop over chunks
    assert shorter.forward_bytes < found.forward_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_a_compiled_model_has_one_graph_for_each_length_and_no_break(name, cpu, monkeypatch):
    gpu.decoding_counts(1, 16, **SMALL)  # what it replaces for a moment must not reach dynamo
    monkeypatch.setattr(gpu, "MIXERS", {name: MIXERS[name]})
    part = Report("gpu")
    gpu.compile_counts(cpu, part, B=2, backend="aot_eager", **SMALL | dict(block_size=16))
    assert [(row["compiled"], row["graphs"], row["breaks"]) for row in part.rows] == [(name, 2, 0)]
