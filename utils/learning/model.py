"""A transformers model whose configuration agrees with the tokenizer and the block size by construction."""

import contextlib
import copy
import difflib
import json
import os

import torch
import transformers
from accelerate.utils import parse_flag_from_env
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from torch.autograd.function import BackwardCFunction
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import is_flash_attn_2_available

from utils.learning.local_attention import LOCAL, pays, slides
from utils.xla import is_xla

MODEL_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "pretraining": transformers.AutoModelForPreTraining,  # masked LM and next sentence: BertForPreTraining
}
# What attention is computed by, and what a transformers model says where it can
ATTENTION = {"auto": "", "eager": "", "sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn",
             "flash_attention_2": "_supports_flash_attn", LOCAL: "_supports_sdpa"}  # fmt: skip
OF_DEFAULTS = "gpt2", "modernbert"  # the scripts' own
ONLY_ON = {"flex_attention": ("cuda", "xpu"), "flash_attention_2": ("cuda",)}  # which includes ROCm
PACKS = ("bert", "ernie", "megatron-bert")  # whose pooler and attention take several sentence pairs to a row
CALL = {"causal": {"use_cache": False}, "masked": {}, "pretraining": {}}  # options of every forward pass
# (setting, its value in an encoder, its value in a causal model): BERT and its kin, XLM, XLNet
LEFT_TO_RIGHT = (("is_decoder", False, True), ("causal", False, True), ("attn_type", "bi", "uni"))


def model_problems(
    kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer=None,
    gradient_checkpointing=False, attn="auto",
):  # fmt: skip
    """What is wrong with these settings, one line each, before any weights are made; [] = nothing."""
    of = kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer
    config, problems = _configure(*of)
    if not problems:
        made = MODEL_CLASSES[kind]._model_mapping[type(config)]
        if gradient_checkpointing and not made.supports_gradient_checkpointing:
            problems.append(f"gradient_checkpointing: transformers' {config.model_type} cannot; leave it out")
        if reason := _without_attention(attn, kind, config):
            problems.append(f"attn_implementation, {attn!r}: {reason}; auto takes what can")
    return problems


def build_model(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer, attn="auto"):
    """A model in float32: random weights of `model_type`, or the weights of `model_name_or_path`.

    kind: of MODEL_CLASSES. config_overrides: "n_layer=4,n_embd=256" or a JSON object, for random weights.
    Vocabulary size, special ids and positions come from tokenizer and block_size where they are not
    overridden. ValueError with `model_problems`."""
    of = kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer
    config, problems = _configure(*of)
    if problems:
        raise ValueError("\n".join(problems))
    made, dtype = MODEL_CLASSES[kind], torch.float32  # transformers would keep that of the file
    if attn == "auto" and pays(config, block_size) and not _without_attention(LOCAL, kind, config):
        attn = LOCAL
    if attn in ("eager", "sdpa", LOCAL):  # else transformers takes sdpa where the model can
        config._attn_implementation = attn
    if model_name_or_path:
        model = made.from_pretrained(model_name_or_path, config=config, dtype=dtype).train()  # with dropout
    else:
        model = made.from_config(config, dtype=dtype)
    if kind == "causal" and not model.generation_config.max_length:
        # Saved with it: otherwise pipeline() asks for 256 new tokens, more than there are positions.
        model.generation_config.max_length = block_size
    use_one_kernel_gelu(model)
    freeze_unused(model, kind, block_size)
    if attn in ONLY_ON:  # not on the CPU, where the model still is
        model.set_attn_implementation(attn)
    return model


def packs_pairs(model_type, model_name_or_path, attn) -> bool:
    """Whether several sentence pairs in a row can be to this model what each would be alone."""
    if model_name_or_path:
        with contextlib.suppress(OSError, ValueError):  # model_problems tells
            model_type = AutoConfig.from_pretrained(model_name_or_path).model_type
    return model_type in PACKS and attn in ("auto", "sdpa", "eager")


def setting(config, name):
    """By the name that most architectures have for it; None where this one has no such thing."""
    return config.to_dict().get(config.attribute_map.get(name, name))


