"""Settings: defaults < preset < flags; every mistake in one message with exit status 2."""

import hashlib
import json
import re
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

import train_clm
import train_mlm
from tests.runs import PROJECT
from utils.flags import ELSEWHERE, parse_args
from utils.io.mistakes import user_mistakes
from utils.learning.optim import stable_steps
from utils.resume import Resume
from utils.settings import (
    changed_settings,
    code_version,
    folder_problems,
    number_problems,
    save_args,
    stop_at,
)
from utils.steps import Steps


@dataclass
class Args:
    preset: str = "small"  # which experiment
    learning_rate: float = 0.1  # peak, 100 % of it
    keywords: list[str] = field(default_factory=lambda: ["a", "b"])  # none: off
    name: str | None = "x"  # none: off
    push: bool = False
    focus: float = field(default=2.0, metadata={"before": 0.0})  # what runs did before there was this field


PRESETS = {"small": {}, "large": {"learning_rate": 0.5, "keywords": ["c"]}}


def test_flags_win_over_the_preset_and_the_preset_over_defaults():
    assert parse_args(Args, PRESETS, []).learning_rate == 0.1
    assert parse_args(Args, PRESETS, ["--focus", "1"]).focus == 1
    assert parse_args(Args, PRESETS, ["--preset", "large"]).learning_rate == 0.5
    args = parse_args(Args, PRESETS, ["--learning_rate", "3e-4", "--preset=large", "--push", "true"])
    assert (args.learning_rate, args.keywords, args.preset, args.push) == (3e-4, ["c"], "large", True)


def test_weights_come_with_their_tokenizer_and_configuration():
    def parsed(*words):
        args = parse_args(train_clm.TrainArgs, train_clm.PRESETS, [*words])
        return args.tokenizer_name, args.config_overrides

    default = None, train_clm.SMALL
    assert parsed() == default == parsed("--model_name_or_path", "none")
    assert parsed("--model_name_or_path", "runs/a", "--preset", "codeparrot") == ("runs/a", "")
    given = parsed("--model_name_or_path=a", "--tokenizer_name", "b", "--config_overrides", "n_layer=2")
    assert given == ("b", "n_layer=2")


def test_evaluating_a_run_takes_its_settings(tmp_path):
    settings = asdict(train_clm.TrainArgs(dataset_name=["texts"], keywords=[], block_size=64, prompts=["a"]))
    save_args(tmp_path, settings | {"not_known_any_more": 1}, {})

    def parsed(*words):
        words = ["--output_dir", str(tmp_path), *words]
        known = dict(presets=train_clm.PRESETS, other_data=train_clm.OTHER_DATA)
        args = parse_args(train_clm.TrainArgs, argv=words, **known)
        return args.dataset_name, args.keywords, args.block_size, args.prompts

    own, usual = (["texts"], [], 64, ["a"]), parsed()
    assert usual[2] == 128 and usual[0] != own[0]
    assert parsed("--eval_only", "false") == usual
    assert parsed("--eval_only") == parsed("--eval_only=True", "--preset", "laptop") == own
    other = parsed("--eval_only", "true", "--dataset_name", "other")
    assert other == (["other"], [], 64, train_clm.OTHER_DATA["prompts"])
    assert parsed("--eval_only", "true", "--model_name_or_path", "weights") == usual
    assert parsed("--eval_only", "true", "--preset", "codeparrot")[0] != own[0]
    (tmp_path / "args.json").write_text("[1]")
    assert parsed("--eval_only", "true") == usual


def test_none_switches_off():
    args = parse_args(Args, PRESETS, ["--keywords", "none", "--name", "none"])
    assert args.keywords == [] and args.name is None


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--preset", "huge"], ["huge", "small, large"]),
        (
            ["--learning_rat", "1", "--pusch"],
            ["--learning_rat: no such setting. Did you mean --learning_rate?", "--push"],
        ),
        (["--learning_rate", "fast"], ["learning_rate", "fast"]),
    ],
)
def test_mistakes_are_named(argv, words):
    with pytest.raises(ValueError) as error:
        parse_args(Args, PRESETS, argv)
    for word in words:
        assert word in str(error.value)


def test_names_of_other_scripts_say_what_does_it_here():
    """Every name of the table is told as such; what it points to is a setting, a launcher's flag, a file."""
    for script in (train_clm, train_mlm):
        for name, there in ELSEWHERE.items():
            assert not hasattr(script.TrainArgs(), name)
            with pytest.raises(ValueError) as error:
                parse_args(script.TrainArgs, script.PRESETS, [f"--{name}", "3"])
            said = str(error.value).splitlines()
            assert said == [f"--{name}: no such setting; instead: {there}.", "`--help` lists every setting."]
            for flag in re.findall(r"--(\w+)", there):
                launcher = flag in ("mixed_precision", "dynamo_backend", "config_file")
                assert launcher or hasattr(script.TrainArgs(), flag), flag
            for file in re.findall(r"accelerate_configs/\w+\.yaml", there):
                assert (PROJECT / file).exists()
    with pytest.raises(ValueError, match="--EPOCHS: no such setting; instead: --num_train_epochs"):
        parse_args(Args, PRESETS, ["--EPOCHS", "5"])
    with pytest.raises(ValueError, match="--fp16: .*mixed_precision, or accelerate_configs"):
        parse_args(Args, PRESETS, ["--fp16"])
    with pytest.raises(ValueError, match="(?s)--warmup-steps=5: .*--lost=1: .*stray: "):
        parse_args(Args, PRESETS, ["--warmup-steps=5", "--lost=1", "stray"])


def test_help_is_the_comment_of_each_setting(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(Args, PRESETS, ["--help"])
    assert end.value.code == 0 and "peak, 100 % of it" in capsys.readouterr().out


@pytest.mark.parametrize("script", [train_clm, train_mlm])
def test_help_has_every_setting_under_a_heading_with_its_default_and_what_it_is(script, capsys):
    with pytest.raises(SystemExit):
        parse_args(script.TrainArgs, script.PRESETS, ["--help", "--preset", list(script.PRESETS)[1]])
    out = capsys.readouterr().out
    for setting in fields(script.TrainArgs):
        assert re.search(rf"^  --{setting.name} \S.*  \S", out, re.M), setting.name
    assert out.index("\nModel\n") < out.index("--model_type") < out.index("\nOptimization\n")
    assert " | ".join(script.PRESETS) in out
    for name in script.PRESETS:
        assert re.search(rf"^  {name} +\S.{{20}}", out, re.M), name
    assert f"--output_dir {script.PRESETS[list(script.PRESETS)[1]]['output_dir']} " in out


def test_a_file_beside_the_script_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "script.args").write_text("--learning_rate 9")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py")])
    assert parse_args(Args, PRESETS).learning_rate == 0.1


def test_problems_are_collected():
    @dataclass
    class More(Args):
        seed: int = -1
        adam_beta2: float = 1.0
        mine: float = float("inf")
        my_bias: float = -3.0  # a field that this project does not know may be anything finite

    problems = number_problems(More(learning_rate=0.0))
    assert problems == [
        "learning_rate: must be greater than 0, is 0.0.", "seed: must be 0 (off) or greater, is -1.",
        "adam_beta2: must be less than 1, is 1.0.", "mine: must be a finite number, is inf.",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="(?s)learning_rate.*seed.*mine"):
        stop_at(problems)
    stop_at([])


def test_changed_settings_are_named_and_new_ones_lock_no_run_out():
    """A field that the run does not know counts as what that run did; a single name equals a list of one."""

    @dataclass
    class Now:
        learning_rate: float = 1e-3
        seed: int = 1
        output_dir: str = "b"
        eval_dataset_name: list[str] = field(default_factory=list)
        z_loss: float = 0.0  # its default is what runs did before it was there
        rate: float = field(default=0.5, metadata={"before": 0.1})

    saved = {"learning_rate": 1e-3, "seed": 1, "output_dir": "a", "eval_dataset_name": None}
    assert changed_settings(saved, Now(rate=0.1)) == []
    assert changed_settings(saved | {"eval_dataset_name": "x"}, Now(rate=0.1, eval_dataset_name=["x"])) == []
    lines = changed_settings(saved | {"old": 2, "rows": 8}, Now(seed=2, z_loss=1e-4), {"rows": 16})
    assert lines[0].startswith("b holds a run with other settings")
    assert lines[1:] == [
        "old: 2 in the run, missing now", "rate: 0.1 in the run, 0.5 now", "rows: 8 in the run, 16 now",
        "seed: 1 in the run, 2 now", "z_loss: 0.0 in the run, 0.0001 now",
    ]  # fmt: skip


