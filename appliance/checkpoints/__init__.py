"""Checkpoint sources and downloads. Each kind of source has its own module; all share these steps:

    order ─▶ store ─▶ listing ─▶ shelf        download spec, source, its files, cache directory
                        ├─▶ facts             small files and headers of weights, enough for a plan
                        └─▶ fetch             the other files: retries, resumption, checksums, a lock

This package imports neither torch nor a client library before a source needs it.
"""
