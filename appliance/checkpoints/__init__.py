"""Where a checkpoint comes from. One file for each kind; what they share:

    order ─▶ store ─▶ listing ─▶ shelf        what is wanted, where it lies, its files, where they go
                        ├─▶ facts             small files and the headers of weights: enough for a plan
                        └─▶ fetch             the rest: attempts, resumption, checksums, a lock

No torch here, and no client library before a source needs it.
"""
