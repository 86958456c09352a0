"""A transformers model whose configuration agrees with the tokenizer and the block size by construction."""

import os
from pathlib import Path

import torch
from torch.autograd.function import BackwardCFunction

from utils.devices import device_type, memory_of
from utils.learning.configuration import CALL, MODEL_CLASSES, configure, meta_model, one_line, read_config
from utils.learning.evaluation import eval_mode
from utils.learning.local_attention import LOCAL, WINDOW, slides
from utils.learning.one_kernel import use_one_kernel_gelu, use_one_kernel_rms_norm
from utils.learning.overrides import setting

# Attention kernels, and the model's attribute that says it has them
ATTENTION = {"auto": "", "eager": "", "sdpa": "_supports_sdpa", LOCAL: "_supports_sdpa"}
ATTENTION[WINDOW] = "_supports_flash_attn"  # types that support it pass their window to the kernel
PACKS = ("bert", "ernie", "megatron-bert")  # whose pooler and attention take several sentence pairs to a row


def model_problems(
    kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer=None,
    gradient_checkpointing=False, attn="auto", eval_only=False,
):  # fmt: skip
    """What is wrong with these settings, one line each, before any weights are made; [] = nothing."""
    of = kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer
    config, problems = configure(*of)
    if problems:
        return problems
    made = MODEL_CLASSES[kind]._model_mapping[type(config)]
    if gradient_checkpointing and not made.supports_gradient_checkpointing:
        problems.append(f"gradient_checkpointing: transformers' {config.model_type} cannot; leave it out")
    if reason := _without_attention(attn, kind, config):
        problems.append(f"attn_implementation, {attn!r}: {reason}; auto takes what can")
    if not problems and (reason := _too_large(meta_model(kind, config).num_parameters(), eval_only)):
        problems.append(f"model: {reason}")
    if model_name_or_path and not problems:
        try:
            load_weights(kind, model_name_or_path, config, device_map="meta")
        except ValueError as error:
            problems.append(str(error))
    return problems


def build_model(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer, attn="auto"):
    """A model in float32: random weights of `model_type`, or the weights of `model_name_or_path`.

    kind: of MODEL_CLASSES. config_overrides: "hidden_size=256,num_hidden_layers=4" or a JSON object, for
    random weights. Vocabulary size, special ids and positions come from tokenizer and block_size where they
    are not overridden. ValueError with `model_problems`."""
    of = kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer
    config, problems = configure(*of)
    if problems:
        raise ValueError("\n".join(problems))
    attn = fastest_attention(kind, config, block_size) if attn == "auto" else attn
    if attn != "auto":  # transformers takes sdpa where the model can
        config._attn_implementation = attn
    if model_name_or_path:
        model, extra = load_weights(kind, model_name_or_path, config)
        model.train()  # with dropout
        if extra and os.environ.get("RANK", "0") == "0":
            print(f"weights    {len(extra)} are not needed and left out: {', '.join(extra[:3])}")
    else:
        model = MODEL_CLASSES[kind].from_config(config, dtype=torch.float32, trust_remote_code=False)
    if kind == "causal":
        _set_generation(model, block_size)
    freeze_unused(model, kind, block_size)  # before custom functions, which hide what they lead to
    use_one_kernel_gelu(model)
    use_one_kernel_rms_norm(model)
    return model


def _set_generation(model, block_size):
    """What pipeline() finds in the saved model."""
    generation, config = model.generation_config, model.config
    # It would ask for 256 new tokens, more than there are positions.
    generation.max_length = generation.max_length or block_size
    # transformers' cache asks for an attention layer, and for the number of layers (BLT's has another name).
    linear = set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}
    if linear or setting(config, "num_hidden_layers") is None:
        generation.use_cache = False


def load_weights(kind, name_or_path, config, **options):
    """(the model with these weights, in float32; names of weights that it does not need). ValueError where
    they cannot be read, or some are missing, of another shape or not finite."""
    blamed = f"model_name_or_path, {name_or_path!r}"
    options |= {"config": config, "dtype": torch.float32, "trust_remote_code": False}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # told here
    try:
        model, info = MODEL_CLASSES[kind].from_pretrained(name_or_path, **options)
    except Exception as error:  # of a damaged file any
        if Path(name_or_path, "model").is_dir():
            folder = Path(name_or_path).absolute().parents[1]
            raise ValueError(f"{blamed}: a sharded checkpoint; its run's model is in {folder}") from None
        raise ValueError(f"{blamed}: its weights cannot be read ({one_line(error)})") from None
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    for name, there, here in sorted(info["mismatched_keys"]):
        wrong.append(f"{name} is {list(there)}, not {list(here)}")
    if not wrong:
        weights = ((name, weight) for name, weight in model.named_parameters() if not weight.is_meta)
        wrong = [f"{name} is not finite" for name, weight in weights if not weight.isfinite().all()]
    if wrong:
        more = ", ..." if len(wrong) > 3 else ""
        told = f"{len(wrong)} of its weights do not fit the model: {', '.join(wrong[:3])}{more}"
        raise ValueError(f"{blamed}: {told}; choose a folder that save_pretrained wrote")
    return model, sorted(info["unexpected_keys"])


