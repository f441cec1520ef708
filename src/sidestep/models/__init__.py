"""Models and tokenizers: checked first, then loaded; and the tiny model that ships here.

`packaged`, `addition` and `folders` load no torch.
"""
