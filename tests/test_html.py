"""The page of the report: its numbers are the report's, its text is escaped, it needs no network."""

import json
from html.parser import HTMLParser

import pytest
from test_bench import finished
from test_seeds import several

from lowbit.bench.html import page
from lowbit.bench.report import COLUMNS

STEPS = 600


class Read(HTMLParser):
    """The cells of the first table, addresses, and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.places, self.scripts, self.tags, self.inside = [], [], [], [], None
        self.tables = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.places += [attrs[name] for name in ("src", "href") if name in attrs]
        self.tables += tag == "table"
        if self.tables == 1 and tag == "tr":
            self.rows.append([])
        if self.tables == 1 and tag in ("td", "th"):
            self.rows[-1].append([attrs.get("data-value"), ""])
        self.inside = tag

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        elif self.tables == 1 and self.rows and self.rows[-1]:
            self.rows[-1][-1][1] += data

    def handle_endtag(self, tag):
        self.inside = None
        self.tables += tag == "table"  # what follows is in none


def large(optimizers=10, seeds=5):
    """A report of so many runs with all curves."""
    losses = [[step, 3.0 + 1.0 / step] for step in range(1, STEPS + 1)]
    curves = {name: losses for name in ("seconds", "grad_norm", "update", "stuck")}
    memory = {"weights": 2**30, "gradients": 2**30, "state": 2**30, "rest": 2**30}
    result = {"losses": losses, "curves": curves, "memory": memory, "held_out_loss": 1.5, "tokens_per_second": 100.0}
    rows = [
        {"optimizer": f"optimizer {i}", "seed": seed, "status": "ok", "reason": None, "result": result}
        for seed in range(seeds)
        for i in range(optimizers)
    ]
    return finished() | {"rows": rows, "options": finished()["options"] | {"seeds": seeds}}


def test_the_table_has_the_numbers_of_the_report():
    rows = Read(page(finished())).rows
    result = finished()["rows"][1]["result"]
    name, *found = rows[2]
    assert name[1] == "8bit" and len(rows[0]) == len(rows[2])
    for (header, key, text), (value, shown) in zip(COLUMNS, found, strict=True):
        expected = result[key] if isinstance(key, str) else result[key[0]] - result[key[1]]
        assert (float(value), shown) == (expected, text(expected)), header
    assert rows[3][0][1] == "a|b" and rows[3][1][1] == "failed"
    assert "out of memory: lower --batch-size" in page(finished())


def test_several_seeds_are_a_line_with_deviations_and_a_test():
    rows = {row[0][1]: row for row in Read(page(several())).rows}
    assert [x[1] for x in rows["optimizer"][-2:]] == ["held-out loss, minus torch", "mc2, minus torch"]
    assert "2.2500 ± 0.3536" in [x[1] for x in rows["torch"]]
    value, shown = rows["8bit"][-2]
    assert float(value) == pytest.approx(-0.2) and shown == "-0.2000 ± 0.1414p = 0.3"
    assert rows["4bit"][-2][1] == "+0.2500"  # one seed has no deviation


@pytest.mark.parametrize("report", [finished(), several(), large(2, 2)], ids=["one", "several", "curves"])
def test_it_is_whole_in_itself(report):
    found = Read(page(report))
    assert all(place.startswith(("data:", "#")) for place in found.places)
    assert not {"link", "img", "iframe"} & set(found.tags) or found.tags.count("link") == 1
    data = json.loads(next(text for text in found.scripts if text.startswith("[")))
    assert len(data) == len({row["optimizer"] for row in report["rows"]})


def test_text_of_the_report_is_escaped():
    bad = "<script>alert(1)</script>"
    rows = [dict(row, optimizer=bad + row["optimizer"]) for row in finished()["rows"]]
    rows[2]["reason"] = bad
    text = page(finished() | {"rows": rows})
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text
    assert Read(text).rows[1][0][1] == bad + "not fine-tuned"


def test_curves_are_thin_and_numbers_that_json_lacks_are_left_out():
    report = large()
    text = page(report)
    assert len(text) < 2**20
    data = json.loads(next(text for text in Read(text).scripts if text.startswith("[")))
    first, last = data[0]["curves"]["update"][0], data[0]["curves"]["update"][-1]
    assert first[1] == 4.0 and last == [600.0, pytest.approx(3.0 + 1 / 600, rel=1e-5), 0.0]
    report["rows"][0]["result"]["curves"]["grad_norm"] = [[1, float("inf")], [2, 2.0], [3, float("nan")]]
    page(report)
