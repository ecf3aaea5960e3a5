"""What one line of a log shows of a job: a step, an end, a start, an answer. Pure.

Not everything with a number is a step. The settings that a job prints at its start are none, nor are the bars
of what it loads, nor one that stands at 0. A job that dies draws its bars once more, saves what it can, and
wandb sums it up: none of these counts.

A server is at work when it answers a request. A page that is read, such as the one that tells its health,
does not show that: the part that does the work may be long dead.

Every program has words of its own for its steps. But steps come again and again: lines that differ in their
numbers only, and have values among them, are steps in any words (`_rhythm`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.diagnose.explain.denials import without_denials
from rallypoint.diagnose.explain.prefixes import Line, Process

STEP: Final = "step"
LOAD: Final = "load"
"""A bar of what a job loads before its first step."""
END: Final = "end"
"""The end of something, or a value that was computed."""
SUCCESS: Final = "success"
"""A launcher or a library says that all went well."""
OVER: Final = "over"
"""The end of all, in words that mean nothing less."""
ROW: Final = "row"
"""A step that is known as a row of a table only."""
BEAT: Final = "beat"
"""A step that is known by its rhythm only."""
BEGIN: Final = "begin"
"""The job starts, or starts again."""
LAST: Final = "last"
"""What the last epoch gave, by its number."""
DUE: Final = "due"
"""Something that a job does after its training has begun."""
READY: Final = "ready"
"""A server that can be asked has outlived its start."""
SHUT: Final = "shut"
"""A server ends in good order: since it was told to, or since it has failed."""
UP: Final = "up"
"""A server is there, which says nothing of the part that does its work."""
STUCK: Final = "stuck"
"""There are requests, and none is worked on."""
REFUSED: Final = "refused"
"""A server has found a request to be a bad one, as an exception before it may say."""
PROMPTS: Final = "prompts"
"""vLLM's bars of the prompts that a script has for it."""
ANSWERED_ALL: Final = "answered all"
"""Such a bar that is full."""

