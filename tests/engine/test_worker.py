"""The thread of the device: every call in it, in order; results, errors and cancelled waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from microbatch.engine.worker import WorkerThread

pytestmark = pytest.mark.anyio


async def test_calls_run_in_one_thread_in_order() -> None:
    worker = WorkerThread("device")
    seen: list[int] = []

    def note(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*[worker.call(note, i) for i in range(20)])
    worker.end()
    assert seen == list(range(20)) and set(names) == {"device"}


async def test_what_a_call_raises_is_raised_where_it_is_awaited() -> None:
    worker = WorkerThread("device")

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(KeyError, match="no"):
        await worker.call(fail, KeyError("no"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.call(fail, StopIteration())
    with pytest.raises(SystemExit):
        await worker.call(fail, SystemExit(3))
    assert await worker.call(len, "still there") == 11
    worker.end()


async def test_a_cancelled_wait_leaves_the_thread_at_work() -> None:
    worker = WorkerThread("device")
    gate = threading.Event()
    waiting = asyncio.ensure_future(worker.call(gate.wait, 20))
    await asyncio.sleep(0)
    waiting.cancel()
    after = worker.call(threading.current_thread)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert (await after).name == "device"
    worker.end()


async def test_end_lets_the_calls_before_it_finish_and_may_be_repeated() -> None:
    worker = WorkerThread("device")
    worker.end()
    thread = await worker.call(threading.current_thread)
    last = worker.call(len, "abc")
    worker.end()
    worker.end()
    assert await last == 3
    thread.join(20)
    assert not thread.is_alive()


async def test_the_waiting_thread_keeps_nothing_of_the_last_call() -> None:
    class Big:
        pass

    worker, big = WorkerThread("device"), Big()
    gone = weakref.ref(big)
    await worker.call(id, big)
    await worker.call(len, "")
    del big
    gc.collect()
    assert gone() is None
    worker.end()


def test_an_event_loop_that_has_ended_is_not_missed() -> None:
    worker, gate = WorkerThread("device"), threading.Event()
    made: list[threading.Thread] = []

    async def leave() -> None:
        made.append(await worker.call(threading.current_thread))
        worker.call(gate.wait, 20)
        worker.end()

    asyncio.run(leave())
    gate.set()
    made[0].join(20)
    assert not made[0].is_alive()
