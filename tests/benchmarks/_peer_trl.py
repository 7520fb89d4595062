"""TRL's GRPO trainer on the same model, prompts, samples and tokens: the yardstick for `demo` and `smollm2`.

Run as a process of its own (``python -P _peer_trl.py JOB.json``): it prints one JSON line with steps, samples per second and
its peak resident memory. The job file names the model folder, the prompts, the answers and the sizes; a completion is
rewarded when its first line is the answer. TRL is a development dependency and never needed to run Temper.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main(path: str) -> int:
    """Train as the job says and print the figures."""
    job: dict[str, Any] = json.loads(Path(path).read_text())
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(job["threads"]))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    stamps: list[float] = []

    class Stamps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            stamps.append(time.perf_counter())

    def reward(prompts: list[str], completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]

    stops = [tokenizer.eos_token_id, *job.get("stop_token_ids", [])]
    samples = int(job["groups"]) * int(job["samples_per_group"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=bool(job["bf16"]),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_steps=int(job["steps"]),
            per_device_train_batch_size=int(job.get("micro_batch", samples)),
            gradient_accumulation_steps=samples // int(job.get("micro_batch", samples)),
            num_generations=int(job["samples_per_group"]),
            max_completion_length=int(job["max_new_tokens"]),
            learning_rate=float(job["learning_rate"]),
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            generation_kwargs={"eos_token_id": stops},
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]}),
            callbacks=[Stamps()],
        )
        trainer.train()
    steady = stamps[len(stamps) // 4 :]  # the first quarter is warm-up
    seconds = (steady[-1] - steady[0]) / (len(steady) - 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"step_s": seconds, "samples_per_s": samples / seconds, "peak_bytes": peak, "steps": len(stamps)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
