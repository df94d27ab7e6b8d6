"""The engine: scheduler, paged KV cache, models, kernels, one loop.

One word for one thing, everywhere:

block     equal piece of the KV pool, `block_tokens` tokens of every layer of one group
page      the bytes of one block in one layer
group     layers that share a block table, because they keep the same kind of state
row       one request's part of one step
slot      a request's place in the worker's request table, fixed while it runs
source    a tensor of the checkpoint
rank      one process of a tensor-parallel group
step      one run of the model over a plan's rows
"""
