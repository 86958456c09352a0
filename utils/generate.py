"""Complete a prompt with a trained model, or fill the mask in it.

python -m utils.generate runs/clm --prompt "import numpy as np"
python -m utils.generate runs/mlm --prompt "Goal of my life is to [MASK]."
"""

import argparse

from transformers import AutoConfig, pipeline

from utils.display.progress import quiet_libraries
from utils.display.samples import DECODING, MASK
from utils.entry import user_mistakes
from utils.learning.model import setting


def main() -> None:
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("model", help="an output_dir or a Hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    args = parser.parse_args()
    quiet_libraries()
    with user_mistakes():
        print(*answers(args.model, args.prompt, args.max_new_tokens, args.temperature), sep="\n")


def answers(model: str, prompt: str, max_new_tokens: int, temperature: float) -> list[str]:
    """The prompt completed, or the five likeliest words for its mask. ValueError where that cannot be."""
    if not (0 <= temperature <= 1e6 and max_new_tokens > 0):
        raise ValueError("--temperature: 0 or greater, and finite; --max_new_tokens: greater than 0")
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        raise ValueError(
            f"{model}: no folder with a trained model (config.json) and no model on the Hub within reach"
        ) from None
    causal = any(name in config.architectures[0] for name in ("CausalLM", "LMHead"))
    pipe = pipeline("text-generation" if causal else "fill-mask", model=model)
    prompt = prompt if causal else prompt.replace(MASK, pipe.tokenizer.mask_token)
    limit = min(filter(None, (pipe.tokenizer.model_max_length, setting(config, "max_position_embeddings"))))
    room = limit - len(pipe.tokenizer(prompt)["input_ids"])
    if room < causal:
        raise ValueError(f"--prompt: {limit - room} tokens, and {model} has room for {limit}: shorten it")
    if causal:
        sampling = {"do_sample": True, "temperature": temperature} if temperature else DECODING
        return [pipe(prompt, max_new_tokens=min(max_new_tokens, room), **sampling)[0]["generated_text"]]
    if prompt.count(pipe.tokenizer.mask_token) != 1:
        raise ValueError(f"--prompt: write {MASK} once, where the word is missing")
    found = [(answer["score"], answer["sequence"].replace("\n", "\\n")) for answer in pipe(prompt)]
    return [f"{score:6.1%}  {text}" for score, text in found]  # a line each


if __name__ == "__main__":
    main()
