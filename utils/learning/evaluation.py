"""Evaluation: sums over the whole data set, divided once, at the end."""

import math
from collections.abc import Callable, Iterable

import torch
from accelerate.utils import DistributedType

from utils.display.progress import bar
from utils.xla import sync

# The most likely token each time. Those that have occurred count 1.2 times less (CTRL, arXiv 1909.05858,
# section 4.1), or models that are small or young repeat one phrase for ever.
DECODING = {"do_sample": False, "repetition_penalty": 1.2}


@torch.no_grad()
def sum_over_dataset(
    accelerator,
    model: torch.nn.Module,
    loader: Iterable,
    batch_sums: Callable[[dict], torch.Tensor],
    stopped: Callable[[], int] = lambda: 0,
) -> list[float] | None:
    """Adds up `batch_sums(batch)` (1-d, [K], float32) over all batches and processes; K floats, added in
    float64.

    Padding rows (row == -1) must count as nothing in `batch_sums`; then every sample counts once for any
    batch size and any number of processes. Nothing is read by the host before the end. None if `stopped()`
    ended it early.
    """
    model.eval()
    sums = []
    for batch in bar(loader, "evaluating", is_main_process=accelerator.is_main_process):
        sums.append(batch_sums(batch))
        sync()  # the last batch's graph is that of all others
        if stopped():
            break
    else:
        totals = accelerator.gather(torch.stack(sums))  # [batches x processes, K]
        model.train()
        return totals.cpu().double().sum(0).tolist()
    model.train()
    return None


def perplexity_metrics(loss_sum: float, tokens: float, bytes_per_token: float) -> dict[str, float]:
    """loss_sum: cross-entropy in nats over `tokens` predicted tokens; bytes_per_token: UTF-8 bytes of the
    text over its tokens. bits_per_byte compares models with different tokenizers (Gao et al., "The Pile",
    2020, section 3.1).
    """
    loss = loss_sum / tokens
    return {
        "loss/eval": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "eval_tokens": int(tokens),
    }


@torch.no_grad()
def complete_prompts(
    accelerator, model, tokenizer, prompts: list[str], max_new_tokens: int = 48
) -> list[str]:
    """Completions of `prompts` by the main process, by DECODING; the others return [].

    None under FSDP, where no process holds the weights, nor on XLA, where each length would compile a graph
    anew.
    """
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.XLA)
    if sharded or not accelerator.is_main_process:
        return []
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    room = lm.config.max_position_embeddings - max_new_tokens
    lm.eval()
    completions = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        ids = ids[:, -max(room, 1) :].to(accelerator.device)  # [1, prompt tokens]
        new = min(max_new_tokens, lm.config.max_position_embeddings - ids.shape[1])
        with accelerator.autocast():
            output = lm.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                pad_token_id=tokenizer.eos_token_id, **DECODING,
            )  # fmt: skip
        completions.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    lm.train()
    return completions
