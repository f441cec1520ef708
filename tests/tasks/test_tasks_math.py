"""Mathematics: published forms of rows, math-verify's verdicts, a worker that may hang or die."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import RewardError, UsageError
from sidestep.tasks.build import make_task
from sidestep.tasks.math_reward import DIED, TIMED_OUT, MathReward, MathWorker
from sidestep.tasks.math_rows import last_boxed, math_fields
from sidestep.tasks.math_worker import NO_ANSWER, NO_GOLD, RIGHT, WRONG

math_verify = pytest.importorskip("math_verify")

HANGS = r"\boxed{9^{9^{9^9}}}"  # SymPy tries to write this number out

PAIRS = [
    # fractions and decimals
    (r"\frac{3}{4}", r"so it is \boxed{\frac{6}{8}}", True),
    ("3/4", "The answer is 0.75.", True),
    ("0.5", r"$\frac12$", True),
    (r"\frac{1}{3}", r"\boxed{0.333}", False),
    # percent
    ("50%", r"\boxed{0.5}", True),
    (r"50\%", r"\boxed{50\%}", True),
    ("50%", r"\boxed{50}", True),
    # units
    (r"12\text{ cm}", r"\boxed{12}", True),
    ("12 cm", "It is 12 cm.", True),
    (r"90^\circ", r"\boxed{90}", True),
    ("$18", r"She makes \boxed{\$18} a day", True),
    ("12 cm", r"\boxed{13\text{ cm}}", False),
    # intervals and sets
    ("[1,2)", r"\boxed{[1,2)}", True),
    ("[1,2)", r"\boxed{(1,2)}", False),
    (r"(-\infty,3)\cup(5,\infty)", r"\boxed{(-\infty, 3) \cup (5, \infty)}", True),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
    ("1 < x < 2", r"\boxed{(1,2)}", True),
    ("(1,2)", r"\boxed{1<x<2}", False),
    # LaTeX
    (r"\sqrt{8}", r"\boxed{2\sqrt2}", True),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
    ("5", r"x = \boxed{5}", True),
    (r"(3, \frac{\pi}{2})", r"\boxed{(3,\pi/2)}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
    # plain numbers
    ("10,000", "#### 10000", True),
    ("72", "So she has 73.", False),
]


@pytest.fixture(scope="module")
def worker():
    worker = MathWorker(10.0)
    yield worker
    worker.close()


@pytest.mark.parametrize(("gold", "completion", "right"), PAIRS)
def test_verdicts_on_latex_units_fractions_percent_and_intervals(worker, gold, completion, right):
    assert worker.ask(gold, completion) == (RIGHT if right else WRONG)


@pytest.fixture
def math_task(tmp_path):
    tasks = []

    def make(*rows, **settings):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        defaults = {"kind": "math", "path": str(path), "eval_size": 0}
        tasks.append(make_task(TaskConfig(**defaults | settings)))
        return tasks[-1]

    yield make
    for task in tasks:
        task.close()


def test_rewards_are_the_librarys_own_verdicts_on_50_items(math_task):
    """math-verify called directly, in this process, on the same texts."""
    golds = [rf"\frac{{{n}}}{{{n % 7 + 2}}}" if n % 2 else str(n * n) for n in range(50)]
    said = [
        [rf"Thus \boxed{{{gold}}}." for gold in golds],
        [f"The answer is {n / (n % 7 + 2) if n % 2 else n * n}" for n in range(50)],
        [rf"Thus \boxed{{{n + 1}}}." for n in range(50)],
        ["no idea"] * 50,
    ]
    task = math_task(*({"problem": f"{n}?", "answer": gold} for n, gold in enumerate(golds)))
    seen = set()
    for completions in said:
        expected = [
            float(math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(text)))
            for gold, text in zip(golds, completions, strict=True)
        ]
        assert task.score(task.train, completions) == expected
        seen |= set(expected)
    assert seen == {0.0, 1.0}


def test_wrong_empty_and_unparsable_answers_score_0_and_only_the_latter_are_counted(math_task):
    task = math_task({"problem": "p", "answer": "72"})
    judged = task.judge([task.train[0]] * 5, ["72", "73", "", "  \n", "I cannot tell"])
    assert judged.rewards == (1.0, 0.0, 0.0, 0.0, 0.0)
    assert judged.problems == ("", "", *(["math: no answer found"] * 3))


def test_an_answer_that_hangs_is_ended_counted_and_the_next_is_compared(math_task):
    task = math_task({"problem": "p", "answer": "1"}, math_timeout_s=0.5)
    started = time.monotonic()
    judged = task.judge([task.train[0]] * 3, [r"\boxed{1}", HANGS, r"\boxed{1}"])
    assert judged.rewards == (1.0, 0.0, 1.0)
    assert judged.problems == ("", "math: timed out", "")
    assert time.monotonic() - started < 60


def test_a_worker_that_was_killed_is_replaced():
    worker = MathWorker(10.0)
    try:
        assert worker.ask("1", "1") == RIGHT
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.ask("1", "1") in (DIED, RIGHT)  # the pipe may take the question first
        assert worker.ask("1", "1") == RIGHT
    finally:
        worker.close()


def test_the_worker_ends_with_the_task_and_a_hanging_one_does_not_delay_it():
    worker = MathWorker(60.0)
    with ThreadPoolExecutor(1) as pool:
        assert worker.ask("1", "1") == RIGHT
        asked, pid = pool.submit(worker.ask, "1", HANGS), worker.pid
        time.sleep(0.5)
        started = time.monotonic()
        worker.close()
        assert time.monotonic() - started < 5
        assert asked.result() in (TIMED_OUT, DIED)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    worker.close()
    with pytest.raises(RewardError, match="after the run had ended"):
        worker.ask("1", "1")


def test_a_worker_whose_parent_is_gone_ends_by_itself_even_while_it_hangs():
    """Its alarm kills it wherever it is; nobody else would."""
    import subprocess

    command = [sys.executable, "-P", "-m", "sidestep.tasks.math_worker", "0.5"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(json.dumps({"gold": "1", "completion": HANGS}).encode() + b"\n")
    process.stdin.close()
    assert process.stdout.read() == b"ready\n"
    assert process.wait(timeout=30) == -signal.SIGALRM
    process.stdout.close()


def test_one_worker_serves_several_threads(worker):
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda n: worker.ask(str(n), str(n + n % 2)), range(40)))
    assert verdicts == [RIGHT, WRONG] * 20


def test_what_a_library_prints_is_no_verdict(worker):
    assert worker.ask("", "5") == NO_GOLD
    assert worker.ask("5", "...") == NO_ANSWER


FORMS = {
    "MATH500": ({"problem": "P", "solution": r"so \boxed{3}", "answer": "3", "level": 2}, "3"),
    "MATH": (
        {"problem": "P", "solution": r"\boxed{1} then $\boxed{\frac{1}{2}}$."},
        r"\frac{1}{2}",
    ),
    "GSM8K": ({"question": "P", "answer": "She has 9*8=<<9*8=72>>72.\n#### 1,072"}, "1072"),
    "AIME 2024": ({"ID": "2024-I-1", "Problem": "P", "Solution": "...", "Answer": 204}, "204"),
    "AIME 2025": ({"problem": "P", "answer": "070"}, "070"),
    "own": ({"prompt": "P", "answer": 1.5}, "1.5"),
}


@pytest.mark.parametrize("form", FORMS)
def test_published_files_drop_in(form):
    row, answer = FORMS[form]
    example = math_fields(("task.path", "f:1"), row)
    assert (example.prompt, example.columns["answer"]) == ("P", answer)
    assert set(map(str.lower, row)) - {"problem", "question", "prompt"} <= set(
        map(str.lower, example.columns)
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "3"}, "lacks `problem` or `question` or `prompt` or `messages`"),
        ({"problem": "P"}, "lacks `answer`"),
        ({"problem": "P", "solution": "so 3"}, "`solution` has no \\boxed{}"),
        ({"problem": "P", "solution": r"\boxed{3"}, "`solution` has no \\boxed{}"),
        ({"question": "P", "answer": "so 3 ####"}, "nothing behind ####"),
        ({"question": 3, "answer": "3"}, "`prompt` is the number 3"),
    ],
)
def test_a_faulty_row_is_named(row, said):
    with pytest.raises(UsageError) as caught:
        math_fields(("task.path", "f.jsonl:7"), row)
    assert str(caught.value).startswith("task.path: f.jsonl:7: ")
    assert said in str(caught.value)


def test_the_last_boxed_counts_braces():
    assert last_boxed(r"\boxed{1} \boxed {\frac{a}{b}} x") == r"\frac{a}{b}"
    assert last_boxed(r"\fbox{2}") == "2"
    assert last_boxed("none") is None


def test_rows_whose_right_answer_cannot_be_read_are_left_out_counted_and_shown(math_task):
    """No completion could be right there, and a group of zeros teaches nothing."""
    row = {"problem": "p", "answer": "7"}
    task = math_task(row, {"problem": "q", "answer": "\\text{}"}, row)
    assert [example.prompt for example in task.train] == ["p", "p"]
    (notice,) = task.notices
    assert notice.startswith("1 of 3 rows left out: math-verify does not understand their `answer`")
    assert "data.jsonl:2: " in notice
    with pytest.raises(UsageError, match=r"math-verify understands no `answer` \(the first: "):
        math_task({"problem": "q", "answer": "\\text{}"})


def test_a_worker_that_cannot_start_ends_the_run_and_says_why(monkeypatch):
    """Faked: a Python that is no Python."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="math-verify did not start: it said nothing"):
        MathWorker(1.0).ask("1", "1")


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'sidestep\[math\]'"):
        MathReward(1.0)
