"""Loggers of a run, read back with their own libraries."""

import json
import math
import socket
import sqlite3
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from lowbit.finetune import loggers
from lowbit.finetune.errors import UserError
from lowbit.finetune.memory import peak_bytes
from lowbit.finetune.options import FinetuneOptions
from lowbit.finetune.run import finetune

RATES = [0.01 * x for x in (0.0, 1.0, (1 + math.cos(math.pi / 3)) / 2, (1 + math.cos(2 * math.pi / 3)) / 2)]
EVALUATION = ("held_out_loss", "mc1", "mc2")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return tiny.write_all(tmp_path_factory.mktemp("tiny"))


def options_of(setting, **more):
    """The arguments of the command line as :class:`FinetuneOptions`, with a report every step."""
    return tiny.options_of(FinetuneOptions, setting, log_every=1, **more)


@pytest.fixture(scope="module")
def outside():
    """Addresses outside this machine that this process asked for; it gets none."""
    with pytest.MonkeyPatch.context() as patch:
        found, connect = [], socket.socket.connect

        def refuse(self, address):
            if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
                return connect(self, address)
            found.append(address)
            raise OSError("no network in this test")

        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", _local_names(found, socket.getaddrinfo))
        yield found


def _local_names(found, getaddrinfo):
    def look_up(host, *arguments, **options):
        if host in (None, "127.0.0.1", "::1", "localhost"):
            return getaddrinfo(host, *arguments, **options)
        found.append(host)
        raise socket.gaierror("no network in this test")

    return look_up


@pytest.fixture(scope="module")
def ran(setting, outside, tmp_path_factory):
    """``(folder of the logs, TrainResult, evaluation)`` of a run with all loggers."""
    folder = tmp_path_factory.mktemp("run")
    options = options_of(
        setting, loggers="tensorboard,wandb,trackio,jsonl", log_peak_memory=True, out=str(folder / "out")
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "TRACKIO_DIR"):
            patch.delenv(name, raising=False)
        patch.setenv("TRACKIO_SPACE_ID", "somebody/somewhere")  # is not logged to
        patch.setenv("HF_TOKEN", "hf_token")  # nobody is asked whose it is
        patch.setenv("NETRC", str(folder / "netrc"))  # no login
        patch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
            patch.delitem(sys.modules, name)  # it reads its folder when it is imported
        result, evaluation, _ = finetune(options)
        patch.delenv("TRACKIO_DIR")
    return folder / "out" / "logs" / "8bit", result, evaluation


def check_reports(reports, result):
    """The reports of the four steps, dicts by name, are those of a result."""
    assert [report["loss"] for report in reports] == pytest.approx([loss for _, loss in result.losses], rel=1e-6)
    for name in ("grad_norm", "seconds"):
        values = [value for _, value in result.curves[name]]
        assert [report[name] for report in reports] == pytest.approx(values, rel=1e-6)
    assert [report["lr"] for report in reports] == pytest.approx(RATES, rel=1e-6)
    peaks = [report["peak_memory_resident"] for report in reports]
    assert peaks == sorted(peaks) and peaks[0] > 0.01 and peaks[-1] <= 1.1 * peak_bytes(torch.device("cpu")) / 2**30
    assert all(report["tokens_per_second_per_gpu"] > 0 for report in reports)


def scalars(folder):
    """``{tag: [(step, value)]}`` of event files."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_jsonl(ran):
    folder, result, evaluation = ran
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert [(line["step"], line["loss"]) for line in lines[:4]] == result.losses
    check_reports(lines[:4], result)
    assert lines[4] == {"step": 4, **{name: evaluation[name] for name in EVALUATION}}


def test_tensorboard(ran):
    folder, result, evaluation = ran
    found = scalars(folder)
    names = {"loss", "lr", "tokens_per_second_per_gpu", "seconds", "grad_norm", "peak_memory_resident"}
    assert set(found) == names | set(EVALUATION)
    assert all([step for step, _ in found[name]] == [1, 2, 3, 4] for name in names)
    check_reports([{name: found[name][i][1] for name in names} for i in range(4)], result)
    for name in EVALUATION:
        assert found[name] == [(4, pytest.approx(evaluation[name], rel=1e-6))]


def wandb_records(path):
    """Records of an offline run: a file of LevelDB's log format after 7 bytes, in blocks of 32 KiB."""
    data, place, whole, part = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too short for a header
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            whole.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return whole


def test_wandb(ran):
    folder, result, evaluation = ran
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(path)
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("lowbit", "8bit")
    assert run.run_id == (folder / "wandb-id").read_text() and path.name == f"run-{run.run_id}.wandb"
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["optimizer"], config["lr"], config["steps"]) == ("8bit", 0.01, 4)
    reports = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [report["_step"] for report in reports] == [1, 2, 3, 4]
    check_reports(reports, result)
    for name in EVALUATION:
        assert reports[-1][name] == evaluation[name]


