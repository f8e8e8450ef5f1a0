import subprocess
import sys
from typing import Any

import pytest
import typer.main

from vicinal import __version__
from vicinal.cli import app

COMMANDS = ("demo", "train", "evaluate", "adapt", "bench", "compare", "report", "reproduce", "results")
GROUPS = {"data": ("list", "status", "get", "check")}


def test_the_help_lists_every_command(vicinal: Any) -> None:
    ran = vicinal("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in (*COMMANDS, *GROUPS))


def test_these_are_all_commands() -> None:
    group = typer.main.get_command(app)
    assert set(group.commands) == {*COMMANDS, *GROUPS}
    for name, commands in GROUPS.items():
        assert set(group.commands[name].commands) == set(commands)


@pytest.mark.parametrize("name", GROUPS)
def test_the_help_of_a_group_lists_its_commands(vicinal: Any, name: str) -> None:
    for words in ((name, "--help"), (name,)):
        ran = vicinal(*words)
        assert all(command in ran.out + ran.err for command in GROUPS[name])
    for command in GROUPS[name]:
        ran = vicinal(name, command, "--help")
        assert ran.code == 0
        options = typer.main.get_command(app).commands[name].commands[command].params
        assert all(option in ran.out for item in options for option in item.opts if option.startswith("--"))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_its_options(vicinal: Any, name: str) -> None:
    ran = vicinal(name, "--help")
    assert ran.code == 0
    options = [
        option
        for item in typer.main.get_command(app).commands[name].params
        for option in item.opts
        if option.startswith("--")
    ]
    assert options
    missing = [option for option in options if option not in ran.out]
    assert not missing


@pytest.mark.parametrize("words", [(), ("adapt",), ("data",), ("data", "check")])
def test_help_by_one_letter(vicinal: Any, words: tuple[str, ...]) -> None:
    short, long = vicinal(*words, "-h"), vicinal(*words, "--help")
    assert short.code == 0, short.err
    assert short.out == long.out


def test_the_version(vicinal: Any) -> None:
    ran = vicinal("--version")
    assert (ran.code, ran.out.strip()) == (0, __version__)


def test_an_option_that_does_not_exist(vicinal: Any) -> None:
    ran = vicinal("demo", "--fast")
    assert ran.code == 2
    assert "--fast" in ran.err


def test_a_refusal_in_a_process_of_its_own() -> None:
    run = "from vicinal.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", run, "adapt", "nowhere", "nothing"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == ["vicinal: nowhere: no such checkpoint"]


def test_it_runs_as_a_module_where_the_command_is_not_on_the_path() -> None:
    ran = subprocess.run([sys.executable, "-m", "vicinal", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, __version__)
