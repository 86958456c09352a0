"""The configuration of a model: what the settings choose, what tokenizer and block size require, and whether
such a model can be built and run, which is tried on the meta device without memory."""

import contextlib
import copy
from unittest import mock

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, AutoConfig, masking_utils

from utils.learning.overrides import in_proportion, near, parse_overrides, setting

MODEL_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "pretraining": transformers.AutoModelForPreTraining,  # masked LM and next sentence: BertForPreTraining
}
CALL = {"causal": {"use_cache": False}, "masked": {}, "pretraining": {}}  # options of each forward pass
# (setting, its value in an encoder, its value in a causal model): of BERT and similar types, XLM, XLNet
LEFT_TO_RIGHT = (("is_decoder", False, True), ("causal", False, True), ("attn_type", "bi", "uni"))


def read_config(name_or_path):
    """The configuration in a folder or on the Hub. ValueError if there is none that can be read."""
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # a damaged file may raise any
        problem = "no folder with a config.json and no model on the Hub that can be reached"
        raise ValueError(f"model_name_or_path, {name_or_path!r}: {problem} ({one_line(error)})") from None


def configure(kind, model_type, config_overrides, model_name_or_path, block_size, tokenizer):
    """(configuration, problems as lines). The configuration can be used if there are no problems."""
    problems = []
    if tokenizer is not None and kind != "causal":
        roles = "pad", "mask", "cls", "sep"
        if missing := [role for role in roles if getattr(tokenizer, f"{role}_token_id") is None]:
            names = ", ".join(missing)
            problems.append(f"tokenizer: a masked language model needs its {names} token, which it lacks")
    if model_name_or_path and config_overrides:
        problems.append(f"config_overrides, {config_overrides!r}: cannot go with model_name_or_path; leave "
                        'it out, or set it to ""')
    if model_name_or_path:
        config, more = _of_weights(kind, model_name_or_path, block_size, tokenizer)
    else:
        config, more = _from_scratch(kind, model_type, config_overrides, block_size, tokenizer)
    return config, problems + more


def _of_weights(kind, name_or_path, block_size, tokenizer):
    blamed = f"model_name_or_path, {name_or_path!r}"
    try:
        config = read_config(name_or_path)
    except ValueError as error:
        return None, [str(error)]
    try:
        if reason := _unfit(kind, config):
            return None, [f"{blamed}: {reason}"]
        values, problems = _agreement(config, {}, kind, block_size, tokenizer, blamed)
    except Exception as error:  # values of wrong types
        return None, [f"{blamed}: its config.json cannot be used ({one_line(error)})"]
    for name, value in values.items():
        with contextlib.suppress(StrictDataclassFieldValidationError):  # keep those that cannot be None
            setattr(config, name, value)
    return config, problems or _blame(blamed, objection(kind, config))


def _from_scratch(kind, model_type, overrides, block_size, tokenizer):
    blamed, source = f"model_type, {model_type!r}", "config_overrides"
    if model_type not in CONFIG_MAPPING:
        return None, [f"{blamed}: unknown to transformers{near(model_type, CONFIG_MAPPING)}"]
    if reason := _unfit(kind, CONFIG_MAPPING[model_type]):
        return None, [f"{blamed}: {reason}"]
    default = AutoConfig.for_model(model_type)
    chosen, problems = parse_overrides(default, overrides)
    if problems:
        return None, problems
    try:
        values, problems = _agreement(default, chosen, kind, block_size, tokenizer, source)
    except TypeError as error:  # a value of a wrong type
        return None, [f"{source}: {one_line(error)}"]
    values |= in_proportion(default, chosen)

    def build(values):
        try:
            config = AutoConfig.for_model(model_type, **values)
        except Exception as error:  # of any kind, as transformers checks few values
            return None, one_line(error)
        return config, objection(kind, config)

    config, reason = build(values)
    if reason and values.get("pad_token_id", 0) is None:  # it needs one: an id that no text has
        size = values["vocab_size"]
        other = build(values | {"pad_token_id": size, "vocab_size": size + 1})
        config, reason = (config, reason) if other[1] else other
    return config, problems or _blame(f"{source}, {overrides!r}" if overrides else blamed, reason)


def _blame(blamed, reason):
    return [reason if reason.startswith("model_type") else f"{blamed}: {reason}"] if reason else []


