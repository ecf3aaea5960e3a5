"""The certificate of a server: the user's own, or one that is made at the start.

One that is made proves nothing by itself. It gives the connection its keys, and the proofs of the secret are
bound to it (`store/wire/preface.py`). So nobody has to sign it, and it is forgotten with the process.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from rallypoint.errors import UsageError

CERTIFICATE_VARIABLE: Final = "RALLYPOINT_TLS_CERT"
KEY_VARIABLE: Final = "RALLYPOINT_TLS_KEY"
AUTHORITY_VARIABLE: Final = "RALLYPOINT_TLS_CA"

_DAYS: Final = 3650
_MAKE: Final = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-subj", "/CN=rallypoint", "-days", str(_DAYS), "-keyout", "-"),
)
_MAKE_SECONDS: Final = 30.0
_END: Final = "-----END CERTIFICATE-----"


class ServerTls(NamedTuple):
    """What a server needs for TLS."""

    context: ssl.SSLContext
    certificate: bytes
    """The hash of its certificate."""


def server_tls(environ: Mapping[str, str] = os.environ) -> ServerTls:
    """With the user's certificate, if the variables name one, or a new one. UsageError if neither works."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing is resumed, and nothing is sent unasked
    certificate, key = environ.get(CERTIFICATE_VARIABLE), environ.get(KEY_VARIABLE)
    try:
        if certificate:
            context.load_cert_chain(certificate, key or None, password=_no_password)
            return ServerTls(context, _hash_of(Path(certificate).read_text("ascii")))
        return ServerTls(context, _load(context, _make()))
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if not certificate:
            raise UsageError(f"no certificate could be made, as TLS needs it: {reason}") from error
        raise UsageError(
            f"the certificate {certificate!r} with the key {key or certificate!r} cannot be used: {reason}",
            hint=f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} name files in PEM format; without these "
            "variables a certificate is made at the start",
        ) from error


def client_context(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """For clients: certificates are verified if RALLYPOINT_TLS_CA names who signs them."""
    return _client_context(environ.get(AUTHORITY_VARIABLE))


@lru_cache(maxsize=1)  # to make one takes as long as a fifth of a handshake
def _client_context(authority: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not authority:  # the proof of the secret decides
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{authority!r} cannot be used: {error.strerror or error}",
            hint=f"{AUTHORITY_VARIABLE} names a file in PEM format with the certificates of those who sign",
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def hash_of(certificate: bytes) -> bytes:
    """The hash of a certificate, as the proofs have it."""
    return sha256(certificate).digest()


def _hash_of(pem: str) -> bytes:
    """That of the first one in a text: the server's own."""
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    return hash_of(ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(_END, begin) + len(_END)] + "\n"))


def _load(context: ssl.SSLContext, pem: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="rallypoint-") as folder:  # only its owner may enter it
        path = Path(folder, "certificate.pem")
        path.write_text(pem, "ascii")  # ssl reads files alone
        context.load_cert_chain(path)
    return _hash_of(pem)


def _make() -> str:
    """A new key and its certificate, in PEM format."""
    try:
        from cryptography import x509  # noqa: F401 - only to see whether it is there
    except ImportError:
        return _make_by_program()
    return _make_by_package()


def _make_by_program() -> str:
    try:
        made = subprocess.run(_MAKE, capture_output=True, text=True, timeout=_MAKE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"no certificate could be made, as TLS with the job's secret needs it: {error}",
            hint="pip install '.[tls]' in a clone of Rallypoint, or install the program openssl, "
            f"or name a certificate of your own in {CERTIFICATE_VARIABLE} and {KEY_VARIABLE}",
        ) from error
    return made.stdout


def _make_by_package() -> str:
    from datetime import datetime, timedelta, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rallypoint")])
    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(days=1),  # clocks differ
        not_valid_after=now + timedelta(days=_DAYS),
    )
    certificate = builder.sign(key, hashes.SHA256())
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, *form)
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii")
