"""Plans are read from a file and options, and refused with the place of what makes no sense in them."""

import re
from pathlib import Path

import pytest

from benchmarks.peers.plan import Plan, PlanOptions, read_plan
from loadtest.errors import UsageError

READY_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "peers.toml"
ONE = '[[server]]\nname = "a"\ncommand = "serve"\n'


def plan_of(tmp_path: Path, text: str, **options: object) -> Plan:
    path = tmp_path / "servers.toml"
    path.write_text(text)
    return read_plan(path, PlanOptions(**options), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no [[server]]"),
        ("[", "servers.toml"),
        ("server = 3", "[[server]]"),
        ('[server]\nname = "a"\ncommand = "x"', "[[server]]"),
        ("rounds = 0\n" + ONE, "rounds is a number from 1 up"),
        ("rounds = true\n" + ONE, "rounds is a number from 1 up"),
        ("rounds = 2.5\n" + ONE, "rounds is a whole number"),
        ("round = 2\n" + ONE, "nothing is called round"),
        ('scenarios = ["S9"]\n' + ONE, "no scenario is called S9"),
        ('scenarios = "S1"\n' + ONE, "scenarios is a list of strings"),
        ('subject = "b"\n' + ONE, "no server is called b"),
        (ONE + ONE, "the same name"),
        ('[[server]]\nname = "a"', "server 1: command is missing"),
        ('[[server]]\nname = "a"\ncommand = " "', "server 1: command is missing"),
        ('[[server]]\nname = "a"\ncommand = "# x"', "server 1: command is missing"),
        ('[[server]]\nname = 3\ncommand = "x"', "server 1: name is missing"),
        (ONE + 'port = 3', "server 1: nothing is called port"),
        (ONE + "environment = { A = 3 }", "environment is a table of strings"),
        (ONE + "load = 3", "load is a list of strings"),
        (ONE + "version = 3", "version is a string"),
        (ONE + "start_timeout_s = 0", "start_timeout_s is a number"),
        (ONE + 'scenarios = ["S0"]', "server 1: no scenario is called S0"),
        ('[[server]]\nname = "a"\ncommand = "serve \'"', "server 1: No closing quotation"),
        ('[[server]]\nname = "a"\ncommand = "serve $"', "server 1: Invalid placeholder"),
        ('load = ["--prefix-len", "5"]\n' + ONE, "--prefix-len"),
        ('load = ["--seed", "5"]\n' + ONE, "--seed does not belong to the load"),
        (ONE + 'load = ["http://other"]', "the load cannot name a server: http://other"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused_with_the_place(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        plan_of(tmp_path, text)


@pytest.mark.parametrize("options", [{"only": ["b"]}, {"subject": "b"}])
def test_a_server_that_the_file_does_not_name_cannot_be_asked_for(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no server is called b; there are: a"):
        plan_of(tmp_path, ONE, **options)


@pytest.mark.parametrize(
    "flag",
    [
        *(
            "--seed 3",
            "--seed=3",
            "--see 3",
            "--rounds 1",
            "--scenario S1",
            "--wait 0",
            "--json x",
            "--strict",
            "--quiet",
        ),
        *("--sweep 1,2", "--plot x.svg"),
    ],
)
def test_a_flag_without_effect_is_refused_among_those_of_the_load(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{flag[:4]}.* does not belong to the load"):
        plan_of(tmp_path, ONE, load=flag.split())


@pytest.mark.parametrize("load", [["http://other"], ["--warmup", "3", "http://other"], ["http://other", "--model"]])
def test_the_load_names_no_server(load: list[str], tmp_path: Path) -> None:
    with pytest.raises((UsageError, SystemExit)):
        plan_of(tmp_path, ONE, load=load)


def test_the_subject_that_is_asked_for_is_among_the_servers_that_are_asked_for(tmp_path: Path) -> None:
    two = ONE + ONE.replace('"a"', '"b"')
    with pytest.raises(UsageError, match="--subject a is not among the servers of --only"):
        plan_of(tmp_path, two, only=["b"], subject="a")
    assert plan_of(tmp_path, two, only=["a", "b"], subject="b").subject == "b"


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        read_plan(tmp_path / "nowhere.toml", PlanOptions(), 7)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    text = 'rounds = 3\nlimit_s = 9\nscenarios = ["S2", "S1"]\nload = ["--warmup", "1"]\n' + ONE
    plan = plan_of(tmp_path, text)
    assert (plan.rounds, plan.limit_s, plan.scenarios, plan.seed) == (3, 9, ("S2", "S1"), 7)
    plan = plan_of(tmp_path, text, rounds=1, limit_s=5, scenarios=["S3"], seed=1, load=["--warmup", "4"])
    assert (plan.rounds, plan.limit_s, plan.scenarios, plan.seed) == (1, 5, ("S3",), 1)
    assert plan.config(plan.servers[0], "S3", 0).schedule.num_warmup == 4
    plan = plan_of(tmp_path, ONE)
    assert (plan.rounds, plan.limit_s, plan.scenarios) == (2, 600, ("S1", "S2", "S3", "S4", "S5"))


def test_flags_of_a_server_win_over_those_for_all(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 'load = ["--warmup", "1"]\n' + ONE + 'load = ["--warmup", "3"]')
    assert plan.config(plan.servers[0], "S1", 0).schedule.num_warmup == 3


def test_a_server_may_have_fewer_scenarios_in_the_order_of_all(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 'scenarios = ["S3", "S2", "S1"]\n' + ONE + 'scenarios = ["S1", "S2"]')
    assert plan.servers[0].scenarios == ("S2", "S1")


def test_a_scenario_that_is_named_twice_is_measured_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, f'scenarios = ["S2", "S1", "S2"]\n{ONE}')
    assert plan.scenarios == plan.servers[0].scenarios == ("S2", "S1")
    assert plan_of(tmp_path, ONE, scenarios=["S3", "S3"]).scenarios == ("S3",)


def test_the_subject_is_the_first_server_unless_another_is_named(tmp_path: Path) -> None:
    two = ONE + ONE.replace('"a"', '"b"')
    assert plan_of(tmp_path, two).subject == "a"
    assert plan_of(tmp_path, 'subject = "b"\n' + two).subject == "b"
    assert plan_of(tmp_path, 'subject = "b"\n' + two, subject="a").subject == "a"
    assert plan_of(tmp_path, 'subject = "b"\n' + two, only=["a"]).subject == "a"


def test_no_two_runs_have_a_seed_in_common(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ONE, rounds=12)
    seeds = [plan.config(plan.servers[0], name, number).seed for name in plan.scenarios for number in range(12)]
    assert len(set(seeds)) == len(seeds)


def test_a_variable_with_spaces_stays_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/with a/space")
    text = (
        '[[server]]\nname = "a"\ncommand = "${PLACE}/x --port ${PORT} $$1"\nenvironment = { LIBS = "${PLACE}:${PORT}" }'
    )
    server = plan_of(tmp_path, text).servers[0]
    assert server.arguments(81) == ["/with a/space/x", "--port", "81", "$1"]
    assert server.variables(81)["LIBS"] == "/with a/space:81"
    assert server.variables(81)["PLACE"] == "/with a/space"


@pytest.mark.parametrize(
    "where", ['version = "${NOPE}"', 'environment = { A = "${NOPE}" }', 'load = ["--model", "${NOPE}"]']
)
def test_a_variable_that_is_not_set_leaves_the_server_out_wherever_it_stands(where: str, tmp_path: Path) -> None:
    assert plan_of(tmp_path, ONE + where).servers[0].skipped == "NOPE is not set"


def test_the_ready_file_needs_only_a_model_for_twostep(monkeypatch: pytest.MonkeyPatch) -> None:
    text = READY_FILE.read_text(encoding="utf-8")
    for name in variables_in(text):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL", "/a model")
    plan = read_plan(READY_FILE, PlanOptions(), 7)
    assert {server.name for server in plan.servers if not server.skipped} == {"twostep", "twostep int8", "twostep int4"}


def test_the_ready_file_can_be_started_when_all_its_variables_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables_in(READY_FILE.read_text(encoding="utf-8")):
        monkeypatch.setenv(name, "/somewhere")
    assert [server.skipped for server in read_plan(READY_FILE, PlanOptions(), 7).servers] == [""] * 10


def test_the_ready_file_explains_its_variables() -> None:
    text = READY_FILE.read_text(encoding="utf-8")
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert [name for name in variables_in(text) if not re.search(rf"\b{name}\b", comments)] == []


def variables_in(text: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)\}", text)) - {"PORT", "PYTHON", "PATH"}
