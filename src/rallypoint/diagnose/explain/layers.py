"""What a library says by itself, beside the exception that torch raises for it. Pure.

The library's own line says what happened. torch's exception, which follows from it, only says that the
library failed. So beside such an exception, the library's first line in that log is nearer to the cause.
Without one it is nothing: healthy jobs have such lines as well. Compilers count as libraries here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Layer:
    """A library below torch."""

    part: str
    """Entries of this part of the knowledge base fit the library's own lines as well."""
    marks: tuple[str, ...]
    """Every line that it says by itself, and outside of an exception's message, has one of these."""
    said: re.Pattern[str]
    failed: re.Pattern[str]
    """In what torch says of it."""
    no_cause: re.Pattern[str] | None = None
    """Of the lines that it says by itself, those that follow from others, or that healthy jobs have."""

    def speaks(self, text: str) -> bool:
        """Whether the library says here what happened."""
        found = self.said.search(text)
        return found is not None and (self.no_cause is None or not self.no_cause.search(found["text"]))


LAST_ERROR: Final = "Last error:"
"""How NCCL's own words begin within the message of torch; they follow in the next line."""
_NCCL: Final = Layer(
    "nccl",
    ("NCCL WARN", LAST_ERROR),
    re.compile(rf"(?:\bNCCL WARN |^{LAST_ERROR} )(?P<text>.+)"),
    re.compile(r"NCCL error|nccl\w*Error\b|NCCL failure|nccl[A-Z]\w+ failed|NCCL WARN"),
    re.compile(
        r"(?i)connection closed|connection reset|broken pipe|socket recv failed|remote process|abort"
        r"|proxy(?!.{0,80}\(Connect\))"
        r"|failed to open lib|plugin|iommu|no device found|could not find:|disabling|deprecated|numa"
        r"|recommended"
    ),
)
LAYERS: Final = (
    _NCCL,
    # MPI's daemons
    Layer(
        "",
        ("PRTE ERROR", "PMIX ERROR", "_ERROR_LOG"),
        re.compile(r"(?P<text>\b(?:(?:PRTE|PMIX) ERROR|[OP]\w{2,4}_ERROR_LOG): .+)"),
        re.compile(r"\bMPI error|\bMPI_\w+|\bmpi4py\b"),
    ),
    # CUDA's kernels: the assertion that failed comes before all that the driver says of it
    Layer(
        "script",
        ("Assertion",),
        re.compile(r"(?P<text>: block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion )"),
        re.compile("device-side assert"),
    ),
    # Huawei's HCCL and Intel's oneCCL
    Layer(
        "",
        ("|CCL_ERROR|",),
        re.compile(r"(?P<text>^(?:\[PID: \d+\] [\d:.-]+ )?(?:\w+\()?E[A-Z]\d{4}\b.+|\|CCL_ERROR\|.+)"),
        re.compile("HCCL error|hccl api|oneCCL:"),
    ),
    # llama.cpp: the line of the loader; what follows only says that no model was loaded
    Layer(
        "",
        ("gguf_init_from_file", "llama_model_load", "error loading model"),
        re.compile(
            r"(?P<text>^(?:gguf_init_from_file|llama_model_load\w*|error loading model): "
            r"(?=.*\b(?:error|invalid|unsupported|mismatch|unable|missing|unknown|wrong)\b).+)"
        ),
        re.compile(r"(?i)(?:could not|failed to) load (?:llama )?model|validation error for LlamaCpp"),
        re.compile(r"failed to load model"),
    ),
    # compilers and linkers, which torch and Triton start while a job runs
    Layer(
        "",
        (": error:", ": fatal error", "ld: cannot find", "nvcc fatal", "ptxas fatal"),
        re.compile(
            r"(?P<text>^ {0,8}(?:[A-Za-z]:)?[^\s:]{1,300}(?::\d+(?::\d+)?|\(\d+\)): "
            r"(?:fatal )?error(?:| [A-Z]+\d+): "
            r"|^ {0,8}\S{0,300}\bld: cannot find |^ {0,8}(?:nvcc|ptxas) fatal +: |^ {0,8}LINK : fatal error )"
        ),
        re.compile(
            r"Error building extension|ninja: build stopped|BackendCompilerFailed"
            r"|cannot open shared object file"
            r"|Command '?\[?'?[^'\s]{0,200}(?:ninja|cc|gcc|g\+\+|c\+\+|clang|nvcc|tcc)(?:\.exe)?\b"
        ),
    ),
)
# These say that another process failed: no line of this one is their cause.
_ECHO: Final = re.compile(r"remote process|RemoteError|closed by")


def layer_of(text: str) -> Layer | None:
    """The library that says here what happened."""
    return next((layer for layer in LAYERS if layer.speaks(text)), None)


def is_echo(text: str) -> bool:
    """Whether a library says here that another process failed."""
    return _ECHO.search(text) is not None
