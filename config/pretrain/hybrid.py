"""
Named behind one of the others: three layers of Gated DeltaNet with their published gate, then gated softmax, as in
Qwen3-Next. Result: not run.

    python train.py config/pretrain/124M.py config/pretrain/hybrid.py --out_dir=out/pretrain/124M_hybrid
"""

attention = "gated_deltanet,gated_deltanet,gated_deltanet,softmax"
gate = "native,native,native,elementwise"
