"""Readers and links: the same bytes whichever way, exact counts, faults named, throttles that keep their rate; and the arena."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_cases import break_disk, direct_folder, mixed_plan, small_model

from moesim.errors import EXIT_DOES_NOT_FIT, InputError
from moesim.host.arena import PAGE_BYTES, Arena, OutOfMemory, as_array
from moesim.host.links import CopyLink, Throttle

pytest.importorskip("torch", reason="expert stores need torch: pip install 'moesim[validate]'")

from moesim.expert_store import ExpertStore  # noqa: E402
from moesim.expert_store.builder import build_store  # noqa: E402
from moesim.expert_store.readers import open_reader  # noqa: E402
from moesim.host import disk_calls  # noqa: E402

WAYS = [("direct", 1), ("direct", 4), ("buffered", 1), ("mmap", 1)]
LAYOUTS = ["merged", "scattered"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExpertStore]:
    folder = tmp_path_factory.mktemp("stores")
    return {x: build_store(folder / x, small_model(), mixed_plan(), layout=x, scattered_piece=8192) for x in LAYOUTS}


def slot(store: ExpertStore, layer: int) -> memoryview:
    return Arena("ram", store.slot_bytes(layer)).take(store.slot_bytes(layer), 4096)


def expected(store: ExpertStore, layer: int, expert: int) -> bytes:
    data, out = store.path.read_bytes(), bytearray(store.slot_bytes(layer))
    for offset, at, size in store.extents(layer, expert):
        out[at : at + size] = data[offset : offset + size]
    return bytes(out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine,depth", WAYS)
def test_all_ways_deliver_the_same_bytes(stores: dict[str, ExpertStore], engine: Any, depth: int, layout: str) -> None:
    store = stores[layout]
    if engine == "direct":
        direct_folder(store.path.parent)
    for request in (4096, 12288, 1 << 20):
        with open_reader(store, engine, request_bytes=request, depth=depth) as reader:
            for layer, expert in ((0, 0), (0, 13), (1, 15)):
                target = slot(store, layer)
                read = reader.prepare(layer, expert, target)
                for _ in range(2):
                    target[:] = b"\xff" * len(target)
                    assert read() == store.slot_bytes(layer)
                    assert bytes(target) == expected(store, layer, expert)
                    store.check(layer, expert, target)


def test_operations_run_at_once(stores: dict[str, ExpertStore]) -> None:
    """Each of four threads has its own context, and none gets another's events."""
    store = stores["merged"]
    direct_folder(store.path.parent)
    failures: list[BaseException] = []
    with open_reader(store, request_bytes=4096, depth=2) as reader:

        def work(expert: int) -> None:
            try:
                target = slot(store, 1)
                read = reader.prepare(1, expert, target)
                for _ in range(20):
                    target[:8] = bytes(8)
                    assert read() == store.slot_bytes(1)
                    store.check(1, expert, target)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(e,)) for e in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert failures == []


