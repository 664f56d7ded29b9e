"""How do we stand beside other servers? The same clients and prompts against each one that is there, in turn.

N clients send one streaming completion each at the same moment; greedy, ``ignore_eos``, prompts of single-token words.
Every server computes in float32 with two threads. Figures, medians of rounds: output tokens/s of the whole, and decode
tokens/s (for each stream, tokens after the first over the time after it; the sum of all streams), median time to the
first token, peak memory of the server and its children. LitServe stands for a server written around
``model.generate``: it answers when a batch is done, in one piece, so it has no decode rate and its first token is its
last. A server that is not named is left out; one that fails shows why.

    python -m bench.peers [--vllm PYTHON] [--llama SERVER --gguf FILE] [--transformers COMMAND]
                          [--litserve PYTHON] [--model FOLDER] [--concurrency 1 8 32] [--lengths 128/64] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

import httpx2 as httpx

from bench.peer_servers import Peer, PeerFailed, known_peers, running
from bench.report import median, write

#: Words that are one token each, with a space before, in the vocabularies of GPT-2 and its kin.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country hand".split()
)
_REQUEST_TIMEOUT_S = 300.0


async def stream(client: httpx.AsyncClient, peer: Peer, prompt: str, tokens: int) -> tuple[float, float, float]:
    """(sent, first token, end) of one completion, in seconds; it must have had all its tokens."""
    body = {"model": peer.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}, "cache_salt": str(random.random())}
    body |= peer.fields
    for name in peer.leave_out:
        del body[name]
    sent, first, used = time.perf_counter(), 0.0, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise PeerFailed(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data:") and not line.endswith("[DONE]"):
                first = first or time.perf_counter()
                if '"completion_tokens":' in line:
                    used = int(line.split('"completion_tokens":')[1].split(",")[0].strip(" }"))
    if used != tokens:
        raise PeerFailed(f"{used} tokens instead of {tokens}")
    return sent, first, time.perf_counter()


async def one_round(peer: Peer, port: int, concurrency: int, lengths: tuple[int, int], seed: int) -> dict[str, float]:
    """All clients at once."""
    rnd = random.Random(seed)
    prompts = [" ".join(rnd.choices(WORDS, k=lengths[0])) for _ in range(concurrency)]
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_TIMEOUT_S, limits=limits
    ) as client:
        times = await asyncio.gather(*[stream(client, peer, prompt, lengths[1]) for prompt in prompts])
    wall = max(end for _, _, end in times) - min(sent for sent, _, _ in times)
    return {
        "tokens_per_s": concurrency * lengths[1] / wall,
        "decode_tokens_per_s": 0.0 if peer.note else sum((lengths[1] - 1) / (end - first) for _, first, end in times),
        "ttft_s": statistics.median(first - sent for sent, first, _ in times),
    }


def measure(peer: Peer, counts: list[int], lengths: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """One server from start to end; an error in the place of figures where it fails."""
    results: dict[str, Any] = {}
    try:
        with running(peer) as server:
            asyncio.run(one_round(peer, server.port, 1, (16, 4), 0))
            for pair in lengths:
                for count in counts:
                    seen = [asyncio.run(one_round(peer, server.port, count, pair, 7 + k)) for k in range(rounds)]
                    name = f"{pair[0]}/{pair[1]} x {count}"
                    results[name] = {key: median((s[key] for s in seen), 3) for key in seen[0]}
                    print(peer.name, name, results[name], flush=True)
            results["peak_mib"] = server.peak_mib()
    except (PeerFailed, httpx.HTTPError, OSError) as error:
        results["error"] = f"{type(error).__name__}: {error}"[:300]
        print(peer.name, results["error"], flush=True)
    return {"version": peer.version, **({"note": peer.note} if peer.note else {}), **results}


def ratios(results: dict[str, dict[str, Any]], ours: str) -> dict[str, dict[str, float]]:
    """For each other server and workload: our decode tokens/s over its; if it answers in one piece, tokens/s of the
    whole."""
    found: dict[str, dict[str, float]] = {}
    for name, theirs in results.items():
        shared = [w for w, figures in theirs.items() if isinstance(figures, dict) and w in results[ours]]
        if name != ours and shared:
            rate = "tokens_per_s" if "note" in theirs else "decode_tokens_per_s"
            found[name] = {w: round(results[ours][w][rate] / theirs[w][rate], 2) for w in shared}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="Python of an environment that has vLLM")
    parser.add_argument("--llama", help="llama-server")
    parser.add_argument("--gguf", help="the model in float32 for llama-server")
    parser.add_argument("--transformers", help="the command transformers")
    parser.add_argument("--litserve", help="Python of an environment that has LitServe, torch and transformers")
    parser.add_argument("--model", help="folder of the model; the embedded one unless given")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", nargs="+", default=["128/64"])
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    pairs = [(int(a), int(b)) for a, b in (text.split("/") for text in chosen.lengths)]
    results = {peer.name: measure(peer, chosen.concurrency, pairs, chosen.rounds) for peer in known_peers(vars(chosen))}
    kept = {"servers": results, "ours_to": ratios(results, "microbatch")}
    print(kept["ours_to"])
    write("peers", (__doc__ or "").splitlines()[0], kept)