def test_trackio(ran, outside):
    folder, result, evaluation = ran
    with sqlite3.connect(folder.parent / "lowbit.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("8bit", step) for step in (1, 2, 3, 4, 4)]
    check_reports([json.loads(metrics) for _, _, metrics in rows[:4]], result)
    assert {name: json.loads(rows[4][2])[name] for name in EVALUATION} == {x: evaluation[x] for x in EVALUATION}
    config = json.loads(config)
    assert (config["optimizer"], config["lr"], config["steps"]) == ("8bit", 0.01, 4)


def test_nothing_is_sent(ran, outside):
    assert outside == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_named_before_anything_is_loaded(name, tmp_path, monkeypatch, cli):
    monkeypatch.setitem(sys.modules, name, None)
    message = f"--loggers {name}: the package {name} is missing: pip install {name}"
    with pytest.raises(UserError, match=f"^{message}$"):
        loggers.check(FinetuneOptions(loggers=f"jsonl, {name}"))
    status, _, error = cli("finetune", "--model", tmp_path / "none", "--loggers", name, "--out", tmp_path / "out")
    assert status == 2 and message in error and not (tmp_path / "out").exists()


def test_an_unknown_logger_is_refused(setting, tmp_path, cli):
    status, _, error = cli("finetune", *setting, "--loggers", "jsonl,mlflow", "--out", tmp_path / "out")
    assert status == 2 and "--loggers is jsonl,mlflow: give some of tensorboard, wandb, trackio, jsonl" in error


def test_after_a_resume_no_step_is_there_twice(setting, tmp_path):
    options = options_of(setting, loggers="jsonl,tensorboard", out=str(tmp_path / "out"), save_every=2)
    folder = tmp_path / "out" / "logs" / "8bit"
    with pytest.raises(tiny.Stopped):
        finetune(options, on_step=tiny.stop_at(4))
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]  # one more than the checkpoint
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a line
    result, evaluation, _ = finetune(replace(options, resume=True))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == result.losses
    assert lines[-1] == {"step": 4, **{name: evaluation[name] for name in EVALUATION}} and len(lines) == 5
    found = scalars(folder)
    assert found["loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in result.losses]
    assert [step for step, _ in found["held_out_loss"]] == [4]


def test_a_new_run_replaces_the_log_of_one_that_saved_nothing(setting, tmp_path):
    options = options_of(setting, loggers="jsonl,tensorboard", out=str(tmp_path / "out"))
    with pytest.raises(tiny.Stopped):
        finetune(options, on_step=tiny.stop_at(3))
    result = finetune(options)[0]
    folder = tmp_path / "out" / "logs" / "8bit"
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert [step for step, _ in scalars(folder)["loss"]] == [1, 2, 3, 4] and result.steps == 4


def test_log_every(setting, tmp_path):
    options = replace(options_of(setting, loggers="jsonl", out=str(tmp_path / "out"), diagnostics=True), log_every=3)
    result = finetune(options)[0]
    lines = [json.loads(line) for line in (tmp_path / "out" / "logs" / "8bit" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4, 4]
    losses = dict(result.losses)
    for line, step, update, stuck in zip(lines, (3, 4), result.curves["update"], result.curves["stuck"], strict=False):
        assert line["loss"] == losses[step] and [step, line["update"]] == update and [step, line["stuck"]] == stuck


def test_names_inside_dicts_are_paths(tmp_path):
    options = FinetuneOptions(loggers="jsonl")
    with loggers.opened(options, tmp_path / "run") as log:
        log.write(7, {"mc1": None, "tasks": {"arc": {"acc": 0.5, "acc_stderr": None}}})
        log.write(8, {"mc1": None})
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text()) == {"step": 7, "tasks/arc/acc": 0.5}


def test_bench_logs_each_run_in_a_folder(setting, tmp_path, cli):
    more = ("--optimizers", "8bit", "--seeds", "2", "--seed", "5", "--loggers", "jsonl", "--log-every", "1")
    status, _, error = cli("bench", *setting, *more, "--out", tmp_path / "out")
    assert status == 0, error
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {(row["optimizer"], row["seed"]): row["result"] for row in report["rows"]}
    names = {"not-fine-tuned": ("not fine-tuned", 5), "8bit-seed5": ("8bit", 5), "8bit-seed6": ("8bit", 6)}
    assert {path.name for path in (tmp_path / "out" / "logs").iterdir()} == set(names)
    for name, key in names.items():
        path = tmp_path / "out" / "logs" / name / "log.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [[line["step"], line["loss"]] for line in lines[:-1]] == rows[key].get("losses", [])
        expected = {"step": rows[key].get("steps", 0), **{x: rows[key][x] for x in EVALUATION}}
        assert lines[-1] == expected
