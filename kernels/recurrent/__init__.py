"""Operations of recurrent layers: short convolutions, the delta rule, selective scans and gated norms.

common.py documents the arguments that all operations with a state share.
"""