def _agreement(config, chosen, kind, block_size, tokenizer, source):
    """(the values that the configuration must have, `chosen` included; problems)"""
    of_weights = source != "config_overrides"
    values, problems, pad_id = dict(chosen), [], getattr(config, "pad_token_id", None)
    for name, bidirectional, causal in LEFT_TO_RIGHT if kind == "causal" else ():
        if getattr(config, name, None) == bidirectional:  # a token would see the next one
            values.setdefault(name, causal)
    after_pad = positions_after_pad(kind, config, values)
    if tokenizer is not None:
        problems = _agree_with_tokenizer(config, values, kind, tokenizer, source)
        pad_id = values.get("pad_token_id")
        if after_pad and pad_id is None:
            problems.append("tokenizer: positions count from the pad token's id, and it has none beside EOS")
        elif of_weights and after_pad and pad_id != config.pad_token_id:
            ids = f"{source}: its pad_token_id is {config.pad_token_id}, the tokenizer's is {pad_id}"
            problems.append(f"{ids}, and positions count from there; choose the tokenizer of the model")
    else:  # placeholders, to check the rest
        unknown = (("vocab_size", 512), ("pad_token_id", 0))
        values = {name: some for name, some in unknown if getattr(config, name, 0) is None} | values
    if getattr(config, "languages", None):  # adapters of X-MOD
        values.setdefault("default_language", config.default_language or config.languages[0])
    key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if default := setting(config, key):
        offset = (pad_id or 0) + 1 if after_pad else 0
        has = default if of_weights else values.setdefault(key, block_size + offset)
        if has < block_size + offset:
            needs = f"block_size, {block_size}: needs {key} of at least {block_size + offset}"
            problems.append(f"{needs}, but {source} says {has}; lower block_size or raise it")
    if kind == "pretraining" and hasattr(config, "type_vocab_size"):
        types = config.type_vocab_size if of_weights else values.setdefault("type_vocab_size", 2)
        if types < 2:
            problems.append(f"{source}: type_vocab_size {types} must be 2, to tell two sentences apart")
    return values, problems


def _agree_with_tokenizer(config, values, kind, tokenizer, source):
    """Adds the vocabulary's size and the special ids to `values`. Returns problems as lines."""
    problems = []
    needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # ids may have gaps
    of_weights = source != "config_overrides"
    vocab_size = config.vocab_size if of_weights else values.setdefault("vocab_size", needed)
    if vocab_size < needed:
        sizes = f"{source}: vocab_size {vocab_size} is smaller than the tokenizer's {needed}"
        remedy = "choose the tokenizer of the model, or a larger vocab_size with random weights"
        problems.append(f"{sizes}; {remedy}")
    if not of_weights and hasattr(config, "unpadded_vocab_size"):  # of Inkling 2's head
        values.setdefault("unpadded_vocab_size", vocab_size)
    for key in (f"{name}_id" for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES):
        token_id = getattr(tokenizer, key)
        if key[:3] in ("bos", "eos", "pad") or key in config.to_dict() and token_id is not None:
            values.setdefault(key, token_id)
    ends = values.get("eos_token_id"), values.get("bos_token_id")
    if kind == "causal" and values.get("pad_token_id") in ends:
        values["pad_token_id"] = None  # its embedding has no gradient, so EOS would not be learnt
    return problems


def positions_after_pad(kind, config, values) -> bool:
    """Whether positions count from pad_token_id + 1, as RoBERTa's: their embeddings have a padding_idx."""
    asked = copy.deepcopy(config)
    try:
        for name, value in (values | {"vocab_size": 8, "pad_token_id": 0}).items():
            setattr(asked, name, value)
        modules = meta_model(kind, asked).named_modules()
    except Exception:  # `objection` reports it
        return False
    positions = (module for name, module in modules if name.endswith("position_embeddings"))
    return any(getattr(module, "padding_idx", None) is not None for module in positions)


def _unfit(kind, config) -> str:
    """Why this architecture cannot be trained on text alone, or "". config: a configuration or its class."""
    classes = MODEL_CLASSES[kind]._model_mapping
    if classes.get(config if isinstance(config, type) else type(config), None) is None:
        remedy = "; with next_sentence take --model_type bert" if kind == "pretraining" else ""
        return f"transformers has no {kind} language model of this type{remedy}"
    if any(part.startswith(("text_", "vision_", "audio_")) for part in config.sub_configs):
        text = getattr(config.sub_configs.get("text_config"), "model_type", "")
        known = text in CONFIG_MAPPING and CONFIG_MAPPING[text] in classes
        parts = f"made of {', '.join(sorted(config.sub_configs))}, for more than text"
        return parts + (f"; its text part: {text}" if known else "")
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder, and there is no input for an encoder here"
    if kind == "causal" and hasattr(config, "prompt_length"):
        return "attends in both directions, as if all the text were a prompt"
    return ""


def meta_model(kind, config):
    """The model of this configuration on the meta device, without memory."""
    with torch.device("meta"):
        return MODEL_CLASSES[kind].from_config(config, trust_remote_code=False)


def objection(kind, config) -> str:
    """Why no model of this configuration can be built and run on text, "" if one can."""
    asked = copy.deepcopy(config)
    asked._experts_implementation = "batched_mm"  # the usual one runs on real devices only
    try:
        model = meta_model(kind, asked)
    except Exception as error:
        return one_line(error)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        # Without the search for documents within a row, which reads the data.
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None):
            model(input_ids=ids, **CALL[kind])
    except Exception as error:
        # Some models read their data, but here are none.
        if "meta" not in str(error) and not isinstance(error, NotImplementedError):
            return one_line(error)
    if isinstance(layers := setting(config, "num_hidden_layers"), int) and layers < 1:
        return "a model without layers"
    names, of_type = [name for name, _ in model.named_modules()], f"model_type, {config.model_type!r}"
    if any(name.endswith(("encoder_attn", "cross_attn")) for name in names):
        return f"{of_type}: attends to an encoder, and there is no input for one here"
    if kind == "pretraining" and not any("seq_relationship" in name for name in names):
        return f"{of_type}: has no next-sentence head; choose bert"
    return ""


def one_line(error) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
