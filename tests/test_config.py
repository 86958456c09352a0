"""Settings: defaults < preset < flags; every mistake in one message with exit status 2."""

import json
from dataclasses import dataclass, field

import pytest

from utils.settings import attempt, number_problems, output_dir_problems, parse_args, save_args, user_mistakes


@dataclass
class Args:
    preset: str = "small"  # which experiment
    learning_rate: float = 0.1  # peak, 100 % of it
    keywords: list[str] = field(default_factory=lambda: ["a", "b"])  # none: off
    name: str | None = "x"  # none: off
    push: bool = False


PRESETS = {"small": {}, "large": {"learning_rate": 0.5, "keywords": ["c"]}}


def test_flags_win_over_the_preset_and_the_preset_over_defaults():
    assert parse_args(Args, PRESETS, []).learning_rate == 0.1
    assert parse_args(Args, PRESETS, ["--preset", "large"]).learning_rate == 0.5
    args = parse_args(Args, PRESETS, ["--learning_rate", "3e-4", "--preset=large", "--push", "true"])
    assert (args.learning_rate, args.keywords, args.preset, args.push) == (3e-4, ["c"], "large", True)


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


def test_help_is_the_comment_of_each_setting(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(Args, PRESETS, ["--help"])
    assert end.value.code == 0 and "peak, 100 % of it" in capsys.readouterr().out


def test_a_file_beside_the_script_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "script.args").write_text("--learning_rate 9")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py")])
    assert parse_args(Args, PRESETS).learning_rate == 0.1


def test_problems_are_collected():
    problems = []

    def bad(x):
        raise ValueError(f"no {x}")

    assert attempt(problems, bad, "way") is None and attempt(problems, int, "3") == 3
    args = Args(learning_rate=0.0)
    problems += number_problems(args, may_be_zero=set())
    assert problems == ["no way", "learning_rate: must be greater than 0, is 0.0."]


def test_an_output_folder_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in output_dir_problems(str(tmp_path / "file"))[0]
    assert "not" in output_dir_problems(str(tmp_path / "file" / "below"))[0]
    assert output_dir_problems(str(tmp_path / "new" / "deep")) == [] and not (tmp_path / "new").exists()


def test_our_value_error_is_the_users_mistake_a_librarys_is_not(capsys):
    with pytest.raises(SystemExit) as end, user_mistakes():
        raise ValueError("block_size: 0")
    assert end.value.code == 2 and capsys.readouterr().err == "error: block_size: 0\n"
    with pytest.raises(ValueError), user_mistakes():
        json.loads("{")


def test_args_json_holds_settings_and_versions(tmp_path):
    save_args(Args(), str(tmp_path))
    record = json.loads((tmp_path / "args.json").read_text())
    assert record["settings"]["learning_rate"] == 0.1 and record["versions"]["torch"]
