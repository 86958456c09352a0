"""Builds the transformers model, with a configuration that fits the tokenizer and the block size."""

import contextlib
import functools
import os
import re

import torch
from accelerate.utils import DynamoBackend
from transformers import AutoTokenizer, GenerationConfig

from utils.devices import forward_on_xla, is_xla
from utils.io.files import is_missing_folder
from utils.learning.configuration import MODEL_CLASSES, configure, one_line, setting
from utils.learning.fused_head import CompilerSoftmax
from utils.learning.kernels import use_fast_products, use_few_kernel_norms, use_one_kernel_gelu
from utils.learning.xla_attention import use_xla_attention

EXAMPLES = {"text-generation": "The", "fill-mask": "It is [MASK]."}  # {pipeline: example prompt}


def check_model(args, kind) -> list[str]:
    """A line per problem with model_type, config_overrides, model_name_or_path and gradient_checkpointing,
    without memory for weights. kind: "causal", "masked" or "pretraining"."""
    tokenizer = None  # if the run will train its tokenizer
    name = args.tokenizer_name or args.model_name_or_path
    if name and not is_missing_folder(name):
        with contextlib.suppress(Exception):  # a damaged file; load_rows reports it
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    config, model, problems = configure(args, kind, tokenizer)
    if problems:
        return problems
    if args.gradient_checkpointing and not model.supports_gradient_checkpointing:
        problems.append(f"gradient_checkpointing: {config.model_type} does not support it; leave it out")
    if args.model_name_or_path and not problems:
        try:
            load_weights(kind, args.model_name_or_path, config, device_map="meta")
        except ValueError as error:
            problems.append(str(error))
    return problems


def build_model(args, kind, tokenizer):
    """A model in float32 with random weights (args.model_type, config_overrides) or those of
    model_name_or_path. Vocabulary size, special token ids and positions come from tokenizer and block_size
    unless overridden. Parameters that no gradient reaches are frozen. ValueError with all problems."""
    config, _, problems = configure(args, kind, tokenizer)
    if problems:
        raise ValueError("\n".join(problems))
    if args.model_name_or_path:
        model, extra = load_weights(kind, args.model_name_or_path, config)
        model.train()  # with dropout
        if extra and os.environ.get("RANK", "0") == "0":
            print(f"weights    {len(extra)} are not part of the model and ignored: {', '.join(extra[:3])}")
    else:
        model = MODEL_CLASSES[kind].from_config(config, dtype=torch.float32, trust_remote_code=False)
    if kind == "causal":
        # pipeline() would generate 256 new tokens by default, more than the model has positions.
        model.generation_config.max_length = model.generation_config.max_length or args.block_size
        # transformers loads settings that it refuses to save: temperature without do_sample, pad_token_id=-1.
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
        if is_xla():  # torch's checkpoint fails: it looks for torch.xla (2.9)
            from torch_xla.utils.checkpoint import checkpoint

            model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def to_device(model, accelerator) -> None:
    """Moves a loss module to the device, before its optimizer is built. Chooses the softmax and limits for
    torch.compile if `prepare` will compile. On XLA the module then computes in bfloat16."""
    model.to(accelerator.device)
    # Moving to XLA makes new parameters, which are no longer tied. recompute_mapping=False: weights that were
    # loaded as different tensors stay different, even if the configuration ties them.
    model.lm.tie_weights(recompute_mapping=False)
    device, compiled = accelerator.device.type, accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
    if device == "xla" or compiled and device != "cpu":
        model.chunk_softmax = CompilerSoftmax()
    if compiled:
        import torch._dynamo  # takes a second

        # The limit is per function. All types of blocks share one, and evaluation needs graphs of its own.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if device == "xla":
        use_xla_attention()
        forward_on_xla(model)


def load_weights(kind, name_or_path, config, **options):
    """(the model with these weights in float32, names of weights that are not part of it). ValueError if they
    cannot be read, or if some are missing, have another shape, or are not finite."""
    setting_text = f"model_name_or_path, {name_or_path!r}"
    options |= {"config": config, "dtype": torch.float32, "trust_remote_code": False}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # the message below names them
    try:
        model, info = MODEL_CLASSES[kind].from_pretrained(name_or_path, **options)
    except Exception as error:  # a damaged file: errors of any type
        raise ValueError(f"{setting_text}: its weights cannot be read ({one_line(error)})") from None
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [f"{name} is {[*saved]}, not {[*size]}" for name, saved, size in sorted(info["mismatched_keys"])]
    wrong += [f"{name} is not finite" for name, weight in model.named_parameters()
              if not wrong and not weight.is_meta and not weight.isfinite().all()]  # fmt: skip
    if wrong:
        first = ", ".join(wrong[:3]) + ", ..." * (len(wrong) > 3)
        raise ValueError(f"{setting_text}: {len(wrong)} of its weights do not fit the model: {first}; choose "
                         "a folder that save_pretrained wrote")
    return model, sorted(info["unexpected_keys"])


def try_model(model, kind, block_size) -> None:
    """Runs the model forward and backward on eight tokens and, if parameters get no gradient, on a full row.
    Parameters that still get none, such as an unused pooler, are frozen: DDP would wait for their gradients.

    ValueError if the model does not run on token ids alone, or if a causal model sees the next token."""
    reached, size = set(), model.config.vocab_size
    options = {"use_cache": False} if kind == "causal" else {}

    def forward(ids):
        with torch.random.fork_rng(devices=[]):  # Reformer draws random hashes
            torch.manual_seed(0)
            return model(input_ids=ids, **options)

    def note(parameter):
        reached.add(parameter)
        parameter.grad = None  # at once, so that the gradients are never all in memory

    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    model.eval()
    try:
        for length in (min(8, block_size), block_size):
            ids = (size // 2 + torch.arange(length)[None]) % size  # unlikely to be special tokens
            out = forward(ids)
            sum(x.float().sum() for x in out.values() if getattr(x, "requires_grad", False)).backward()
            if reached == trained:
                break
        with torch.no_grad():
            if kind == "causal" and _sees_next(forward, ids, out["logits"]):
                raise ValueError("a token sees the next one, which it should predict")
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
    """True if a change of the last token changes the logits at earlier positions."""
    changed = forward(torch.cat([ids[:, :-1], ids[:, :1]], 1))["logits"]
    return bool((changed - logits)[:, :-1].abs().max() > 1e-4 * logits.abs().max())


def compare_with_default(args, lm, tokenizer) -> str:
    """Such as ", 1.6 x the default's": the parameters of lm relative to the script's default model with the
    same tokenizer. "" for the default model."""
    default = type(args)()
    if (args.model_type, args.config_overrides) == (default.model_type, default.config_overrides):
        return ""
    kind = "causal" if pipeline_tag(lm) == "text-generation" else "masked"
    _, model, problems = configure(default, kind, tokenizer)
    if problems:
        return ""
    size = f"{lm.num_parameters() / model.num_parameters():.2g}"
    return "" if size == "1" else f", {size} x the default's"


def example_prompt(facts: dict) -> str:
    """A prompt to try the saved model with. facts: of Log."""
    prompts = facts["settings"].get("prompts") or ["rows"]
    return prompts[0] if prompts != ["rows"] else facts.get("tried") or EXAMPLES[facts["pipeline_tag"]]


def pipeline_tag(lm) -> str:
    """The pipeline of transformers that runs the model: "text-generation" or "fill-mask"."""
    return "text-generation" if re.search(r"CausalLM|LMHead", type(lm).__name__) else "fill-mask"
