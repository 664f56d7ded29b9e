"""Decode steps as CUDA graphs: the forward of a batch is recorded once for each size and then only started.

A step of few tokens is hundreds of kernels that each take less time than the call that starts them. A graph starts
them all at once, but always on the same memory with the same shapes: so there is one graph for each bucket of batch
sizes, and every step is copied into the same buffers, padded with rows that have no context and store nothing.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Final

import torch

from microbatch.core.plan import SequenceStep
from microbatch.executor.attention import PagedStep
from microbatch.executor.run import PagedModel
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.blocks import NULL_BLOCK
from microbatch_kernels.metadata import num_blocks_for, slot_mapping

logger = logging.getLogger(__name__)

#: Runs the forward over the buffers and gives the logits ``[rows, vocabulary]``.
Forward = Callable[[], torch.Tensor]
#: Makes of a forward one that can be started again at little cost.
Capture = Callable[[Forward], Forward]

#: Rows of the buffers before the block tables: token ids, positions, slots, context lengths.
_HEADER: Final = 4
_NO_SLOT: Final = -1
_WARM_UPS: Final = 2


class DecodeGraphs:
    """Forwards of decode steps of up to ``max_num_seqs`` rows and ``max_model_len`` tokens of context.

    ``capture`` says how a forward becomes cheap to repeat; each bucket is captured when it is made or, at the latest,
    when it is first needed.
    """

    def __init__(self, model: PagedModel, max_num_seqs: int, max_model_len: int, capture: Capture) -> None:
        self.buckets = bucket_sizes(max_num_seqs)
        self._model = model
        self._capture = capture
        self._max_context = max_model_len
        self._forwards: dict[int, Forward] = {}
        width = num_blocks_for(max_model_len, model.store.block_size)
        self._buffer = torch.zeros((_HEADER + width) * self.buckets[-1], dtype=torch.int64, device=model.device)
        self._staging = torch.zeros_like(self._buffer, device="cpu", pin_memory=model.device.type == "cuda")

    def fits(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether a step is one new token for each of so many rows, all of them sampled from."""
        return len(steps) <= self.buckets[-1] and all(
            s.samples and len(s.token_ids) == 1 and s.start < self._max_context for s in steps
        )

    def run(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Logits ``[len(steps), vocabulary]`` of a step that fits, valid until the next call."""
        size = next(size for size in self.buckets if size >= len(steps))
        self._fill(steps, size)
        return self.forward_of(size)()[: len(steps)]

    def forward_of(self, size: int) -> Forward:
        """The forward of one bucket, captured if it is not yet. Runs over whatever the buffers hold."""
        if size not in self._forwards:
            self._forwards[size] = self._capture(self._forward(size))
        return self._forwards[size]

    def capture_all(self) -> None:
        """Capture every bucket now, over rows of padding. The largest first: the others then find room in its
        memory."""
        for size in reversed(self.buckets):
            self._fill([], size)
            self.forward_of(size)

    def _fill(self, steps: Sequence[SequenceStep], size: int) -> None:
        """The step into the first columns of the buffers, padding into the others. The block tables stand upright, a
        row of the buffer for each place in them, so that what a step uses is one piece and one copy."""
        block_size, padding = self._model.store.block_size, size - len(steps)
        tables = [s.block_ids[: num_blocks_for(s.start + 1, block_size)] for s in steps]
        slots = (slot_mapping(s.block_ids, s.start, 1, block_size)[0] for s in steps)
        rows = (
            (*(s.token_ids[0] for s in steps), *[self._model.pad_token_id] * padding),
            (*(s.start for s in steps), *[0] * padding),
            (*slots, *[_NO_SLOT] * padding),
            (*(s.start + 1 for s in steps), *[0] * padding),
            *zip_longest(*tables, *[()] * padding, fillvalue=NULL_BLOCK),
        )
        ints = torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.int64)
        self._staging[: len(ints)].copy_(ints)
        self._buffer[: len(ints)].copy_(self._staging[: len(ints)], non_blocking=True)

    def _forward(self, size: int) -> Forward:
        """The forward of one bucket over its part of the buffers."""
        model = self._model
        views = self._buffer[: len(self._buffer) // self.buckets[-1] * size].view(-1, size)
        token_ids, positions, slots, context_lens = views[:_HEADER]
        each = torch.arange(size + 1, device=model.device)
        inputs = AttentionInputs(
            query_lens=(1,) * size,
            context_lens=(),  # of the host: a graph must not know them
            block_tables=views[_HEADER:].T,
            slot_mapping=slots,
            lens=context_lens,
            query_starts=each,
            decode_rows=each[:size],
        )

        def forward() -> torch.Tensor:
            step = PagedStep(model.store, model.backend, inputs, packed=None)
            output = model.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, paged=step)
            logits: torch.Tensor = output.logits[0]
            return logits

        return forward


def make_graphs(model: PagedModel, max_num_seqs: int, max_model_len: int) -> DecodeGraphs | None:
    """Graphs of all buckets, captured; None where there can be none, with a warning where that is a surprise."""
    if not can_capture(model):
        return None
    started = time.perf_counter()
    try:
        graphs = DecodeGraphs(model, max_num_seqs, max_model_len, CudaCapture())
        graphs.capture_all()
    except RuntimeError as error:  # a forward that waits for the device, or no memory left
        logger.warning("decode steps run without CUDA graphs: %s", str(error).partition("\n")[0])
        return None
    logger.info("CUDA graphs: %d, in %.1f s", len(graphs.buckets), time.perf_counter() - started)
    return graphs


def can_capture(model: PagedModel) -> bool:
    """Whether the model lies on one GPU and its attention asks the host for nothing."""
    devices = {layer.device for layer in model.store.layers}
    plain = all(layer.storage is None for layer in model.store.layers)  # K/V of 8 bits is written by torch operators
    return len(devices) == 1 and devices.pop().type == "cuda" and model.backend.reads_on_device and plain


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, the multiples of 8 below ``most``, and ``most``."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


class CudaCapture:
    """Records forwards as CUDA graphs, in one pool of memory, since only one of them ever runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def __call__(self, forward: Forward) -> Forward:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # kernels are compiled and libraries set up outside of the recording
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay
