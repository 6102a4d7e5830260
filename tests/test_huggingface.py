"""Models of transformers, read from the folders that it writes, and ours, written for it.

python -m pytest tests/test_huggingface.py

No hub is needed: a model of each class gets random weights, is saved with save_pretrained, and read as a user's folder
would be. published.py has the gated attention of Qiu et al., which no class of transformers has.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import published
import pytest
import torch
from conftest import LINES
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import evaluate
import export
import meters
import sample
import train
from data.shards import open_dataset
from data.text import prepare as text_prepare
from data.tokenizer import FileTokenizer
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints

ROOT = Path(export.__file__).parent
SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, attn_implementation="eager",
    tie_word_embeddings=False,
)  # fmt: skip
DELTA = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12,
    num_hidden_layers=4,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5e5}
PARTIAL = ROPE | {"partial_rotary_factor": 0.25}
DENSE = dict(mlp_only_layers=[0, 1, 2, 3], num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2)


def saved(model, folder, **how):
    """The folder of a model whose weights are far from their start: norms are not 1, biases of the decay not all 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder, **how)
    return model.eval()


FAMILIES = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE)),
    "Llama, tied, no GQA": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=8))
    ),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=ROPE)),
    "Qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | dict(tie_word_embeddings=True))),
    "Qwen3-Next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | DELTA, **DENSE, rope_parameters=PARTIAL)),
    "Qwen3.5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES | DELTA, rope_parameters=PARTIAL)),
    "Qwen3.5, another pattern, tied": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **SIZES | DELTA | dict(num_hidden_layers=3, tie_word_embeddings=True),
            layer_types=["full_attention", "linear_attention", "full_attention"],
        )
    ),
    "Qwen3.5 with images": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=SIZES | DELTA | dict(rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0]}),
            vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32),
        )
    ),
}


def imported(helpers, folder, out, **keys):
    export.main(helpers.words(from_hf=folder, out_dir=out, **keys))
    return checkpoints.load_model(out)[0]


IDX = torch.arange(2 * 48).view(2, 48) * 37 % 300


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_an_imported_model_are_those_of_transformers(name, helpers, tmp_path, capsys):
    theirs = saved(FAMILIES[name](), tmp_path / "theirs", max_shard_size="30KB")  # several files and their index
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(IDX).logits
        torch.testing.assert_close(ours(IDX), expected, rtol=0, atol=1e-4)
        state, logits = ours.init_state(2), []
        for start, stop in ((0, 30), *((i, i + 1) for i in range(30, 48))):
            x, state = ours.features(IDX[:, start:stop], state, start)
            logits.append(ours.logits(x))
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1
    assert ("left out: model.visual." in capsys.readouterr().out) == ("images" in name)


@pytest.mark.parametrize("kind", ["baseline", "headwise", "elementwise"])
def test_logits_of_the_gated_models_are_those_of_their_definition(kind, helpers, tmp_path):
    theirs = saved(published.gated_qwen3(kind, **SIZES, rope_parameters=ROPE), tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    about = json.loads(file.read_text()) | {
        f"{name}_attn_output_gate": name == kind for name in ("headwise", "elementwise")
    }
    file.write_text(json.dumps(about | {"use_qk_norm": True, "qkv_bias": False, "auto_map": {"AutoModel": "evil.py"}}))
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    assert ours.config.gate == ("none" if kind == "baseline" else kind)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDX), theirs(IDX).logits, rtol=0, atol=1e-4)
