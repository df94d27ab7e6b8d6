"""Checkpoint sources and downloads. Each kind of source has its own module; all share these steps:

    download spec ─▶ store ─▶ listing ─▶ cache directory
                                 ├─▶ facts     small files and headers of weights, enough for a plan
                                 └─▶ fetch     the other files: retries, resumption, checksums, a lock

A store is a source, such as a repository or a bucket; a listing names the files of one version. This package imports
neither torch nor a client library before a source needs it.
"""
