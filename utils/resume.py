"""Where a run continues: the checkpoint of its folder or its place, whether it fits, and what it saves."""

from pathlib import Path

from utils.io.secrets import without_secrets
from utils.publishing.export import more_configurations
from utils.publishing.places import fetch_checkpoint
from utils.settings import changed_settings, code_version, save_args
from utils.state.checkpoint import Checkpoints
from utils.state.folders import read_state
from utils.state.preemption import lock_output_dir

EXTRA = {"state": dict, "settings": dict, "rows": int, "data": dict, "code": dict, "metrics_offset": int}


class Resume:
    """Made when the run starts, on all processes; output_dir is this run's from then on.

    stable: [first, last] of the steps of constant learning rate; launch: what it runs on; place: where
    checkpoints are kept, too, or None."""

    def __init__(self, args, accelerator, steps, data, stable: list, launch: dict, place=None):
        self.args, self.steps, self.data, self.launch, self.place = args, steps, data, launch, place
        self.lock = lock_output_dir(args.output_dir) if accelerator.is_main_process else None  # until the end
        self.counts = {"rows_per_step": steps.rows_before(1), "max_steps": steps.last}
        self.counts |= {"training_rows": data.length, "stable": stable}
        self.code, self.saved = code_version(args), None
        if place and args.resume_from_checkpoint == "auto":
            fetch_checkpoint(place, args.output_dir, self._check_fetched)
        accelerator.wait_for_everyone()
        self.checkpoints = Checkpoints(accelerator, args.output_dir, args.save_total_limit)
        self.checkpoints.kept_step = stable[1]  # runs of other lengths may begin there

    @property
    def origin(self) -> dict | None:
        """{"run": name, "step": step} where this run is a branch of another one."""
        return without_secrets(self.checkpoints.origin)

    def load(self, model, keep: dict) -> dict | None:
        """Restores model and kept things. Returns what was saved with them; None: the run begins.
        ValueError where the checkpoint is of another experiment."""
        self.saved = self.checkpoints.load(self.args.resume_from_checkpoint, model, keep, self.check)
        return self.saved

    @property
    def metrics_offset(self) -> int:
        """Bytes of metrics.jsonl that are of this run, up to where it continues."""
        return self.saved["metrics_offset"] if self.saved and not self.origin else 0

    def save_args(self, settings: dict, origin: dict | None) -> None:
        if self.lock:
            save_args(self.args.output_dir, settings, self.code, self.launch, origin)

    def state_of(self, saved: dict) -> dict:
        return saved["state"] | ({"origin": self.origin, "ended": None} if self.origin else {})

    def save(self, state, model, keep, settings: dict, config, metrics_offset: int, final: bool) -> None:
        rows, tokenizer = self.steps.rows_before(state["step"]), self.data.tokenizer
        files = {"tokenizer.json": tokenizer.backend_tokenizer.to_str()}
        files["config.json"] = without_secrets(config.to_json_string())
        extra = {"state": state, "settings": settings | self.counts, "metrics_offset": metrics_offset}
        extra |= {"rows": rows, "data": self.data.fingerprints, "stream": self.data.state_dict(rows)}
        extra |= {"code": self.code, "launch": self.launch}
        beside = [(name, text.encode()) for name, text in files.items()]
        beside += [(file.name, file.read_bytes()) for file in more_configurations(self.args.output_dir)]
        self.checkpoints.save(state["step"], model, keep, extra=extra, beside=beside, final=final)

    def refuse_bad_weights(self, names: list[str], step: int) -> None:
        """RuntimeError where weights of these names are not finite: they would replace good ones."""
        if names:
            good = self.checkpoints.last_good or "missing"
            raise RuntimeError(f"weights are not finite at step {step} ({names[0]}): they are not saved. "
                               f"The last good checkpoint is {good}.")

    def changes(self) -> list[tuple]:
        """(line, event for metrics.jsonl or None) of what may differ from the run so far, and does."""
        found, saved = [], self.saved
        if not saved:
            return found
        for name, was in saved.get("launch", {}).items():
            if was != self.launch[name]:
                found.append((f"launch     {name}: {was} in the run so far, {self.launch[name]} now", None))
        if saved["code"]["script"] != self.code["script"]:
            found.append(("code       the script has changed since the last save", None))
        if saved["data"]["eval"] != self.data.fingerprints["eval"]:
            line = "data       evaluated on other rows than the run so far"
            found.append((line, "evaluation_data_changed"))
        return found

    def check(self, saved: dict, place: str = "") -> None:
        """ValueError where the checkpoint is of another experiment. place: where it is, if not here."""
        found = saved if isinstance(saved, dict) else {}
        wrong = [name for name, kind in EXTRA.items() if not isinstance(found.get(name), kind)]
        if wrong or not isinstance(saved["state"].get("step"), int):
            raise ValueError(f"a checkpoint of {place or self.args.output_dir} is not that of a run "
                             f"({(wrong or ['state'])[0]}); resume from another one, or name another folder")
        problems = changed_settings(saved["settings"], self.args, self.counts)
        if problems and place:
            problems[0] = f"{place} holds a run with other settings: give these, or another URL"
        checks = self._row_problem, self._length_problem, self._data_problem
        for check in checks:
            if not problems and (problem := check(saved, place)):
                problems.append(problem)
        if problems:
            raise ValueError("\n".join(problems))

    def _check_fetched(self, checkpoint: Path) -> None:
        url = without_secrets(self.args.checkpoint_url)
        self.check(read_state(checkpoint)["extra"], f"checkpoint_url {url}")

    def _row_problem(self, saved: dict, place: str) -> str:
        step = saved["state"]["step"]
        if saved["rows"] == (rows := self.steps.rows_before(step)):
            return ""
        return f"rows of the first {step} steps: {saved['rows']} in the run, {rows} now"

    def _length_problem(self, saved: dict, place: str) -> str:
        step, now = saved["state"]["step"], self.counts["stable"]
        was = saved["settings"].get("stable") or now
        first, last = max(was[0], now[0]), min(was[1], now[1])
        if was == now or first <= step <= last:
            return ""
        return (f"max_train_steps: the learning rate of step {step} was another; resume from one of the "
                f"steps {first} to {last} (--resume_from_checkpoint), in an --output_dir of its own")

    def _data_problem(self, saved: dict, place: str) -> str:
        named = {"tokenizer": "tokenizer_name: the tokenizer", "train": "dataset_name: the training rows"}
        folder, other = place or self.args.output_dir, "URL" if place else "output_dir"
        for name, what in named.items():
            if saved["data"][name] != self.data.fingerprints[name]:
                return f"{what} of the run in {folder} had other content; restore it, or name another {other}"
        return ""