def test_what_shapes_no_row_may_change():
    """Where the run is kept, how its batch is divided, how far a stream is read ahead: not what is learnt."""
    args = train_clm.TrainArgs()
    other = dict(output_dir="b", per_device_train_batch_size=4, gradient_accumulation_steps=2, stream_gb=1.0)
    assert changed_settings(asdict(args), replace(args, **other)) == []
    lines = changed_settings(asdict(args), replace(args, **other, block_size=64))
    assert lines[1:] == ["block_size: 128 in the run, 64 now"]


def test_who_wants_a_longer_run_is_told_how():
    args = train_clm.TrainArgs(max_train_steps=400, output_dir="b")
    saved = asdict(args)
    longer = replace(args, max_train_steps=800)
    *_, length, remedy = changed_settings(saved, longer, {"max_steps": 800})
    assert length.startswith("max_train_steps: 400") and "--model_name_or_path b" in remedy
    assert "docs/learning.md" not in changed_settings(saved, replace(longer, seed=1))[-1]


def test_an_output_folder_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in folder_problems("output_dir", str(tmp_path / "file"))[0]
    assert "not" in folder_problems("output_dir", str(tmp_path / "file" / "below"))[0]
    assert folder_problems("output_dir", str(tmp_path / "new" / "deep")) == []
    assert not (tmp_path / "new").exists()


def test_our_value_error_is_the_users_mistake_a_librarys_is_not(capsys):
    with pytest.raises(SystemExit) as end, user_mistakes():
        raise ValueError("block_size: 0")
    assert end.value.code == 2 and capsys.readouterr().err == "error: block_size: 0\n"
    with pytest.raises(ValueError), user_mistakes():
        json.loads("{")


def test_args_json_holds_settings_and_versions(tmp_path):
    @dataclass
    class Here(Args):
        output_dir: str = str(tmp_path)

    save_args(tmp_path, asdict(Here()), code_version(Here()))
    record = json.loads((tmp_path / "args.json").read_text())
    assert record["settings"]["learning_rate"] == 0.1 and record["versions"]["torch"]
    assert record["code"]["script"] == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def test_a_run_that_began_before_its_stable_steps_were_counted_goes_on():
    cosine = train_clm.TrainArgs()
    saved = asdict(cosine) | {"max_steps": 6}
    assert changed_settings(saved, cosine, {"max_steps": 6, "stable": [2, 6]}) == []
    assert "max_steps: 6 in the run, 8 now" in changed_settings(saved, cosine, {"max_steps": 8})
    stable = train_clm.TrainArgs(lr_scheduler_type="warmup_stable_decay")
    assert changed_settings(asdict(stable) | {"max_steps": 6}, stable, {"max_steps": 8}) == []


@pytest.mark.parametrize(
    ("was", "now", "step", "resumes"),
    [
        (("constant", 1000, 0.04, 0), ("constant", 10_000, 0.04, 0), 250, True),
        (("constant_with_warmup", 1000, 400, 0), ("constant_with_warmup", 10_000, 400, 0), 250, True),
        (("constant_with_warmup", 1000, 0.04, 0), ("constant_with_warmup", 10_000, 0.04, 0), 250, False),
        (("warmup_stable_decay", 100, 10, 20), ("warmup_stable_decay", 110, 10, 30), 80, True),
        (("warmup_stable_decay", 100, 10, 20), ("warmup_stable_decay", 110, 10, 30), 90, False),
    ],
)  # fmt: skip
def test_a_run_may_grow_where_the_rate_so_far_stays_the_same(tmp_path, was, now, step, resumes):
    data = SimpleNamespace(length=10**6, fingerprints={"tokenizer": "t", "train": "t", "eval": {}})
    accelerator, found = Accelerator(cpu=True), []
    for schedule, length, warmup, decay in (was, now):
        args = train_clm.TrainArgs(lr_scheduler_type=schedule, max_train_steps=length, num_decay_steps=decay,
                                   num_warmup_steps=warmup, output_dir=str(tmp_path))  # fmt: skip
        steps = Steps(args, accelerator, data.length)
        found.append(Resume(args, accelerator, steps, data, stable_steps(args, steps), {}))
        found[-1].lock.release()
    first, second = found
    saved = {"state": {"step": step}, "settings": asdict(first.args) | first.counts, "metrics_offset": 0,
             "rows": first.steps.rows_before(step), "data": data.fingerprints, "code": {}}  # fmt: skip
    with nullcontext() if resumes else pytest.raises(ValueError, match="rate of step .* would be different"):
        second.check(saved)