def freeze_unused(model, kind, block_size):
    """No gradient for parameters that text alone does not reach, such as an unused pooler: DDP would wait for
    it. A few tokens tell; where they leave some out, a full row is asked, too."""
    training, trained = model.training, {p for p in model.eval().parameters() if p.requires_grad}

    def unreached(length):
        ids = torch.arange(length)[None] % model.config.vocab_size
        out = model(input_ids=ids, **CALL[kind])
        nodes = new = {value.grad_fn for value in out.values() if getattr(value, "grad_fn", None)}
        while new:
            new = {parent for node in new for parent, _ in node.next_functions if parent} - nodes
            nodes = nodes | new
        hides = any(isinstance(node, BackwardCFunction) for node in nodes)  # its parameters, as Reformer's
        reached = {getattr(node, "variable", None) for node in nodes}
        return trained - reached - set(model.base_model.parameters() if hides else ())

    # Reformer's first row says how many buckets it has.
    few = block_size if getattr(model.config, "num_buckets", 0) is None else min(8, block_size)
    for parameter in unreached(few) and unreached(block_size):
        parameter.requires_grad_(False)
    model.train(training)


def use_one_kernel_gelu(model):
    """Replace GELUs written out in eight operations, which keep several copies of the widest activation for
    backward, by torch's kernel of the same formula. The configuration, and so what is saved, stays as it is.
    """
    written_out = "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module).__name__ in written_out:
            model.set_submodule(name, nn.GELU(approximate="tanh"))


def _device_type():
    """Of what this launch will train on; before there is an Accelerator to ask."""
    if is_xla() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return "xla" if is_xla() else "cpu"
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


