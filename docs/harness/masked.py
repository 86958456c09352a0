"""lm_eval with a model type for masked models: pseudo-log-likelihood.

    python -m docs.harness.masked run --model masked --model_args pretrained=runs/mlm --tasks words \\
        --include_path docs/harness --batch_size 32

Each token of an answer is hidden alone, all others seen, and the log-probabilities of what was hidden are
added up (Salazar et al., 2020). For tasks of choices (multiple_choice), the harness's BLiMP among them.
"""

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from transformers import AutoModelForMaskedLM, AutoTokenizer


@register_model("masked")
class MaskedScores(LM):
    def __init__(self, pretrained: str, batch_size=32, device: str | None = None, max_batch_size=None):
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained, truncation_side="left")
        place = device if torch.accelerator.is_available() and device else "cpu"  # the default names a GPU
        self.model = AutoModelForMaskedLM.from_pretrained(pretrained).to(place).eval()
        self.rows = int(batch_size)  # per forward pass

    def loglikelihood(self, requests):
        return [self.score(*request.args) for request in requests]

    @torch.inference_mode()
    def score(self, before: str, answer: str) -> tuple[float, bool]:
        """Log-probability of the answer, and whether each of its tokens is the likeliest."""
        encoded = self.tokenizer(before + answer, truncation=True, return_offsets_mapping=True,
                               return_special_tokens_mask=True, return_tensors="pt")
        ends, special = encoded["offset_mapping"][0, :, 1], encoded["special_tokens_mask"][0].bool()
        (places,) = torch.where((ends > len(before)) & ~special)
        ids = encoded["input_ids"].to(self.model.device)  # [1, T]
        hidden = ids.repeat(len(places), 1)
        hidden[torch.arange(len(places)), places] = self.tokenizer.mask_token_id
        total, likeliest = 0.0, True
        for rows, where in zip(hidden.split(self.rows), places.split(self.rows), strict=True):
            logits = self.model(rows).logits[torch.arange(len(where)), where].float()  # [B, V]
            true = ids[0, where]
            total += logits.log_softmax(-1).gather(1, true[:, None]).sum().item()
            likeliest &= bool((logits.argmax(-1) == true).all())
        return total, likeliest

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError("a masked model has no perplexity of documents")

    def generate_until(self, requests):
        raise NotImplementedError("a masked model does not write")


if __name__ == "__main__":
    cli_evaluate()
