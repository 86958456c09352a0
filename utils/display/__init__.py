"""What a person sees of a run. In: losses, records, samples and settings of the loop. Out: lines and a bar on
the terminal, metrics.jsonl, args.json, curves.png, trackers. Open first: log.py, which the scripts call."""
