"""config_overrides: settings of a model's configuration, and the sizes that follow from them."""

import contextlib
import difflib
import json

from transformers import AutoConfig

WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "d_inner")  # how their names end


def setting(config, name):
    """A setting of the configuration by the name that most architectures use; None if this one lacks it."""
    return config.to_dict().get(config.attribute_map.get(name, name))


def parse_overrides(config, overrides):
    """'n_layer=4,n_embd=256' -> ({"n_layer": 4, "n_embd": 256}, problems), with the types of the values in
    config. A JSON object may have lists and parts. name?=value is ignored if the type lacks the setting."""
    defaults, chosen, problems, items = config.to_dict(), {}, [], []
    known = {*defaults, *config.attribute_map}
    if (overrides or "").startswith("{"):
        try:
            items = json.loads(overrides).items()
        except ValueError as error:
            problems.append(f"config_overrides, {overrides!r}: is no JSON object ({error})")
    else:
        for item in filter(None, (item.strip() for item in (overrides or "").split(","))):
            if "=" in item:
                items.append([part.strip() for part in item.split("=", 1)])
            else:
                problems.append(f"config_overrides, {item!r}: not of the form name=value")
    for name, value in items:
        optional, name = name.endswith("?"), name.removesuffix("?")
        if name not in known:
            lacking = f"{config.model_type} has no such setting{near(name, known)}"
            problems += [] if optional else [f"config_overrides, {name!r}: {lacking}"]
            continue
        name = config.attribute_map.get(name, name)
        default = defaults.get(name)
        try:
            chosen[name] = _typed(value, default) if isinstance(value, str) else value
        except ValueError:
            problems.append(f"config_overrides, {name!r}: {value!r} is no {type(default).__name__}")
    return chosen, problems


def _typed(text, default):
    """`text` in the type of `default`; if that is None, parsed as JSON if possible."""
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        return type(default)(text)
    value = text
    with contextlib.suppress(ValueError):
        value = None if text.lower() == "none" else json.loads(text.lower())
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError
    return value


def in_proportion(default, chosen) -> dict:
    """The sizes that are not chosen, in the type's own proportion to hidden_size and num_attention_heads."""
    values, sizes = {}, default.to_dict()
    try:
        config = AutoConfig.for_model(default.model_type, **chosen)
        heads = setting(config, "num_attention_heads")
        wider = setting(config, "hidden_size") / setting(default, "hidden_size")
        more = heads / setting(default, "num_attention_heads")
    except Exception:  # `objection` reports what is wrong, or the type has no such sizes
        return values
    # A size that the configuration derives from others differs from the default by now, and is left alone.
    given = {name: size for name, size in config.to_dict().items() if name not in chosen}
    for name, size in given.items():
        if not isinstance(size, int) or sizes.get(name) != size:
            continue
        if name.endswith(WIDTHS):
            values[name] = max(8, round(size * wider / 8) * 8)
        elif name == "num_key_value_heads":
            most = max(1, int(size * more))
            values[name] = next(number for number in range(most, 0, -1) if heads % number == 0)
        elif name == "head_dim" and not any(other.endswith("_head_dim") for other in sizes):
            values[name] = max(2, round(size * wider / more / 2) * 2)
    return {name: value for name, value in values.items() if value != sizes[name]}


def near(name, known):
    near = difflib.get_close_matches(str(name), sorted(known), n=3)
    return f"; near: {', '.join(near)}" if near else ""