_SIGN: Final = r"[\s\"'=:\[(|#]{1,6}"
_NUMBER: Final = rf"{_SIGN}-?\d"
_PROBE: Final = (
    r"/(?:\W|$|(?:health|live|ready|ping|metrics|version|status|stats|favicon|docs|openapi|static|assets"
    r"|index|slots|props|(?:de)?tokenize|apply-template|lora-adapters"
    r"|api/(?:version|tags|ps|show|kernels|contents|sessions)|v\d/(?:models|health))\w{0,4}(?:\W|$))"
)
"""A page that tells how a server is, or what it has: it needs no more than the server."""
_HTTP: Final = r'(?: HTTP/[\d.]+)?"?(?: [\da-f.:]{7,45}(?= ))?'
_NO_ADDRESS: Final = r"(?<![\d.:])"
_ANSWER: Final = re.compile(
    rf"\b(?:(?:POST|PUT) (?!{_PROBE})/\S*{_HTTP} [24]|GET (?!{_PROBE})/\S*{_HTTP} 2)\d\d\b"
    rf"|{_NO_ADDRESS}(?:(?:2\d\d|400|422)\b(?![.:]\d).{{0,60}}\b(?:POST|PUT)|2\d\d\b(?![.:]\d).{{0,60}}\bGET)\b"
    rf'[ "]{{1,9}}(?!{_PROBE})/'
    # vLLM's engine, Ray Serve
    r"|^Finished request [\w-]{1,80}\.$"
    rf"| (?!{_PROBE})/\S{{0,200}} \S{{1,80}} (?:http_)?proxy\.py:\d+ - "
    r"(?:POST|PUT|GET) 2\d\d [\d.]+ms\b|\breplica\.py:\d+ - (?:HANDLE )?__CALL__ OK [\d.]+ms\b"
)
"""A request that was worked on, or found to be a bad one."""
_REFUSAL: Final = re.compile(rf"\b(?:POST|PUT) (?!{_PROBE})/\S*{_HTTP} 4(?!04|05)\d\d\b")
ANSWERED: Final = "answered"
_PROMPTS: Final = re.compile(r"^(?:Adding requests|Processed prompts): (?P<all>(?<=prompts: )100%)?")
_STEP: Final = re.compile(
    rf"(?i)(?:\b|_)(?:loss|ppl|perplexity|acc(?!um)|accuracy|mIoU|reward)\w*(?:@\d+)?{_NUMBER}"
    rf"|(?:\b|fit_|global_)(?:step|iter(?:ation)?|epoch|batch|update|episode|round|trial|fold|sample|game)\b{_NUMBER}"
    rf"|\btraining pass\b{_NUMBER}"
    rf"|\b(?:steps|iter(?:ation)?s|epochs|batches|samples|it)\b{_SIGN}\d+(?:\s?(?:/|of)\s?\d|\b.{{1,200}}\d\.\d)"
    rf"|(?:\b|_)(?:f1|auc|mAP|bleu|rouge\w*|wer|cer|psnr|ssim|fid|top-?\d|precision|recall|score|metric"
    rf"|grad[ _]norm|eta|tflops|mfu|pass@\d+|err@\d)\b{_NUMBER}"
    r"|\berr(?:or)?(?: \w{1,20}){0,4}[\s=:]{1,3}\d+(?:\.\d|e-)"
    r"|\d(?:it/s|s/it|\s?(?:samples?|tokens?|tok|img|images|ex|docs|GB|MB)(?:/s| per second))"
    r"|\d%\|.*\d/\d|(?-i:\d\.\d+T/s)"
    rf"|{_ANSWER.pattern}"
    r"|\bthroughput\b|\bbandwidth\b|\b[1-9]\d* tokens generated in \d|\[[\d:.]+ --> [\d:.]+\]"
    r"|[\[(]\s*(?!0*[01]/)\d+/\s*\d+\b|\b(?!0)(?P<of>\d+) ?/ ?(?!(?P=of)\b)\d+ (?:done|finished|completed)\b"
)
_ROW: Final = re.compile(
    r"^[|\s]*(?:[\d.:e+-]{1,20}[|\s]+){3}|(?:\s{1,40}\d+\.\d+){3}"
    r"|^\|\s*\w[\w/ .@%-]{0,60}\|\s*-?\d[\d.,e+-]*\s*\|"
    r"|[|│┃](?=.{0,200}\d\.\d)(?:\s{0,40}-?\d[\d.,e+-]{0,20}\s{0,40}[|│┃]){3}"
)
# The numbers that grow from step to step: two lines with the same ones are one step.
_COUNTERS: Final = re.compile(
    r"(?i)(?:\b|_)(?:steps?|iter(?:ation)?s?|epochs?|batch|updates?|episodes?|rounds?)"
    r"[\s\"'=:\[(|#]{1,12}(\d+(?:\.\d+)?)|(?<!\d)(?<!\d{4}/)(?!\d{4}/\d\d/\d\d)(\d+)\s{0,9}(?:/\s{0,9}\d|\[)"
)
"""Of a date such as 2024/05/01, nothing counts."""
_FIGURE: Final = re.compile(r"(?i)-?\d+(?:[.:,]\d+){0,9}(?:e[+-]?\d+)?")
_VALUE_OF_STEP: Final = re.compile(r"(?<![\d.])(?<!\d:)\d+\.\d+(?![\d.])")
"""A number with a fraction that is neither an address, a version nor a time."""
_STEPS: Final = 3
"""So many lines that differ in their numbers only are steps; two are values."""
_UP: Final = re.compile(
    r'\b(?:GET|HEAD) \S+ HTTP/[\d.]+" [2-4]\d\d\b'
    rf'|{_NO_ADDRESS}[2-4]\d\d\b(?![.:]\d).{{0,60}}\b(?:GET|HEAD)\b[ "]{{1,9}}/'
    r"|\bproxy\.py:\d+ - (?:GET|HEAD) [2-4]\d\d [\d.]+ms\b"
)
_QUEUED: Final = re.compile(
    r"\b(?:Running|Waiting|Pending): [1-9]\d* reqs\b|#running-req: 0\b.{0,200}#queue-req: [1-9]"
)
_IDLES: Final = re.compile(r"(?<![\d.])0(?:\.0+)? tok(?:en)?s?/s")
_WORKS: Final = re.compile(r"(?<![\d.])(?=[\d.]{0,20}[1-9])[\d.]+ tok(?:en)?s?/s")
_BAR: Final = re.compile(r"\d%(?: Completed )?\|")
_PREPARES: Final = re.compile(r"\d examples/s\b|\d%\|.{0,200}\d ?[kMG]?i?B/s\b")
"""The bars of datasets that are mapped and filtered before the first step, and of what is downloaded."""
_DRAWING: Final = re.compile(r"[\s#=>.█▉▊▋▌▍▎▏-]")
_FULL: Final = "100%|"
DRAWN: Final = "bar "
"""Stands before the counters of a bar, which may be drawn a second time."""
_AT_ZERO: Final = r"\|\s*0/\d+ \[|\?(?:it/s|s/it)"
_NO_STEP: Final = re.compile(
    r"(?i)exception|traceback|fatal|fail(?:ed|ure)|abort|killed"
    # not if it is a metric's
    r"|error: (?!-?\d+\.\d+(?:$|[,;|) ]+(?:$|\w[\w/ ]{0,20}[=: ] ?-?\d)))"
    rf"|{_AT_ZERO}"
    # what is said and done at an end, also at a bad one
    r"|^wandb: |\b(?:emergency|crash|checkpoint|ckpt|sav(?:ed|ing)|dump(?:ed|ing)?)\b"
    r"|\b(?:overall|total) (?:training|time|wall)"
    r"|^\w*(?:namespace|config|args|arguments|params)\w*\("
    r"|\bretry(?:ing)?\b|\battempt\b|\bunexpectedly\b"
    # where a job begins again
    r"|\b(?:continu|resum|start|restor)(?:e[ds]?|ing) (?:\w+ )?from\b|\bskip(?:ping)? (?:the )?first\b"
    # the settings of a benchmark, and the head of its table
    r"|^#(?!.*\bbandwidth\b)"
)
_IDLE: Final = r"(?! (?:new |incoming )?(?:requests?|jobs?|work|tasks?|input)\b)"
"""A server that waits for these is at work."""
_LOADS: Final = re.compile(
    r"(?i)\b(?:initiali[sz]ing|load(?:ed|ing)|starting|connecting|building|setting up|set up|moving|preparing"
    r"|creating|joining|launching|downloading|fetching|compil(?:ed?|ing)|captur(?:ed?|ing)|allocat(?:ed|ing)"
    r"|tokenizing)(?!\w)"
)
_START: Final = re.compile(
    rf"{_LOADS.pattern}|(?<!done )\bwaiting (?:for|on)\b{_IDLE}(?!\w)"
    r"|^(?!(?:saved|wrote)\b).*(?<!exiting)\.\.\.$"
)
IS_BEGUN: Final = re.compile(
    rf"{_START.pattern}|{_AT_ZERO}|(?i:^\W{{0,9}}(?!exit|shutt|clos|warn|dur|\w*thing)\w{{2,20}}ing\b)"
)
"""What has begun, as far as a line tells: it starts something, says what is being done, or is a bar at 0."""
LAST_WORDS: Final = re.compile(
    r"(?i)\b(?:exit(?:ed)?|return(?:ed)?)\b(?:[ :=]{1,3}(?:with|code|status)){0,3}[ :=('\[]{1,4}-?[1-9]"
    r"|\b(?:crash(?:ed)?|abort(?:ed|ing)?|killed|interrupt(?:ed|ion)|preempt(?:ed|ion)|evicted)\b"
    r"|\bterminated\b(?!'|\)| trials:|, \[)"  # not as Ray Tune says it of a trial that is done
    r"|\b(?:cancell?ed|segfault|panicked|disconnect(?:ed)?|fail(?:ed|ure)?|fatal|unexpected(?:ly)?)\b"
    r"|\bbad termination\b|\bconnection\b.{0,80} closed\b"
    r"|\b(?:neg)?sig(?:nal)?[ .]?(?:segv|kill|term|abrt|bus|ill|int|quit|hup|[1-9])"
    r"|\bout of memory\b(?! trying to allocate)|\bmore memory than\b|\btimed out\b"
    r"|\bwatchdog\b.{0,20}\btimeout\b"
    r"|\b(?:exceeded|abnormal(?:ly)?|lost connection|diverged|traceback|stopping because)\b"
    r"|^(?:\w+(?:Error|Interrupt)|error)\b|\berror \d{1,3}$"
    r"|已杀死|已终止|段错误|异常|中断|(?:abgebrochen|getötet|speicherzugriffsfehler|arrêté|tué|interrompu)\b"
)
"""What is said when something ends, good or bad: not good behind a step, in the midst of the work."""
_LOADED: Final = re.compile(r"(?i)\b(?:loaded|started|initiali[sz]ed) in \d+(?:\.\d+)? ?s(?:ec(?:onds)?)?\b")
_PART: Final = re.compile(r"[\[(]\s*\d+/\s*\d+\b")
_BEGIN: Final = re.compile(
    r"(?i)\b(?:initiali[sz]ing|load(?:ed|ing)|starting|(?:re)?launch(?:ed|ing)|resum(?:ed|ing)|requeue(?:d|ing)?"
    r"|restor(?:ed|ing)|re-?(?:start|creat|schedul|provision|spawn|join)(?:ed|ing|s)?|booting"
    r"|resett?(?:ing)? workers|started (?:server|parent|reloader) process)\b"
)
_END: Final = re.compile(
    r"(?i)\b(?:finished|complete[ds]?|done|succeeded|success(?:ful|fully)?|saved|wrote|written|passed"
    r"|exit(?:ing|ed normally|s successfully)|terminated normally|ended with 0|executed in \d|waiting for"
    r"|serving|listening|ready|running on|ok|okay|max_\w+=\d+` reached|total time|time total|took \d"
    r"|(?<!out )in \d+\.\d+ ?s(?:ec(?:onds)?)?|reached max\w*"
    r"|ran \d+ tests?|uploaded|exported (?:\w+ ){0,2}to|generated|resum(?:ed|ing)|recovered|reconnected"
    r"|best|early stopping|synced"
    r"|(?:exit(?:s|ed)?(?: with)?(?: exit)?|ret(?:urn)?)(?:[ _]?code| status)?[ :=]{1,3}0"
    r"|end(?:ed|ing)?\b.{0,30}\bat \d+)\b"
    r"|\d/\d+ +(?:running|completed)\b|built target|(?-i:\bPASS\b)|^true$|完成|成功|完了"
    r"|^>>> ?(?:exit\(\)|quit\(\))?$"
    r"|(?-i:^Number of trials: (\d+)(?:/\1)? \((?:\{'TERMINATED': \1\}|\1 TERMINATED)\)$)"
)
_NO_END: Final = re.compile(
    r"(?i)error|exception|fail|fatal|traceback|abort|killed|not |unable|cannot|\bNCCL INFO\b|saved locally"
    r"|\bretrying\b|\bfor a complete stack trace\b"
    r"|\bsig(?:term|int|kill|segv|hup)\b"
    rf"|(?<!done )waiting (?:for|on)\b{_IDLE}"
)
_NO_RHYTHM: Final = (
    *(_NO_STEP, _START, _NO_END),
    re.compile(
        r"(?i)\b(?:warn\w*|retr(?:y|ies|ying)|attempt|time(?:d )?out|stuck|stall\w*|lost|still|no|since)\b"
        r"|^frame #|^\s*File \"|\bsize: |\b(?:rank|gpu|cuda|device|node|host|worker|process|pid)\W{0,3}\d"
        r"|\b(?:GET|HEAD|POST|PUT)\b ?[/\d]|\btok(?:en)?s?/s"
        r"|\b(?:alive|heartbeats?|uptime|cpu|mem(?:ory)?|util\w*|temp\w*)\b"
    ),
)
"""What a job that hangs or dies says again and again, and what is said once for each part of it.

Requests and rates are judged by themselves.
"""
_VALUE: Final = re.compile(
    r"(?i)\btensor\((?!nan)|\bhas (?:data|value)\b|\b(?:gave|results?|sum|output|answer)[^a-z]{1,20}\d"
    r"|^(?:output|generated(?: text)?|response|answer)(?: \[[^\]]{1,30}\])? ?[:=] ?[\"'] ?\w+ \w+ .*[\"']$"
    r"|^\[\(?-?\d+(?:\.\d+|, \d+\))[\d\s.,()\[\]e+-]{0,500}\]$"
    r"|\bis (?:approximately |about )?-?\d+\.\d|\b(?:equal|close|match(?:es)?|same): true\b"
)
IS_READY: Final = re.compile(
    r"(?i)\bapplication startup complete\b|\brunning on (?:\w+ )?(?:url\b|https?:)"
    r"|\bstarted (?:http|grpc)\w*service\b|\bto see the gui go to\b"
    r"|\buse control-c to stop this server\b"
    r"|\bview your streamlit app in your browser"
)
_SHUT: Final = re.compile(
    r"(?i)(?:^|: +|\] )shutting down(?:: master)?$|\bshutting down (?:fastapi|the server)"
    r"|\bfinished server process"
    r"|\bapplication shutdown complete|\bclosing server\b|\bgracefully (?:stopping|exiting|shutting)"
    r"|\bwaiting for in-flight requests"
)
_RESULT: Final = re.compile(r"(?i)\b(?:final|pass@\d+)\b")
_SUCCESS: Final = re.compile(
    r"(?i)\(success\)|\"status\": \"success\"|WorkerState\.SUCCEEDED"
    r"|worker group successfully finished|\[State Transition\] SHUTTING_DOWN -> FINISHED\b"
    r"|^(?-i:Job 'raysubmit_\w+' succeeded)$"
    r"|max_(?:epochs|steps)=\d+` reached|^=+ \d+ passed\b"
    r"|^(?-i:OK)(?: \([\w =,]{1,80}\))?$|^100% tests passed\b"
)
_OVER: Final = re.compile(
    r"(?i)(?:\btraining (?:(?:job|run) )?(?:is |has )?(?:finished|completed?|done|over|ended)"
    r"|\bfinished training"
    r"|\b(?:network|model) is (?:now |fully )?trained)\b"
    r"(?! (?:(?:of|for|on|the) ){0,2}(?:iter|epoch|step|round|batch|fold|client|stage|phase))"
    r"|(?:\ball |^)(?:finished|completed?|done)\W*$"
    r"|\b(\d+) of \1 (?:tasks|trials|jobs|runs|folds) (?:finished|completed|done)\b"
    r"|\bearly ?stopping\b.{0,20}\b(?:triggered|at epoch)"
    r"|\bstopp(?:ed|ing) (?:early\b|because\b.{0,9}\bpatience)"
    r"|\breached max(?:imum)?[_ ](?:step|epoch|iter|update)|\btrain_runtime\b"
)
_EPOCH: Final = re.compile(r"(?i)\bepochs?\b")
_ALL_OF: Final = re.compile(r"\b(\d+)\s?(?:/|of)\s?\1\b")
DUE_WORK: Final = re.compile(r"(?i)\b(?:sav|writ|stor|upload|push|export|merg|convert|checkpoint)")
"""What a job has to do after its training."""
_DUE: Final = re.compile(
    r"(?i)^\W{0,9}(?:train|sav|writ|stor|upload|push|export|merg|convert|quantiz|evaluat|test|predict)ing\b"
)
_EVALUATED: Final = re.compile(r"(?i)\b(?:test\w*|eval\w*|final|best)\b")


