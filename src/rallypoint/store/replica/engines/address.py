"""Which engine, where, and for which job: the URLs that `--engine` takes.

    etcd://a,b,c:2379/job                    etcds:// for TLS; ?ca=FILE&cert=FILE&key=FILE name its files
    redis://host:6379/0?job=NAME             rediss:// for TLS; 0 is the number of the database
    redis+sentinel://a,b,c:26379/mymaster/0?job=NAME     the hosts are Sentinels; rediss+sentinel:// for TLS

Hosts are names, IPv4 addresses, or IPv6 addresses in brackets, with a port each, or with the last one's, or
with the engine's own. User and password stand in front of them (`user:password@`, percent-encoded). The
password may also be in a file (`?password-file=FILE`) or in the variable RALLYPOINT_ENGINE_PASSWORD: other
users of the machine see neither. Sentinels may have a password of their own: `?sentinel-password-file=FILE`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote

from rallypoint.errors import UsageError
from rallypoint.store.machine.addresses import format_address

PASSWORD_VARIABLE: Final = "RALLYPOINT_ENGINE_PASSWORD"  # noqa: S105
PASSWORD_HINT: Final = (
    f"the user belongs into the URL (USER@HOST), the password into the variable {PASSWORD_VARIABLE}, or into "
    "a file: ?password-file=FILE"
)
DEFAULT_JOB: Final = "rallypoint"

ETCD: Final = "etcd"
REDIS: Final = "redis"
SENTINEL: Final = "redis+sentinel"

_PORTS: Final = {ETCD: 2379, REDIS: 6379, SENTINEL: 26379}
_SCHEMES: Final = {
    **{kind: (kind, False) for kind in _PORTS},
    **{secure: (kind, True) for secure, kind in (("etcds", ETCD), ("rediss", REDIS))},
    "rediss+sentinel": (SENTINEL, True),
}
_FILES: Final = ("ca", "cert", "key")
_OPTIONS: Final = ("job", "password-file", "sentinel-password-file", *_FILES)
_URL: Final = re.compile(r"([a-z+]+)://(?:([^@/?#]*)@)?([^@/?#]*)(/[^@?#]*)?(?:\?([^@#]*))?")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+)(?::([0-9]{1,5}))?")
_HINT: Final = "write etcd://a,b,c:2379/JOB, redis://HOST/0?job=JOB or redis+sentinel://a,b,c/MASTER?job=JOB"
_ENCODING: Final = (
    "; in a user, a password or a name, write %40 for @, %2F for /, %3F for ?, %23 for #, %25 for %"
)


@dataclass(frozen=True)
class Tls:
    """The files of an encrypted connection, PEM. Without `ca`, the certificates of the system count."""

    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True)
class EngineAddress:
    """What a URL says. The password is in no text of it."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    """IPv6 addresses without brackets."""
    job: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: Tls | None = None
    database: int = 0
    """Of Redis."""
    master: str = ""
    """The name by which Sentinels know it."""
    sentinel_password: str = field(default="", repr=False)
    """What the Sentinels themselves ask for; empty: nothing."""

    @property
    def places(self) -> str:
        """All hosts with their ports, for messages."""
        return ", ".join(format_address(*each) for each in self.hosts)

    def __str__(self) -> str:
        master = f", {self.master}" if self.master else ""
        return f"{self.kind} at {self.places}{master}, job {self.job}"


def parse_address(url: str, environ: Mapping[str, str] | None = None) -> EngineAddress:
    """Read a URL. UsageError says what is wrong with it, without the password."""
    match = _URL.fullmatch(url.strip())
    if match is None or match[1] not in _SCHEMES:
        raise UsageError(f"{_without_password(url)!r} is no URL of an engine", hint=_HINT + _ENCODING)
    shown = _without_password(url)
    kind, is_secure = _SCHEMES[match[1]]
    options = _read_options(match[5] or "", shown)
    user, password = _read_user(match[2] or "", options, os.environ if environ is None else environ, shown)
    files = Tls(*(options.get(name, "") for name in _FILES))
    if bool(files.cert) != bool(files.key):
        raise UsageError(f"{shown!r} names one of cert and key", hint="a certificate and its key go together")
    sentinel_file = options.get("sentinel-password-file")
    if sentinel_file is not None and kind != SENTINEL:
        raise UsageError(f"{shown!r} names no Sentinels", hint="sentinel-password-file is for their password")
    hosts = _read_hosts(match[3], _PORTS[kind], shown)
    if kind == REDIS and len(hosts) > 1:
        hint = "to know which of several is the master takes Sentinels: redis+sentinel://a,b,c/mymaster"
        raise UsageError(f"{shown!r} names several servers, where Redis has one host", hint=hint)
    words = [unquote(each) for each in (match[4] or "").strip("/").split("/") if each]
    job, master, database = _read_path(kind, words, options, shown)
    return EngineAddress(
        kind=kind,
        hosts=hosts,
        job=job,
        user=user,
        password=password,
        tls=files if is_secure or files != Tls() else None,
        database=database,
        master=master,
        sentinel_password=_read_file(sentinel_file, shown) if sentinel_file is not None else "",
    )


def _without_password(url: str) -> str:
    """The URL as it may be shown: whatever may be a user or a password is left out, and all options."""
    without_user = re.sub(r"^([a-z+]*:)?/*.*@", r"\1//***@", url.strip(), flags=re.DOTALL)
    shown, question, _ = without_user.partition("?")
    shown = re.sub(r"//:[^@/]*", "//***", shown)  # a password without its host
    return f"{shown}?…" if question else shown


def _read_options(text: str, shown: str) -> dict[str, str]:
    pairs = parse_qsl(text, keep_blank_values=True)
    options = dict(pairs)
    for name in options:
        if name not in _OPTIONS:
            hint = f"there are {', '.join(_OPTIONS)}"
            raise UsageError(f"{shown!r} has the unknown option {name!r}", hint=hint)
    if len(options) < len(pairs):
        raise UsageError(f"{shown!r} has an option twice", hint="give each once")
    return options


def _read_user(
    text: str, options: Mapping[str, str], environ: Mapping[str, str], shown: str
) -> tuple[str, str]:
    user, _, password = text.partition(":")
    file = options.get("password-file")
    if file is not None and password:
        raise UsageError(f"{shown!r} has a password and a file of it", hint="give one of them")
    if file is not None:
        password = _read_file(file, shown)
    else:
        password = unquote(password) or environ.get(PASSWORD_VARIABLE, "")
    return unquote(user), password


def _read_file(path: str, shown: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the password-file of {shown!r} cannot be read: {reason}") from error


def _read_path(kind: str, words: list[str], options: Mapping[str, str], shown: str) -> tuple[str, str, int]:
    """The job, the master's name and the number of the database."""
    job = options.get("job", "")
    if kind == ETCD:
        if job and words:
            raise UsageError(f"{shown!r} names a job twice", hint="name it behind the hosts, or by ?job=")
        return job or "/".join(words) or DEFAULT_JOB, "", 0
    master = words.pop(0) if kind == SENTINEL and words else ""
    if kind == SENTINEL and not master:
        hint = "write redis+sentinel://a,b,c/mymaster"
        raise UsageError(f"{shown!r} does not say which master the Sentinels watch", hint=hint)
    if len(words) > 1 or not all(re.fullmatch(r"[0-9]{1,5}", each) for each in words):
        hint = "only the number of a database may stand there; name the job by ?job=NAME"
        raise UsageError(f"{shown!r} has a path that Redis has no use for", hint=hint)
    return job or DEFAULT_JOB, master, int(words[0]) if words else 0


def _read_hosts(text: str, default: int, shown: str) -> tuple[tuple[str, int], ...]:
    """Hosts with their ports. The port of the last one is that of all that have none."""
    found = [_HOST.fullmatch(each.strip()) for each in text.split(",")]
    matches = [each for each in found if each is not None]
    if len(matches) < len(found) or any(not 0 < int(each[2] or default) < 65_536 for each in matches):
        hint = "write hosts with commas between them, IPv6 in brackets, and ports from 1 to 65535"
        raise UsageError(f"{shown!r} has a host that is none", hint=hint)
    common = int(matches[-1][2] or default)
    return tuple((each[1].strip("[]"), int(each[2] or common)) for each in matches)
