"""
Does it matter that packed documents are read apart? A look: with borders between the documents of a row, and without.

4 layers x 128, rows of 1,024 tokens of 4,096 ids, 2,048 tokens a step, 3,000 steps of data/pylib, softmax and Gated
DeltaNet. "apart" is mask_documents: rows are filled with whole documents, and none reads another. "running" is the
documents end to end, cut into rows anywhere, where a token reads what is before it in the row, whatever document that
is of. Both read 6.1 million tokens.

The outcome is the loss on whole documents: each document of the validation split is read alone, in windows of 1,024
tokens, by both arms (the score "documents", in nats a token). The loss on running text is looked at, too.

Two seeds decide nothing: every claim is exploratory, and its interval says how little is known. Declared before the
first run: reading apart is expected to lower the loss on whole documents, since it is what that loss asks for; by how
much, and whether a recurrent mixer gains more than softmax, is the question. 8 runs, about 4 core-hours.
"""

name = "packing"
metric = "val_loss"
seeds = [91, 92]

mixers = ["softmax", "gated_deltanet"]
variants = {
    "running": {},
    "apart": {"mask_documents": True},
}

first_arms = ["softmax running", "softmax apart"]

prepare = "pylib"
data = {"tokenizer": "bpe:4096", "val_fraction": 0.02, "seed": 0}
pair_spread = 0.02  # in nats, as horizon.py assumes

scores = {
    "documents": {"mask_documents": True, "batch_size": 8},
    "running text": {"mask_documents": False, "batch_size": 8},
}

claim_base = {"other_than": 0, "exploratory": True, "of": ["scores", "documents", "loss"]}
claims = {
    "reading documents apart changes the loss on whole documents": {
        "contrast": "running - apart",
        "pool": mixers,
    },
    "it changes MIXER's": {"contrast": "running - apart", "each": mixers},
    "it changes that of gated_deltanet by more than softmax's": {
        "contrast": "running - apart",
        "pool": "gated_deltanet - softmax",
    },
    "it changes the loss on running text": {
        "contrast": "running - apart",
        "pool": mixers,
        "of": ["scores", "running text", "loss"],
    },
}

base = {
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 4,
    "block_size": 1024,
    "batch_size": 2,
    "max_iters": 3000,
    "warmup_iters": 150,
    "learning_rate": 3e-3,
    "eval_interval": 750,
    "eval_tokens": 50_000,  # of the curve; the scores read the whole split
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
}
