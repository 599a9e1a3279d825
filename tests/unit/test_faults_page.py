"""docs/faults.md has the outcomes that the tests on real engines have."""

from pathlib import Path
from typing import get_args

from moebius_engine.switch.faults import Kind, State
from tests.engine.test_faults import UNDONE, WAITED_FOR
from tests.engine.test_faults_that_end import ENDING


def test_each_cell_of_the_table_is_a_test_and_each_test_a_cell():
    outcomes: dict[tuple[str, str], list[str]] = {}
    for outcome, faults in (
        ("undone", [fault for fault, _ in UNDONE]),
        ("waited for", WAITED_FOR),
        ("resumed", ENDING),
    ):
        for fault in faults:
            cell = outcomes.setdefault((fault.kind, fault.at), [])
            if outcome not in cell:
                cell.append(outcome)
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    (head,) = [row for row in rows if row[0] == "fault" and row[1] == "settle"]
    assert set(head[1:]) == set(get_args(State))
    table = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in get_args(Kind)}
    assert set(table) == set(get_args(Kind))
    found = {
        (kind, state): cell.split(" or ")
        for kind, cells in table.items()
        for state, cell in zip(head[1:], cells, strict=True)
        if cell
    }
    assert found == outcomes
