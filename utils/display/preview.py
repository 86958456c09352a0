"""What the model is fed: `--show 5` prints the first rows of a run as the loop gets them, and ends."""

from utils.io.terminal import visible
from utils.learning.losses import keytoken_row_weights


def show_rows(args, accelerator, loader, tokenizer, keytokens=None) -> None:
    """Prints the first args.show rows of the first process. All processes call it.

    loader: of all positions from 0; keytokens [V]: 1 at key tokens, None if rows have no weights."""
    shown = 0
    for batch in accelerator.prepare(loader):
        if keytokens is not None and keytokens.any():
            batch["weight"] = keytoken_row_weights(batch["input_ids"], keytokens, args.keytoken_alpha)
        if not shown:
            columns = (f"{name} {str(column.dtype).removeprefix('torch.')} {[*column.shape]}"
                       for name, column in batch.items())  # fmt: skip
            accelerator.print(f"What the model is fed. A batch is {', '.join(columns)}.")
        for values in zip(*(column.tolist() for column in batch.values()), strict=True):
            if shown == args.show:
                return
            accelerator.print(_described(dict(zip(batch, values, strict=True)), tokenizer))
            shown += 1


def _described(row: dict, tokenizer) -> str:
    """The text of a row with all special tokens, and what is to be predicted."""
    facts = {name: value for name, value in row.items() if not isinstance(value, list)}
    lines = ["", ", ".join(f"{name} {value:g}" for name, value in facts.items())]
    padding = row.get("attention_mask", []).count(0)  # it comes last
    ids = row["input_ids"][: len(row["input_ids"]) - padding]
    lines.append(visible(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
    if "slots" in row:
        hidden = dict(zip(row["slots"], row["slot_labels"], strict=True))
        places = sorted(place for place, label in hidden.items() if label != -100)
        words = (f"{place} {tokenizer.decode([hidden[place]]).strip()!r}" for place in places)
        lines.append(f"to predict, by position: {', '.join(words)}")
    return "\n".join(lines)
