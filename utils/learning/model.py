"""A transformers model whose configuration agrees with the tokenizer and the block size by construction."""

import contextlib
import functools
import os
import re

import torch
from accelerate.utils import DynamoBackend
from transformers import AutoTokenizer, GenerationConfig

from utils.devices import forward_on_xla, is_xla
from utils.io.files import is_missing_folder
from utils.learning.configuration import CALL, MODEL_CLASSES, configure, one_line, setting
from utils.learning.fused_head import CompilerSoftmax
from utils.learning.kernels import use_fast_products, use_few_kernel_norms, use_one_kernel_gelu
from utils.learning.xla_attention import use_xla_attention

EXAMPLES = {"text-generation": "The", "fill-mask": "It is [MASK]."}  # prompts by pipeline


def check_model(args, kind) -> list[str]:
    """What is wrong with model_type, config_overrides, model_name_or_path and gradient_checkpointing, a line
    each, before any weights are made. kind: "causal", "masked" or "pretraining"."""
    tokenizer = None  # if one will be trained
    name = args.tokenizer_name or args.model_name_or_path
    if name and not is_missing_folder(name):
        with contextlib.suppress(Exception):  # of a damaged file any; load_rows tells it
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    config, model, problems = configure(args, kind, tokenizer)
    if problems:
        return problems
    if args.gradient_checkpointing and not model.supports_gradient_checkpointing:
        problems.append(f"gradient_checkpointing: transformers' {config.model_type} cannot; leave it out")
    if args.model_name_or_path and not problems:
        try:
            load_weights(kind, args.model_name_or_path, config, device_map="meta")
        except ValueError as error:
            problems.append(str(error))
    return problems


def build_model(args, kind, tokenizer):
    """A model in float32: random weights of args.model_type with config_overrides, or the weights of
    model_name_or_path. Vocabulary size, special ids and positions come from tokenizer and block_size where
    they are not overridden. Parameters that no gradient reaches are frozen. ValueError with all problems."""
    config, _, problems = configure(args, kind, tokenizer)
    if problems:
        raise ValueError("\n".join(problems))
    if args.model_name_or_path:
        model, extra = load_weights(kind, args.model_name_or_path, config)
        model.train()  # with dropout
        if extra and os.environ.get("RANK", "0") == "0":
            print(f"weights    {len(extra)} are not needed and left out: {', '.join(extra[:3])}")
    else:
        model = MODEL_CLASSES[kind].from_config(config, dtype=torch.float32, trust_remote_code=False)
    if kind == "causal":
        # pipeline() would ask for 256 new tokens, more than there are positions.
        model.generation_config.max_length = model.generation_config.max_length or args.block_size
        # transformers reads what it refuses to save: a temperature without do_sample, pad_token_id=-1.
        for fix in {}, {"do_sample": True}:
            model.generation_config.update(**fix)
            with contextlib.suppress(ValueError):
                model.generation_config.validate(strict=True)
                break
        else:
            model.generation_config = GenerationConfig.from_model_config(model.config)
            model.generation_config.max_length = args.block_size
    use_fast_products(args.block_size)
    try_model(model, kind, args.block_size)
    use_one_kernel_gelu(model)
    use_few_kernel_norms(model)
    if args.gradient_checkpointing:
        if is_xla():  # torch's own fails: it looks for torch.xla (2.9)
            from torch_xla.utils.checkpoint import checkpoint

            model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def to_device(model, accelerator) -> None:
    """Moves a loss module to the device, before its optimizer is built; gets it ready for what `prepare`
    compiles where accelerate_configs/*.yaml says so; and on XLA makes it compute in bfloat16."""
    model.to(accelerator.device)
    # Moving to XLA makes new parameters, and ties come apart. recompute_mapping=False: weights that were
    # loaded as different ones stay different, whatever the configuration says.
    model.lm.tie_weights(recompute_mapping=False)
    device, compiled = accelerator.device.type, accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
    if device == "xla" or compiled and device != "cpu":
        model.chunk_softmax = CompilerSoftmax()
    if compiled:
        import torch._dynamo  # not at the top: it takes a second

        # Per function: blocks of all kinds share one, and evaluation has graphs of its own.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if device == "xla":
        use_xla_attention()
        forward_on_xla(model)


