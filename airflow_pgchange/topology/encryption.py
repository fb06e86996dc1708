"""TLS settings of the relay."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from airflow_pgchange.errors import InvalidArgument


@dataclass(frozen=True)
class Encryption:
    """A TLS context and its channel binding data.

    ``binding`` is the certificate's hash as RFC 5929's tls-server-end-point; None if the RFC defines no hash for its
    signature algorithm. ``required``: refuse clients that do not encrypt.
    """

    context: ssl.SSLContext
    binding: bytes | None
    required: bool = False


def load_encryption(certificate: Path, key: Path, *, required: bool = False) -> Encryption:
    """Load a certificate and its key from two PEM files. Raises InvalidArgument if they are not a valid pair."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        binding = _binding(x509.load_pem_x509_certificate(certificate.read_bytes()))
        return Encryption(context, binding, required)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{certificate} and {key} are not a certificate and its key: {error}"
        ) from error


def _binding(certificate: x509.Certificate) -> bytes | None:
    algorithm = certificate.signature_hash_algorithm
    if algorithm is None:
        return None
    weak = isinstance(algorithm, hashes.MD5 | hashes.SHA1)
    return certificate.fingerprint(hashes.SHA256() if weak else algorithm)
