"""`sidestep simulate`: what it prints, draws and refuses."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sidestep.cli import simulate as command
from sidestep.cli import simulate_table
from sidestep.control.simulate import (
    CONTROLS,
    LAGS,
    LEARNING_RATES,
    Setting,
    simulate,
    stability_edge,
    stability_map,
)

SMALL = ["--lags", "0,8", "--lrs", "0.1,0.4", "--controls", "none,secant", "--steps", "400"]


def rows_of(table: str) -> dict[str, list[str]]:
    """First column -> the other columns, of every line with cells; of the last table if several."""
    found = {}
    for line in table.splitlines():
        if "│" in line:
            first, *others = (cell.strip() for cell in line.strip("│").split("│"))
            found[first] = others
    return found


def test_json_is_a_list_of_the_cells_and_nothing_else(sidestep):
    code, out, err = sidestep("simulate", *SMALL, "--json")
    assert (code, err) == (0, "")
    expected = stability_map([0, 8], [0.1, 0.4], ["none", "secant"], steps=400)
    assert json.loads(out) == [
        {
            "lag": r.lag,
            "lr": r.lr,
            "control": r.control,
            "loss": r.loss,
            "cosine": r.cosine,
            "skipped": r.skipped,
        }
        for r in expected
    ]
    assert [cell["loss"] is None for cell in json.loads(out)] == [False] * 6 + [True, False]


def test_without_options_the_map_is_the_default_one(sidestep):
    code, out, _ = sidestep("simulate", "--json", "--steps", "2")
    cells = [(cell["lag"], cell["lr"], cell["control"]) for cell in json.loads(out)]
    expected = [(s, lr, c) for s in LAGS for lr in LEARNING_RATES for c in CONTROLS]
    assert (code, cells) == (0, expected)


def test_every_option_reaches_the_simulation(sidestep):
    arguments = "--optimizer momentum --momentum 0.5 --lag-kind heavy --steps 70 --dim 9"
    noisy = "--noise 0.3 --seed 6 --lags 5 --lrs 0.03 --controls half --json"
    _, out, _ = sidestep("simulate", *arguments.split(), *noisy.split())
    options = {"optimizer": "momentum", "momentum": 0.5, "lag_kind": "heavy", "steps": 70}
    expected = simulate(5, 0.03, "half", dim=9, noise=0.3, seed=6, **options)
    assert json.loads(out) == [expected.as_dict()]


def test_several_seeds_are_objects_of_their_own_that_name_the_seed(sidestep):
    one = ["--lags", "4", "--lrs", "0.1", "--controls", "none", "--steps", "50"]
    _, out, _ = sidestep("simulate", *one, "--seed", "3", "--seeds", "2", "--json")
    expected = [simulate(4, 0.1, steps=50, seed=seed) for seed in (3, 4)]
    assert json.loads(out) == [r.as_dict() | {"seed": r.seed} for r in expected]


def test_the_help_states_the_defaults(sidestep):
    _, out, _ = sidestep("simulate", "--help")
    text = " ".join(out.split())
    setting = Setting()
    for default in (
        f"Default: {','.join(map(str, LAGS))}.",
        f"Default: {','.join(f'{lr:g}' for lr in LEARNING_RATES)}.",
        f"Default: {','.join(CONTROLS)}. There is spring, too.",
        f"{setting.optimizer} (default)",
        f"{setting.lag_kind} (default)",
        f"Default: {setting.momentum}.",
        f"Default: {setting.steps}.",
        f"Default: {setting.dim}.",
        f"Default: {setting.noise}.",
    ):
        # The help of a narrow terminal breaks a long word where it must.
        assert default.replace(" ", "") in text.replace(" ", ""), default


def test_the_table_shows_loss_cosine_and_skips_and_draws_the_edge_between_rates(sidestep):
    code, out, err = sidestep("simulate", "--lags", "8", "--lrs", "0.4,0.1", "--steps", "400")
    assert (code, err) == (0, "")
    rows = rows_of(out)
    edge = f"{stability_edge(8):.4g}"
    assert list(rows) == ["0.1", edge, "0.4"]  # sorted, whatever the order asked for
    assert set("".join(rows[edge])) == {"─"} and edge in out.splitlines()[0]
    cells = {(r.lr, r.control): r for r in stability_map([8], [0.1, 0.4], steps=400)}
    none, skip = cells[0.4, "none"], cells[0.1, "skip"]
    assert none.loss is None
    assert rows["0.4"][CONTROLS.index("none")] == f"diverged {none.cosine:+.2f}"
    assert skip.skipped > 0
    shown = rows["0.1"][CONTROLS.index("skip")].lstrip("*")
    assert shown == f"{skip.loss:.3g} {skip.cosine:+.2f} {skip.skipped}"
    # The star: the best rate of each control, one in every column.
    for column, control in enumerate(CONTROLS):
        best = min(
            (lr for lr in (0.1, 0.4) if cells[lr, control].loss is not None),
            key=lambda lr: cells[lr, control].loss,
        )
        starred = [lr for lr in ("0.1", "0.4") if rows[lr][column].startswith("*")]
        assert starred == [f"{best:g}"], control


@pytest.mark.parametrize(("lrs", "last"), [("0.01,0.02", True), ("0.5,0.9", False)])
def test_an_edge_outside_the_rates_is_drawn_at_that_end(sidestep, lrs, last):
    _, out, _ = sidestep("simulate", "--lags", "8", "--lrs", lrs, "--steps", "5")
    assert list(rows_of(out)).index(f"{stability_edge(8):.4g}") == (2 if last else 0)


def test_where_theory_knows_no_edge_the_table_says_so_and_draws_none(sidestep):
    _, out, _ = sidestep(
        "simulate", "--lags", "8", "--lrs", "0.1,0.4", "--lag-kind", "heavy", "--steps", "5"
    )
    assert list(rows_of(out)) == ["0.1", "0.4"]
    assert out.startswith("lag 8 on average, heavy; without control: theory knows no edge")


def test_80_columns_are_enough_for_every_number(sidestep, monkeypatch):
    arguments = ["simulate", "--lags", "32", "--lrs", "0.02,0.05,0.1,0.4"]
    wide = sidestep(*arguments)[1]
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr(simulate_table, "Console", lambda **options: terminal)
    sidestep(*arguments)
    narrow = screen.getvalue()
    assert max(map(len, narrow.splitlines())) <= 80
    numbers = re.compile(r"[-+*]?\d[\d.e+-]*|diverged")
    assert sorted(numbers.findall(narrow)) == sorted(numbers.findall(wide))


def test_over_several_seeds_the_table_counts_those_that_diverged(sidestep):
    arguments = ["--lags", "8", "--lrs", "0.4", "--controls", "none,secant", "--steps", "400"]
    _, out, _ = sidestep("simulate", *arguments, "--seeds", "3")
    none, secant = rows_of(out)["0.4"]
    assert none.startswith("3/3 diverged ")
    losses = [simulate(8, 0.4, "secant", steps=400, seed=seed).loss for seed in range(3)]
    assert secant.startswith(f"*{sum(losses) / 3:.3g} ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--lags 8,x", "--lags='8,x' must be whole numbers with commas between them: --lags 0,8"),
        ("--lags 1.5", "--lags='1.5' must be whole numbers"),
        ("--lags=-1", "--lags=-1 must be a whole number of at least 0"),
        ("--lags 8,8", "--lags=[8, 8] names a value twice"),
        ("--lrs 0.1,,2", "--lrs='0.1,,2' must be numbers with commas between them: --lrs 0.05"),
        ("--lrs 0", "--lrs=0.0 must be above 0"),
        ("--lrs nan", "--lrs=nan must be a finite number"),
        ("--controls none,project", "--controls='project' is unknown: one of none, previous"),
        ("--optimizer lion", "--optimizer='lion' is unknown: one of sgd, momentum, adam"),
        ("--lag-kind pareto", "--lag-kind='pareto' is unknown: one of fixed, geometric, heavy"),
        ("--momentum 1", "--momentum=1.0 must be at least 0 and below 1"),
        ("--steps 0", "--steps=0 must be a whole number of at least 1"),
        ("--dim=-3", "--dim=-3 must be a whole number of at least 1"),
        ("--noise=-1", "--noise=-1.0 must be at least 0"),
        ("--seed=-1", "--seed=-1 must be a whole number of at least 0"),
        ("--seeds 0", "--seeds=0 must be a whole number of at least 1"),
        ("--picture map.png", "--picture='map.png' must end in .html"),
        ("--picture gone/map.html", "--picture='gone/map.html': no such folder 'gone'"),
        ("--picture folder.html", "--picture='folder.html' is a folder: name a file"),
    ],
)
def test_a_bad_value_is_2_and_one_line_with_option_value_and_fix(
    sidestep, tmp_path, arguments, says
):
    (tmp_path / "folder.html").mkdir()
    code, out, err = sidestep("simulate", *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith(says) and err.count("\n") == 1


def test_the_picture_is_one_page_that_loads_nothing(sidestep, tmp_path):
    code, out, err = sidestep("simulate", *SMALL, "--picture", "map.html")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "picture: map.html"
    page = (tmp_path / "map.html").read_text(encoding="utf-8")
    body = page[page.index("<body>") :]
    assert re.findall(r"(?:src|href)=", body) == []
    assert "0.1845 at lag 8" in body and "2 at lag 0" in body
    for title in ("none", "secant"):
        assert f'"text":"{title}"' in body


def test_with_json_the_pictures_place_is_told_on_stderr(sidestep, tmp_path):
    code, out, err = sidestep("simulate", *SMALL, "--json", "--picture", "map.html")
    assert (code, err) == (0, "picture: map.html\n")
    assert len(json.loads(out)) == 8 and (tmp_path / "map.html").exists()


def test_the_pictures_cells_are_the_maps_and_its_edge_lies_between_the_rates():
    from sidestep.cli.simulate_picture import make_figure
    from sidestep.control.simulate import summarise

    cells = summarise(stability_map([8, 0], [0.4, 0.1], ["none"], steps=400))
    at = {(cell.lag, cell.lr): cell for cell in cells}
    loss, diverged, edge = make_figure(cells, Setting(), "loss").data
    cosine, edge_again = make_figure(cells, Setting(), "cosine").data
    # Rows from below: lag 0, lag 8; columns: 0.1, 0.4.
    assert [[10**z if z is not None else None for z in row] for row in loss.z] == [
        [pytest.approx(at[0, 0.1].loss), pytest.approx(at[0, 0.4].loss)],
        [pytest.approx(at[8, 0.1].loss), None],
    ]
    assert [list(row) for row in diverged.z] == [[None, None], [None, 1]]
    assert [list(row) for row in cosine.z] == [
        [at[0, 0.1].cosine, at[0, 0.4].cosine],
        [at[8, 0.1].cosine, at[8, 0.4].cosine],
    ]
    # Lag 0: the edge, 2, is right of both columns. Lag 8: 0.1845 lies between them.
    assert list(zip(edge.x, edge.y, strict=True)) == [
        (1.5, -0.5),
        (1.5, 0.5),
        (0.5, 0.5),
        (0.5, 1.5),
    ]
    assert edge_again.x == edge.x
    adam = make_figure(cells, Setting(optimizer="adam"), "loss").data[-1]
    assert set(adam.x) == {None}


def test_on_a_terminal_a_bar_shows_on_stderr_and_is_gone_afterwards(sidestep, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=60)
    monkeypatch.setattr(command, "Console", lambda **options: terminal)
    code, out, _ = sidestep("simulate", *SMALL, "--json")
    assert code == 0 and len(json.loads(out)) == 8
    assert "simulating" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the bar's line is erased


def test_the_command_needs_no_torch_and_plotly_only_for_a_picture(tmp_path):
    code = (
        "import sys\nfrom sidestep.cli.main import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([n for n in ('torch', 'transformers', 'plotly') if n in sys.modules])\n"
    )
    for more, loaded in (([], "[]"), (["--picture", "map.html"], "['plotly']")):
        done = subprocess.run(
            [sys.executable, "-c", code, "simulate", *SMALL, *more],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == loaded


def test_the_page_shows_the_default_map_as_it_comes(sidestep):
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    _, out, _ = sidestep("simulate")
    printed = "\n".join(line.rstrip() for line in out.rstrip("\n").splitlines())
    assert f"```bash\nsidestep simulate\n```\n\n```\n{printed}\n```\n" in page


@pytest.mark.parametrize("arguments", [["--help"], ["--steps", "x"]])
def test_help_and_a_line_that_cannot_be_parsed_load_nothing_heavy(arguments):
    code = (
        "import sys\nfrom sidestep.cli.main import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([n for n in ('torch', 'plotly', 'numpy') if n in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.returncode == (0 if arguments == ["--help"] else 2)
