"""A rank that was forked from a template cannot be told from one that was started by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")

DRIVER = Path(__file__).parents[1] / "tools" / "forking.py"

FACTS = """
import gc, io, json, multiprocessing, os, pickle, resource, signal, sys, threading
class Thing: pass
def stream(each):
    return [each.name, each.mode, each.encoding, each.errors, each.line_buffering, each.write_through,
            each.newlines, type(each.buffer).__name__]
mask = os.umask(0); os.umask(mask)
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "umask": mask,
    "main": sorted(each for each in vars(main) if each.startswith("__")),
    "file": __file__, "name": __name__, "spec": getattr(__spec__, "origin", None), "package": __package__,
    "loader": type(__loader__).__name__,
    "environ": dict(os.environ), "limits": [resource.getrlimit(each) for each in range(15)],
    "signals": {each: str(signal.getsignal(each)) for each in signal.valid_signals() if each < 32},
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
    "descriptors": [each for each in range(100) if os.path.exists(f"/proc/self/fd/{each}")],
    "streams": [stream(each) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "comm": open("/proc/self/comm").read(),
    "shown": sorted(open("/proc/self/environ").read().split("\\0")),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task")), threading.main_thread().name],
    "is_main": threading.current_thread() is threading.main_thread(),
    "child": multiprocessing.parent_process() is None,
    "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)), "gc": gc.isenabled(),
    "excepthook": sys.excepthook is sys.__excepthook__, "trace": sys.gettrace() is None,
    "flags": [sys.flags.safe_path if hasattr(sys.flags, "safe_path") else None, sys.dont_write_bytecode],
}))
"""

ENDS = {
    "nothing": "print('done')",
    "code": "import sys; sys.exit(3)",
    "large code": "import sys; sys.exit(259)",
    "text": "import sys; sys.exit('a text')",
    "none": "raise SystemExit",
    "exception": "def f(): raise ValueError('wrong')\nf()",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('then') from error",
    "group": "raise BaseException('bare')",
    "interrupt": "import atexit; atexit.register(print, 'exit handler'); raise KeyboardInterrupt",
    "at once": "import atexit, os; atexit.register(print, 'not run'); os._exit(5)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "import os; os.abort()",
    "syntax": "x = = 1",
    "exit handlers": "import atexit; atexit.register(print, 1); atexit.register(print, 2); print(0)",
    "thread": "import threading, time\n"
    "def work(): time.sleep(0.2); print('thread')\nthreading.Thread(target=work).start(); print('main')",
    "daemon": "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
    "excepthook": "import sys; sys.excepthook = lambda *each: print(each[1])\nraise ValueError('seen')",
    "finalizer": "class Thing:\n    def __del__(self): print('deleted')\nthing = Thing()",
    "unflushed": "import sys; sys.stdout.write('no newline')",
    "pools": "import multiprocessing\nif __name__ == '__main__':\n"
    "    for each in ('fork', 'spawn', 'forkserver'):\n"
    "        with multiprocessing.get_context(each).Pool(1) as pool: print(each, pool.map(abs, [-1]))",
    "executor": "from concurrent.futures import ThreadPoolExecutor\n"
    "ThreadPoolExecutor(1).submit(print, 'executor')",
}


def _run(*words: str, forked: bool, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVER)] if forked else [sys.executable, "-u"]
    options = {"env": {**os.environ, "RANK": "0"}, "start_new_session": True, "timeout": 60, **more}
    return subprocess.run([*command, *words], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def _both(*words: str, **more: object) -> list[subprocess.CompletedProcess[str]]:
    return [_run(*words, forked=forked, **more) for forked in (False, True)]


@pytest.mark.parametrize("is_module", [False, True])
def test_nothing_tells_a_fork_from_a_new_process(tmp_path: Path, is_module: bool) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    words = ["-m", "facts"] if is_module else ["facts.py"]
    new, forked = _both(*words, "an argument", "--option=1", cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert new.returncode == 0, new.stderr
    assert json.loads(forked.stdout) == json.loads(new.stdout), forked.stderr
    assert forked.stderr == new.stderr


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_new_process_ends(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS[end])
    new, forked = _both(str(script))
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)


@pytest.mark.parametrize("target", ["folder", "missing.py", "-m missing", "archive.zip"])
def test_other_targets(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("import sys; print(sys.argv, sys.path[0], __name__)")
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-c", "archive.zip", "folder/__main__.py"], cwd=tmp_path, check=True
    )
    new, forked = _both(*target.split(), cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)


def test_every_rank_has_its_own_entropy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import random, uuid, multiprocessing, numpy\n"
        "print(random.random(), uuid.uuid4(), numpy.random.random(), numpy.random.default_rng().random(), "
        "bytes(multiprocessing.current_process().authkey).hex())"
    )
    seen = [_run("--preload=numpy", str(script), forked=True).stdout.split() for _ in range(2)]
    assert len(seen[0]) >= 5
    assert all(one != other for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()",
            "thread",
        ),
        ("import _thread, time\n_thread.start_new_thread(time.sleep, (60,))", "thread"),
        ("import os\nrank = int(os.environ.get('RANK', 0))", "RANK"),
        ("import os\nrank = 'LOCAL_RANK' in os.environ", "LOCAL_RANK"),
        ("log = open(__file__)", "poison.py"),
        ("import os\nos._exit(1)", ""),
        ("raise SystemExit(1)", ""),
        ("print('a banner')", ""),
    ],
)
def test_an_import_that_makes_forks_unsafe_is_left_to_the_ranks(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "poison.py").write_text(text)
    (tmp_path / "harmless.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import sys; print('poison' in sys.modules, 'harmless' in sys.modules)")
    environ = {key: value for key, value in os.environ.items() if key != "RANK"}
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    done = _run("--preload=poison,harmless", str(script), forked=True, env=environ)
    if reason:
        assert done.stdout == "False True\n", done.stderr
        assert done.stderr.startswith("poison: ")
        assert reason in done.stderr
    else:
        assert done.stdout.endswith("True\n" if "print" in text else "False\n") or "True" in done.stdout
        assert done.stderr == ""


_OWNERS = """
import multiprocessing, selectors, socket, sys
from rallypoint.launch.template.template import start_template
sys.owners = [*socket.socketpair(), open(__file__), selectors.DefaultSelector(), *multiprocessing.Pipe()]
rank = start_template().start([sys.executable, "-u", sys.argv[1]], {}, None, None)
sys.exit(rank.wait())
"""
_PIPES = """
import gc, os, sys
descriptors = [each for _ in range(8) for each in os.pipe()]
print(descriptors[0], [os.fstat(each).st_size for each in descriptors].count(0))
sys.owners.clear()
gc.collect()
print([os.fstat(each).st_size for each in descriptors].count(0))
"""


def test_objects_of_the_parent_close_no_descriptor_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(_OWNERS)
    (tmp_path / "script.py").write_text(_PIPES)
    done = subprocess.run(
        [sys.executable, "agent.py", "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "3 16\n16\n", done.stderr


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import threading
        from rallypoint.launch.template.template import start_template
        threading.Thread(target=threading.Event().wait, name="a thread", daemon=True).start()
        print(start_template())
        """)
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "Refused(reason='threads run beside the main one: a thread')\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_template_ends_with_its_agent(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import time
        from rallypoint.launch.template.template import start_template
        template = start_template()
        print(template._pid, flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        template = int(agent.stdout.readline())
        watch = os.pidfd_open(template)
        agent.send_signal(number)
        agent.wait()
        import select

        assert select.select([watch], [], [], 10)[0]
        os.close(watch)
