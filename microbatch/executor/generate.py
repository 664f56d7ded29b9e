"""The run-to-completion executor: one ``model.generate`` a batch, over the paged store, one token a plan.

``generate`` cannot be paused from outside, so it runs in a thread of its own and waits inside its stopping criterion:
each token goes out as a ``StepResult`` and the next plan comes in with the blocks to use and the rows that have left.
The engine thus sees the same three calls a step as with any other executor, tokens stream, and a row that ends gives
its blocks back at once though its lane in the padded batch goes on to the end of the batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection

from microbatch.core.plan import StepPlan, StepResult
from microbatch.core.ports import Forms
from microbatch.executor.faults import memory_faults
from microbatch.executor.run import BatchEnded, GenerateRun, PagedModel


class GenerateExecutor:
    """Implements ``core.ports.Executor`` for policies that run to completion."""

    def __init__(self, model: PagedModel, eos_token_ids: Collection[int] = (), forms: Forms | None = None) -> None:
        self._model = model
        self._forms = forms
        self._eos = frozenset(eos_token_ids)
        self._run: GenerateRun | None = None
        self._runs: queue.SimpleQueue[GenerateRun | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def model(self) -> PagedModel:
        """The model and its store."""
        return self._model

    def execute(self, plan: StepPlan) -> StepResult:
        """Begin a batch, advance the one that runs by a token, or close it. Blocks until the token is there."""
        if self._closed:
            raise RuntimeError("the executor is closed")
        if plan.admitted or not plan.sequences:
            self.reset()
        try:
            with memory_faults(f"a batch of {len(plan.sequences)}", self._model.device):
                self._model.move_blocks(plan)
                if not plan.sequences:
                    return StepResult(plan.step_id, {})
                return self._begin(plan) if plan.admitted else self._advance(plan)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """End the running ``generate``, if any, and wait for it."""
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    def close(self) -> None:
        """End the batch and the thread. Idempotent."""
        self._closed = True
        self.reset()
        if self._thread is not None:
            self._runs.put(None)
            self._thread.join()
            self._thread = None

    def _begin(self, plan: StepPlan) -> StepResult:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="microbatch-generate", daemon=True)
            self._thread.start()
        self._run = GenerateRun(self._model, plan, self._eos, self._forms)
        self._runs.put(self._run)
        return self._run.wait()

    def _advance(self, plan: StepPlan) -> StepResult:
        if self._run is None:
            raise RuntimeError(f"step {plan.step_id} continues a batch, but none runs")
        return self._run.advance(plan)

    def _work(self) -> None:
        """The thread that every ``generate`` of this executor runs in: one thread keeps one OpenMP team."""
        while (run := self._runs.get()) is not None:
            try:
                run.generate()
                run.fail(RuntimeError("generate ended by itself"))
            except BatchEnded:
                pass
            except BaseException as error:  # noqa: B902 - handed to the thread that waits for the step
                run.fail(error)
            finally:
                run.ended.set()