@dataclass(frozen=True)
class Sign:
    """A line that shows a job at work, or at its end."""

    line: int
    kinds: frozenset[str]
    step: str
    """What tells this step from others."""
    form: str
    """What it has in common with others of its kind: the line without its numbers."""
    process: Process
    marked: bool = False
    """Whether it begins with the rank, as torch puts it before each line of an exception."""
    pid: int | None = None
    sums_up: bool = False
    """Whether it tells a result, and counts nothing."""
    full: bool = False
    """Whether it is a bar that is full, or tells how long it took to begin."""


def read_signs(lines: Sequence[tuple[int, Line]]) -> tuple[Sign, ...]:
    """The signs in some lines of a log, each of which comes with its number."""
    signs = []
    plain = [(number, replace(line, text=without_denials(line.text))) for number, line in lines]
    rhythm = _rhythm(line for _, line in plain)
    before, loaded = "", set()
    for number, line in plain:
        kinds = _kinds_of(line.text)
        if kinds == {END} and (_LOADS.search(before) or form_of(line.text) in loaded):
            kinds = frozenset()  # it is only that which is done
            loaded.add(form_of(line.text))
        before = line.text or before
        step = (_step_of(line.text) or f"line {number}") if kinds & {STEP, LOAD} else ""
        if not step and line in rhythm:
            step = rhythm[line]
            kinds |= {STEP, BEAT} if step else {END}
        if kinds:
            marked = line.marked and not line.text[:1].isspace()  # and it is no source code of a frame
            form = form_of(line.text) if step else ""
            sums_up = _EVALUATED.search(line.text) is not None and not _COUNTERS.search(line.text)
            full = _FULL in line.text or _LOADED.search(line.text) is not None
            signs.append(Sign(number, kinds, step, form, line.process, marked, line.pid, sums_up, full))
    return tuple(signs)


