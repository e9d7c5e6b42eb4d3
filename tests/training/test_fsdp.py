# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One mini-batch over real FSDP2 ranks and every cut into micro-batches: the same gradient, metrics and records."""

import functools
import json
import multiprocessing
import socket
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path

import fsdp_rank
import live_reference
import pytest
import torch
from bench import worker
from test_live import a_step, columns_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from fspo_verl.analysis import live
from fspo_verl.observe import attempts
from fspo_verl.observe.metrics import LENGTH_BINS
from fspo_verl.observe.records import read

pytestmark = [pytest.mark.long, pytest.mark.trains]
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def ranks_come_from_one_process_that_has_imported_verl():
    """A rank is forked from it: verl's imports take longer than what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        environment = {"VERL_PLATFORM": "cpu", "WG_BACKEND": "ray", "OMP_NUM_THREADS": "1"}
        folders = Path(fsdp_rank.__file__).parent, Path(worker.__file__).parents[1]
        for name, value in (environment | {"PYTHONPATH": ":".join(map(str, folders))}).items():
            patch.setenv(name, value)
        PROCESSES.set_forkserver_preload(["fsdp_rank"])
        forkserver.ensure_running()


def processes_of(output, ranks, **arguments):
    """Start the processes of ranks; also returns their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logs = [Path(f"{output}.{rank}.log") for rank in range(ranks)]
    processes = [
        PROCESSES.Process(target=fsdp_rank.run, args=(where | {"RANK": str(rank)}, log, arguments | {"output": output}))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    return processes, logs


def ended(processes, logs):
    for process in processes:
        process.join(600)
    assert all(process.exitcode == 0 for process in processes), "\n".join(log.read_text()[-3000:] for log in logs)


def started(output, ranks, **arguments):
    ended(*processes_of(output, ranks, **arguments))
    return torch.load(output, weights_only=False) | {"output": output}


def test_a_training_that_is_killed_between_two_checkpoints_and_resumed_loses_no_step(untrained_model, tmp_path):
    """SIGKILL for both ranks after step 5; a checkpoint has step 4."""

    def launch(first, last, is_killed):
        folder = str(attempts.new(tmp_path / "records", tmp_path / "checkpoints"))  # as the driver names it
        arguments = {"model": untrained_model, "records": folder, "first": first, "last": last, "is_killed": is_killed}
        return processes_of(tmp_path / "checkpoints", 2, what="go_on", **arguments)

    processes, logs = launch(1, 5, True)
    there = [tmp_path / f"checkpoints.{rank}.is_there" for rank in range(2)]
    while not all(file.exists() for file in there):
        assert all(process.is_alive() for process in processes), logs[0].read_text()[-3000:]
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.join()
    assert set(read(tmp_path).table.step) == {1, 2, 3, 4, 5}
    ended(*launch(5, 8, False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded = read(tmp_path)
    assert recorded.incomplete_steps == 0
    # Seven of eight responses have a token; each once, in one of two mini-batches.
    assert recorded.table.groupby("step").size().to_dict() == dict.fromkeys(range(1, 9), 7)
    first, second = attempts.attempts_below(tmp_path)
    assert (first.began, second.began) == (1, 5) and [file.end for file in first.files] == [5, 5]

    ended(*launch(1, 2, False))  # without its checkpoint: what it does not go on from is told
    with pytest.warns(UserWarning, match=f"{first.folder.name}, {second.folder.name} is not read"):
        assert set(read(tmp_path).table.step) == {1, 2}


@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_of_processes_are_those_of_all_rows(tmp_path, ranks):
    """Two mini-batches, and micro-batches of unequal size."""
    records = a_step(0, 60 * ranks, 2)
    step = {name: torch.from_numpy(column) for name, column in columns_of(records).items()}
    shares = torch.arange(60 * ranks).view(2, ranks, 30).tolist()
    cut = [[[rows[: 3 + rank], rows[3 + rank : 20], rows[20:]] for rank, rows in enumerate(mini)] for mini in shares]
    saved = started(tmp_path / "out.pt", ranks, what="gather", step=step, cut=cut)
    got = live.series(saved, min_count=1)
    expected = live_reference.series(records[records.length > 0], None, [16, 64, 256])
    assert {"fspo/clip_rate/all", "fspo/moved_sigma", "fspo/step_responses/unmoved"} <= got.keys()
    assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def train(untrained_model, tmp_path_factory):
    """Train on ranks and a cut, once for all tests that ask alike; what rank 0 has saved, and ``output``, its file."""

    @functools.cache
    def trained(ranks, cut, model=untrained_model, **options):
        return started(tmp_path_factory.mktemp("rank") / "out.pt", ranks, cut=cut, model=model, **options)

    return trained


@pytest.mark.parametrize("ranks, cut", [(1, "packed:4"), (2, "dynamic:110"), (4, "2")])
def test_gradient_and_metrics_do_not_depend_on_ranks_and_micro_batches(train, ranks, cut):
    agree(train(ranks, cut), train(1, "8"))


def test_fused_kernels_change_neither_gradient_nor_metrics(train, untrained_model, tmp_path):
    """verl's use_fused_kernels, torch backend; FSDP2 has none of it where the embeddings are not tied (see checks)."""
    model = AutoModelForCausalLM.from_pretrained(untrained_model, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(untrained_model).save_pretrained(tmp_path / "model")
    got, plain = (train(2, cut, model=tmp_path / "model") for cut in ("fused:2", "2"))
    assert (got["fused"], plain["fused"]) == (True, False)
    agree(got, plain)


def agree(got: dict, whole: dict):
    """Assert that two runs of :func:`train` saved the same."""
    norm = torch.cat([g.flatten() for g in whole["gradient"].values()]).norm()
    assert norm > 0
    assert got["metrics"]["actor/pg_loss"] == pytest.approx(whole["metrics"]["actor/pg_loss"], rel=1e-5)
    for name, expected in whole["gradient"].items():
        torch.testing.assert_close(got["gradient"][name], expected, rtol=1e-5, atol=1e-6 * norm.item())
    for name, value in whole["metrics"].items():
        if name.startswith("actor/fspo/"):
            assert got["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert clipped(whole["metrics"]) > 0
    assert whole["metrics"]["actor/fspo/sequence_fraction"] == 7 / 8


def clipped(metrics: dict) -> float:
    """The clipped responses of all length bins, as a share of the rows."""
    return sum(value for name, value in metrics.items() if "/length_" in name and name.endswith("/clipped"))


MOVES = {"mini_batch_size": 4, "lr": 1e-3}  # two mini-batches, of which the second sees a policy that has moved


@pytest.mark.parametrize("ranks, cut", [(2, "dynamic:110"), (4, "1")])
def test_metrics_of_several_mini_batches_equal_what_the_records_give(train, ranks, cut):
    """Ragged micro-batches."""
    saved = train(ranks, cut, **MOVES)
    metrics, output = saved["metrics"], saved["output"]
    recorded = read(f"{output}.records")
    records = recorded.table
    assert len(records) == 7 and set(records.step) == {12}
    (attempt,) = attempts.attempts_below(f"{output}.records")
    assert [file.rank for file in attempt.files] == list(range(ranks))
    assert set(records.mini_batch) == {0, 1} and set(records.prompt) == {f"prompt {i}" for i in range(4)}
    series = live.series(metrics, min_count=1)
    expected = live_reference.series(records, recorded.settings, LENGTH_BINS)
    assert series == pytest.approx({name: expected[name] for name in series}, rel=1e-6, abs=1e-12)
    assert {"fspo/clip_rate/len_00064_00255", "fspo/lre", "fspo/ess", "fspo/noise_sigma"} < series.keys()
    assert series["fspo/mismatch_sigma"] == pytest.approx(0.1, rel=0.2)
    by_hand = [(d.sum().item(), d.square().sum().item()) for d in mismatch_of_tokens() if len(d)]
    got = zip(records.rollout_log_ratio, records.rollout_quadratic_variation, strict=True)
    for pair, expected in zip(sorted(got), sorted(by_hand), strict=True):
        assert pair == pytest.approx(expected, rel=1e-5)


def mismatch_of_tokens():
    """Trainer's minus engine's log-probs of the tokens of each response; the vocabulary has no say in them."""
    batch = fsdp_rank.mini_batch(8)
    parts = (batch[name].unbind() for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
    return [(old - engine)[mask.bool()] for old, engine, mask in zip(*parts, strict=True)]


def test_an_observed_loss_trains_the_same_weights_bit_for_bit(train):
    plain, observed = (train(1, "1", mini_batch_size=2, lr=1e-3, loss="vanilla", observed=of) for of in (False, True))
    for name, weight in plain["weights"].items():
        assert torch.equal(observed["weights"][name], weight), name
    # Those of the start, as its learning rate is 0.
    assert any((weight != train(1, "8")["weights"][name]).any() for name, weight in plain["weights"].items())
    expected = {name: value for name, value in plain["metrics"].items() if "perf/" not in name}
    assert {name: observed["metrics"][name] for name in expected} == expected
    assert clipped(observed["metrics"]) > 0


def test_no_collective_is_added(train):
    """Two ranks, two mini-batches, metrics and records on: the collectives of stock verl's gspo, and as many."""
    stock = train(2, "dynamic:110", **MOVES, loss="gspo")["collectives"]
    assert sum(stock.values()) > 0 and train(2, "dynamic:110", **MOVES)["collectives"] == stock


def eps_of_ranks(saved, ranks):
    """The eps after each step, which all ranks have."""
    first, *others = (json.loads(Path(f"{saved['output']}.eps.{rank}").read_text()) for rank in range(ranks))
    assert others == [first] * (ranks - 1)
    return first


def test_eps_that_follows_a_clip_rate_is_the_same_on_every_rank_and_number_of_ranks(train):
    found = []
    for ranks, cut in ((1, "8"), (2, "dynamic:110"), (4, "1")):
        saved = train(ranks, cut, target_clip_rate=0.3, steps=3)
        found.append(eps_of_ranks(saved, ranks))
        assert saved["metrics"]["fspo/eps_low"] == pytest.approx(found[-1][1]["eps_low"], rel=1e-12)
        records = read(f"{saved['output']}.records").table
        for name in ("eps_low", "eps_high"):
            assert set(records[name]) == {0.5, *(step[name] for step in found[-1][:-1])}
    assert found[0] == found[1] == found[2]
    assert len({eps for step in found[0] for eps in step.values()} - {0.5}) > 3


def test_a_resumed_run_goes_on_with_the_eps_of_its_checkpoint(train, tmp_path):
    options, checkpoint = {"target_clip_rate": 0.3, **MOVES}, tmp_path / "checkpoint"
    whole = train(2, "2", **options, steps=3, save=checkpoint)
    rest = train(2, "2", **options, load=checkpoint)
    assert eps_of_ranks(rest, 2) == eps_of_ranks(whole, 2)[-1:]
    assert rest["metrics"]["fspo/eps_low"] == whole["metrics"]["fspo/eps_low"] != 0.5
    for name, weight in whole["weights"].items():
        assert torch.equal(rest["weights"][name], weight), name
