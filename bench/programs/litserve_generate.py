"""LitServe as its examples show it: batches of at most 8 within 50 ms, one padded ``model.generate`` for each.

    python litserve_generate.py PORT MODEL

Its examples answer when a batch is done, so the whole answer comes as one piece; it is put into the events of a
completions stream here, that the clients of ``bench.peers`` can read it. ``ignore_eos`` and ``max_tokens`` are those of
the longest request of a batch.
"""

# No "from __future__ import annotations" here: LitServe reads the types of decode_request and encode_response.
import json
import sys
from typing import Any

import litserve
import torch
from fastapi import Request, Response
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_BATCH_SIZE = 8
BATCH_TIMEOUT_S = 0.05


class Generate(litserve.LitAPI):  # type: ignore[misc]
    """Prompts in, whole texts out."""

    model_folder = ""

    def setup(self, device: str) -> None:
        """Load model and tokenizer."""
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32).eval()

    def decode_request(self, request: Request) -> Any:
        """The body of a completions request."""
        return request

    def batch(self, inputs: list[Any]) -> list[Any]:
        """A list is a batch."""
        return inputs

    def unbatch(self, output: list[Any]) -> list[Any]:
        """And so are the answers."""
        return output

    def predict(self, bodies: list[Any]) -> list[dict[str, Any]]:
        """One ``generate`` over all of them."""
        inputs = self.tokenizer([body["prompt"] for body in bodies], return_tensors="pt", padding=True)
        longest = max(body["max_tokens"] for body in bodies)
        with torch.inference_mode():
            output = self.model.generate(
                **inputs, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
            )
        rows = output[:, inputs["input_ids"].shape[1] :]
        return [
            {"text": self.tokenizer.decode(row[: body["max_tokens"]]), "tokens": body["max_tokens"]}
            for row, body in zip(rows, bodies, strict=True)
        ]

    def encode_response(self, output: dict[str, Any]) -> Response:
        """One event with the text, one with the usage, the end."""
        chunks = [
            {"choices": [{"index": 0, "text": output["text"], "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": output["tokens"]}},
        ]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return Response("".join(events) + "data: [DONE]\n\n", media_type="text/event-stream")


if __name__ == "__main__":
    api = Generate(max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S, api_path="/v1/completions")
    api.model_folder = sys.argv[2]  # of the object: it is sent to the process that runs it
    server = litserve.LitServer(api, accelerator="cpu", timeout=False)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="error")
