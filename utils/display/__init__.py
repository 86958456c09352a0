"""What a person sees of a run. In: losses, records, samples and settings of the loop. Out: lines and a bar on
the terminal, metrics.jsonl, args.json, curves.png, trackers. Read log.py first, which the scripts call."""
