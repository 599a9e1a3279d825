"""The page and the command, on synthetic traces. Its layout is tried in a headless Chromium where there is one."""

import html
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from rollout.cli import app
from rollout.report.page import render
from rollout.report.sources import read_runs
from tests.unit.report_cases import synthetic, three_runs, write_lines

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def page(tmp_path):
    return render(read_runs([str(three_runs(tmp_path))]))


def texts(page: str) -> str:
    """What the page says; raises if it is not well formed."""
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    return re.sub(r"\s+", " ", " ".join(root.itertext()))


def test_page_is_well_formed_and_says_it_all(page):
    said = texts(page)
    for words in (
        "switching: 1.42× (1.33 to 1.50) over the better static layout, 2.00× (2.00 to 2.00) over the worse, 2 steps.",
        "static TP : static TP, since it stayed in TP. 2 steps",
        "1 6.00 4.00 2.00 8.00 2.00 6.00 4.00 2.00 2.00 1.50× 2.00× 1.50× 2.00×",
        "mean 7.00 5.00 2.00 10.00 3.00 7.00 5.00 3.00 2.00 1.42× 2.00× 1.42× 2.00×",
        "ep→tp 15 ms",
        "T_h = 4",
        "switching, ep→tp 2 1.0 2.0 3.0 4.0 5.0 15.0",
    ):
        assert words in said, words


def test_charts(page):
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    bars, one, two, costs = root.findall(".//figure//svg")
    shapes = [shape for shape in bars.iter("rect") if shape.get("class").startswith("run")]
    heights = {shape.find("title").text: float(shape.get("height")) for shape in shapes}
    assert len(heights) == 2 * 3 * 2
    burst, tail = (heights[f"static EP, 1: 8 s, {part}"] for part in ("burst 2 s", "tail 6 s"))
    assert tail == pytest.approx(3 * burst, rel=0.01)
    assert [shape.get("class") for shape in one.iter("path") if "curve" in shape.get("class")] == [
        "curve run0",
        "curve run1",
        "curve run2",
    ]
    assert [shape.get("class") for shape in two.iter("circle")] == ["mark run2"]
    widths = [float(shape.get("width")) for shape in costs.iter("rect")]
    assert widths == pytest.approx([widths[0] * factor for factor in (1, 2, 3, 4, 5)], rel=0.01)


def test_page_needs_no_network(page):
    assert "://" not in page
    assert not re.search(r"@import|<script|<link|<img|src=|href=", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#hatch"}


def test_texts_are_escaped(tmp_path):
    name = "<script>alert('&')</script>"
    three_runs(tmp_path)
    page = render(read_runs([str(tmp_path / "tp"), f"{name}={tmp_path / 'switching'}"]))
    assert "<script" not in page
    assert name in texts(page)


def test_what_is_missing_is_said(tmp_path):
    path = write_lines(tmp_path, [synthetic("ep", 1, 1, 1)])
    said = texts(render(read_runs([str(path)])))
    for words in ("No static TP run was given", "No switching run was given", "No switch was made in these runs."):
        assert words in said


def test_a_long_run_is_grouped_and_its_table_folded(tmp_path):
    path = write_lines(tmp_path, [synthetic("ep", step, 1, 1) for step in range(40)])
    page = render(read_runs([str(path)]))
    said = texts(page)
    assert "All 40 steps" in said and "6 of 40 steps are drawn" in said and "mean over several steps" in said
    assert page.count('class="run1"') == 1 + 1 + 2 * 9  # two legends, burst and tail of nine bars


def test_command(tmp_path):
    folder = three_runs(tmp_path / "runs")
    out = tmp_path / "new" / "report.html"
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"Written: {out}"
    assert "1.42× (1.33 to 1.50) over the better static layout" in done.output
    texts(out.read_text(encoding="utf-8"))


def test_command_refuses_with_exit_code_2(tmp_path):
    folder = three_runs(tmp_path)
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "nowhere does not exist"),
        ([str(folder / "tp"), str(folder / "tp")], "are both named tp"),
        ([str(folder), "--out", str(folder)], "is a folder; name a file"),
    ):
        done = CliRunner().invoke(app, ["report", *arguments])
        assert done.exit_code == 2
        assert done.stderr.startswith("Error: ") and message in done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs a headless Chromium")
def test_no_horizontal_scrolling_on_a_phone_and_on_a_wide_screen(tmp_path):
    three_runs(tmp_path / "runs")
    many = write_lines(tmp_path / "many", [synthetic("switching", step, 1, 1) for step in range(1000, 1040)])
    arguments = [str(tmp_path / "runs" / "tp"), str(tmp_path / "runs" / "ep"), f"{'a_long_name_' * 9}={many}"]
    control = '<!DOCTYPE html><p style="width: 2000px">is too wide</p>'
    pages = [render(read_runs([str(tmp_path / "runs")])), render(read_runs(arguments)), control]
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width: {width}px; height: 900px; border: 0"></iframe>'
        for page in pages
        for width in (360, 1400)
    )
    measure = (
        "onload = () => { document.title = [...document.querySelectorAll('iframe')]"
        ".map(f => f.contentDocument.documentElement.scrollWidth).join(' '); }"
    )
    wrapper = tmp_path / "frames.html"
    wrapper.write_text(f"<title>not run</title>{frames}<script>{measure}</script>", encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=10000", "--dump-dom", wrapper.as_uri()],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    widths = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    assert widths == "360 1400 360 1400 2008 2008"  # the control must be found too wide
