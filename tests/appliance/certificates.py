"""Self-signed certificates for tests."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificate(folder: Path, name: str, days: float = 30.0, passphrase: bytes = b"") -> None:
    """Write `<name>.crt` and `<name>.key`, valid for localhost and 127.0.0.1 for the given number of days."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.DNSName("localhost")]
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=60))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    for suffix, data in (
        ("crt", built.public_bytes(serialization.Encoding.PEM)),
        ("key", key.private_bytes(*form, hidden)),
    ):
        # Replace the file atomically, like certificate renewal tools.
        (folder / f"{name}.{suffix}.new").write_bytes(data)
        (folder / f"{name}.{suffix}.new").replace(folder / f"{name}.{suffix}")