def _without_attention(name, kind, config, device=None):
    """Why a model cannot be trained with this attention on `device`, or here; "" if it can."""
    if name not in ATTENTION:
        return f"unknown, give one of {', '.join(ATTENTION)}"
    made, device = MODEL_CLASSES[kind]._model_mapping[type(config)], device or _device_type()
    settings, precision = config.to_dict().items(), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    dropout = (value for key, value in settings if key.startswith("att") and "drop" in key)
    flex, flash, local = (name == other for other in (*ONLY_ON, LOCAL))
    reasons = {
        f"transformers' {config.model_type} cannot": not getattr(made, ATTENTION[name], True),
        "none of its layers is a sliding one": local and not slides(config),
        f"cannot train on {device}": device not in ONLY_ON.get(name, (device,)) or local and device == "xla",
        "it has no dropout, which config_overrides has to set to 0": flex and any(dropout),
        "the package flash-attn is not installed": flash and not is_flash_attn_2_available(),
        "needs --mixed_precision bf16 or fp16 of the launcher": flash and precision not in ("bf16", "fp16"),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _configure(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer):
    """(configuration, problems as lines); the configuration is usable if there are none."""
    config, problems = None, []
    if tokenizer is not None and kind != "causal":
        roles = ("pad", "mask", "cls", "sep")
        missing = ", ".join(role for role in roles if getattr(tokenizer, f"{role}_token_id") is None)
        if missing:
            problems.append(f"tokenizer: a masked language model needs its {missing} token, which it lacks")
    if model_name_or_path:
        blamed = f"model_name_or_path, {model_name_or_path!r}"
        if config_overrides:
            problems.append(f"config_overrides, {config_overrides!r}: not with model_name_or_path, add "
                            '--config_overrides "", which leaves it out')
        try:
            config = AutoConfig.from_pretrained(model_name_or_path)
        except (OSError, ValueError) as error:
            told = f"{blamed}: no folder with a config.json and no model on the Hub that can be reached"
            return None, problems + [f"{told} ({str(error).splitlines()[0]})"]
        if found := _unfit(kind, config, blamed):
            return None, problems + found
        values, found = _agreement(config, {}, kind, block_size, tokenizer, blamed)
        for name, value in values.items():
            with contextlib.suppress(StrictDataclassFieldValidationError):  # some cannot be None, and stay
                setattr(config, name, value)
        return config, problems + (found or _built(kind, lambda: config, blamed)[1])
    blamed = f"model_type, {model_type!r}"
    if model_type not in CONFIG_MAPPING:
        return None, problems + [f"{blamed}: unknown to transformers{_near(model_type, CONFIG_MAPPING)}"]
    if found := _unfit(kind, CONFIG_MAPPING[model_type], blamed):
        return None, problems + found
    blamed = f"config_overrides, {config_overrides!r}" if config_overrides else blamed
    default = AutoConfig.for_model(model_type)
    chosen, found = _parse_overrides(default, config_overrides)
    if not found:
        values, found = _agreement(default, chosen, kind, block_size, tokenizer, "config_overrides")
    if found:
        return None, problems + found
    config, found = _built(kind, lambda: AutoConfig.for_model(model_type, **values), blamed)
    if found and values.get("pad_token_id", 0) is None:  # some cannot be without: one that no text has
        size = values["vocab_size"]
        other = values | {"pad_token_id": size, "vocab_size": size + 1}
        made = _built(kind, lambda: AutoConfig.for_model(model_type, **other), blamed)
        config, found = (config, found) if made[1] else made
    return config, problems + found


def _agreement(config, chosen, kind, block_size, tokenizer, source):
    """(what the configuration has to say beside `chosen`, which is included; problems)."""
    pretrained = source != "config_overrides"
    values, problems, pad_id = dict(chosen), [], getattr(config, "pad_token_id", None)
    for name, bidirectional, causal in LEFT_TO_RIGHT if kind == "causal" else ():
        if getattr(config, name, None) == bidirectional:  # every token would see the next one
            values.setdefault(name, causal)
    after_pad = _positions_after_pad(kind, config, values)
    if tokenizer is not None:
        # Not len(tokenizer) alone: ids may have gaps.
        needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        vocab_size = config.vocab_size if pretrained else values.setdefault("vocab_size", needed)
        if vocab_size < needed:
            told = f"{source}: vocab_size {vocab_size} is smaller than the tokenizer's {needed}; choose the "
            problems.append(told + "tokenizer of the model, or a larger vocab_size with random weights")
        for key in (f"{name}_id" for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES):
            found = getattr(tokenizer, key)
            if key[:3] in ("bos", "eos", "pad") or key in config.to_dict() and found is not None:
                values.setdefault(key, found)
        pad_id = values.get("pad_token_id")
        if kind == "causal" and pad_id in (values.get("eos_token_id"), values.get("bos_token_id")):
            # The embedding of a pad id gets no gradient: EOS would not be learned.
            pad_id = values["pad_token_id"] = None
        if after_pad and pad_id is None:
            told = "tokenizer: positions count from the id of the pad token here, and it has none beside EOS"
            problems.append(told)
        elif pretrained and after_pad and pad_id != config.pad_token_id:
            told = f"{source}: its pad_token_id is {config.pad_token_id}, the tokenizer's is {pad_id}, and "
            problems.append(told + "positions count from there; choose the tokenizer of the model")
    else:  # any, to try the rest
        unknown = {"vocab_size": 512, "pad_token_id": 0}
        values = {name: any for name, any in unknown.items() if getattr(config, name, 0) is None} | values
    if getattr(config, "languages", None):  # adapters of X-MOD
        values.setdefault("default_language", config.default_language or config.languages[0])
    key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if default := setting(config, key):
        offset = (pad_id or 0) + 1 if after_pad else 0
        has = default if pretrained else values.setdefault(key, block_size + offset)
        if has < block_size + offset:
            told = f"block_size, {block_size}: needs {key} of at least {block_size + offset}, but {source} "
            problems.append(told + f"says {has}; lower block_size or raise it")
    if kind == "pretraining" and hasattr(config, "type_vocab_size"):
        types = config.type_vocab_size if pretrained else values.setdefault("type_vocab_size", 2)
        if types < 2:
            problems.append(f"{source}: type_vocab_size {types} must be 2, to tell two sentences apart")
    return values, problems


def _positions_after_pad(kind, config, values):
    """Whether positions count from pad_token_id + 1, as RoBERTa's: its embeddings of them know the pad."""
    asked = copy.deepcopy(config)
    try:
        for name, value in (values | {"vocab_size": 8, "pad_token_id": 0}).items():
            setattr(asked, name, value)
        with torch.device("meta"):
            modules = MODEL_CLASSES[kind].from_config(asked).named_modules()
    except Exception:  # `_built` tells it
        return False
    positions = (module for name, module in modules if name.endswith("position_embeddings"))
    return any(getattr(module, "padding_idx", None) is not None for module in positions)


def _parse_overrides(config, overrides):
    """'n_layer=4,n_embd=256' -> ({"n_layer": 4, "n_embd": 256}, problems), typed by the values in config. Or
    a JSON object, for lists and parts."""
    defaults, chosen, problems, items = config.to_dict(), {}, [], []
    known = {*defaults, *config.attribute_map}
    if (overrides or "").startswith("{"):
        try:
            items = json.loads(overrides).items()
        except ValueError as error:
            problems.append(f"config_overrides, {overrides!r}: no JSON object ({error})")
    else:
        for item in filter(None, (item.strip() for item in (overrides or "").split(","))):
            if "=" in item:
                items.append([part.strip() for part in item.split("=", 1)])
            else:
                problems.append(f"config_overrides, {item!r}: not of the form name=value")
    for name, value in items:
        if name not in known:
            told = f"config_overrides, {name!r}: {config.model_type} has no such setting"
            problems.append(told + _near(name, known))
            continue
        name = config.attribute_map.get(name, name)
        default = defaults.get(name)
        try:
            chosen[name] = _typed(value, default) if isinstance(value, str) else value
        except ValueError:
            problems.append(f"config_overrides, {name!r}: {value!r} is no {type(default).__name__}")
    if not known.issuperset(name for name, _ in items) and config.model_type not in OF_DEFAULTS:
        problems.append(f"config_overrides: their default is for {' or '.join(OF_DEFAULTS)}; give those of "
                        f"{config.model_type}, such as --config_overrides num_hidden_layers=4,hidden_size="
                        "128,num_attention_heads=4, or '' for its full size")  # fmt: skip
    return chosen, problems


def _typed(text, default):
    """`text` as the type of `default`; where that is None, as JSON if it is some."""
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        return type(default)(text)
    value = text
    with contextlib.suppress(ValueError):
        value = None if text.lower() == "none" else json.loads(text.lower())
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError
    return value


def _unfit(kind, config, blamed):
    """What the architecture needs beside text, by its configuration or the class of that, as one line."""
    classes, reason = MODEL_CLASSES[kind]._model_mapping, ""
    model = classes.get(config if isinstance(config, type) else type(config), None)
    if model is None:
        reason = f"transformers has no {kind} language model of this type"
        reason += "; with next_sentence take --model_type bert" if kind == "pretraining" else ""
    elif any(part.startswith(("text_", "vision_", "audio_")) for part in config.sub_configs):
        reason = f"made of {', '.join(sorted(config.sub_configs))}, for more than text"
        text = getattr(config.sub_configs.get("text_config"), "model_type", "")
        if text in CONFIG_MAPPING and CONFIG_MAPPING[text] in classes:
            reason += f"; its text part: {text}"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder, and there is no input for an encoder here"
    elif kind == "causal" and hasattr(config, "prompt_length"):
        reason = "attends in both directions, as if all the text were a prompt"
    return [f"{blamed}: {reason}"] if reason else []


def _built(kind, make_config, blamed):
    """(configuration, problems): the model is built without memory, to hear what it objects to."""
    config = None
    try:
        config = make_config()
        with torch.device("meta"):
            model = MODEL_CLASSES[kind].from_config(config)
            for options in (CALL[kind], CALL["masked"]):  # one may look into its data, where there are none
                try:
                    model(input_ids=torch.zeros(1, 4, dtype=torch.long), **options)
                except Exception as error:
                    of_meta = isinstance(error, RuntimeError) or options != CALL[kind]
                    if "size" in str(error) or not of_meta:  # parts do not fit together
                        raise
    except Exception as error:  # transformers checks little, with whatever exception comes
        return config, [f"{blamed}: {' '.join(f'{type(error).__name__}: {error}'.split())}"]
    if isinstance(layers := setting(config, "num_hidden_layers"), int) and layers < 1:
        return config, [f"{blamed}: a model without layers"]
    names, of_type = [name for name, _ in model.named_modules()], f"model_type, {config.model_type!r}"
    if any(name.endswith(("encoder_attn", "cross_attn")) for name in names):
        return config, [f"{of_type}: attends to an encoder, and there is no input for one here"]
    if kind == "pretraining" and not any("seq_relationship" in name for name in names):
        return config, [f"{of_type}: has no next-sentence head; choose bert"]
    return config, []


def _near(name, known):
    near = difflib.get_close_matches(str(name), sorted(known), n=3)
    return f"; near: {', '.join(near)}" if near else ""
