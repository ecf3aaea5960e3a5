"""Random scripts for `fuzz_cores` and texts for `fuzz_texts`, and new ones made of those that are known."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from ends import BEAT, BYE, CALLED, DONE, PRESENT, REFUSED, UNCHANGED, blob, end_of_wait, i64, session, u64
from fuzz_cores import STAGES, Script, Step
from fuzz_requests import BOUNDARIES, mutate_bytes, one_request, relayed_requests, short_value
from fuzz_texts import TEXTS, WORDS

KEYS: Final = [
    *(
        b"/k1",
        b"/k2",
        b"/k3",
        b"/k9",
        b"/rallypoint/roll",
        b"/default_pg/0//cpu//0/1",
        b"/rallypoint/meeting/j/roster",
    ),
    b"/number",
]
SIZES: Final = (1, 2, 2, 3, 0, -1)
LONGEST: Final = 20
"""Steps of a script."""
MOST_BYTES: Final = 6_000

_CLIENTS: Final = {"send": 60, "batch": 25, "drop": 3, "raw": 2, "end": 3, "close": 4, "unread": 4, "time": 6}
_VERBS: Final = {
    "store": _CLIENTS,
    "relay": _CLIENTS | {"lose": 6},
    "upstream": _CLIENTS | {"items": 60, "up": 4, "lose": 4},
}
"""What happens in a script, and how often."""


def make_script(rng: Random, target: str, known: Sequence[Script]) -> Script:
    """A new script: mostly one that is known, with some changes."""
    if not known or rng.random() < 0.03:
        count = rng.randrange(1, 9) if target in STAGES else 1
        return [_step(rng, target) for _ in range(count)]
    script = list(rng.choice(known))
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        script = _changed(rng, target, script, known)
    return script[:LONGEST] or [_step(rng, target)]


def _step(rng: Random, target: str) -> Step:
    if target not in STAGES:
        kind = "log" if target == "logs" else rng.choice([kind for kind in TEXTS if kind != "log"])
        return Step(kind, 0, rng.choice(TEXTS[kind].seeds))
    verb = rng.choices(list(_VERBS[target]), list(_VERBS[target].values()))[0]
    return Step(verb, rng.randrange(5), _data(rng, verb))


def _data(rng: Random, verb: str) -> bytes:
    requests = [one_request(rng, KEYS, SIZES, short_value) for _ in range(rng.choice((1, 1, 2, 4)))]
    if verb in ("batch", "drop"):
        requests += relayed_requests(rng, KEYS) if rng.random() < 0.6 else []
        return b"".join(map(blob, requests))
    if verb in ("send", "raw"):
        requests += (
            [PRESENT, BYE, BEAT, session(bytes(16), keep=rng.choice((0, 900)))] if rng.random() < 0.05 else []
        )
        return b"".join(requests)
    if verb in ("items", "up"):
        return b"".join(_item(rng) for _ in range(rng.choice((1, 1, 2, 4))))
    return bytes(rng.randrange(200)) if verb == "unread" else b""


def _item(rng: Random) -> bytes:
    """An answer to one of a relay's requests: one of those that fit some of them."""
    status, content = rng.choice(
        (
            (DONE, i64(rng.randrange(-1, 4))),
            (DONE, end_of_wait(rng.randrange(4))),
            (DONE, blob(short_value(rng))),
            (DONE, b"\x00"),
            (DONE, i64(1) + blob(b"value")),
            (CALLED, end_of_wait(rng.randrange(3))),
            (REFUSED, b"no"),
            (UNCHANGED, b""),
            (4, b""),
            (DONE, b""),
        )
    )
    tag = rng.choices((rng.randrange(12), (1 << 64) - 1), (95, 5))[0]
    return u64(tag) + bytes([status]) + blob(content)


def _changed(rng: Random, target: str, script: Script, known: Sequence[Script]) -> Script:
    if target not in STAGES or rng.random() < 0.4:
        at = rng.randrange(len(script))
        return [*script[:at], _changed_step(rng, target, script[at], known), *script[at + 1 :]]
    at, other = rng.randrange(len(script) + 1), rng.choice(known)
    begin = rng.randrange(len(other))
    choice = rng.randrange(6)
    if choice == 0:
        return [*script[:at], _step(rng, target), *script[at:]]
    if choice == 1 and len(script) > 1:
        return [*script[:at], *script[at + 1 :]]
    if choice == 2:  # go on as another one does
        return [*script[:at], *other[begin:]]
    if choice == 3:  # do a part of another one in between
        return [*script[:at], *other[begin : begin + rng.randrange(1, 5)], *script[at:]]
    if choice == 4:  # do a part twice
        return [*script[:at], *script[max(at - rng.randrange(1, 5), 0) : at], *script[at:]]
    return [*script, _step(rng, target)]


def _changed_step(rng: Random, target: str, step: Step, known: Sequence[Script]) -> Step:
    choice = rng.random()
    if target not in STAGES:
        return step._replace(data=_changed_text(rng, step, known))
    if choice < 0.15:
        return step._replace(who=rng.randrange(5))
    if choice < 0.5 and step.data and step.verb != "unread":
        more = _data(rng, step.verb)
        return step._replace(data=step.data + more if rng.random() < 0.7 else more + step.data)
    if choice < 0.6:  # what another one says here
        same = [each for each in rng.choice(known) if each.verb == step.verb]
        return step._replace(data=step.data + rng.choice(same).data) if same else step
    data = bytearray(step.data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        mutate_bytes(rng, data)
    return step._replace(data=bytes(data[:MOST_BYTES]))


def _changed_text(rng: Random, step: Step, known: Sequence[Script]) -> bytes:
    """A text with a word of it exchanged, with a part of another one, or with bytes changed."""
    data = bytearray(step.data)
    choice = rng.random()
    at = rng.randrange(len(data) + 1)
    if choice < 0.5:
        data[at : at + rng.choice((0, 0, 1, 2, 8))] = rng.choice(WORDS)
    elif choice < 0.6:
        data[at : at + rng.choice((0, 1, 8))] = str(rng.choice(BOUNDARIES)).encode()
    elif choice < 0.75:
        other = rng.choice(known)[0].data
        begin = rng.randrange(len(other) + 1)
        data[at:] = other[begin : begin + rng.randrange(1, 300)] + (data[at:] if rng.random() < 0.5 else b"")
    else:
        mutate_bytes(rng, data)
    return bytes(data[:MOST_BYTES])


# In files: a line for each step, so that a person can read and change it


def to_text(target: str, script: Script) -> str:
    return "\n".join([target, *(f"{step.verb} {step.who} {step.data.hex()}" for step in script), ""])


def from_text(text: str) -> tuple[str, Script]:
    target, *lines = text.splitlines()
    steps = (line.split(" ") for line in lines)
    return target, [Step(verb, int(who), bytes.fromhex(data)) for verb, who, data in steps]
