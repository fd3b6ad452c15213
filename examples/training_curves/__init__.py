"""Small models trained on real text with our attention and with torch's, from the same seeds: are the curves one?

`text.py` what is learnt, `models.py` a GPT and a T5-like model in plain PyTorch that are told how to attend,
`ways.py` the ways to attend, `run.py` one training, `command.py` several and what their losses differ by.
"""
