"""Media that cannot decide a transfer's speed are left out of simulations."""

import random
from dataclasses import replace

import pytest

from hetpipe.plan.sharing import _decisive
from hetpipe.schedule.generators import generate
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer

STAGES = 4


def draw_times(seed: int) -> StageTimes:
    """Return random times, whose messages use up to six of eight media."""
    rng = random.Random(seed)

    def transfer(_: int) -> Transfer:
        media = rng.sample("abcdefgh", rng.randint(0, 6))
        return Transfer(rng.random() / 8, rng.random(), tuple(media))

    forwards, backwards = ([rng.random() for _ in range(STAGES)] for _ in range(2))
    links = [tuple(map(transfer, range(count))) for count in (STAGES - 1, STAGES - 1, STAGES)]
    return StageTimes(
        tuple(forwards),
        tuple(backwards),
        forward_links=links[0],
        backward_links=links[1],
        sums=links[2],
    )


def only(kept: set[str], transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    return tuple(t._replace(media=tuple(m for m in t.media if m in kept)) for t in transfers)


@pytest.mark.parametrize("seed", range(8))
def test_a_simulation_needs_only_decisive_media(seed: int) -> None:
    times = draw_times(seed)
    groups = times.forward_links, times.backward_links, times.sums
    kept = _decisive([transfer for group in groups for transfer in group])
    ahead, back, sums = (only(kept, group) for group in groups)
    fewer = replace(times, forward_links=ahead, backward_links=back, sums=sums)
    schedule = generate("1f1b", STAGES, 6, replicas=(2,) * STAGES)
    ends = [simulate(schedule, each).total_s for each in (times, fewer)]
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)
    ahead, back, sums = (only(set(), group) for group in groups)
    alone = replace(times, forward_links=ahead, backward_links=back, sums=sums)
    assert simulate(schedule, alone).total_s < ends[0]


def test_a_medium_is_left_out_if_another_has_all_its_transfers() -> None:
    media = ["ab", "abc", "bd", "e"]  # "c", "d" and "e" have one transfer; "b" has all of "a"
    assert _decisive([Transfer(media=tuple(each)) for each in media]) == {"b"}
