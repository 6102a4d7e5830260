"""
Named behind another config: Muon for the matrices of its blocks, AdamW at its learning rate for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/pretrain/124M.py config/muon.py --out_dir=out/muon
    python train.py config/wikitext103/base.py config/muon.py --out_dir=out/wikitext103/muon

Muon's rate is four times AdamW's, 2.4e-3 at 768 channels. README.md beside this file has the sweep by width that it
follows, and what 1,024 and 2,048 channels take. Result: not run behind these configs.
"""

optimizer = "muon"
muon_lr_scale = 4.0
qk_norm = True
