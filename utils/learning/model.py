"""A transformers model whose configuration agrees with the tokenizer and the block size by construction."""

import copy
import difflib

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    activations,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_CLASSES = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "pretraining": AutoModelForPreTraining,  # masked LM and next sentence together: BertForPreTraining
}


def model_problems(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer=None):
    """What is wrong with these settings, one line each, before any weights are made; [] = nothing."""
    return _configure(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer)[1]


def build_model(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer):
    """A model in float32: random weights of `model_type`, or the weights of `model_name_or_path`.

    kind: "causal", "masked" or "pretraining" (masked LM with next sentence). config_overrides:
    "n_layer=4,n_embd=256", for random weights only. Vocabulary size, special ids and positions come from
    tokenizer and block_size where they are not overridden. Raises ValueError, one problem per line, when they
    cannot agree.
    """
    config, problems = _configure(
        kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer
    )
    if problems:
        raise ValueError("\n".join(problems))
    if model_name_or_path:
        # Without dtype, transformers keeps the type of the file: training would go on in bfloat16 weights.
        model = MODEL_CLASSES[kind].from_pretrained(model_name_or_path, config=config, dtype=torch.float32)
        model.train()  # it comes without dropout
    else:
        model = MODEL_CLASSES[kind].from_config(config, dtype=torch.float32)
    if kind == "causal" and not model.generation_config.max_length:
        # Saved with it: otherwise pipeline() asks for 256 new tokens, more than there are positions.
        model.generation_config.max_length = block_size
    use_one_kernel_gelu(model)
    return model


def use_one_kernel_gelu(model):
    """Replace GELUs written out in eight operations by torch's kernel of the same formula.

    The configuration, and so what is saved, stays as it is. Written out, each keeps several copies of the
    widest activation for backward.
    """
    written_out = (
        activations.NewGELUActivation, activations.FastGELUActivation, activations.AccurateGELUActivation
    )  # fmt: skip
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, written_out):
                setattr(module, name, nn.GELU(approximate="tanh"))


def _configure(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer):
    """(configuration, problems as lines); the configuration is usable if there are none."""
    config, problems = None, []
    if tokenizer is not None and kind != "causal":
        roles = ("pad", "mask", "cls", "sep")
        missing = ", ".join(role for role in roles if getattr(tokenizer, f"{role}_token_id") is None)
        if missing:
            problems.append(f"tokenizer: a masked language model needs its {missing} token, which it lacks")
    if model_name_or_path:
        if config_overrides:
            problems.append(
                f"config_overrides, {config_overrides!r}: only for random weights; leave it empty to "
                f"continue from model_name_or_path, {model_name_or_path!r}"
            )
        try:
            config = AutoConfig.from_pretrained(model_name_or_path)
        except (OSError, ValueError) as error:
            return None, problems + [
                f"model_name_or_path, {model_name_or_path!r}: no folder with a config.json and no model "
                f"on the Hub that can be reached ({str(error).splitlines()[0]})"
            ]
        source = f"model_name_or_path, {model_name_or_path!r}"
        values, found = _agreement(config, {}, kind, block_size, tokenizer, source)
        for name, value in values.items():
            setattr(config, name, value)
    else:
        if model_type not in CONFIG_MAPPING:
            return None, problems + [
                f"model_type, {model_type!r}: unknown to transformers{_near(model_type, CONFIG_MAPPING)}"
            ]
        config = AutoConfig.for_model(model_type)
        chosen, found = _parse_overrides(config, config_overrides)
        if not found:
            values, found = _agreement(config, chosen, kind, block_size, tokenizer, "config_overrides")
        if not found:
            try:
                config = AutoConfig.for_model(model_type, **values)
            except Exception as error:  # transformers checks little, with whatever exception comes
                found = [f"config_overrides, {config_overrides!r}: {_one_line(error)}"]
    return config, problems + (found or _shape_problems(kind, config, config_overrides))


