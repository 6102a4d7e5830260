"""
A gate on a published model that starts at the same function, trained on your text: SmolLM2-135M on a laptop.

    make model                                                       # out/smollm2/model.gguf
    python data/text/prepare.py book.txt --tokenizer=out/smollm2 --out_dir=data/smollm2
    python train.py config/late_gate.py
    python train.py config/late_gate.py --gate=none --out_dir=out/plain
    python meters.py --checkpoint=out/smollm2,out/plain,out/late_gate --dataset=data/smollm2
"""
