"""What the benchmarks compute around a measurement. None of it needs a GPU."""

import csv
import math
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import baseline  # noqa: E402
import bench_sparse_decode  # noqa: E402
import figures  # noqa: E402
import peer  # noqa: E402
import profile_ncu  # noqa: E402
import search_plan  # noqa: E402
import step_benchmark  # noqa: E402
import targets  # noqa: E402
from common import Machine, ResultsCsv, hbm_peak_gbs, numbers, read_csv  # noqa: E402
from regret import Choice, Point, summarize, times_by_point  # noqa: E402
from workload import PAGE, RECORDS, Shape, Workload, check, filled_pool, random_records  # noqa: E402

import flash_mla.timing  # noqa: E402
from flash_mla import kv_cache  # noqa: E402
from flash_mla.reference import sparse_decode  # noqa: E402
from flash_mla.timing import COLD_BYTES, Timing, calls_per_graph, time_graphs  # noqa: E402

MACHINE = Machine("2026-01-02T03:04Z", "NVIDIA H200", 132, "2.11.0+cu130", "13.0", "123456789012")


class ReferenceApi:
    """FlashMLA's two functions over the reference, so that calls can be made without a GPU."""

    def __init__(self):
        self.calls = []

    def get_mla_metadata(self):
        return object(), None

    def flash_mla_with_kvcache(self, q, k_cache, block_table, cache_seqlens, d_v, meta, **rest):
        self.calls.append(dict(q=q, k_cache=k_cache, meta=meta, **rest))
        return sparse_decode(
            q,
            k_cache,
            rest["indices"],
            sm_scale=rest["softmax_scale"],
            attn_sink=rest["attn_sink"],
            extra_kv=rest["extra_k_cache"],
            extra_indices=rest["extra_indices_in_kvcache"],
            topk_length=rest.get("topk_length"),
            extra_topk_length=rest.get("extra_topk_length"),
            out=rest.get("out"),
        )


@pytest.fixture(scope="module")
def workload():
    return Workload("v4", pool_bytes=16 << 20, device="cpu")


# ---- Timing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, width", [(1, 128), (1, 640), (16, 640), (128, 2048)])
def test_a_graph_reads_more_keys_than_the_l2_holds(tokens, width):
    bytes_per_call = tokens * width * 584
    calls = calls_per_graph(bytes_per_call)
    assert calls * bytes_per_call >= COLD_BYTES
    assert 20 <= calls <= 4096


def test_a_graph_has_no_more_calls_than_needed_or_allowed():
    assert calls_per_graph(1_000_000) == 160
    assert calls_per_graph(1_000_001) == 160
    assert calls_per_graph(999_999) == 161
    assert calls_per_graph(1) == calls_per_graph(0) == 4096


