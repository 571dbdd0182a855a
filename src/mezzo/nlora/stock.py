"""Run as a script: answers of a plain LoRA folder in stock PEFT. A job as JSON on stdin; imports nothing of mezzo."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Prints the replies, a JSON list of lists of token ids, in the order of the prompts."""
    job: dict[str, Any] = json.load(sys.stdin)

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    base = AutoModelForCausalLM.from_pretrained(job["base"], dtype=getattr(torch, job["dtype"]))
    model = PeftModel.from_pretrained(base, job["lora"]).eval()
    pad = model.generation_config.pad_token_id
    replies: list[list[int]] = [[] for _ in job["prompts"]]
    order = sorted(range(len(job["prompts"])), key=lambda k: len(job["prompts"][k]))
    for start in range(0, len(order), job["batch_size"]):
        chosen = order[start : start + job["batch_size"]]
        prompts = [job["prompts"][k] for k in chosen]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        made = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=job["max_new_tokens"], do_sample=False, pad_token_id=pad
        )
        for k, reply in zip(chosen, made[:, longest:].tolist(), strict=True):
            replies[k] = reply
    if "mezzo" in sys.modules:
        raise SystemExit("mezzo was imported")
    sys.stdout.write(json.dumps(replies) + "\n")


if __name__ == "__main__":
    main()