def _rhythm(lines: Iterable[Line]) -> dict[Line, str]:
    """The lines that a writer repeats with other numbers: steps with these numbers, others with nothing."""
    forms: dict[tuple[object, ...], dict[Line, str]] = {}
    for line in lines:
        if _VALUE_OF_STEP.search(line.text) and not any(each.search(line.text) for each in _NO_RHYTHM):
            figures = " ".join(_FIGURE.findall(line.text))
            forms.setdefault((*line.writer, form_of(line.text)), {})[line] = figures
    several = [found for found in forms.values() if len(set(found.values())) > 1]
    return {
        line: figures if len(set(found.values())) >= _STEPS else ""
        for found in several
        for line, figures in found.items()
    }


def _kinds_of(text: str) -> frozenset[str]:
    """What a line shows."""
    starts = _START.search(text) is not None
    if IS_READY.search(text) and not _NO_STEP.search(text):
        return frozenset([STEP, END, READY])
    if _SHUT.search(text):
        return frozenset([SHUT])
    if _QUEUED.search(text) and not _WORKS.search(text):
        return frozenset([STUCK])
    if (_UP.search(text) and not _ANSWER.search(text)) or (_IDLES.search(text) and not _WORKS.search(text)):
        return frozenset([UP])
    if _REFUSAL.search(text):
        return frozenset([STEP, REFUSED])
    over = [OVER] if _OVER.search(text) else []
    row = not _STEP.search(text)
    if (not row or _ROW.search(text)) and not _NO_STEP.search(text) and not _is_at_zero(text):
        if (starts and (_BAR.search(text) or _PART.search(text))) or _PREPARES.search(text):
            return frozenset([LOAD, BEGIN, *([] if _BAR.search(text) else [UP])])
        last = [LAST] if _is_last(text) else []
        end = [END] if _RESULT.search(text) else []
        bar = _PROMPTS.search(text)
        prompts = [PROMPTS, *([ANSWERED_ALL] if bar["all"] else [])] if bar else []
        return frozenset([STEP, *end, *last, *([ROW] if row else []), *over, *prompts])
    if _SUCCESS.search(text):
        return frozenset([END, SUCCESS, OVER])
    if _NO_END.search(text):
        return frozenset([BEGIN] if _BEGIN.search(text) else [])
    if _VALUE.search(text):
        return frozenset([END])
    begin = [BEGIN] if _BEGIN.search(text) else []
    if _END.search(text) and not starts:
        return frozenset([END, *over, *begin])
    return frozenset([*begin, *([DUE] if _DUE.search(text) else [])])


def form_of(text: str) -> str:
    """A line without its numbers, and without what a bar draws."""
    return ANSWERED if _ANSWER.search(text) else _DRAWING.sub("", _FIGURE.sub("", text))


def _is_last(text: str) -> bool:
    """Whether a line tells what the last epoch gave: it has values, and all that it counts is complete."""
    if not _EPOCH.search(text) or not _VALUE_OF_STEP.search(text) or _BAR.search(text):
        return False
    return 0 < len(_COUNTERS.findall(text)) == len(_ALL_OF.findall(text))


def _is_at_zero(text: str) -> bool:
    """Whether a line counts, and has not begun to: `Epoch 0 step 0`."""
    figures = _FIGURE.findall(text)
    return bool(figures) and all(figure == "0" for figure in figures)


def _step_of(text: str) -> str:
    """The counters of a line, as a text. Every answer is a step of its own."""
    if _ANSWER.search(text):
        return ""
    counters = " ".join(found[1] or found[2] for found in _COUNTERS.finditer(text))
    return f"{DRAWN}{counters}" if counters and _BAR.search(text) else counters
