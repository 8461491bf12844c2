"""Bounds, shares, waiting, predictions and critical paths of videos with known times."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dyno.video import figures, words
from dyno.video.figures import PROCESSORS, Server, Simulation, Video, mean_interval
from dyno.video.tables import HAND_OVER, compute_critical_path
from dyno.worker.facts.job import VideoFacts

SECONDS = {"decode": 0.002, "preprocess": 0.001, "inference": 0.010, "postprocess": 0.001}


def video(
    seconds: dict[str, float] | None = None, *, processors: int = 8, period: float = 0.010, count: int = 100
) -> Video:
    """Build a steady pipeline: a frame each `period`; its stages work their seconds one after the other."""
    seconds = seconds or SECONDS
    arrays: dict[str, np.ndarray] = {}
    at = period * np.arange(count)
    began = at
    for name, each in seconds.items():
        arrays |= {f"alone_{name}": np.full(count, each), f"{name}_began": at, f"{name}_ended": at + each,
                   f"{name}_handed": at + each, f"{name}_waiting": np.ones(count, int)}  # fmt: skip
        at = at + each
    arrays |= {"frame_began": began, "frame_known": at, "frame_boxes": np.zeros(count, int)}
    facts = VideoFacts("v.mp4", frames=count, answered=count, seconds=count * period, processors=processors,
                       rate=25.0, height=540, width=960, cpu=dict(seconds),
                       cpu_whole=sum(seconds.values()))  # fmt: skip
    return Video(facts, arrays)


def test_with_many_processors_the_slowest_stage_is_the_bound() -> None:
    found = video()
    assert found.bound.name == "inference" and found.bound.rate == pytest.approx(100)
    assert found.rate == pytest.approx(100) and found.bound.share(found.rate) == pytest.approx(1)
    assert found.find_bound("inference", 0.5).rate == pytest.approx(200)
    assert found.find_bound("inference", 0.1).name == "decode"


def test_with_few_processors_the_sum_of_stages_is_the_bound() -> None:
    found = video(processors=1, period=0.014)
    assert found.bound.name == PROCESSORS and found.bound.rate == pytest.approx(1 / 0.014)
    assert found.find_bound("inference", 0.5).rate == pytest.approx(1 / 0.009)


def crowded(found: Video, factor: float, inference: float = 0.0) -> Video:
    """Return the video under full CPU load: `factor` times the processor time, `inference` seconds of it inference."""
    return replace(found, facts=replace(found.facts, crowding=factor, cpu_inference=inference))


def test_cpu_contention_lowers_the_bound() -> None:
    found = crowded(video(processors=2), 1.5)
    assert found.bound.name == PROCESSORS and found.bound.rate == pytest.approx(2 / (1.5 * 0.014))
    assert found.find_crowding(1) == 1 and found.find_crowding(1.5) == 1.25 and found.find_crowding(7) == 1.5
    # One processor always infers, slowed down while the other one works, which is 0.4 of the time.
    assert figures.predict_streams(found, 4).rate == pytest.approx(80, rel=0.02)
    assert "1.50 times the processor time" in " ".join(words.list_sentences(found))
    steady = crowded(video(processors=2), 1.5, inference=0.010)  # load doesn't slow the engine
    assert steady.cpu_under_load == pytest.approx(1.5 * 0.004 + 0.010)
    assert figures.predict_streams(steady, 4).rate > 1.1 * figures.predict_streams(found, 4).rate
    decoding = crowded(video({"decode": 0.010, "inference": 0.002, "postprocess": 0.0001}, processors=2), 1.5)
    assert figures.predict_streams(decoding, 4).rate == pytest.approx(2 / (1.5 * 0.0121), rel=0.02)


def test_stage_times_split_into_working_starved_and_blocked() -> None:
    by_name = {stage.name: stage for stage in video().stages}
    assert by_name["inference"].working == pytest.approx(1)
    assert by_name["decode"].working == pytest.approx(0.2)
    assert by_name["decode"].starved == pytest.approx(0.8, abs=0.02)
    assert by_name["decode"].blocked == 0
    assert by_name["inference"].in_pipeline.value == pytest.approx(0.010)


def test_latency_counts_from_the_reading_of_a_frame() -> None:
    np.testing.assert_allclose(video().list_latencies("known"), 0.014)
    assert not video().list_latencies("written").size


def predicted(seconds: dict[str, float], count: int, processors: int = 64) -> figures.StreamPrediction:
    return figures.predict_streams(video(seconds, processors=processors), count)


def test_streams_share_the_engine_and_the_processors() -> None:
    stages = {"decode": 0.010, "inference": 0.002, "postprocess": 0.0001}
    alone = predicted(stages, 1)
    assert (alone.bound, alone.rate) == ("decode", pytest.approx(100, rel=0.01))
    assert alone.p99 == pytest.approx(0.0121, rel=0.01)  # nothing waits for the slowest stage
    assert predicted(stages, 4).rate == pytest.approx(400, rel=0.01)
    many = predicted(stages, 32)
    assert (many.bound, many.rate) == ("inference", pytest.approx(500, rel=0.02))
    assert many.stream_rate == many.rate / 32
    assert many.p99 == pytest.approx(32 * 6 / 500, rel=0.2)  # each stream: one decoded, four waiting, one at the engine
    few = predicted(stages, 8, processors=2)
    assert (few.bound, few.rate) == (PROCESSORS, pytest.approx(2 / 0.0121, rel=0.02))
    found = video(stages, processors=64)
    assert figures.count_fitting(found, 24.9) == 20 and figures.count_fitting(found, 101) == 0


def test_hand_over_time_counts_only_in_predictions() -> None:
    found = video(processors=1, period=0.028)
    handing = replace(found, facts=replace(found.facts, hand_over=0.001))
    assert figures.predict_streams(handing, 2).rate == pytest.approx(1 / 0.017, rel=0.02)  # handed to three stages
    assert handing.bound.rate == found.bound.rate
    assert found.utilization == pytest.approx(0.5)
    assert "the stages kept 50.0 % of the processors' time busy" in " ".join(words.list_sentences(found))


def test_bounds_count_the_stages_of_all_streams() -> None:
    found = video({"decode": 0.010, "inference": 0.002, "postprocess": 0.0001}, processors=64)
    several = replace(found, facts=replace(found.facts, streams=4, answered=400))
    assert several.by_stage.name == "decode" and several.by_stage.rate == pytest.approx(400)
    assert several.rate == pytest.approx(400)


def test_stages_after_the_slowest_starve_and_stages_before_it_block() -> None:
    slow_end = Simulation([Server(np.array([0.001]), 1.0), Server(np.array([0.01]), 1.0)], 0, 1, 200, 8, depth=3).run()
    assert slow_end.rate == pytest.approx(100, rel=0.02)
    np.testing.assert_allclose(slow_end.latencies, 0.001)  # known before the stage waits
    shared = [Server(np.array([0.001]), 1.0), Server(np.array([0.02]), 1.0, shared=True)]
    for streams_at_once in (1, 3):  # one engine
        found = Simulation(shared, 1, streams_at_once, 200, 8, depth=3).run()
        assert found.rate == pytest.approx(50, rel=0.02)


def test_sentences_name_the_bound_and_the_remedy() -> None:
    said = " ".join(words.list_sentences(video()))
    assert "100 frames/s end to end (4.00 times its own speed)" in said
    assert "Inference bounds the whole. If inference took half the time, 200 frames/s would be possible (2.00x)" in said
    four = replace(video(), facts=replace(video().facts, streams=4))
    assert "100 frames/s end to end (each at 1.00 times its own speed)" in " ".join(words.list_sentences(four))
    assert "More than the bound was reached" in " ".join(words.list_sentences(video(period=0.005)))
    slower = " ".join(words.list_sentences(video(period=0.020)))
    assert "50.0 % of the bound was reached: the rest is filling" in slower
    disturbed = " ".join(words.list_sentences(replace(video(period=0.020), other_load=1.5)))
    assert "other programs kept 1.50 of 8 processors busy" in disturbed


def test_intervals_come_from_blocks_of_frames() -> None:
    samples = np.random.default_rng(0).normal(0.01, 0.001, 400)
    found = mean_interval(samples)
    assert found.low < 0.01 < found.high and found.high - found.low < 0.001
    assert math.isnan(mean_interval(samples[:5]).low)


NAMES = ("decode", "preprocess", "inference", "postprocess")
COUNT = 200


def pipeline(*seconds: float, depth: int = 4, wake: float = 0.0, first: float = 0.0) -> Video:
    """Simulate stages with these seconds per frame, room for `depth` frames before each, and threads that need `wake`
    to begin; nothing happens before `first`."""
    began, ended, handed = (np.zeros((len(seconds), COUNT)) for _ in range(3))
    for k in range(COUNT):
        for s, each in enumerate(seconds):
            came = handed[s - 1, k] if s else first
            began[s, k] = max(came, handed[s, k - 1] if k else 0.0) + wake
            ended[s, k] = began[s, k] + each
            handed[s, k] = ended[s, k]
        for s in range(len(seconds) - 1):  # room: the next stage has begun frame k - `depth`
            if k >= depth:
                handed[s, k] = max(ended[s, k], began[s + 1, k - depth])
                began[s + 1, k] = max(handed[s, k], handed[s + 1, k - 1]) + wake
                ended[s + 1, k] = handed[s + 1, k] = began[s + 1, k] + seconds[s + 1]
    names = NAMES[: len(seconds)]
    arrays = {f"{name}_{key}": times[s] for s, name in enumerate(names)
              for key, times in (("began", began), ("ended", ended), ("handed", handed))}  # fmt: skip
    arrays |= {f"alone_{name}": np.full(COUNT, each) for name, each in zip(names, seconds, strict=True)}
    arrays |= {f"{name}_waiting": np.ones(COUNT, int) for name in names}
    arrays |= {"frame_began": began[0], "frame_known": ended[-1], "frame_boxes": np.zeros(COUNT, int)}
    return Video(VideoFacts(frames=COUNT, answered=COUNT, seconds=float(ended[-1, -1])), arrays)


@pytest.mark.parametrize("slow", range(4))
def test_the_slowest_stage_has_almost_the_whole_critical_path(slow: int) -> None:
    seconds = [0.001] * 4
    seconds[slow] = 0.010
    video = pipeline(*seconds)
    found = compute_critical_path(video)
    assert sum(found.values()) == pytest.approx(video.facts.seconds)
    assert found[NAMES[slow]] > 0.97 * video.facts.seconds
    assert all(value >= 0 for value in found.values()) and found[HAND_OVER] < 0.001


def test_start_and_end_of_a_run_belong_to_the_stages_waited_for() -> None:
    found = compute_critical_path(pipeline(0.001, 0.002, 0.010, 0.003))
    assert found["inference"] == pytest.approx(COUNT * 0.010)
    assert [found[name] for name in ("decode", "preprocess", "postprocess")] == pytest.approx([0.001, 0.002, 0.003])


def test_wake_up_and_late_start_count_as_hand_over() -> None:
    video = pipeline(0.001, 0.010, wake=0.002, first=0.5)
    found = compute_critical_path(video)
    assert sum(found.values()) == pytest.approx(video.facts.seconds)
    assert found[HAND_OVER] == pytest.approx(0.5 + 0.002 * (COUNT + 1), rel=0.01)
    assert found["preprocess"] == pytest.approx(COUNT * 0.010)


def test_a_single_stage_is_the_whole_path() -> None:
    assert compute_critical_path(pipeline(0.004)) == {
        "decode": pytest.approx(COUNT * 0.004),
        HAND_OVER: pytest.approx(0, abs=1e-9),
    }
