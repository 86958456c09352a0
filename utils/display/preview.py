"""What the model is fed: `--show 5` prints the first rows of a run as the loop gets them, and ends."""

import os
import sys
from itertools import chain, groupby, islice

from utils.io.terminal import in_one_line, visible
from utils.launch import counted
from utils.learning.losses import keytoken_row_weights


def show_rows(args, accelerator, loader, tokenizer, keytokens=None) -> None:
    """Prints the first args.show rows that the main process trains on. All processes call it.

    loader: of all positions from 0; keytokens [V]: 1 at key tokens, None if rows have no weights."""
    alpha = args.keytoken_alpha if keytokens is not None and keytokens.any() else 0.0
    batches = iter(accelerator.prepare(loader))
    first = next(batches)
    batches = chain([first], batches)
    rows = list(islice(_rows(batches, keytokens if alpha else None, alpha), args.show))
    if not accelerator.is_main_process:
        return
    end, mask = tokenizer.eos_token or tokenizer.sep_token, tokenizer.mask_token
    lines = [f"What the model is fed: the first {counted(len(rows), 'row')} of this run"]
    columns = (f"{name} {str(column.dtype).removeprefix('torch.')} {[*column.shape]}"
               for name, column in first.items())
    lines.append(f"  a batch is {', '.join(columns)}")
    lines.append(f"  {end} ends a document; all special tokens are shown by their names")
    if "key" in rows[0]:
        lines.append(f"  «plt» is a key token: it adds {alpha:g} to its row's weight, which is 1 without")
    if "slots" in rows[0]:
        hidden = f"is given {mask}, or another token, or the token itself"
        lines.append(f"  «the→{mask}» is to be predicted: the model must say «the», and {hidden}")
    if "next_sentence_label" in rows[0]:
        lines.append(f"  label 0: B, after A and {end}, follows A; 1: B is from another document")
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    sources = list(getattr(loader.dataset, "sources", []))
    for number, row in enumerate(rows):
        total = sources[row["source"]] if len(sources) > 1 else f"{len(loader.dataset):,}"
        lines.append(f"\n{_facts(row, 1 + number // per_step, total)}{_text(row, tokenizer, end)}")
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # of `| head`: Python must not fail again when it flushes the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _rows(batches, keytokens, alpha):
    """The rows of this process's micro-batches, {name: list or number}, without padding, which is counted."""
    for batch in batches:
        if keytokens is not None:
            weights = keytoken_row_weights(batch["input_ids"], keytokens, alpha)
            batch = batch | {"key": keytokens[batch["input_ids"]], "weight": weights}
        for values in zip(*(column.tolist() for column in batch.values()), strict=True):
            row = dict(zip(batch, values, strict=True))
            padding = row.get("attention_mask", []).count(0)  # it comes last
            ids = row["input_ids"][: len(row["input_ids"]) - padding]
            yield row | {"input_ids": ids, "padding": padding}


def _facts(row: dict, step: int, total: str) -> str:
    facts = [counted(len(row["input_ids"]), "token")]
    facts += [f"{row['padding']} of padding"] if row["padding"] else []
    if "slots" in row:
        facts.append(f"{sum(label != -100 for label in row['slot_labels'])} to be predicted")
    if "weight" in row:
        facts.append(f"{counted(int(sum(row['key'])), 'key token')}, weight {row['weight']:g}")
    if "next_sentence_label" in row:
        facts.append(f"label {row['next_sentence_label']}")
    return f"step {step}, row {row['row']:,} of {total}: {', '.join(facts)}"


def _text(row: dict, tokenizer, end: str) -> str:
    """The lines of a row. Each begins with "│"."""
    ids, key, parts = row["input_ids"], row.get("key"), ["\n  │ "]
    slots = zip(row.get("slots", []), row.get("slot_labels", []), strict=True)
    labels = {place: label for place, label in slots if label != -100}  # -100: an empty slot
    special = set(tokenizer.all_special_ids)
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]  # some decoders drop the first space

    def decoded(tokens: list[int]) -> str:
        texts = [tokenizer.decode(t, clean_up_tokenization_spaces=False) for t in (anchor, anchor + tokens)]
        return visible(texts[1].removeprefix(texts[0]))

    def word(token: int) -> str:
        text = tokenizer.convert_ids_to_tokens(token) if token in special else decoded([token])
        return in_one_line(text)

    def own_part(place: int) -> int | None:
        """A marked token is shown alone; the others are decoded together."""
        return place if ids[place] in special or place in labels or key and key[place] else None

    for marked, places in groupby(range(len(ids)), own_part):
        if marked is None:
            parts.append(decoded([ids[place] for place in places]).replace("\n", "\n  │ "))
            continue
        shown = word(labels.get(marked, ids[marked]))
        text = shown.lstrip(" ") or shown
        parts.append(shown.removesuffix(text))
        if marked in labels:
            text = f"«{text}→{word(ids[marked]).strip(' ') or ' '}»"
        elif ids[marked] not in special:
            text = f"«{text}»"
        parts.append(text)
        if text == end and marked < len(ids) - 1:
            parts.append("\n  │ ")
    return "".join(parts)
