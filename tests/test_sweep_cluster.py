"""A sweep on a real Dask scheduler: equal results, and nothing finished is lost with a worker, the scheduler or the client."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_cases import write_sweep

from moesim.errors import InputError
from moesim.sweep import plan_sweep, sweep
from moesim.sweep import run as sweep_run
from moesim.sweep.run import on_cluster
from moesim.sweep.space import code_identity
from moesim.sweep.store import Store

pytest.importorskip("distributed", reason="needs the extra cluster")
AXES = "axes:\n  seed: {from: 0, to: 23, steps: 24}\n  placement.pools.vram.hold: [2, 4]\n"  # points that share nothing


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Cluster:
    """A scheduler and workers, each a process of its own, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self.scheduler = self._start("scheduler", "--port", str(self.port), "--no-dashboard")
        self.workers: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _start(self, what: str, *argv: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *argv, "--host", "127.0.0.1"]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def add_worker(self) -> subprocess.Popen[bytes]:
        worker = self._start("worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard")
        self.workers.append(worker)
        return worker

    def restart_scheduler(self) -> None:
        self.scheduler.send_signal(signal.SIGKILL)
        self.scheduler.wait()
        self.scheduler = self._start("scheduler", "--port", str(self.port), "--no-dashboard")

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_cluster_gives_what_processes_give(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_worker(), cluster.add_worker()
    plan = plan_sweep(write_sweep(tmp_path))
    there = sweep(plan, runner=on_cluster(cluster.address), workers=2)
    assert there.rows == sweep(plan, workers=1).rows


def test_a_worker_that_dies_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.add_worker()
    plan = plan_sweep(write_sweep(tmp_path, AXES))

    def kill(done: int, total: int) -> None:
        if done >= 5 and first.poll() is None and len(cluster.workers) == 1:
            cluster.add_worker()
            first.kill()

    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        found = sweep(plan, store, runner=on_cluster(cluster.address), workers=2, progress=kill)
    assert first.poll() is not None
    assert found.rows == sweep(plan, workers=1).rows


def test_a_scheduler_that_comes_back_is_given_the_rest(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "LOOK_S", 0.5)
    cluster.add_worker()
    plan = plan_sweep(write_sweep(tmp_path, AXES))
    restarted = []

    def restart(done: int, total: int) -> None:
        if done >= 5 and not restarted:
            restarted.append(done)
            cluster.restart_scheduler()
            cluster.add_worker()

    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        found = sweep(plan, store, runner=on_cluster(cluster.address), workers=2, progress=restart)
    assert restarted
    assert found.rows == sweep(plan, workers=1).rows


def test_a_client_that_is_killed_has_what_arrived(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_worker()
    path, store = write_sweep(tmp_path, AXES), tmp_path / "s.sqlite"
    command = [sys.executable, "-m", "moesim", "sweep", str(path), "--store", str(store), "--cluster", cluster.address]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and client.poll() is None and stored(store) < 5:
        time.sleep(0.02)
    client.kill()
    client.wait()
    before = stored(store)
    assert before >= 5
    counts: dict[str, int] = {}
    plan = plan_sweep(path)
    with Store(store, code_identity()) as opened:
        found = sweep(plan, opened, runner=on_cluster(cluster.address), workers=1, counted=counts.update)
    assert counts == {"computed": 48 - before, "found": before}
    assert found.rows == sweep(plan, workers=1).rows


def stored(path: Path) -> int:
    if not path.exists():
        return 0
    with Store(path, code_identity()) as store:
        return len(store.keys())


def test_no_scheduler_is_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep_run, "CONNECT_S", 0.2)
    monkeypatch.setattr(sweep_run, "ATTEMPTS", 1)
    plan = plan_sweep(write_sweep(tmp_path, "axes:\n  seed: [1]\n"))
    with pytest.raises(InputError, match="a Dask scheduler"):
        sweep(plan, runner=on_cluster(f"tcp://127.0.0.1:{free_port()}"), workers=1)
