"""For the tests of `rallypoint explain`: a small knowledge base, and logs as texts."""

from __future__ import annotations

import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

from rallypoint.diagnose.explain import Explanation, Log, explain
from rallypoint.diagnose.explain.knowledge import Cause, load

KNOWN = r"""
[[cause]]
id = "port-in-use"
title = "The port is taken"
part = "store"
role = "cause"
sure = "certain"
example = "EADDRINUSE"
patterns = ['''EADDRINUSE.*?port (?P<port>\d+)''', '''EADDRINUSE''']
what = "Another process holds port[ {port}]."
why = "Two processes cannot listen on one port."
do = ["Use another port[ than {port}].", "End the other process."]
sources = ["pytorch/pytorch#73320"]

[[cause]]
id = "high-port"
title = "The port is one that the system hands out"
part = "store"
role = "cause"
sure = "likely"
example = "EADDRINUSE on port 40000"
patterns = ['''EADDRINUSE.*?port (?P<port>\d+)''']
where = ["port >= 32768"]
over = ["port-in-use"]
what = "Port {port} may be taken at any time."
why = "The system gives such ports to outgoing connections."
do = ["Use a port below 32768."]
sources = ["NVIDIA/enroot#243"]

[[cause]]
id = "gpu-memory"
title = "The memory of a GPU is full"
part = "memory"
role = "cause"
sure = "certain"
example = "CUDA out of memory"
patterns = ['''CUDA out of memory(?:\. Tried to allocate (?P<size>[\d.]+ \w+))?''']
what = "A GPU had no room[ for {size}]."
why = "What a rank wants to keep does not fit."
do = ["Use a smaller batch."]
sources = ["pytorch/pytorch#1"]

[[cause]]
id = "stale-nccl"
title = "NCCL found the id of an earlier try"
part = "nccl"
role = "cause"
sure = "possible"
example = "ncclInternalError"
patterns = ['''ncclInternalError''']
context = ['''stale id''']
what = "The id was stale."
why = "The store is shared."
do = ["Start again."]
sources = ["pytorch/pytorch#2"]

[[cause]]
id = "peer-gone"
title = "A connection to another rank was lost"
part = "gloo"
role = "symptom"
sure = "certain"
example = "Broken pipe"
patterns = ['''Connection closed by peer''', '''Broken pipe''']
what = "A rank lost its connection to another one."
why = "The other rank ended."
do = ["Look at the logs of the other ranks."]
sources = ["pytorch/pytorch#123969"]

[[cause]]
id = "child-failed"
title = "torchrun ended because a rank failed"
part = "launcher"
role = "wrapper"
sure = "certain"
example = "ChildFailedError"
patterns = ['''ChildFailedError''', '''failed \(exitcode: \d+\)''']
what = "A rank failed."
why = "torchrun says no more than that."
do = ["Look above."]
sources = ["reproduced with torch 2.13.0"]

[[cause]]
id = "no-ipv6"
title = "IPv6 is off"
part = "network"
role = "notice"
sure = "certain"
example = "Address family not supported"
patterns = ['''Address family not supported''']
what = "An IPv6 address was tried."
why = "torch tries IPv6 first."
do = ["Nothing."]
sources = ["pytorch/pytorch#128998"]
"""


def known(text: str = KNOWN) -> tuple[Cause, ...]:
    """A knowledge base from a text."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "causes.toml"
        path.write_text(text, encoding="utf-8")
        return load(path)


CAUSES = known()


def log_of_text(text: str, name: str = "log") -> Log:
    return Log(name, [text.encode(errors="surrogateescape")])


def report_of(*texts: str | Log) -> Explanation:
    """What is said of some logs, by the small knowledge base."""
    logs = [
        text if isinstance(text, Log) else log_of_text(dedent(text), f"{index}.log")
        for index, text in enumerate(texts)
    ]
    return explain(logs, CAUSES)


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def traceback(line: str, prefix: str = "", file: str = "train.py") -> str:
    """A traceback that ends with a line, each line of it behind a prefix."""
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 8, in train', "    step()", line]
    return "".join(f"{prefix}{each}\n" for each in lines)
