"""Published formulas compared with the simulator: equal in their domains, wrong beyond.

Letters: N stages, M micro-batches, F and B seconds of a forward and a backward, SR of a
transfer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from hetpipe.schedule.generators import generate
from hetpipe.simulate.outcome import Memory, Outcome, outcome
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer

SIZES = [(n, m) for n in range(2, 7) for m in (2, 3, 5, 8, 17, 32)]
Formula = Callable[[int, int, float, float, float], float]


def exposed(n: int, m: int) -> int:
    """Return X: the round trips of transfers that 1F1B-SNO does not hide."""
    return n + m - 2 - math.ceil((m - 1) / n)


def fill_s(n: int, m: int, f: float, b: float, sr: float) -> float:
    """Return the step of 1F1B-AS and FBP-AS, which hide transfers."""
    return (m + n - 1) * (f + b)


def sno_s(n: int, m: int, f: float, b: float, sr: float) -> float:
    return (m + n - 1) * (f + b) + exposed(n, m) * 2 * sr


def so_s(n: int, m: int, f: float, b: float, sr: float) -> float:
    return (m + n - 1) * (f + b) + (n - 1) * 2 * sr


def sno_bubble(n: int, m: int, f: float, b: float, sr: float) -> float:
    inside_s = (m - 1 - math.ceil((m - 1) / n)) * 2 * sr
    return ((n - 1) * (f + b + 2 * sr) + inside_s) / sno_s(n, m, f, b, sr)


def so_bubble(n: int, m: int, f: float, b: float, sr: float) -> float:
    return (n - 1) * (f + b + 2 * sr) / so_s(n, m, f, b, sr)


def fill_bubble(n: int, m: int, f: float, b: float, sr: float) -> float:
    return (n - 1) / (m + n - 1)


def equal_stages(name: str, n: int, m: int, f: float, b: float, sr: float) -> Outcome:
    """Return the outcome of a step of equal stages that keep 1 byte per micro-batch.

    Under the asynchronous schedules the stages stream.
    """
    hops = (Transfer(0.0, sr),) * (n - 1)
    chunks = math.inf if name in ("1f1b-as", "fbp") else 1
    times = StageTimes((f,) * n, (b,) * n, (), hops, hops, chunks=(chunks,) * n)
    return outcome(simulate(generate(name, n, m), times), [Memory(0, 1)] * n)


def random_case(seed: int) -> tuple[int, int, float, float, float]:
    """Return N, M, F, B and SR <= min(F, B)."""
    rng = random.Random(seed)
    f, b = rng.uniform(0.1, 9), rng.uniform(0.1, 9)
    return rng.randint(2, 6), rng.randint(2, 32), f, b, rng.random() * min(f, b)


BAPIPE: dict[str, tuple[Formula, Formula, int]] = {
    "1f1b-as": (fill_s, fill_bubble, 1),
    "fbp": (fill_s, fill_bubble, 2),
    "1f1b-sno": (sno_s, sno_bubble, 1),
    "1f1b-so": (so_s, so_bubble, 2),
}
"""Table 1: mini-batch time, bubble share, and how many times N-n micro-batches stage n keeps."""


@pytest.mark.parametrize("name", BAPIPE)
@pytest.mark.parametrize("seed", range(60))
def test_table_1_of_bapipe(name: str, seed: int) -> None:
    """Under FBP the table gives an upper bound for the micro-batches that a worker keeps."""
    n, m, f, b, sr = random_case(seed)
    step_s, bubble, depth = BAPIPE[name]
    actual = equal_stages(name, n, m, f, b, sr)
    assert actual.step_s == pytest.approx(step_s(n, m, f, b, sr), rel=1e-9)
    assert actual.bubble == pytest.approx([bubble(n, m, f, b, sr)] * n, rel=1e-9)
    kept = [min(depth * (n - stage), m) for stage in range(n)]
    if name != "fbp":
        assert list(actual.peak_nbytes) == kept
    assert all(peak <= most for peak, most in zip(actual.peak_nbytes, kept, strict=True))


def error(name: str, n: int, m: int, sr: float) -> float:
    """Return the relative error of a formula, for F = 10 and B = 20; positive if the step is
    longer."""
    closed_s = BAPIPE[name][0](n, m, 10, 20, sr)
    return equal_stages(name, n, m, 10, 20, sr).step_s / closed_s - 1


@pytest.mark.parametrize(
    ("sr", "worst"), [(5, 0), (10, 0), (15, 0.0417), (20, 0.1182), (30, 0.3421)]
)
def test_so_holds_up_to_sr_equal_to_the_shorter_pass(sr: float, worst: float) -> None:
    """Compare the greatest error for N of 2-6 and M of 2-32: beyond F = 10 ms an edge sets the
    pace."""
    errors = [error("1f1b-so", n, m, sr) for n in range(2, 7) for m in range(2, 33)]
    assert min(errors) > -1e-12
    assert max(errors) == pytest.approx(worst, abs=1e-4)


def test_the_error_of_so_grows_without_bound() -> None:
    """The error grows with SR and M: here to 3, 10 and 21 times the formula."""
    errors = [error("1f1b-so", 2, m, 1000) for m in (8, 32, 128)]
    assert errors == pytest.approx([3.432, 10.391, 21.157], abs=1e-3)


def test_sno_holds_up_to_sr_equal_to_both_passes() -> None:
    """Beyond F + B = 30 ms an edge is still busy when the next message is ready."""
    for sr in (11, 20, 30):
        assert max(abs(error("1f1b-sno", n, m, sr)) for n, m in SIZES) < 1e-12
    assert max(error("1f1b-sno", n, m, 31) for n, m in SIZES) == pytest.approx(0.0066, abs=1e-4)
    assert max(error("1f1b-sno", n, m, 45) for n, m in SIZES) == pytest.approx(0.0833, abs=1e-4)


@pytest.mark.parametrize("name", ["1f1b-as", "fbp"])
def test_as_holds_up_to_sr_equal_to_the_shorter_pass(name: str) -> None:
    assert max(abs(error(name, n, m, 10)) for n, m in SIZES) < 1e-12
    assert min(error(name, n, m, 11) for n, m in SIZES) > 0


def latency_s(
    f: Sequence[float], b: Sequence[float], ar: Sequence[float], m: int, printed: bool = False
) -> float:
    """Return DAPPLE's latency of a mini-batch (section 4.1); transfers are separate stages.

    The pivot Q moves from the last stage to an earlier one if its passes take longer than all
    passes from there to Q. The backwards of Q itself and of the last stage must not be
    subtracted after Q; `printed` subtracts them, as the paper does.
    """
    q = len(f) - 1
    for s in range(len(f) - 2, -1, -1):
        between_s = sum(f[s + 1 : q]) + sum(b[s + 1 : q])
        if (m - 1) * (f[s] + b[s]) > (m - 1) * (f[q] + b[q]) + between_s:
            q = s
    ends_s = []
    for s, ar_s in enumerate(ar):
        after_q = sum(b[q : s + 1]) if printed else sum(b[q + 1 : s])
        ends_s.append(ar_s + (sum(b[s : q + 1]) if s <= q else -after_q))
    return sum(f[: q + 1]) + (m - 1) * (f[q] + b[q]) + max(ends_s)


def dapple_s(
    f: Sequence[float], b: Sequence[float], ar: Sequence[float] = (), m: int = 8, sr: float = 0.0
) -> float:
    """Return a step under early backwards, with depths P_B if there are transfers and P_A
    otherwise."""
    n = len(f)
    hops = (Transfer(0.0, sr),) * (n - 1)
    depths = [2 * (n - stage) - 1 if sr else n - stage for stage in range(n)]
    schedule = generate("1f1b", n, m, in_flight=depths, replicas=(2,) * n if ar else ())
    times = StageTimes(tuple(f), tuple(b), (), hops, hops, all_reduce_s=tuple(ar))
    return simulate(schedule, times).step_s


def test_a_long_sum_after_the_pivot() -> None:
    """The printed formula subtracts two backwards too many; both formulas omit a bubble."""
    f, b, ar = (10, 8), (20, 16), (0, 200)
    assert latency_s(f, b, ar, 8, printed=True) == 384
    assert latency_s(f, b, ar, 8) == 420
    assert dapple_s(f, b, ar) == 438


def test_formulas_omit_bubbles_in_the_steady_phase() -> None:
    assert latency_s((10, 9), (20, 18), (0, 0), 8) == 240
    assert dapple_s((10, 9), (20, 18)) == 264


@pytest.mark.parametrize("seed", range(60))
def test_dapples_latency_of_equal_stages(seed: int) -> None:
    """The formula is exact for equal stages, with transfers between them and with sums of
    gradients."""
    n, m, f, b, sr = random_case(seed)
    ar = [sr * stage for stage in range(n)]
    together = [[*(each,) * (2 * n - 1)] for each in (f, b, 0.0)]
    for cut in range(1, 2 * n - 1, 2):
        together[0][cut] = together[1][cut] = sr
    assert dapple_s([f] * n, [b] * n, m=m, sr=sr) == pytest.approx(
        latency_s(*together, m), rel=1e-9
    )
    assert dapple_s([f] * n, [b] * n, ar, m) == pytest.approx(
        latency_s([f] * n, [b] * n, ar, m), rel=1e-9
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(30))
def test_early_backwards_keep_gpipes_bubble_and_bound_memory(name: str, seed: int) -> None:
    n, m, f, b, _ = random_case(seed)
    actual = equal_stages(name, n, m, f, b, 0.0)
    assert actual.step_s == pytest.approx(fill_s(n, m, f, b, 0.0), rel=1e-9)
    assert actual.bubble == pytest.approx([fill_bubble(n, m, f, b, 0.0)] * n, rel=1e-9)
    depths = [m] * n if name == "gpipe" else [min(n - stage, m) for stage in range(n)]
    assert list(actual.peak_nbytes) == depths


@pytest.mark.parametrize(
    ("depths", "busy"), [((4, 3, 2, 1), 0.8), ((7, 5, 3, 1), 1.0)], ids=["NOAM", "2(N-n)-1"]
)
def test_pipedreams_depth_hides_transfers_or_not(depths: tuple[int, ...], busy: float) -> None:
    """N = 4, F = 10, B = 20, SR = 5: compare the busy share between two mini-batches far from
    the ends."""
    hops = (Transfer(0.0, 5.0),) * 3
    times = StageTimes((10.0,) * 4, (20.0,) * 4, (), hops, hops)
    schedule = generate("pipedream", 4, 1, mini_batches=80, in_flight=depths)
    ends_s = {str(span.action): span.end_s for span in simulate(schedule, times).spans}
    assert 40 * 30 / (ends_s["3U60"] - ends_s["3U20"]) == pytest.approx(busy, rel=1e-9)
