"""Certificates for tests."""

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


def write_authority(folder: Path) -> tuple[Path, Path, Path]:
    """Write the certificate of an authority, and a certificate for localhost that it has signed, with its key.

    Return the three files. Clients that use rustls refuse the certificate of an authority as that of a server."""
    now, keys = datetime.datetime.now(datetime.UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "server")]
    files = folder / "authority.pem", folder / "server.pem", folder / "server.key"
    for file, name, key in zip(files, names, keys, strict=False):
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=key is keys[0], path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(keys[0], hashes.SHA256())
        )
        file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files[2].write_bytes(keys[1].private_bytes(*form))
    return files
