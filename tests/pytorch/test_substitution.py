"""torch's `TCPStore` on a build without libuv, patched in place: it behaves as torch's own."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobs import end_torch_stores, free_port, own_servers, patch_torch
from rallypoint.client.tcp import TCPStore
from rallypoint.diagnose.verify import SIMULATION
from rallypoint.launch.environment import inject, put_on_path
from rallypoint.pytorch import store as python_stores
from rallypoint.pytorch import substitution
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.pytorch.schemes import meet_at_server, register_rally
from rallypoint.pytorch.servers import owned_at
from rallypoint.pytorch.store import PythonStore
from rallypoint.pytorch.substitution import Fault, fault_in
from raw import until

_SHORT = timedelta(seconds=0.3)
_LONG = timedelta(seconds=20)
_IN_USE = "The server socket has failed to listen on any local network address. port: .* name: EADDRINUSE"


def _refusing_libuv() -> Any:
    """A constructor like that of a torch without libuv, which says so first thing, by default."""
    init = substitution._init

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        StoreParameters(*args, **kwargs)  # arguments that do not fit are a TypeError before all else
        if args[8:] != (False,) and kwargs.get("use_libuv", True):
            raise dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
        init(self, *args, **kwargs)

    return refuse


@pytest.fixture(autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    end_torch_stores()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our patch on the torch of this process."""
    patch_torch(monkeypatch)


@pytest.fixture
def without_libuv(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a torch without libuv, and our patch on it."""
    monkeypatch.setattr(substitution, "_init", _refusing_libuv())


@pytest.fixture
def broken(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a torch whose store does not work at all, and our patch on it."""

    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistNetworkError("Unknown error")

    monkeypatch.setattr(substitution, "_init", fail)


def _master(port: int = 0, **options: Any) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=True, timeout=_LONG, **options)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_words_of_builds_are_known() -> None:
    assert (
        fault_in(RuntimeError("use_libuv was requested but PyTorch was build without libuv"))
        is Fault.NO_LIBUV
    )
    assert fault_in(RuntimeError("unmatched '}' in format string")) is Fault.BROKEN
    assert fault_in(RuntimeError("The client socket has timed out after 60s")) is None