def test_timing_is_the_median_of_the_replays():
    assert Timing.of([3.0, 1.0, 2.0, 9.0, 2.5]) == Timing(2.5, 1.0, 9.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_timing_without_a_gpu_says_so():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        time_graphs({"x": lambda i: None}, 1)


# ---- The calls -------------------------------------------------------------------------------


def test_a_pool_repeats_the_template_block_by_block():
    record = RECORDS["v4"]
    template = random_records(record, "cpu")[:3]
    kv = filled_pool(8, record, template)
    slot = torch.tensor([PAGE * 7 + 5])
    expected = kv_cache.gather(template, record, torch.tensor([PAGE * 1 + 5]))
    assert torch.equal(kv_cache.gather(kv, record, slot), expected)
    assert kv_cache.unpack(kv, record).isfinite().all()
    assert kv_cache.unpack(kv, record).abs().amax() > 0.1


def test_every_call_has_indices_of_its_own_inside_the_pool(workload):
    shape = Shape.of_width(4, 8, 640)
    seen = [workload.indices(shape, i) for i in range(20)]
    for main, extra in seen:
        assert main.shape == (4, 1, 128) and extra.shape == (4, 1, 512)
        assert main.dtype == torch.int32 and main.is_contiguous() and extra.is_contiguous()
        assert main.data_ptr() % 256 == seen[0][0].data_ptr() % 256
        for slots in (main, extra):
            assert 0 <= slots.min() and slots.max() < kv_cache.num_slots(workload.kv)
    starts = {main.data_ptr() for main, _ in seen}
    assert len(starts) == 20


def test_indices_start_over_where_the_list_ends(workload):
    shape = Shape(128, 8, 2048)
    for i in (0, 31, 32, 1000):
        main, extra = workload.indices(shape, i)
        assert main.shape == (128, 1, 2048) and extra is None


def test_padding_is_zero_rows_with_no_sink(workload):
    q, sink = workload.queries(Shape(3, 8, 128), 64)
    native_q, native_sink = workload.queries(Shape(3, 8, 128), 8)
    assert q.shape == (3, 1, 64, 512)
    assert torch.equal(q[:, :, :8], native_q) and (q[:, :, 8:] == 0).all()
    assert torch.equal(sink[:8], native_sink) and (sink[8:] == -math.inf).all()


def test_v32_calls_come_as_one_request_without_a_sink():
    workload = Workload("v32", pool_bytes=16 << 20, device="cpu")
    api = ReferenceApi()
    out, lse = workload.call(api, Shape(3, 8, 192, s_q=3), 8)(0)
    assert out.shape == (1, 3, 8, 512) and lse.shape == (1, 8, 3)
    assert api.calls[0]["attn_sink"] is None and api.calls[0]["extra_k_cache"] is None


def test_one_schedule_serves_all_calls_of_a_contender(workload):
    api = ReferenceApi()
    call = workload.call(api, Shape.of_width(1, 8, 192), 8)
    call(0), call(1)
    assert api.calls[0]["meta"] is api.calls[1]["meta"]
    assert not torch.equal(api.calls[0]["indices"], api.calls[1]["indices"])


def test_the_check_compares_with_reference_and_peer(workload):
    shape = Shape.of_width(2, 8, 192)
    call = workload.call(ReferenceApi(), shape, 8)
    padded = workload.call(ReferenceApi(), shape, 64)
    errors = check(workload, shape, call, padded)
    assert errors.reference < 5e-3 and errors.peer < 1e-2

    def wrong(i):
        out, lse = call(i)
        return out * 1.1, lse

    with pytest.raises(AssertionError, match="out"):
        check(workload, shape, wrong, None)
    with pytest.raises(AssertionError, match="FlashMLA"):
        check(workload, shape, call, wrong)


# ---- Results files ---------------------------------------------------------------------------


def test_results_survive_the_csv(tmp_path):
    row = {"tokens": 3, "us": 4.25, "plan": "16/4/64", "speedup": None}
    with ResultsCsv(tmp_path / "new" / "x.csv", list(row), MACHINE) as results:
        results.write(row)
    (read,) = read_csv(tmp_path / "new" / "x.csv")
    assert {key: read[key] for key in row} == row
    # A commit of digits only stays text.
    assert Machine.of_row(read) == MACHINE


def test_command_line_lists():
    assert numbers("1-4,8,16") == [1, 2, 3, 4, 8, 16]


def test_bandwidth_is_known_by_the_longest_name():
    assert hbm_peak_gbs("NVIDIA H200") == 4800.0
    assert hbm_peak_gbs("NVIDIA H20") == 4000.0
    assert hbm_peak_gbs("another") is None


def test_baseline_is_linear_between_its_tokens_and_ends_with_them():
    assert baseline.measured("v4", 640, 128, "flashmla_us") == 47.0
    assert baseline.measured("v4", 640, 5, "floor_us") is None
    assert baseline.interpolated("v4", 640, 12, "floor_us") == pytest.approx((3.8 + 4.7) / 2)
    assert baseline.interpolated("v4", 128, 1, "floor_us") == 1.9
    assert baseline.interpolated("v4", 128, 256, "floor_us") is None
    assert baseline.interpolated("v4", 333, 1, "floor_us") is None


# ---- Targets ---------------------------------------------------------------------------------


def measured_row(tokens, heads=8, width=128, speedup=3.0, **changes):
    row = dict.fromkeys(bench_sparse_decode.FIELDS)
    row.update(record="v4", tokens=tokens, heads=heads, width=width, status="ok", plan="16/4/64")
    row.update(ours_us=5.0, flashmla_us=5.0 * speedup, speedup=speedup, calls=20, gbs=1000.0)
    row.update(tflops=1.0, hbm_fraction=0.2, error_reference=1e-3)
    return {**row, **changes}


def wrong_row(tokens):
    nothing = dict(ours_us=None, flashmla_us=None, speedup=None, plan=None, error_reference=None)
    return {**measured_row(tokens), **nothing, "status": "out: NaN"}


def cell(outcomes, title, group, width):
    (found,) = [
        o
        for o in outcomes
        if o.target.title == title and (o.target.group, o.target.width) == (group, width)
    ]
    return found


ISSUE3 = "Issue 3: over FlashMLA"


def test_a_cell_is_as_good_as_its_worst_row():
    rows = [measured_row(1, speedup=3.1), measured_row(4, 16, speedup=2.79), measured_row(5)]
    outcome = cell(targets.evaluate(rows), ISSUE3, "1–4", 128)
    assert not outcome.met and outcome.value == 2.79
    assert (outcome.row["tokens"], outcome.row["heads"]) == (4, 16)
    assert "NOT MET" in str(outcome) and "4 tok, 16 h" in str(outcome)


def test_a_target_that_is_just_reached_is_met():
    outcome = cell(targets.evaluate([measured_row(128, speedup=1.8)]), ISSUE3, "128", 128)
    assert outcome.met and ": met" in str(outcome)


def test_a_wrong_result_fails_its_cell():
    rows = [measured_row(1), wrong_row(2)]
    outcome = cell(targets.evaluate(rows), ISSUE3, "1–4", 128)
    assert not outcome.met and outcome.row["tokens"] == 2
    assert "NOT MET" in str(outcome)


def test_what_was_not_measured_is_neither_met_nor_missed():
    outcomes = targets.evaluate([measured_row(1)])
    assert cell(outcomes, ISSUE3, "64", 128).met is None
    assert "not measured" in str(cell(outcomes, ISSUE3, "64", 128))


def test_the_documents_figures_are_those_of_the_csvs(capsys):
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_every_target_is_shown():
    assert set(figures.CSV_OF_TARGETS) == {target.title for target in targets.TARGETS}


def test_the_peer_is_found_where_the_tests_have_fetched_it(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    fetched = tmp_path / ".cache" / "vllm-0.33.0" / "vllm" / peer.FILE
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    assert peer.find(None) == fetched
    own = tmp_path / ".peer" / peer.FILE
    own.parent.mkdir()
    own.touch()
    assert peer.find(None) == own


def test_figures_stand_between_their_markers():
    text = "a <!-- figures:x:begin -->\nold\n<!-- figures:x:end --> b"
    assert figures.filled(text, "x", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- figures:y:begin -->"):
        figures.filled(text, "y", "new")


def test_padded_rows_count_for_padded_targets_only():
    rows = [measured_row(1, speedup=2.4, pad_to=64)]
    outcomes = targets.evaluate(rows)
    assert cell(outcomes, ISSUE3, "1–4", 128).met is None
    assert cell(outcomes, "Issue 4: padded to 64 rows, over FlashMLA", "1–16", 128).met


def test_padding_may_cost_a_tenth_of_the_native_time():
    rows = [measured_row(4, width=2048, record="v32", pad_to=64, native_us=4.5, ours_us=5.0)]
    outcome = cell(targets.evaluate(rows), "Issue 4: V3.2, native over padded time", "1–16", 2048)
    assert outcome.value == pytest.approx(0.9) and not outcome.met


def test_targets_print_as_markdown():
    rows = [measured_row(t, h) for t in (1, 8, 32, 64, 128) for h in (8, 16)]
    pages = list(targets.tables(targets.evaluate(rows), markdown=True))
    page = next(page for page in pages if page.startswith(ISSUE3))
    assert "| tokens | width 128 | width 192 | width 640 |" in page
    assert "| 24–32 | ≥ 2.30: met, 3.00" in page
    # Nothing of V3.2 was measured, so nothing is said about it.
    assert not any("V3.2" in page for page in pages)


# ---- The sparse decode benchmark --------------------------------------------------------------


def test_the_default_run_has_every_configuration_of_the_issue():
    shapes = bench_sparse_decode.shapes(bench_sparse_decode.parse([]))
    assert len(shapes) == len(set(shapes)) == 20 * 2 * 3
    assert {s.width for s in shapes} == {128, 192, 640}
    assert {s.heads for s in shapes} == {8, 16}


def test_v32_is_one_cache_of_2048_keys():
    arguments = bench_sparse_decode.parse(["--record", "v32", "--pad-to", "64"])
    assert {(s.main, s.extra) for s in bench_sparse_decode.shapes(arguments)} == {(2048, 0)}
    assert bench_sparse_decode.default_name(arguments) == "sparse_decode_v32_pad64"


def test_padding_below_the_real_heads_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_sparse_decode.parse(["--pad-to", "8", "--heads", "16"])
    assert "--pad-to" in capsys.readouterr().err


def test_a_configuration_is_checked_and_then_timed(workload, monkeypatch):
    timed = {"ours": Timing(5.0, 4.5, 6.0), "native": Timing(4.0, 4.0, 4.0)}
    timed["flashmla"] = Timing(15.0, 15.0, 15.0)

    def fake_timing(contenders, calls, rounds):
        assert list(contenders) == list(timed) and calls == 1071
        return timed

    api = ReferenceApi()
    plan = types.SimpleNamespace(head_tile=16, splits=4, block_keys=64)
    meta = types.SimpleNamespace(plan=plan)
    monkeypatch.setattr(flash_mla.timing, "time_graphs", fake_timing)
    monkeypatch.setattr(flash_mla, "get_mla_metadata", lambda: (meta, None), raising=False)
    monkeypatch.setattr(
        flash_mla, "flash_mla_with_kvcache", api.flash_mla_with_kvcache, raising=False
    )
    arguments = bench_sparse_decode.parse(["--pad-to", "64"])
    shape = Shape.of_width(2, 8, 128)
    row = bench_sparse_decode.measure(workload, shape, arguments, ReferenceApi(), MACHINE)
    assert set(row) == set(bench_sparse_decode.FIELDS) and row["status"] == "ok"
    assert row["speedup"] == 3.0 and row["native_us"] == 4.0 and row["plan"] == "16/4/64"
    assert row["ours_spread"] == pytest.approx(0.3)
    assert row["gbs"] == pytest.approx(2 * 128 * 584 / 5e-6 / 1e9)
    assert row["hbm_fraction"] == pytest.approx(row["gbs"] / 4800)
    assert row["tflops"] == pytest.approx(2 * 2 * 8 * 128 * 1024 / 5e-6 / 1e12)
    assert row["floor_us"] == pytest.approx(1.9 + 0.6 / 3) and row["triton_us"] is None


def test_an_earlier_run_is_printed_and_drawn_again(tmp_path, capsys):
    path = tmp_path / "run.csv"
    rows = [measured_row(t, h, w) for w in (128, 640) for h in (8, 16) for t in (1, 4, 16)]
    rows.append(wrong_row(64))
    with ResultsCsv(path, bench_sparse_decode.FIELDS, MACHINE) as results:
        for row in rows:
            results.write(row)
    status = bench_sparse_decode.main(["--from-csv", str(path), "--targets"])
    assert status == 1  # for the wrong one
    assert path.with_suffix(".png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "WRONG at 64 tokens" in printed and "NOT MET" in printed


# ---- The plan search ---------------------------------------------------------------------------


def plan_rows(**times):
    """`s4k32=5.0` -> a row of a 4-token point with 4 splits, blocks of 32 keys."""
    for name, us in times.items():
        splits, keys = name[1:].split("k")
        yield dict(
            tokens=4, width=640, heads=8, sms=132, head_tile=8, splits=int(splits), block_keys=int(keys), us=us
        )


POINT = Point(4, 640, 8, 132)


def test_regret_is_the_time_over_the_best_time():
    times = times_by_point(plan_rows(s4k32=5.0, s8k32=4.0, s8k64=4.4))
    summary = summarize(times, lambda point: Choice(8, 8, 64))
    (regret,) = summary.regrets
    assert regret.point == POINT and regret.best == Choice(8, 8, 32)
    assert regret.value == pytest.approx(0.1)
    assert summary.median == summary.worst == pytest.approx(0.1)


def test_the_best_choice_has_no_regret():
    times = times_by_point(plan_rows(s4k32=5.0, s8k32=4.0))
    assert summarize(times, lambda point: Choice(8, 8, 32)).worst == 0.0


def test_a_choice_without_a_time_is_reported_not_guessed():
    summary = summarize(times_by_point(plan_rows(s4k32=5.0)), lambda point: Choice(8, 2, 32))
    assert summary.untimed == [(POINT, Choice(8, 2, 32))] and not summary.regrets
    assert math.isnan(summary.worst)


def test_the_worst_point_comes_first():
    times = {
        POINT: {Choice(8, 1, 32): 2.0, Choice(8, 2, 32): 1.0},
        POINT._replace(tokens=8): {Choice(8, 1, 32): 3.0, Choice(8, 2, 32): 1.0},
        POINT._replace(tokens=9): {Choice(8, 1, 32): 1.0},
    }
    summary = summarize(times, lambda point: Choice(8, 1, 32))
    assert [r.point.tokens for r in summary.regrets] == [8, 4, 9]
    assert summary.worst == pytest.approx(2.0) and summary.median == pytest.approx(1.0)


def test_every_point_keeps_candidates_of_few_and_of_many_splits():
    for tokens in search_plan.TOKENS:
        for width in search_plan.WIDTHS:
            for heads in search_plan.HEADS:
                point = Point(tokens, width, heads, 132)
                kept = search_plan.candidates(point)
                assert 2 <= len(kept) <= len(search_plan.candidates(point, everything=True)) == 80


def test_candidates_left_out():
    assert not search_plan.worth_timing(Point(1, 64, 8, 132), Choice(8, 16, 32))  # 4 keys a split
    assert not search_plan.worth_timing(Point(1, 128, 8, 132), Choice(8, 4, 64))  # half of it empty
    assert not search_plan.worth_timing(Point(128, 640, 8, 132), Choice(8, 16, 32))  # 2048 CTAs
    assert not search_plan.worth_timing(Point(1, 4096, 8, 132), Choice(8, 1, 64))  # 131 idle SMs
    assert not search_plan.worth_timing(Point(1, 128, 8, 132), Choice(16, 2, 64))  # 8 rows too many
    assert search_plan.worth_timing(Point(1, 128, 9, 132), Choice(16, 4, 32))
    assert not search_plan.worth_timing(Point(1, 128, 16, 132), Choice(64, 2, 64))
    assert search_plan.worth_timing(Point(1, 128, 64, 132), Choice(64, 2, 64))
    assert search_plan.worth_timing(Point(1, 128, 4, 132), Choice(8, 4, 32))  # no tile is smaller
    assert search_plan.worth_timing(Point(1, 4096, 8, 132), Choice(8, 16, 64))
    assert search_plan.worth_timing(Point(128, 4096, 8, 132), Choice(8, 1, 64))


def test_todays_plan_is_good_on_the_recorded_times():
    """Status 1 over 5 % at the median or 12 % at worst: whoever changes the plan measures again."""
    assert search_plan.main(["--from-csv", str(search_plan.RESULTS / "plan_search.csv")]) == 0


def test_regret_of_a_recorded_search(tmp_path, monkeypatch, capsys):
    path = tmp_path / "plan_search.csv"
    with ResultsCsv(path, search_plan.FIELDS, MACHINE) as results:
        for row in plan_rows(s4k32=5.0, s8k32=4.0):
            del row["sms"]  # a column of the machine
            results.write({**row, "chosen": 0})
    monkeypatch.setattr(search_plan, "chosen_plan", lambda point: Choice(8, 4, 32))
    assert search_plan.main(["--from-csv", str(path)]) == 1
    assert "worst 25.0 %" in capsys.readouterr().out
    monkeypatch.setattr(search_plan, "chosen_plan", lambda point: Choice(8, 8, 32))
    assert search_plan.main(["--from-csv", str(path)]) == 0


# ---- The step benchmark ------------------------------------------------------------------------


def test_topk_layers_lie_evenly():
    flags = [step_benchmark.has_topk(i, 40, 20) for i in range(40)]
    assert flags == [False, True] * 20
    assert sum(step_benchmark.has_topk(i, 40, 13) for i in range(40)) == 13
    assert not any(step_benchmark.has_topk(i, 40, 0) for i in range(40))


def test_requests_do_not_share_pages():
    paging = step_benchmark.Paged.shuffled(3, 100, "cpu")
    positions = torch.arange(100).expand(3, -1)
    slots = paging.slots(positions)
    assert slots.dtype == torch.int32 and len(slots.unique()) == 300
    assert slots.max() < paging.blocks * PAGE
    # Within a page, positions are neighbours.
    assert (slots[:, 1:PAGE] - slots[:, : PAGE - 1] == 1).all()


def test_a_step_calls_every_layer_with_its_own_cache():
    model = step_benchmark.Model(2, layers=4, topk_layers=2, context=4096, device="cpu")
    api = ReferenceApi()
    step, out = model.step(api, 2)
    step(0)
    assert len({call["k_cache"].data_ptr() for call in api.calls}) == 4
    assert [call["extra_k_cache"] is not None for call in api.calls] == [False, True] * 2
    # One schedule for the layers of a type.
    metas = [id(call["meta"]) for call in api.calls]
    assert metas[0] == metas[2] != metas[1] == metas[3]
    window = api.calls[0]["indices"]
    assert window.shape == (6, 1, 128)
    # Token 1 sees what token 0 sees, one slot on.
    assert torch.equal(window[1, 0, :-1], window[0, 0, 1:])
    topk = api.calls[1]["extra_indices_in_kvcache"]
    assert topk.shape == (6, 1, 512) and all(len(t.unique()) == 512 for t in topk)
    assert out[:, :, :8].float().abs().amax() > 0 and out.shape == (6, 1, 64, 512)


def test_a_step_of_an_earlier_run_is_drawn_again(tmp_path, capsys):
    path = tmp_path / "step.csv"
    row = dict.fromkeys(step_benchmark.FIELDS)
    row.update(concurrency=4, tokens=12, layers=40, topk_layers=20, context=32768, ours_us=240.0)
    with ResultsCsv(path, step_benchmark.FIELDS, MACHINE) as results:
        results.write(row)
        results.write({**row, "flashmla_us": 600.0, "saved_us": 360.0, "speedup": 2.5})
    assert step_benchmark.main(["--from-csv", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 5_000
    assert "2.50x" in capsys.readouterr().out


# ---- The peer and the profiler -----------------------------------------------------------------


def test_the_peer_file_is_the_given_one_or_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="--peer"):
        peer.find(str(tmp_path / "none.so"))
    given = tmp_path / peer.FILE
    given.touch()
    assert peer.find(str(given)) == given
    assert (peer.head_rows(8), peer.head_rows(64), peer.head_rows(65)) == (64, 64, 128)


def test_vllms_interface_is_pointed_at_another_namespace(tmp_path):
    path = tmp_path / "flash_mla_interface.py"
    path.write_text(
        "import dataclasses\nimport torch\n"
        "import vllm._flashmla_C\nflash_mla_cuda = torch.ops._flashmla_C\n"
        "@dataclasses.dataclass\nclass FlashMLASchedMeta:\n    config: 'int' = 0\n"
    )
    module = peer.load_interface(path, "aten")
    assert module.flash_mla_cuda is torch.ops.aten
    assert module.FlashMLASchedMeta().config == 0


NCU_OUTPUT = (
    "==PROF== Connected to process 1\n"
    '"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread",'
    '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"\n'
    '"","","us","register/thread","inst","inst","inst","inst"\n'
    '"0","decode","4.70","128","1.00","3.00","9.00","1.00"\n'
)


def test_ncu_output_becomes_a_short_report():
    ((name, metrics),) = profile_ncu.parse_raw_csv(NCU_OUTPUT)
    text = profile_ncu.kernel_report(name, metrics)
    assert text.startswith("decode\n")
    assert "4.70 us" in text and "128 register/thread" in text
    # Shares of the waiting only, largest first; "selected" is no waiting.
    assert profile_ncu.top_stalls(metrics) == [("long_scoreboard", 3.0), ("barrier", 1.0)]
    assert "long_scoreboard           75 %" in text


def test_ncu_without_a_kernel_says_what_it_said():
    with pytest.raises(SystemExit, match="no kernel"):
        profile_ncu.parse_raw_csv("==ERROR== nothing\n")


def test_baseline_table_has_no_row_twice():
    with (BENCHMARK / "baseline_h200.csv").open(newline="") as file:
        points = [(r["record"], r["width"], r["tokens"]) for r in csv.DictReader(file)]
    assert len(points) == len(set(points)) == 28
