"""Where a run continues: the checkpoint to resume from, whether it fits this run, and what a save holds."""

from pathlib import Path

from utils.io.secrets import without_secrets
from utils.publishing.remote import fetch_checkpoint
from utils.settings import changed_settings, code_version
from utils.state.checkpoint import Checkpoints
from utils.state.folders import read_state
from utils.state.preemption import lock_output_dir

EXTRA = {"state": dict, "settings": dict, "rows": int, "data": dict, "code": dict, "metrics_offset": int}


class Resume:
    """Made when the run starts, on all processes. Locks output_dir until the process ends.

    stable: [first, last] step of constant learning rate; launch: as doctor.launch_facts; remote: where
    checkpoints are kept too, or None."""

    def __init__(self, args, accelerator, steps, data, stable: list, launch: dict, remote=None):
        self.args, self.accelerator, self.steps = args, accelerator, steps
        self.data, self.launch = data, launch
        self.lock = lock_output_dir(args.output_dir) if accelerator.is_main_process else None
        self.counts = {"rows_per_step": steps.rows_before(1), "max_steps": steps.last,
                       "training_rows": data.length, "stable": stable}
        self.code = code_version(args)
        if remote and args.resume_from_checkpoint == "auto":
            url = f"checkpoint_url {without_secrets(args.checkpoint_url)}"
            fetch_checkpoint(remote, args.output_dir, lambda path: self.check(read_state(path)["extra"], url))
        accelerator.wait_for_everyone()
        kept_step = stable[1]  # longer or shorter runs may branch off there
        self.checkpoints = Checkpoints(accelerator, args.output_dir, args.save_total_limit, kept_step)
        self.saved = None  # the extra of the checkpoint that was loaded
        self.origin = None  # {"run": name, "step": step} if this run is a branch of another run
        self.metrics_offset = 0  # bytes of metrics.jsonl up to the step where the run continues

    def load(self, model, keep: dict) -> dict | None:
        """Restores model and kept things. Returns the run's state, None if it starts anew. ValueError if the
        checkpoint is another experiment's."""
        saved = self.saved = self.checkpoints.load(self.args.resume_from_checkpoint, model, keep, self.check)
        if saved is None:
            return None
        self.checkpoints.reserve(model, keep)
        self.data.train.load_state_dict(saved["stream"])
        self.origin = without_secrets(self.checkpoints.origin)
        if self.origin:
            return saved["state"] | {"origin": self.origin, "ended": False, "best": None}
        self.metrics_offset = saved["metrics_offset"]
        return saved["state"]

    def save(self, model, keep: dict, extra: dict, final: bool) -> None:
        """extra: state, settings and metrics_offset of the run."""
        step = extra["state"]["step"]
        config = self.accelerator.unwrap_model(model, keep_torch_compile=False).lm.config
        rows = self.steps.rows_before(step)
        extra |= {"settings": extra["settings"] | self.counts, "rows": rows, "data": self.data.fingerprints,
                  "stream": self.data.train.state_dict(rows), "code": self.code, "launch": self.launch}
        files = {"tokenizer.json": self.data.tokenizer.backend_tokenizer.to_str().encode()}
        files["config.json"] = without_secrets(config.to_json_string()).encode()
        others = (Path(self.args.output_dir, f"{name}_config.json") for name in ("generation", "tokenizer"))
        files |= {file.name: file.read_bytes() for file in others if file.exists()}  # read by pipeline()
        self.checkpoints.save(step, model, keep, extra, final, files.items())

    def changes(self) -> dict[str, str | None]:
        """{line: event for metrics.jsonl or None} for each allowed difference from the run so far."""
        lines, saved = {}, self.saved or {}
        for name, was in saved.get("launch", {}).items():
            if was != self.launch[name]:
                lines[f"launch     {name}: {was} in the run so far, {self.launch[name]} now"] = None
        if saved and saved["code"]["script"] != self.code["script"]:
            lines["warning    the script was edited after the last save and goes on with the edit"] = None
        if saved and saved["data"]["eval"] != self.data.fingerprints["eval"]:
            lines["data       evaluated on other rows than the run so far"] = "evaluation_data_changed"
        return lines

    def check(self, saved: dict, place: str = "") -> None:
        """ValueError if the checkpoint is another experiment's. place: where it is, if not in output_dir."""
        here, known = place or self.args.output_dir, saved if isinstance(saved, dict) else {}
        wrong = [name for name, kind in EXTRA.items() if not isinstance(known.get(name), kind)]
        if wrong or not isinstance(saved["state"].get("step"), int):
            raise ValueError(f"a checkpoint of {here} lacks {(wrong or ['the step of state'])[0]}; "
                             "resume from another one, or name another folder")
        problems = changed_settings(saved["settings"], self.args, self.counts)
        if problems and place:
            problems[0] = f"{place} holds a run with other settings: repeat them, or choose another URL"
        if message := "\n".join(problems) or self._other_run(saved, here, "URL" if place else "output_dir"):
            raise ValueError(message)

    def _other_run(self, saved: dict, here: str, kind: str) -> str:
        """What differs from this run beside the settings, or ""."""
        step, rows = saved["state"]["step"], self.steps.rows_before(saved["state"]["step"])
        if saved["rows"] != rows:
            return f"batch size: {saved['rows']} rows in {step} steps, {rows} now"
        was, now = self.counts | saved["settings"], self.counts
        (warm_was, end_was), (warm, end) = was["stable"], now["stable"]
        first, last = (0 if warm_was == warm else max(warm_was, warm)), min(end_was, end)  # same rate
        if (end_was, was["max_steps"]) != (end, now["max_steps"]) and not first <= step <= last:
            return (f"max_train_steps: the learning rate of step {step} would be different: resume from one "
                    f"of the steps {first} to {last} (--resume_from_checkpoint), in another --output_dir")
        named = {"tokenizer": "tokenizer_name: the tokenizer", "train": "dataset_name: the training rows"}
        for name, what in named.items():
            if saved["data"][name] != self.data.fingerprints[name]:
                return f"{what} of the run in {here} had other content: restore it, or name another {kind}"
        return ""