@pytest.mark.parametrize("build", ["without_libuv", "broken"])
class TestAnyFaultyBuild:
    @pytest.fixture(autouse=True)
    def _faulty(self, build: str, request: pytest.FixtureRequest) -> None:
        request.getfixturevalue(build)

    def test_errors_have_torchs_types_and_words(self) -> None:
        before = own_servers()
        master = _master()
        with socket.create_server(("127.0.0.1", 0)) as other:
            for port in (master.port, other.getsockname()[1]):
                with pytest.raises(dist.DistNetworkError, match=_IN_USE):
                    _master(port)
        words = "The client socket has timed out after 300ms while trying to connect to "
        with pytest.raises(dist.DistNetworkError, match=words):
            dist.TCPStore("127.0.0.1", free_port(), timeout=_SHORT)
        with pytest.raises(dist.DistNetworkError, match=rf"{words}\(nobody.invalid, 0\)"):
            dist.TCPStore("nobody.invalid", 0, is_master=True, timeout=_SHORT)
        words = r"Timed out after 1 seconds waiting for clients. 1/3 clients joined. 1 of 3 workers .* 0.3 s"
        with pytest.raises(dist.DistStoreError, match=words):
            dist.TCPStore("127.0.0.1", 0, 3, True, _SHORT)
        until(lambda: len(own_servers() - before) == 1, "only the first master's server is left")
        master.set_timeout(_SHORT)
        with pytest.raises(dist.DistStoreError):
            master.get("missing")

    def test_a_worker_that_would_hold_the_agents_store_is_its_client(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with TCPStore("127.0.0.1", 0, is_master=True) as agents:
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            monkeypatch.setenv("MASTER_PORT", str(agents.port))
            _master(agents.port, world_size=2).set("key", "value")
            assert agents.get("key") == b"value"

    def test_a_process_group_can_be_made_again(self) -> None:
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        for _ in range(2):
            dist.init_process_group("gloo", init_method=url, rank=0, world_size=1, timeout=_LONG)
            store = dist.distributed_c10d._get_default_store()
            assert store.add("tries", 1) == 1
            del store
            assert _listens(port)
            dist.destroy_process_group()
            assert not _listens(port)


@pytest.mark.usefixtures("without_libuv")
class TestWithoutLibuv:
    def test_a_master_and_a_client_exchange(self) -> None:
        master = _master()
        assert type(master) is dist.TCPStore
        assert master.port > 0
        client = dist.TCPStore("127.0.0.1", master.port, timeout=_LONG)
        client.set("key", "value")
        assert master.get("key") == b"value"
        assert master.add("count", 2) == 2
        assert client.multi_get(["key", "count"]) == [b"value", b"2"]

    def test_the_master_waits_for_its_workers(self) -> None:
        port = free_port()
        stores: list[Any] = []
        worker = threading.Thread(
            target=lambda: stores.append(dist.TCPStore("127.0.0.1", port, 2, False, _LONG))
        )
        worker.start()
        stores.append(_master(port, world_size=2))
        worker.join()
        assert len(stores) == 2

    def test_a_master_need_not_wait_for_its_workers(self) -> None:
        assert dist.TCPStore("127.0.0.1", 0, 3, True, _SHORT, wait_for_workers=False).port > 0

    def test_a_short_time_out_is_not_for_its_own_server(self) -> None:
        master = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(milliseconds=1))
        assert master.timeout == timedelta(milliseconds=1)
        master.set_timeout(_LONG)
        assert master.num_keys() >= 0

    def test_it_says_what_the_caller_wrote(self) -> None:
        for host in ("localhost", socket.gethostname()):
            master = dist.TCPStore(host, 0, is_master=True, timeout=_LONG)
            assert (master.host, master.clone().host) == (host, host)
            client = dist.TCPStore("127.0.0.1", master.port, timeout=_LONG)
            assert client.host == "127.0.0.1"
            assert (master.libuvBackend, client.libuvBackend) == (True, True)

    def test_queues_are_those_of_the_server(self) -> None:
        master = _master()
        client = dist.TCPStore("127.0.0.1", master.port, timeout=_LONG)
        prefixed = dist.PrefixStore("a", dist.PrefixStore("b", client))
        master.queue_push("b/a/queue", "first")
        prefixed.queue_push("queue", b"second")
        assert prefixed.clone().queue_len("queue") == 2
        assert (client.queue_pop("b/a/queue"), prefixed.queue_pop("queue")) == (b"first", b"second")
        client.set_timeout(_SHORT)
        with pytest.raises(dist.DistStoreError):
            client.queue_pop("b/a/queue")
        with pytest.raises(dist.DistStoreError):
            prefixed.queue_pop("queue", block=False)

    def test_tenants_share_a_server(self) -> None:
        first = _master(multi_tenant=True)
        first.set("key", "value")
        second = _master(first.port, multi_tenant=True)
        assert second.get("key") == b"value"
        del first
        assert second.get("key") == b"value"

    def test_the_server_ends_with_the_last_store(self) -> None:
        before = own_servers()
        master = _master(multi_tenant=True)
        clone = master.clone()
        (server,) = own_servers() - before
        del master
        assert clone.num_keys() >= 0  # a clone holds it, too
        del clone
        gc.collect()
        until(lambda: server not in own_servers(), "the server ends")

    def test_the_server_lives_while_only_cpp_holds_the_store(self) -> None:
        before = own_servers()
        prefixed = dist.PrefixStore("p", _master())
        gc.collect()
        prefixed.set("key", "value")
        assert prefixed.get("key") == b"value"
        assert len(own_servers() - before) == 1

    def test_a_port_can_be_had_again_at_once_and_is_empty(self) -> None:
        master = _master(multi_tenant=True)
        port = master.port
        for _ in range(2):
            master.set("key", "of the run before")
            del master
            master = _master(port, multi_tenant=True)
            assert not master.check(["key"])

    def test_a_listening_descriptor_is_used(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        master = _master(port, master_listen_fd=listener.detach())
        assert master.port == port
        assert TCPStore("127.0.0.1", port, timeout=5).num_keys() >= 0

    def test_a_subclass_comes_up(self) -> None:
        class Mine(dist.TCPStore):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__("127.0.0.1", 0, is_master=True, timeout=_LONG)

        store = Mine()
        store.set("key", "value")
        assert store.get("key") == b"value"

    def test_an_explicit_false_is_torchs_own_server(self) -> None:
        before = own_servers()
        master = _master(use_libuv=False)
        assert master.num_keys() >= 0
        assert own_servers() <= before

    @pytest.mark.parametrize("use_libuv", ["0", "1"])
    def test_the_backend_follows_the_variable(self, use_libuv: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("USE_LIBUV", use_libuv)
        master = _master()
        owned = owned_at(master.port)
        assert owned is not None
        assert owned.server.backend == ("libuv" if use_libuv == "1" else "legacy")
        for store in (master, master.clone(), dist.PrefixStore("", master)):  # both have queues
            store.queue_push("queue", "value")

    def test_never_means_never(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RALLYPOINT_PATCH", "never")
        with pytest.raises(dist.DistStoreError, match="without libuv"):
            _master()


def test_a_store_of_rally_is_whole_where_the_constructor_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_torch(monkeypatch, register_rally)
    monkeypatch.setattr(substitution, "_init", _refusing_libuv())
    url = f"rally://localhost:{free_port()}?rank=0&world_size=1"
    store, *_ = next(iter(meet_at_server(url, timeout=_LONG)))
    assert (store.host, store.libuvBackend) == ("localhost", True)
    clone = store.clone()
    for each in (store, clone, dist.PrefixStore("", store)):
        each.queue_push("queue", "value")
    del store, each
    gc.collect()
    assert clone.num_keys() >= 0  # it holds the server


@pytest.mark.usefixtures("broken")
class TestBroken:
    def test_our_client_takes_its_place(self) -> None:
        master = _master(world_size=1)
        assert isinstance(master, PythonStore)
        client = dist.TCPStore("127.0.0.1", master.port, timeout=_LONG)
        assert isinstance(client, PythonStore)
        client.set("key", "value")
        assert master.get("key") == b"value"
        assert client.host == "127.0.0.1"

    def test_not_if_torchs_client_was_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RALLYPOINT_CLIENT", "torch")
        with pytest.raises(dist.DistNetworkError, match="Unknown error"):
            _master()

    def test_a_process_group_that_fails_leaves_no_server(self) -> None:
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        with pytest.raises(AssertionError, match="nonsense"), pytest.warns(UserWarning, match="nonsense"):
            dist.init_process_group("nonsense", init_method=url, rank=0, world_size=1, timeout=_LONG)
        assert not _listens(port)

    @pytest.mark.parametrize("scheme", ["env://", "rally://127.0.0.1:{}?client=python"])
    def test_a_process_group_at_an_agents_store_leaves_no_connection(
        self, scheme: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        register_rally()
        mine = _master()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(mine.port)}
        rank = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
        for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", **place, **rank}.items():
            monkeypatch.setenv(name, value)
        by_hand = dist.TCPStore("127.0.0.1", mine.port, 1, timeout=_LONG)
        url = scheme.format(mine.port)
        before = len(python_stores._kept)
        for _ in range(2):
            dist.init_process_group("gloo", init_method=url, rank=0, world_size=1, timeout=_LONG)
            assert len(python_stores._kept) > before
            dist.destroy_process_group()
            assert len(python_stores._kept) == before
        dist.init_process_group("gloo", store=by_hand, rank=0, world_size=1, timeout=_LONG)
        dist.destroy_process_group()
        assert by_hand.num_keys() > 0  # it is the caller's


_NO_ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    (("127.0.0.1", "29500"), {}),
    (("127.0.0.1", 70_000, 1, True), {}),
    (("127.0.0.1", -1, 1, True), {}),
    ((None, 0, 1, True), {}),
    (("127.0.0.1", 0, 1, True, 5), {}),
    (("127.0.0.1", 0, 1, "yes"), {}),
    (("127.0.0.1", 0, 1.5, True), {}),
    (("127.0.0.1", 0), {"nonsense": True}),
]


@pytest.mark.usefixtures("patched")
class TestNothingIsWrong:
    def test_our_client_takes_the_arguments_that_torchs_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RALLYPOINT_CLIENT", "python")
        for args, kwargs in _NO_ARGUMENTS:
            with pytest.raises(TypeError, match="incompatible constructor arguments"):
                dist.TCPStore(*args, **kwargs)
        store = dist.TCPStore(b"127.0.0.1", torch.tensor(0), torch.tensor(1), is_master=True, timeout=20.0)
        assert isinstance(store, PythonStore)
        assert store.timeout == _LONG

    def test_torchs_own_store_is_left_alone(self) -> None:
        before = own_servers()
        master = _master()
        assert type(master) is dist.TCPStore
        assert master.libuvBackend
        assert own_servers() == before

    def test_unless_ours_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RALLYPOINT_PATCH", "always")
        before = own_servers()
        master = _master()
        assert len(own_servers() - before) == 1
        assert master.num_keys() >= 0

    def test_unless_our_client_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RALLYPOINT_CLIENT", "python")
        assert isinstance(_master(), PythonStore)


# In processes of their own ---------------------------------------------------------------------------------


def _run(
    code: str, environ: dict[str, str], tmp_path: Path, *arguments: str, seconds: float = 180
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=tmp_path,
    )


def _simulated(kind: str) -> dict[str, str]:
    return {**put_on_path(os.environ, SIMULATION), "RALLYPOINT_SIMULATE": kind, "OMP_NUM_THREADS": "1"}


_LOOP = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port, leaving):
    url = f"tcp://127.0.0.1:{port}"
    for _ in range(int(sys.argv[2])):
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        dist.all_reduce(torch.ones(1))
        leaving.wait()  # a rank that goes would break the other's all_reduce
        dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]), mp.get_context("spawn").Barrier(2)), nprocs=2)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("switches", "rounds"),
    [
        pytest.param({"RALLYPOINT_SIMULATE": "no-libuv"}, 3, id="quick"),
        pytest.param({"RALLYPOINT_SIMULATE": "no-libuv"}, 15, id="refusing", marks=pytest.mark.slow),
        pytest.param({"RALLYPOINT_PATCH": "always"}, 15, id="always", marks=pytest.mark.slow),
        pytest.param({"RALLYPOINT_CLIENT": "python"}, 15, id="python", marks=pytest.mark.slow),
        pytest.param({}, 15, id="torch", marks=pytest.mark.slow),
    ],
)
def test_a_process_group_of_two_can_be_made_again_and_again(
    switches: dict[str, str], rounds: int, tmp_path: Path
) -> None:
    """On the same port, again and again, though one rank is always the quicker one."""
    environ = inject(put_on_path(os.environ, SIMULATION) if "RALLYPOINT_SIMULATE" in switches else os.environ)
    environ |= {"OMP_NUM_THREADS": "1", **switches}
    done = _run(_LOOP, environ, tmp_path, str(free_port()), str(rounds), seconds=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "method",
    ["spawn", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "fork"))],
)
def test_what_they_start_comes_up_as_well(method: str, tmp_path: Path) -> None:
    code = f"""
    import multiprocessing

    def work(queue):
        import torch.distributed as dist
        queue.put(type(dist.TCPStore("127.0.0.1", 0, is_master=True)).__name__)

    if __name__ == "__main__":
        context = multiprocessing.get_context("{method}")
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(queue.get(timeout=150))
        process.join()
    """
    done = _run(code, inject(_simulated("no-libuv")), tmp_path)
    assert (done.returncode, done.stdout) == (0, "TCPStore\n"), done.stderr


def test_another_sitecustomize_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.flag_of_mine = __name__\n")
    environ = inject(put_on_path(os.environ, tmp_path))
    done = _run("import sys\nprint(sys.flag_of_mine, 'torch' in sys.modules)", environ, tmp_path)
    assert done.stdout == "sitecustomize False\n", done.stderr


def test_injection_is_cheap(tmp_path: Path) -> None:
    """Every Python process of a job pays for it, also those that never import torch."""
    code = """
    import sys
    dear = {"torch", "rallypoint", "asyncio", "typing", "inspect"}
    print(sorted({name.partition(".")[0] for name in sys.modules} & dear))
    """
    done = _run(code, inject(os.environ), tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_a_variable_that_says_nothing_known_harms_nobody(tmp_path: Path) -> None:
    """A stand-in for torch is enough: the variable is read when torch.distributed has been imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed.py").touch()
    environ = {**inject(put_on_path(os.environ, tmp_path)), "RALLYPOINT_PATCH": "sometimes"}
    done = _run("import torch.distributed\nprint('up')", environ, tmp_path)
    assert done.stdout == "up\n"
    assert "this process runs without Rallypoint" in done.stderr
    assert "sometimes" in done.stderr