def test_depth_bounds_what_is_in_flight(stores: dict[str, ExpertStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """A context for two requests serves twelve; asked for more than it holds, the loop waits instead of failing."""
    store = stores["merged"]
    direct_folder(store.path.parent)
    seen: list[int] = []
    real = disk_calls.aio_read
    monkeypatch.setattr(disk_calls, "aio_read", lambda *a: (seen.append(a[2]), real(*a))[1])
    with open_reader(store, request_bytes=4096, depth=2) as reader:
        assert reader.prepare(0, 0, slot(store, 0))() == store.slot_bytes(0)
    assert seen == [2]


@pytest.mark.parametrize("engine,depth", WAYS[:3])
def test_short_reads_and_errors_are_named(stores: dict[str, ExpertStore], monkeypatch: pytest.MonkeyPatch, engine: Any, depth: int) -> None:
    store = stores["merged"]
    if engine == "direct":
        direct_folder(store.path.parent)
    last = 3 * store.slot_bytes(0) - 4096
    for fault, words in (
        ("short", f"read at offset {last:,}: expected 4,096 bytes, got 2,048; the file is cut short"),
        ("eio", rf"read at offset {last:,}: expected 4,096 bytes, got Input/output error \(error 5\)"),
    ):
        with monkeypatch.context() as patch, open_reader(store, engine, request_bytes=4096, depth=depth) as reader:
            break_disk(patch, fault, call=1)
            read = reader.prepare(0, 2, slot(store, 0))
            assert read() == store.slot_bytes(0)
            with pytest.raises(InputError, match=words) as error:
                read()
            assert str(store.path) in str(error.value)
            assert read() == store.slot_bytes(0)  # the reader itself is sound


@pytest.mark.parametrize("engine,depth", WAYS)
def test_a_wrong_bit_is_seen_in_the_slot(stores: dict[str, ExpertStore], monkeypatch: pytest.MonkeyPatch, engine: Any, depth: int) -> None:
    store = stores["merged"]
    if engine == "direct":
        direct_folder(store.path.parent)
    break_disk(monkeypatch, "flip")
    target = slot(store, 0)
    with open_reader(store, engine, depth=depth) as reader:
        reader.prepare(0, 0, target)()
    with pytest.raises(InputError, match="other bytes"):
        store.check(0, 0, target)


@pytest.mark.parametrize("engine,depth", WAYS[:3])
def test_a_file_cut_while_open(tmp_path: Path, engine: Any, depth: int) -> None:
    folder = direct_folder(tmp_path)
    store = build_store(folder / "cut", small_model(), mixed_plan())
    with open_reader(store, engine, request_bytes=8192, depth=depth) as reader:
        read = reader.prepare(1, 15, slot(store, 1))
        os.truncate(store.path, store.index.data_bytes - 4096)
        with pytest.raises(InputError, match="the file is cut short"):
            read()


def test_errors_of_the_system_calls(stores: dict[str, ExpertStore]) -> None:
    """A closed file gives EBADF through both loops, and nothing hangs."""
    store = stores["merged"]
    direct_folder(store.path.parent)
    for engine, depth in WAYS[:3]:
        reader = open_reader(store, engine, depth=depth)  # type: ignore[arg-type]
        read = reader.prepare(0, 0, slot(store, 0))
        fd, reader.fd = reader.fd, -1
        os.close(fd)
        with pytest.raises((InputError, OSError), match="Bad file descriptor"):
            read()
        reader.close()


def test_without_native_aio(stores: dict[str, ExpertStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores["merged"]
    direct_folder(store.path.parent)

    def none(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(disk_calls, "aio_setup", none)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InputError, match="expected 1 where Linux' native AIO cannot be used, got 4; io_setup: Function not implemented"):
        open_reader(store, depth=4)
    assert len(os.listdir("/proc/self/fd")) == files
    with open_reader(store, depth=1) as reader:
        target = slot(store, 0)
        assert reader.prepare(0, 5, target)() == store.slot_bytes(0)
        store.check(0, 5, target)


def test_refused_ways_to_read(stores: dict[str, ExpertStore], tmp_path: Path) -> None:
    store = stores["merged"]
    unaligned = build_store(direct_folder(tmp_path) / "x", small_model(), mixed_plan(), align=512)
    cases: list[tuple[ExpertStore, dict[str, Any], str]] = [
        (store, {"engine": "dirct"}, 'did you mean "direct"'),
        (store, {"depth": 0}, "at least 1"),
        (store, {"request_bytes": 5000}, "a multiple of 4096 for direct reads"),
        (store, {"engine": "mmap", "depth": 4}, "expected 1 for mmap reads"),
        (store, {"bytes_per_s": 0.0}, "a rate above 0"),
        (unaligned, {}, "build the store with align 4096"),
    ]
    files = len(os.listdir("/proc/self/fd"))
    for chosen, arguments, words in cases:
        with pytest.raises(InputError, match=words):
            open_reader(chosen, **arguments)
    with open_reader(store, "direct") as reader:
        arena = Arena("ram", 1 << 20)
        arena.take(512)
        with pytest.raises(InputError, match="an address that is a multiple of 4096"):
            reader.prepare(0, 0, arena.take(store.slot_bytes(0)))
        with pytest.raises(InputError, match="writable bytes in a row"):
            reader.prepare(0, 0, arena.take(4096, 4096))
        with pytest.raises(InputError, match="read-only"):
            reader.prepare(0, 0, slot(store, 0).toreadonly())
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("engine,depth", WAYS)
def test_nothing_stays_open(stores: dict[str, ExpertStore], engine: Any, depth: int) -> None:
    files = len(os.listdir("/proc/self/fd"))
    reader = open_reader(stores["scattered"], engine, depth=depth)
    reader.prepare(0, 0, slot(stores["scattered"], 0))()
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == files


# ---- throttles and copies


@pytest.mark.parametrize("rate,n_bytes", [(20e6, 100_000), (100e6, 100_000)])
def test_throttle_keeps_its_mean_rate(rate: float, n_bytes: int) -> None:
    """Late wake-ups do not add up: 5 ms and 1 ms a piece."""
    operation = Throttle(rate).pace(lambda: n_bytes, n_bytes)
    n = int(0.3 * rate / n_bytes)
    tries = []
    for _ in range(3):  # the best of three, as others may use the machine
        begin = time.perf_counter()
        assert sum(operation() for _ in range(n)) == n * n_bytes
        tries.append(abs(n * n_bytes / (time.perf_counter() - begin) / rate - 1))
        if tries[-1] < 0.03:
            break
    assert min(tries) < 0.03, tries


def test_idle_time_earns_nothing() -> None:
    operation = Throttle(1e6).pace(lambda: 20_000, 20_000)
    operation()
    time.sleep(0.1)
    begin = time.perf_counter()
    operation()
    assert time.perf_counter() - begin > 0.017


def test_threads_share_one_throttle() -> None:
    operation = Throttle(1e6).pace(lambda: 10_000, 10_000)
    threads = [threading.Thread(target=operation) for _ in range(5)]
    begin = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert time.perf_counter() - begin > 0.048


def test_reader_and_copies_take_the_time_of_their_rate(stores: dict[str, ExpertStore]) -> None:
    store = stores["merged"]
    source, target = slot(store, 0), slot(store, 0)
    rate = store.slot_bytes(0) / 0.02
    with open_reader(store, "buffered", bytes_per_s=rate) as reader:
        for operation in (reader.prepare(0, 4, source), CopyLink(rate).prepare(source, target)):
            begin = time.perf_counter()
            assert operation() == store.slot_bytes(0)
            assert time.perf_counter() - begin > 0.0199
    store.check(0, 4, target)
    assert bytes(source) == bytes(target)
    assert CopyLink().prepare(source, target)() == store.slot_bytes(0)
    with pytest.raises(InputError, match="two slots of one size"):
        CopyLink().prepare(source, target[:-1])


# ---- the arena


def test_arena_counts_to_the_byte() -> None:
    arena = Arena("vram", 10_000)
    a = arena.take(3)
    b = arena.take(4096, align=4096)
    assert arena.used_bytes == 8192 and arena.left_bytes == 1808
    with pytest.raises(OutOfMemory, match="vram is out of memory: asked for 1,809 B, 1,808 B left of 10,000 B") as error:
        arena.take(1809)
    assert error.value.exit_code == EXIT_DOES_NOT_FIT and error.value.left_bytes == 1808
    last = arena.take(1808)
    assert arena.left_bytes == 0 and len(last) == 1808
    assert arena.take(0) is not None
    with pytest.raises(OutOfMemory):
        arena.take(1)
    assert as_array(b).ctypes.data % PAGE_BYTES == 0 and len(a) == 3


def test_arena_views_share_memory_and_touch_keeps_it() -> None:
    arena = Arena("ram", 3 * PAGE_BYTES)
    region = arena.take(2 * PAGE_BYTES)
    numbers = as_array(region, np.float32)
    numbers[:] = 1.5
    arena.touch()
    assert bytes(region[:4]) == np.float32(1.5).tobytes() and bool((numbers == 1.5).all())
    other = arena.take(4)
    as_array(other)[:] = 7
    assert bytes(other) == b"\x07" * 4 and bool((numbers == 1.5).all())


def test_touched_pages_are_resident_and_private() -> None:
    def field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    before = field("RssAnon"), field("VmData")
    arena = Arena("ram", 1 << 26)
    assert field("VmData") - before[1] >= 1 << 26
    arena.touch()
    assert field("RssAnon") - before[0] >= (1 << 26) * 0.95
    arena.close()
    assert field("RssAnon") - before[0] < 1 << 25


def test_closed_and_impossible_arenas() -> None:
    arena = Arena("ram", 100)
    region = arena.take(10)
    arena.close()
    arena.close()
    region[0] = 1  # what is in use stays
    with pytest.raises(InputError, match="got a closed one"):
        arena.take(1)
    with pytest.raises(OutOfMemory, match="the system refused the mapping"):
        Arena("ram", 1 << 62)
    for arguments in ((-1, 1), (1, 3), (1, 8192)):
        with pytest.raises(InputError, match="take"):
            Arena("ram", 100).take(*arguments)
    with pytest.raises(InputError, match="at least 0"):
        Arena("ram", -1)
