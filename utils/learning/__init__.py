"""In: settings, a tokenizer, batches of token ids. Out: a transformers model with its loss, an optimizer, its
schedule, mean losses. model.py first: how a model is made of settings; then losses.py and optim.py."""
