"""In: settings, a tokenizer, batches of token ids. Out: a transformers model with its loss, an optimizer, its
schedule, mean losses. Read model.py first, which builds a model; then losses.py and optim.py."""
