"""Linear and state space models of others, read from the folders that fla, transformers and Mamba-2's authors write.

python -m pytest tests/test_linear_families.py

published.FlaModel is written from fla's code and needs no fla; test_fla.py has the same with fla's own models.
"""

import json

import published
import pytest
import torch
from test_huggingface import IDX, imported, save

import export
from runs import checkpoint as checkpoints

SIZES = dict(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, intermediate_size=40, num_heads=2, max_position_embeddings=128,
    norm_eps=1e-5, use_short_conv=True, conv_size=4,
)  # fmt: skip
GLA = SIZES | dict(model_type="gla", expand_k=0.5, expand_v=1.0, use_short_conv=False, use_output_gate=True)
GATED_DELTANET = SIZES | dict(model_type="gated_deltanet", head_dim=8, expand_v=2.0, use_gate=True)
DELTA_NET = SIZES | dict(model_type="delta_net", expand_k=1.0, expand_v=1.0, use_gate=False)
KDA = SIZES | dict(model_type="kda", head_dim=8, expand_v=1.0)
ATTN = dict(layers=[1], num_heads=4, num_kv_heads=2, window_size=5, rope_theta=500.0)
OF_FLA = {
    "GLA": GLA,
    "GLA without a gate": GLA | dict(use_output_gate=False, expand_k=1.0, expand_v=0.5, num_hidden_layers=1),
    "Gated DeltaNet": GATED_DELTANET,
    "Gated DeltaNet, grouped": GATED_DELTANET
    | dict(num_v_heads=4, allow_neg_eigval=True, conv_size=3, output_gate_activation="sigmoid"),
    "Gated DeltaNet with softmax": GATED_DELTANET | dict(attn=ATTN, use_gate=False, num_hidden_layers=4),
    "DeltaNet": DELTA_NET,
    "DeltaNet with a gate": DELTA_NET | dict(use_gate=True, expand_k=0.5, use_short_conv=False, allow_neg_eigval=True),
    "KDA": KDA,
    "KDA, grouped": KDA | dict(num_v_heads=4, expand_v=1.5, allow_neg_eigval=True),
}
LONG = torch.arange(2 * 64).view(2, 64) * 37 % 299


@torch.no_grad()
def largest_difference(ours, theirs):
    """From the logits of theirs: of ours in one call, of each shorter text, and with the cache."""
    expected = theirs(LONG).float()
    assert expected.std() > 0.1
    logits, state = [ours(LONG[:, :stop])[:, -1:] for stop in range(1, 65)], ours.init_state(2)
    cached = [ours.logits(ours.features(LONG[:, :30], state)[0])]
    cached += [ours.logits(ours.features(LONG[:, i : i + 1], state, i)[0]) for i in range(30, 64)]
    pairs = (ours(LONG), torch.cat(logits, 1), torch.cat(cached, 1))
    return max((y - expected).abs().max().item() for y in pairs)


@pytest.mark.parametrize("name", OF_FLA)
def test_logits_of_a_model_of_fla_are_those_of_its_definition(name, helpers, tmp_path):
    theirs = published.save_fla(OF_FLA[name], tmp_path)
    ours = imported(helpers, tmp_path, tmp_path / "ours")
    assert largest_difference(ours, theirs) < 1e-4
    export.main(helpers.words(checkpoint=tmp_path / "ours", safetensors=tmp_path / "export"))
    again = checkpoints.load_model(tmp_path / "export")[0]
    assert again.config == ours.config and torch.equal(again(IDX), ours(IDX))


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mamba-2", "Mamba-2, groups, tied"])
def test_a_mamba2_generates_what_transformers_generates(name, helpers, tmp_path):
    theirs = save(name, tmp_path)
    ours = imported(helpers, tmp_path, tmp_path / "ours")
    assert ours.config.mlp == "none" and largest_difference(ours, lambda idx: theirs(idx).logits) < 1e-4
    made = theirs.generate(IDX[:1, :20], max_new_tokens=20, do_sample=False, eos_token_id=-1)
    assert torch.equal(ours.generate(IDX[:1, :20], 20, temperature=0), made)


def save_as_the_authors(folder, **ssm):
    """A folder of state-spaces/mamba: a pickle, its output layer a second time, rows of the vocabulary rounded up."""
    theirs = save("Mamba-2", folder, dict(tie_word_embeddings=True, vocab_size=304))
    (folder / "model.safetensors").unlink()
    tensors = {name.replace("embeddings.", "embedding."): tensor for name, tensor in theirs.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    about = dict(d_model=32, n_layer=2, vocab_size=299, attn_layer_idx=[], attn_cfg={}, rms_norm=True, d_intermediate=0)
    about["ssm_cfg"] = dict(layer="Mamba2", d_state=8, headdim=16) | ssm
    (folder / "config.json").write_text(json.dumps(about))
    return theirs


@torch.no_grad()
def test_a_mamba2_as_its_authors_publish_it_is_read_from_its_pickle(helpers, tmp_path):
    theirs = save_as_the_authors(tmp_path)
    ours = imported(helpers, tmp_path, tmp_path / "ours")
    assert ours.config.vocab_size == 299 and ours.wte.weight.shape == (304, 32)
    assert largest_difference(ours, lambda idx: theirs(idx).logits[..., :299]) < 1e-4
