"""The demo model's skills, tokenizer and training network; `tools/demo_corpus.py` and `tools/train_demo.py` put them together."""
