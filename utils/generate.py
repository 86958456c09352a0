"""Complete a prompt with a trained model, or fill the mask in it.

python -m utils.generate runs/clm --prompt "import numpy as np"
python -m utils.generate runs/mlm --prompt "Goal of my life is to <mask>."
"""

import argparse

from transformers import AutoConfig, pipeline

from utils.evaluation import DECODING


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="an output_dir or a Hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    args = parser.parse_args()
    architecture = AutoConfig.from_pretrained(args.model).architectures[0]
    if "CausalLM" in architecture or "LMHead" in architecture:
        sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else DECODING
        generator = pipeline("text-generation", model=args.model)
        print(generator(args.prompt, max_new_tokens=args.max_new_tokens, **sampling)[0]["generated_text"])
    else:
        for answer in pipeline("fill-mask", model=args.model)(args.prompt):
            print(f"{answer['score']:6.1%}  {answer['sequence']}")


if __name__ == "__main__":
    main()
