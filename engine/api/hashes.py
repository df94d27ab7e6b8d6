"""Hashes of prompt blocks: hash i covers every token up to the end of block i, so equal hashes mean equal prefixes."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from hashlib import blake2b

DIGEST_BYTES = 16


def root_hash(*parts: bytes) -> bytes:
    """Return the start of a hash chain: everything besides the tokens that block contents depend on (salt, adapter,
    RoPE variant)."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


NO_MARKS: Mapping[int, bytes] = {}


def extend(
    chain: list[bytes], root: bytes, tokens: Items[int], block_tokens: int, marks: Mapping[int, bytes] = NO_MARKS
) -> None:
    """Append the hashes of the full blocks of `tokens` that `chain` does not have yet. marks: further
    input of a block's hash, by its number, such as the digests of images."""
    for index in range(len(chain), len(tokens) // block_tokens):
        digest = blake2b(chain[-1] if chain else root, digest_size=DIGEST_BYTES)
        digest.update(array("I", tokens[index * block_tokens : (index + 1) * block_tokens]).tobytes())
        digest.update(marks.get(index, b""))
        chain.append(digest.digest())
