"""What the model is fed: `--show 5` prints the first rows of a run as `update` would get them, and ends."""

import os
import sys
from itertools import groupby, islice

from utils.display.doctor import counted
from utils.learning.losses import keytoken_row_weights

MARKS = {  # kind of token -> example, what it means
    "special": ("{end}", "ends a document; all special tokens go by their names"),
    "key": ("«plt»", "a key token: it adds {alpha:g} to the weight of its row, which is 1 without"),
    "masked": ("«the→{mask}»", "to be predicted: the model is given {mask} and must say «the»"),
    "replaced": ("«the→cat»", "to be predicted: it is given another token instead"),
    "kept": ("«the→the»", "to be predicted: it is given the token itself"),
}
LABELS = "label 0: B follows A; 1: B is from another document"


def show_rows(number: int, data, steps, keytokens=None, alpha: float = 0.0) -> None:
    """Prints the first rows of the run that the main process takes. All processes call it.

    keytokens, alpha: as for keytoken_row_weights; None where rows have no weights."""
    rows = list(islice(_rows(data, steps, keytokens, alpha), number))
    if not data.accelerator.is_main_process:
        return
    blocks, seen, tokenizer = [], set(), data.tokenizer
    sources = list(getattr(data.train, "sources", ()))  # of a mixture
    for row in rows:
        spans = list(_spans(row, tokenizer))
        seen |= {kind for kind, _ in spans}
        total = sources[row["source"]] if sources else data.length and f"{data.length:,}"
        blocks.append(_facts(row, total) + "".join(text for _, text in spans))
    legend = f"What the model is fed: the first {counted(len(rows), 'row')} of this run"
    names = {"end": tokenizer.eos_token or tokenizer.sep_token, "mask": tokenizer.mask_token, "alpha": alpha}
    for example, meaning in (MARKS[kind] for kind in MARKS if kind in seen):
        legend += f"\n  {example.format(**names):<16}{meaning.format(**names)}"
    if rows and "next_sentence_label" in rows[0]:
        legend += f"\n  {LABELS}"
    text, encoding = "\n\n".join([legend, *blocks]), sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # by `| head`: what is left must not fail again when Python flushes it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _rows(data, steps, keytokens, alpha):
    """Row by row what the micro-batches of this process hold, {name: list or number}, and the `step`."""
    for step, micro_batches in enumerate(data.batches(steps, 0), start=1):
        for batch in micro_batches:
            if keytokens is not None:
                weights = keytoken_row_weights(batch["input_ids"], keytokens, alpha)
                batch = batch | {"key": keytokens[batch["input_ids"]], "weight": weights}
            for values in zip(*(column.tolist() for column in batch.values()), strict=True):
                yield dict(zip(batch, values, strict=True)) | {"step": step}


def _facts(row: dict, total: str | None) -> str:
    size, real = len(row["input_ids"]), _real(row)
    facts = [counted(real, "token")] + ([f"{size - real} of padding"] if real < size else [])
    if "slots" in row:
        facts.append(f"{sum(label != -100 for label in row['slot_labels'])} to be predicted")
    if "weight" in row:
        facts.append(f"{counted(int(sum(row['key'])), 'key token')}, weight {row['weight']:g}")
    if "next_sentence_label" in row:
        labels = row["next_sentence_label"]
        labels = [label for label in labels if label != -100] if isinstance(labels, list) else [labels]
        facts.append(f"{counted(len(labels), 'pair')}, label {' '.join(map(str, labels))}")
    return f"step {row['step']}, row {row['row']:,}{f' of {total}' if total else ''}: {', '.join(facts)}"


def _real(row: dict) -> int:
    """Tokens before the padding."""
    return sum(mask > 0 for mask in row.get("attention_mask", [1] * len(row["input_ids"])))


def _spans(row: dict, tokenizer):
    """(kind, text) one after the other, kind "" for what has no mark; lines begin at a "│"."""
    ids, key, pair = row["input_ids"], row.get("key"), row.get("token_type_ids")
    slots = zip(row.get("slots", []), row.get("slot_labels", []), strict=True)
    labels = {place: label for place, label in slots if label != -100}  # -100: an empty slot
    special, end = set(tokenizer.all_special_ids), tokenizer.eos_token or tokenizer.sep_token
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]  # some decoders drop the first one's space

    def decoded(tokens: list[int]) -> str:
        texts = [tokenizer.decode(t, clean_up_tokenization_spaces=False) for t in (anchor, anchor + tokens)]
        text = texts[1].removeprefix(texts[0])
        return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

    def word(token: int) -> str:
        text = tokenizer.convert_ids_to_tokens(token) if token in special else decoded([token])
        return text.replace("\n", "\\n").replace("\t", "\\t")

    def kind_of(place: int) -> str:
        token, label = ids[place], labels.get(place)
        if label is not None:
            return "kept" if token == label else "masked" if token == tokenizer.mask_token_id else "replaced"
        return "special" if token in special else "key" if key and key[place] else ""

    real, margin = _real(row), None
    for kind, places in groupby(range(real), kind_of):  # padding comes last
        for run in [list(places)] if kind == "" else ([place] for place in places):
            if margin != (margin := f"\n{'AB'[pair[run[0]]] if pair else ' '} │ "):
                yield "", margin
            if kind == "":
                yield "", decoded([ids[place] for place in run]).replace("\n", "\n  │ ")
                continue
            shown = word(labels.get(run[0], ids[run[0]]))
            text = shown.lstrip(" ") or shown
            yield "", shown.removesuffix(text)
            if kind != "special":
                given = word(ids[run[0]]).strip(" ") or " "
                text = f"«{text}→{given}»" if run[0] in labels else f"«{text}»"
            yield kind, text
            if text == end and not pair and run[0] < real - 1:
                yield "", "\n  │ "
