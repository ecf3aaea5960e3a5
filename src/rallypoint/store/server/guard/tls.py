"""TLS with a proof of the job's secret: one end of a connection, bytes in and bytes out, without a socket.

A server's certificate is the user's own, or made at the start. The latter proves nothing by itself: it gives
the connection its keys, and the proofs of the secret are bound to it (`store/wire/preface.py`). So nobody has
to sign it, and it is not kept.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from rallypoint.errors import AccessError, UsageError
from rallypoint.store.server.guard.secret import Secret, Token
from rallypoint.store.wire.preface import NONCE_BYTES, ClientPreface, Right, ServerPreface

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
_RECORD_BYTES: Final = 1 << 14

Preface = ClientPreface | ServerPreface


class Channel:
    """Takes the received bytes, and gives those to send. It is of no use after an error."""

    def __init__(
        self, context: ssl.SSLContext, preface: Callable[[bytes], Preface], name: str | None = None
    ) -> None:
        """`preface` makes the preface, given the hash of the other end's certificate, if that has one.

        `name`: for a client, the host name that it has connected to.
        """
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = name is None
        self._tls = context.wrap_bio(
            self._coming, self._going, server_side=is_server, server_hostname=None if is_server else name
        )
        self._make_preface = preface
        self._preface: Preface | None = None
        self.right: Right | None = None
        """For a server: the right that the client has proved."""
        self.has_ended = False
        """Whether the other end sends nothing more."""

    @property
    def is_open(self) -> bool:
        """Whether both ends have proved the secret."""
        return self._preface is not None and self._preface.is_done

    def begin(self) -> bytes:
        """For a client: what to send first."""
        self.receive(b"")
        return self.take()

    def receive(self, data: bytes) -> bytes:
        """Take received bytes, and return the plain text in them. Send what `take` gives next.

        AccessError if the other end cannot prove the secret, or breaks TLS.
        """
        self._coming.write(data)
        try:
            if self._preface is None and not self._shake_hands():
                return b""
            said = self._read()
            preface = self._preface
            if preface is None or preface.is_done or not said:
                return said
            try:
                answer, rest = preface.receive(said)
            except AccessError as error:
                self._write(error.replies)
                error.replies = b""
                raise
            self._write(answer)
            if isinstance(preface, ServerPreface):
                self.right = preface.right
        except ssl.SSLCertVerificationError as error:
            raise AccessError(
                f"its certificate is refused: {error.verify_message}",
                hint="RALLYPOINT_TLS_CA has to name who has signed it, and it has to be valid and to name "
                "this host",
            ) from error
        except ssl.SSLError as error:
            raise AccessError(_words_for(error)) from error
        return rest

    def seal(self, data: bytes) -> bytes:
        """The bytes to send for a plain text."""
        self._write(data)
        return self.take()

    def take(self) -> bytes:
        """The bytes to send by now."""
        return self._going.read()

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        shown = self._tls.getpeercert(binary_form=True)
        self._preface = self._make_preface(_hash_of(shown) if shown else b"")
        self._write(self._preface.begin())
        return True

    def _read(self) -> bytes:
        pieces = []
        try:
            while piece := self._tls.read(_RECORD_BYTES):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.has_ended = True
        return b"".join(pieces)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]


def server_channel(tls: ServerTls, secret: Secret) -> Channel:
    return Channel(
        tls.context, lambda _: ServerPreface(secret.keys, tls.certificate, os.urandom(NONCE_BYTES))
    )


def client_channel(host: str, secret: Secret | Token) -> Channel:
    """For a client that has connected to `host`."""

    def preface(certificate: bytes) -> ClientPreface:
        return ClientPreface(*secret.proof, certificate, os.urandom(NONCE_BYTES))

    return Channel(_client_context(os.environ.get(AUTHORITY_VARIABLE)), preface, host.strip("[]"))


def _words_for(error: ssl.SSLError) -> str:
    reason = (error.reason or "unknown error").replace("_", " ").lower()
    if reason.endswith("alert access denied"):
        return "it takes no TLS: it has no secret, or RALLYPOINT_INSECURE is set for this process alone"
    if reason in ("wrong version number", "record layer failure"):
        return "it speaks no TLS: it is no store of Rallypoint's, or has no secret"
    return f"TLS failed: {reason}"


# Certificates


class ServerTls(NamedTuple):
    """A server's part of TLS."""

    context: ssl.SSLContext
    certificate: bytes
    """The hash of its certificate."""


def server_tls() -> ServerTls:
    """With the certificate that the variables name, or a new one. UsageError if that fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing is resumed, and nothing is sent unasked
    certificate, key = os.environ.get(CERTIFICATE_VARIABLE), os.environ.get(KEY_VARIABLE)
    try:
        if certificate:
            context.load_cert_chain(certificate, key or None, password=_no_password)
            return ServerTls(context, _hash_of_pem(Path(certificate).read_text("ascii")))
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


@lru_cache(maxsize=1)  # to make one takes as long as a fifth of a handshake
def _client_context(authority: str | None) -> ssl.SSLContext:
    """Certificates are verified if `authority` names the file of those who sign them."""
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


def _hash_of(certificate: bytes) -> bytes:
    """As the proofs use it."""
    return sha256(certificate).digest()


def _hash_of_pem(pem: str) -> bytes:
    """Of the first certificate in a text: the server's own."""
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    return _hash_of(ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(_END, begin) + len(_END)] + "\n"))


def _load(context: ssl.SSLContext, pem: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="rallypoint-") as folder:  # only its owner may enter it
        path = Path(folder, "certificate.pem")
        path.write_text(pem, "ascii")  # ssl reads files alone
        context.load_cert_chain(path)
    return _hash_of_pem(pem)


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
