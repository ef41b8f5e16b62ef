"""Result files become one page that says where each figure comes from."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.clients import Task, compare, serving_report
from benchmarks.intervals import with_intervals
from benchmarks.results import render
from foredraft.bench.report import write_json
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.drafters.trained import SHIPPED
from tests.docs.pages import REPO


def rendered(tmp_path: Path, figures: dict[str, Any]) -> str:
    write_json(str(tmp_path / "one.json"), figures, seed=7)
    return render(tmp_path)


def test_a_figure_stands_beside_its_origin(tmp_path: Path) -> None:
    page = rendered(tmp_path, {"model": "tiny"})
    report = json.loads((tmp_path / "one.json").read_text())
    assert "## one" in page
    for part in (report["command"], report["date"], report["machine"]["cpu"], "seed 7", "torch"):
        assert part in page
    assert f"{report['machine']['threads']} threads" in page


def test_records_are_a_table_and_their_parts_columns(tmp_path: Path) -> None:
    figures = [{"name": "target", "parts_ms": {"head": 1.23456}}, {"name": "a|b", "parts_ms": {}}]
    page = rendered(tmp_path, {"figures": figures, "empty": None})
    assert "| name | parts_ms: head |\n| --- | ---: |\n| target | 1.235 |\n| a\\|b |  |" in page


def test_older_speedups_get_their_intervals(tmp_path: Path) -> None:
    """Paired: a prompt that is slow for both is no spread; and within categories."""
    seconds = {"a1": 1.0, "a2": 3.0, "b1": 2.0, "b2": 8.0}
    gains = {"even": [2.0] * 4, "by category": [2.0, 2.0, 6.0, 6.0], "uneven": [1.0, 2.0, 1.0, 4.0]}
    trials = [
        {"prompt": prompt, "category": prompt[0], "contender": name, "temperature": 0.0,
         "num_tokens": 11, "first_s": 1.0, "total_s": 1.0 + plain_s / gain}
        for name, by_prompt in {"none": [1.0] * 4, **gains}.items()
        for (prompt, plain_s), gain in zip(seconds.items(), by_prompt, strict=True)
    ]  # fmt: skip
    speedups = {"none": 1.0, "even": 2.0, "by category": 4.0, "uneven": 2.0}
    lines = [{"contender": n, "temperature": 0.0, "speedup": s} for n, s in speedups.items()]
    page = rendered(tmp_path, {"overall": lines, "trials": trials})
    for sure in ("none | 0 | 1 | 1 | 1", "even | 0 | 2 | 2 | 2", "by category | 0 | 4 | 4 | 4"):
        assert f"| {sure} |" in page
    uneven = next(one for one in with_intervals(lines, trials) if one["contender"] == "uneven")
    assert 0.5 < uneven["low"] < 1.5 < 2.5 < uneven["high"] < 5.0
    single = [each for each in trials if each["prompt"] != "b2"]
    assert {one["low"] for one in with_intervals(lines, single)} == {None}


@pytest.mark.parametrize("text", ["{", '{"figure": 1}', "[]", "3"])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        render(tmp_path)


def test_every_file_of_our_own_is_shown() -> None:
    folder = REPO / "docs" / "results"
    page = render(folder)
    assert [path.name for path in folder.glob("*.json") if f"`{path.name}`" not in page] in (
        [],
        ["titles.json"],
    )


def test_no_prompt_comes_twice_and_every_client_has_one() -> None:
    """A server that keeps what it read would answer a prompt that comes again at once."""
    task = Task(["tea", "mill"], 8, 0.0)
    rounds = [task.in_round(number, clients) for clients in (1, 4) for number in range(3)]
    prompts = [prompt for each in rounds for prompt in each.prompts]
    assert len({*prompts}) == len(prompts)
    assert [len(each.prompts) for each in rounds] == [2, 2, 2, 4, 4, 4]
    beginnings = {prompt.partition(":")[0] for prompt in prompts}
    assert len(beginnings) == len(prompts), "they differ from the first words on"
    assert all(prompt.endswith(("tea", "mill")) for prompt in prompts)


class _Server(BaseHTTPRequestHandler):
    """Two events of text and a count, as OpenAI's servers stream them."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.headers["authorization"], body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        for chunk in (
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [{"delta": {"content": "b"}}]},
            {"choices": [], "usage": {"completion_tokens": 7}},
        ):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_trained_heads_stand_side_by_side(tmp_path: Path) -> None:
    shipped = [path.parent for path in SHIPPED.glob("*/*/head.json")]
    bare = tmp_path / "a-head-without-measured-figures"
    shutil.copytree(next(path for path in shipped if path.name != "table"), bare)
    meta = json.loads((bare / "head.json").read_text())
    (bare / "head.json").write_text(json.dumps(meta | {"measured": {}}))
    out = tmp_path / "heads.json"
    result = CliRunner().invoke(app, ["curves", *map(str, [bare, *shipped]), "--output", str(out)])
    assert result.exit_code == 0, result.exception
    assert max(map(len, result.output.splitlines())) <= 80
    heads = json.loads(out.read_text())["heads"]
    assert {"table", "copies", "table + copies", bare.name} <= {head["name"] for head in heads}
    assert heads[-1]["name"] == bare.name


def test_any_server_is_loaded(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    task = Task(["a", "b"], 4, 0.0, api_key="secret", model="m")
    figures = compare({"ours": url, "theirs": url}, [1, 2], task, rounds=1)
    rows = serving_report(figures).as_dict()["figures"]
    found = [(each["server"], each["clients"]) for each in rows]
    assert found == [("ours", 1), ("theirs", 1), ("ours", 2), ("theirs", 2)]
    keys, bodies = zip(*server.asked, strict=True)  # type: ignore[attr-defined]
    assert {*keys} == {"Bearer secret"}
    assert {body["model"] for body in bodies} == {"m"}
    assert len(bodies) == 2 * 2 * 2 * 2, "servers, rounds, numbers of clients, prompts"


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ForedraftError, match="does not answer"):
        compare({"gone": "http://127.0.0.1:9"}, [1], Task(["a"], 4, 0.0), rounds=1)