def packs_pairs(model_type, model_name_or_path, attn) -> bool:
    """Whether this model can keep several sentence pairs in one row apart."""
    if model_name_or_path:
        try:
            model_type = read_config(model_name_or_path).model_type
        except ValueError:  # model_problems tells
            return False
    return model_type in PACKS and attn in ("auto", "sdpa", "eager", WINDOW)


def freeze_unused(model, kind, block_size):
    """Freezes parameters without a gradient, such as an unused pooler: DDP would wait for it. Tries a few
    tokens, then a full row if some get none."""
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}

    def unreached(length):
        ids = torch.arange(length)[None] % model.config.vocab_size
        out = model(input_ids=ids, **CALL[kind])
        nodes = new = {value.grad_fn for value in out.values() if getattr(value, "grad_fn", None)}
        while new:
            new = {parent for node in new for parent, _ in node.next_functions if parent} - nodes
            nodes = nodes | new
        hides = any(isinstance(node, BackwardCFunction) for node in nodes)  # as Reformer's hide theirs
        reached = {getattr(node, "variable", None) for node in nodes}
        return trained - reached - set(model.base_model.parameters() if hides else ())

    # Reformer's first row says how many buckets it has.
    few = block_size if getattr(model.config, "num_buckets", 0) is None else min(8, block_size)
    with eval_mode(model):
        unused = unreached(few) and unreached(block_size)
    for parameter in unused:
        parameter.requires_grad_(False)


def fastest_attention(kind, config, block_size, device=None):
    """As measured: on a CPU blocks, for rows much longer than the window of sliding layers. Elsewhere torch's
    kernel with a window, also for sentence pairs, of which several share a row. Else "auto", what
    transformers takes."""
    device = device or device_type()
    if device == "cpu":
        name, pays = LOCAL, slides(config) and block_size >= 8 * max(config.sliding_window, 64)
    else:
        name, pays = WINDOW, slides(config) or kind == "pretraining"
    return name if pays and not _without_attention(name, kind, config, device) else "auto"


def _without_attention(name, kind, config, device=None):
    """Why a model cannot be trained with this attention on `device`, or here; "" if it can."""
    if name not in ATTENTION:
        return f"unknown, give one of {', '.join(ATTENTION)}"
    made, device = MODEL_CLASSES[kind]._model_mapping[type(config)], device or device_type()
    if not getattr(made, ATTENTION[name], True) or name == WINDOW and not made._supports_sdpa:
        return f"transformers' {config.model_type} cannot"
    if name == LOCAL and not slides(config):
        return "none of its layers is a sliding one"
    if name == WINDOW and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its layers attend in chunks"
    if name == LOCAL and device == "xla" or name == WINDOW and device != "cuda":  # or ROCm
        return f"cannot train on {device}"
    if name == WINDOW and os.environ.get("ACCELERATE_MIXED_PRECISION") not in ("bf16", "fp16"):
        return "needs --mixed_precision bf16 or fp16 of the launcher"
    return ""


def _too_large(parameters, eval_only):
    """Why so many parameters cannot be trained, or only evaluated, here; "" if they may be."""
    device, sharded = torch.device(device_type()), os.environ.get("ACCELERATE_USE_FSDP") == "true"
    processes = int(os.environ.get("WORLD_SIZE", 1)) if sharded else 1
    least = parameters * (4 if eval_only else 12) // processes  # weights, gradients, one state or two
    for takes, room in (least, memory_of(device)), (parameters * 4, memory_of(torch.device("cpu"))):
        if room and takes > room:
            memory = f"{takes / 2**30:.0f} GiB, and there are {room / 2**30:.0f}"
            return f"{parameters / 1e9:.1f} billion parameters take {memory}; give smaller config_overrides"
    return ""
