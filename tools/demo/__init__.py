"""The demo model's skills, tokenizer and training network, put together by `tools/train_demo.py`."""
