"""What the model puts in place of a mask: the samples printed at each evaluation of a masked LM."""

import torch
from accelerate.utils import DistributedType

MASK = "[MASK]"  # written so in prompts; each tokenizer has its own


@torch.no_grad()
def fill_masks(accelerator, model, tokenizer, prompts: list[str], top: int = 5) -> list[str]:
    """A line per mask, with its `top` most likely tokens and their probabilities, from the main process; the
    others return []. None under FSDP, where no process holds the weights.

    All prompts go through in one batch of fixed shape, so on XLA this is one graph.
    """
    if accelerator.distributed_type == DistributedType.FSDP or not accelerator.is_main_process or not prompts:
        return []
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    lm.eval()
    texts = [prompt.replace(MASK, tokenizer.mask_token) for prompt in prompts]
    # Padded and cut here: asked to, the tokenizer would remember it, and save it with the model.
    ids = [{"input_ids": tokenizer(text)["input_ids"][: tokenizer.model_max_length]} for text in texts]
    inputs = tokenizer.pad(ids, return_tensors="pt")  # [prompts, T]
    rows, places = (inputs["input_ids"] == tokenizer.mask_token_id).nonzero(as_tuple=True)
    with accelerator.autocast():
        out = lm(**inputs.to(accelerator.device))
    logits = out["logits" if "logits" in out else "prediction_logits"].float().cpu()  # [prompts, T, V]
    lm.train()
    lines = []
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        scores, ids = logits[row, place].softmax(-1).topk(top)
        words = (tokenizer.decode([i]).strip() or "▁" for i in ids.tolist())
        guesses = ", ".join(f"{word} {score:.0%}" for word, score in zip(words, scores.tolist(), strict=True))
        lines.append(f"{prompts[row]}  ->  {guesses}")
    return lines
