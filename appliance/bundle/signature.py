"""Ed25519 signatures of the index, with keys of `ssh-keygen -t ed25519` or PEM files.

The signed bytes begin with a context, so that a signature is valid for bundles only.
"""

import base64
import binascii
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from appliance.bundle.index import BundleError, OptionError

CONTEXT = b"slipway bundle 1\n"


def sign(index: bytes, key: Path) -> bytes:
    """Return the signature file of an index. Raises OptionError and OSError."""
    data = key.read_bytes()
    load = load_ssh_private_key if b"OPENSSH PRIVATE KEY" in data else load_pem_private_key
    try:
        private = load(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise OptionError(f"{key}: not a private key without a passphrase: {error}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise OptionError(f"{key}: not an Ed25519 key; create one with `ssh-keygen -t ed25519`")
    return base64.b64encode(private.sign(CONTEXT + index)) + b"\n"


def verify(index: bytes, signature: bytes | None, key: Path) -> None:
    """Raises BundleError if the signature is missing or not of this public key, OptionError for a file without such a
    key, and OSError."""
    if signature is None:
        raise BundleError(f"is not signed, but {key} is required")
    data = key.read_bytes()
    try:
        public = load_pem_public_key(data) if data.startswith(b"-----") else load_ssh_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise OptionError(f"{key}: not a public key: {error}") from error
    if not isinstance(public, Ed25519PublicKey):
        raise OptionError(f"{key}: not an Ed25519 key")
    try:
        public.verify(base64.b64decode(signature.strip(), validate=True), CONTEXT + index)
    except (InvalidSignature, binascii.Error) as error:
        raise BundleError(f"the signature is not valid for {key}") from error