def _agreement(config, chosen, kind, block_size, tokenizer, source):
    """(what the configuration has to say beside `chosen`, which is included; problems)."""
    pretrained = source != "config_overrides"
    values, problems = dict(chosen), []
    pad_id = config.pad_token_id
    if kind == "causal" and getattr(config, "is_decoder", None) is False:
        values.setdefault("is_decoder", True)  # BERT and its kin: without it every token sees the next one
    after_pad = _positions_after_pad(kind, config, values)
    if tokenizer is not None:
        # Not len(tokenizer) alone: ids may have gaps.
        needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        vocab_size = config.vocab_size if pretrained else values.setdefault("vocab_size", needed)
        if vocab_size < needed:
            problems.append(
                f"{source}: vocab_size {vocab_size} is smaller than the tokenizer's {needed}; choose the "
                "tokenizer of the model, or a larger vocab_size with random weights"
            )
        for key in (key for key in config.to_dict() if key.endswith("_token_id")):
            values.setdefault(key, getattr(tokenizer, key, None))
        pad_id = values["pad_token_id"]
        if kind == "causal" and pad_id in (values.get("eos_token_id"), values.get("bos_token_id")):
            # The embedding of a pad id gets no gradient: EOS would not be learned.
            pad_id = values["pad_token_id"] = None
        if pretrained and after_pad and pad_id != config.pad_token_id:
            problems.append(
                f"{source}: its pad_token_id is {config.pad_token_id}, the tokenizer's is {pad_id}, and its "
                "positions count from there; choose the tokenizer of the model"
            )
    if hasattr(config, "max_position_embeddings"):
        key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        offset = (pad_id or 0) + 1 if after_pad else 0
        has = config.max_position_embeddings if pretrained else values.setdefault(key, block_size + offset)
        if has < block_size + offset:
            problems.append(
                f"block_size, {block_size}: needs {key} of at least {block_size + offset}, but {source} says "
                f"{has}; lower block_size or raise it"
            )
    if kind == "pretraining" and hasattr(config, "type_vocab_size"):
        types = config.type_vocab_size if pretrained else values.setdefault("type_vocab_size", 2)
        if types < 2:
            problems.append(
                f"{source}: type_vocab_size {types} cannot tell the two sentences apart; it must be 2"
            )
    return values, problems


def _positions_after_pad(kind, config, values):
    """Whether the model numbers positions from pad_token_id + 1 and takes every pad id for padding, as
    RoBERTa and its descendants do: then its position embeddings know the pad id.
    """
    asked = copy.deepcopy(config)
    try:
        for name, value in (values | {"vocab_size": 8, "pad_token_id": 0}).items():
            setattr(asked, name, value)
        with torch.device("meta"):
            modules = MODEL_CLASSES[kind].from_config(asked).named_modules()
    except Exception:  # `_shape_problems` tells it
        return False
    return any(
        name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        for name, module in modules
    )


def _parse_overrides(config, overrides):
    """'n_layer=4,n_embd=256' -> ({"n_layer": 4, "n_embd": 256}, problems), typed by the values in config."""
    known, chosen, problems = {*config.to_dict(), *config.attribute_map}, {}, []
    for item in filter(None, (item.strip() for item in (overrides or "").split(","))):
        name, equals, text = (part.strip() for part in item.partition("="))
        if not equals:
            problems.append(f"config_overrides, {item!r}: not of the form name=value")
        elif name not in known:
            problems.append(
                f"config_overrides, {item!r}: {config.model_type} has no such setting{_near(name, known)}"
            )
        else:
            default = getattr(config, name, None)
            try:
                chosen[config.attribute_map.get(name, name)] = _typed(text, default)
            except ValueError:
                problems.append(f"config_overrides, {item!r}: {text!r} is no {type(default).__name__}")
    return chosen, problems


def _typed(text, default):
    """`text` as the type of `default`; where that is None, as the narrowest type that it reads as."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    if isinstance(default, (int, float, str)):
        return type(default)(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _shape_problems(kind, config, config_overrides):
    """Build the model without memory, to hear what the model's own constructor objects to."""
    try:
        with torch.device("meta"):
            model = MODEL_CLASSES[kind].from_config(config)
            try:
                model(input_ids=torch.zeros(1, 4, dtype=torch.long))
            except Exception as error:
                if "size" in str(error):  # parts do not fit together; other failures are the meta device's
                    raise
    except Exception as error:
        if type(config) not in MODEL_CLASSES[kind]._model_mapping:
            return [
                f"model_type, {config.model_type!r}: transformers has no {kind} language model of this type"
            ]
        return [f"config_overrides, {config_overrides!r}: {_one_line(error)}"]
    if kind == "pretraining" and not any("seq_relationship" in name for name, _ in model.named_modules()):
        return [f"model_type, {config.model_type!r}: has no next-sentence head; choose bert"]
    return []


def _near(name, known):
    near = difflib.get_close_matches(str(name), sorted(known), n=3)
    return f"; near: {', '.join(near)}" if near else ""


def _one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())