def load_weights(kind, name_or_path, config, **options):
    """(the model with these weights, in float32; names of weights that it does not need). ValueError where
    they cannot be read, or some are missing, of another shape or not finite."""
    blamed = f"model_name_or_path, {name_or_path!r}"
    options |= {"config": config, "dtype": torch.float32, "trust_remote_code": False}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # told here
    try:
        model, info = MODEL_CLASSES[kind].from_pretrained(name_or_path, **options)
    except Exception as error:  # of a damaged file any
        raise ValueError(f"{blamed}: its weights cannot be read ({one_line(error)})") from None
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [f"{name} is {[*there]}, not {[*here]}" for name, there, here in sorted(info["mismatched_keys"])]
    wrong += [f"{name} is not finite" for name, weight in model.named_parameters()
              if not wrong and not weight.is_meta and not weight.isfinite().all()]  # fmt: skip
    if wrong:
        first = ", ".join(wrong[:3]) + ", ..." * (len(wrong) > 3)
        raise ValueError(f"{blamed}: {len(wrong)} of its weights do not fit the model: {first}; choose a "
                         "folder that save_pretrained wrote")
    return model, sorted(info["unexpected_keys"])


def try_model(model, kind, block_size) -> None:
    """Runs the model forward and backward on a few tokens, and on a full row if that leaves parameters
    without a gradient; those that still have none, such as an unused pooler, are frozen: DDP would wait for
    them.

    ValueError if transformers cannot run it on token ids alone, or if a causal model sees the next token."""
    reached, size = set(), model.config.vocab_size

    def forward(ids):
        with torch.random.fork_rng(devices=[]):  # Reformer draws its hashes
            torch.manual_seed(0)
            return model(input_ids=ids, **CALL[kind])

    def note(parameter):
        reached.add(parameter)
        parameter.grad = None  # at once: not a second copy of the weights in memory

    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    model.eval()
    try:
        for length in (min(8, block_size), block_size):
            ids = (size // 2 + torch.arange(length)[None]) % size  # hardly special ones
            out = forward(ids)
            sum(x.float().sum() for x in out.values() if getattr(x, "requires_grad", False)).backward()
            if reached == trained:
                break
        with torch.no_grad():
            if kind == "causal" and _sees_next(forward, ids, out["logits"]):
                raise ValueError("a token sees the next one, so there would be nothing to predict")
    except Exception as error:
        heads, key_heads = (setting(model.config, f"num_{name}_heads") for name in ("attention", "key_value"))
        hint = f"; num_key_value_heads is {key_heads}" if key_heads and heads % key_heads else ""
        message = f"model_type, {model.config.model_type!r}: cannot be trained on token ids alone"
        raise ValueError(f"{message} ({one_line(error)}){hint}") from None
    finally:
        model.train()
        for hook in hooks:
            hook.remove()
    if kind == "pretraining" and "seq_relationship_logits" not in out:
        raise ValueError(f"model_type, {model.config.model_type!r}: has no next-sentence head; choose bert")
    for parameter in trained - reached:
        parameter.requires_grad_(False)


def _sees_next(forward, ids, logits) -> bool:
    """Whether another last token changes the logits of those before it."""
    changed = forward(torch.cat([ids[:, :-1], ids[:, :1]], 1))["logits"]
    return bool((changed - logits)[:, :-1].abs().max() > 1e-4 * logits.abs().max())


def beside_default(args, lm, tokenizer) -> str:
    """", 1.6 x the default's": the parameters of lm beside those of the script's default model with this
    tokenizer; "" for the default itself."""
    default = type(args)()
    if (args.model_type, args.config_overrides) == (default.model_type, default.config_overrides):
        return ""
    kind = "causal" if pipeline_tag(lm) == "text-generation" else "masked"
    _, model, problems = configure(default, kind, tokenizer)
    return "" if problems else f", {lm.num_parameters() / model.num_parameters():.2g} x the default's"


def pipeline_tag(lm) -> str:
    """The pipeline of transformers that runs the model: "text-generation" or "fill-mask"."""
    return "text-generation" if re.search(r"CausalLM|LMHead", type(lm).__name__) else "fill-mask"
