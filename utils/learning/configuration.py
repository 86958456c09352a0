"""Builds a model's configuration from the settings, the tokenizer and the block size, and checks on the meta
device, without memory, that transformers can build such a model."""

import contextlib
import copy
import difflib

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, AutoConfig

from utils.flags import named_values
from utils.io.files import is_missing_folder

MODEL_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "pretraining": transformers.AutoModelForPreTraining,  # masked LM and next sentence: BertForPreTraining
}
# (setting, value in an encoder, value in a causal model) of BERT and similar types, XLM, XLNet
LEFT_TO_RIGHT = (("is_decoder", False, True), ("causal", False, True), ("attn_type", "bi", "uni"))


def configure(args, kind, tokenizer=None):
    """(configuration, its model on the meta device, a line per problem) for args.model_type with
    config_overrides, or for model_name_or_path. Use configuration and model only if there are no problems.

    kind: a key of MODEL_CLASSES. Without a tokenizer, placeholders take the place of its sizes and ids."""
    weights, overrides, values = args.model_name_or_path, args.config_overrides, {}
    config, model, problems, culprit = None, None, [], f"model_type, {args.model_type!r}"
    if weights and overrides:
        return None, None, [f"config_overrides, {overrides!r}: cannot go with model_name_or_path; leave it "
                            'out, or set it to ""']  # fmt: skip
    try:
        if weights:
            culprit = f"model_name_or_path, {weights!r}"
            config = _read_config(weights)
            _check_kind(kind, type(config))
        elif args.model_type in CONFIG_MAPPING:
            _check_kind(kind, CONFIG_MAPPING[args.model_type])
            config = AutoConfig.for_model(args.model_type)
        else:
            raise ValueError(f"unknown to transformers{_similar(args.model_type, CONFIG_MAPPING)}")
        if overrides:
            culprit = f"config_overrides, {overrides!r}"
            values = parse_overrides(config, overrides, getattr(type(args), "config_overrides", ""))
        source = culprit if weights else "config_overrides"
        problems += _fit_tokenizer(config, values, kind, tokenizer, weights, source)
        config, model, too_short = _fit_positions(config, values, kind, args.block_size, weights, source)
        problems += too_short
    except Exception as error:  # transformers checks few values, and files may be damaged: errors of any type
        problems = problems or [f"{culprit}: {one_line(error)}"]
    return config, model, problems


def _read_config(name_or_path):
    if is_missing_folder(name_or_path):
        raise ValueError("there is no such folder")
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:
        problem = "no folder with a config.json and no model on the Hub that can be reached"
        raise ValueError(f"{problem} ({one_line(error)})") from None


def _check_kind(kind, config_class) -> None:
    """ValueError if transformers has no language model of this kind for text alone."""
    if config_class not in MODEL_CLASSES[kind]._model_mapping:
        remedy = ""
        for other, script in {"causal": "train_clm.py", "masked": "train_mlm.py"}.items():
            if config_class in MODEL_CLASSES[other]._model_mapping:
                remedy = f"; {script} trains it"
        remedy = "; with next_sentence take --model_type bert" if kind == "pretraining" else remedy
        raise ValueError(f"transformers has no {kind} language model of this type{remedy}")
    if kind != "causal" and getattr(config_class, "is_encoder_decoder", False):
        raise ValueError("it is an encoder-decoder, and the rows have no input for a decoder")
    if any(part.startswith(("text_", "vision_", "audio_")) for part in config_class.sub_configs):
        text = getattr(config_class.sub_configs.get("text_config"), "model_type", "")
        parts = f"it has {', '.join(sorted(config_class.sub_configs))}, so it is for more than text"
        raise ValueError(parts + (f"; its text part: {text}" if text in CONFIG_MAPPING else ""))


def _fit_tokenizer(config, values, kind, tokenizer, weights, source) -> list[str]:
    """Adds vocabulary size, special token ids and the other values that `kind` needs to `values`. Returns a
    line per problem."""
    for name, bidirectional, causal in LEFT_TO_RIGHT if kind == "causal" else ():
        if getattr(config, name, None) == bidirectional:  # a token would see the next one
            values.setdefault(name, causal)
    if kind == "pretraining" and not weights and hasattr(config, "type_vocab_size"):
        values.setdefault("type_vocab_size", 2)  # sentences A and B
    if tokenizer is None:
        for name, placeholder in ("vocab_size", 512), ("pad_token_id", 0):
            if getattr(config, name, 0) is None:
                values.setdefault(name, placeholder)
        return []
    problems, roles = [], () if kind == "causal" else ("pad", "mask", "cls", "sep")
    if missing := [role for role in roles if getattr(tokenizer, f"{role}_token_id") is None]:
        names = ", ".join(missing)
        problems.append(f"tokenizer: has no {names} token, which a masked language model needs")
    needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # there may be gaps between ids
    vocab_size = config.vocab_size if weights else values.setdefault("vocab_size", needed)
    if vocab_size < needed:
        sizes = f"{source}: vocab_size {vocab_size} is smaller than the tokenizer's {needed}"
        remedy = "choose the model's tokenizer, or random weights with a larger vocab_size"
        problems.append(f"{sizes}; {remedy}")
    for key in (f"{name}_id" for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES):
        token_id = getattr(tokenizer, key)
        if key[:3] in ("bos", "eos", "pad") or key in config.to_dict() and token_id is not None:
            values.setdefault(key, token_id)
    if kind == "causal" and values["pad_token_id"] in (values["eos_token_id"], values["bos_token_id"]):
        values["pad_token_id"] = None  # its embedding gets no gradient: EOS would not be learnt
    return problems


def _fit_positions(default, values, kind, block_size, weights, source):
    """(configuration, its model on the meta device, a line per problem), with a position for each token of a
    row. RoBERTa's positions start after padding_idx, so that it needs padding_idx + 1 more of them."""
    key = default.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    choose = setting(default, key) and not weights and key not in values
    config, model = _build(kind, default, values | ({key: block_size} if choose else {}), weights)
    positions = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    starts = [module.padding_idx for module in positions if getattr(module, "padding_idx", None) is not None]
    needed = block_size + (starts[0] + 1 if starts else 0)
    if choose and needed > block_size:
        config, model = _build(kind, default, values | {key: needed}, weights)
    if weights and starts and starts[0] != default.pad_token_id:
        pads = f"its pad_token_id, {default.pad_token_id}, and the tokenizer's is {starts[0]}"
        return config, model, [f"{source}: positions count from {pads}; choose the model's tokenizer"]
    if (positions := setting(config, key) or needed) >= needed:
        return config, model, []
    needs = f"block_size, {block_size}: needs {key} of at least {needed}"
    return config, model, [f"{needs}, but {source} says {positions}; lower block_size or raise {key}"]


def _build(kind, default, values, weights):
    """(the configuration `default` with these values, its model on the meta device)."""
    config = copy.deepcopy(default) if weights else AutoConfig.for_model(default.model_type, **values)
    for name, value in values.items() if weights else ():
        with contextlib.suppress(StrictDataclassFieldValidationError):  # a value that cannot be None
            setattr(config, name, value)
    on_meta = copy.deepcopy(config)
    on_meta._experts_implementation = "batched_mm"  # the default does not run on the meta device
    with torch.device("meta"):
        return config, MODEL_CLASSES[kind].from_config(on_meta, trust_remote_code=False)


def setting(config, name):
    """A value of the configuration by the name that most model types use; None if this type lacks it."""
    return config.to_dict().get(config.attribute_map.get(name, name))


def parse_overrides(config, overrides: str, default_overrides: str = "") -> dict:
    """'n_layer=4,n_embd=256' -> {"n_layer": 4, "n_embd": 256}. ValueError for unknown names; those from
    `default_overrides`, which may be for another model type, are dropped. transformers checks types."""
    values, defaults = named_values(overrides), named_values(default_overrides)
    config_values, other_names = config.to_dict(), config.attribute_map
    known = {*config_values, *other_names}
    values = {name: value for name, value in values.items()
              if name in known or (name, value) not in defaults.items()}  # fmt: skip
    if unknown := [f"{name}{_similar(name, known)}" for name in values if name not in known]:
        rest = ",".join(f"{name}={value}" for name, value in values.items() if name in known)
        remedy = f"give name=value,... with names of its configuration{', such as ' * bool(rest)}{rest}"
        raise ValueError(f"{config.model_type} has no {', '.join(unknown)}; {remedy}")
    values = {other_names.get(name, name): value for name, value in values.items()}
    floats = (name for name, value in values.items() if isinstance(config_values.get(name), float))
    return values | {name: float(values[name]) for name in floats}


def _similar(name, known):
    similar = difflib.get_close_matches(str(name), sorted(known), n=3)
    return f" (similar: {', '.join(similar)})" if similar else ""


def one_line(error) -> str:
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:300]
