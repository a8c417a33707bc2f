"""Break a worker at every moment of many trainings, and compare the results with undisturbed ones.

    python tests/engine/break_workers.py [--part 1] [--skip 0] [--kinds kill,raise] [CASE ...]

Each action and each command of the controller is a moment. Then two workers are lost: the second
one at a moment of the recovery from the first loss, or of the training after it; then three. With
`--part 0.1` a random tenth of all moments is broken, and with `--part 0.1 --skip 0.1` another
tenth. This takes hours; Ctrl-C or SIGTERM ends it, with the counts so far.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]
from breaking import KINDS  # noqa: E402
from broken_cases import CASES, NO_BREAK, Break, problems, run, undisturbed  # noqa: E402

START_TICKS = 10


def breaks_of(name: str, kind: str) -> Iterator[list[Break]]:
    """Yield a break at every moment of every worker with layers."""
    for member in CASES[name].used:
        for moment in range(len(undisturbed(name).moments[member])):
            yield [Break(member, kind, moment)]


def more_breaks_of(name: str, kind: str, chance: random.Random) -> Iterator[list[Break]]:
    """Yield, after a random break, a second one at every moment of every other worker; and after
    two random breaks a third one. If lost members return, the later break comes before or after."""
    case = CASES[name]
    if not case.can_lose_two:
        return
    pauses: list[list[Break]] = [[], [NO_BREAK]] if case.returns else [[]]
    before = chance.choice([*breaks_of(name, kind)])
    for losses in (1, 2):
        found = run(case, before)
        if len(found.lost) < losses or len(found.moments) < 2:
            return
        breaks = [
            [*before, *pause, Break(member, "kill" if moment < 0 else kind, moment)]
            for pause in pauses
            for member, moments in found.moments.items()
            for moment in range(-START_TICKS, len(moments))
        ]
        yield from breaks
        # Three errors at the same mini-batch would end the training.
        before = [each._replace(kind="kill") for each in chance.choice(breaks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--part", type=float, default=1.0)
    parser.add_argument("--skip", type=float, default=0.0, help="this part is run elsewhere")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--losses", default="1,2,3", help="how many workers are lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end-s", type=float, default=1e9, help="begin no run after these seconds")
    chosen = parser.parse_args()
    logging.disable()
    end_s = time.monotonic() + chosen.end_s
    numbers = {int(number) for number in chosen.losses.split(",")}
    counts: Counter[tuple[str, str]] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    waits_s: list[float] = []
    table = [(name, kind) for name in chosen.cases or CASES for kind in chosen.kinds.split(",")]
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name, kind in table:
            chance, share = (random.Random(f"{chosen.seed} {name} {kind} {n}") for n in range(2))
            all_breaks = [*breaks_of(name, kind)]
            if max(numbers) > 1:
                all_breaks += more_breaks_of(name, kind, chance)
            for breaks in all_breaks:
                is_chosen = 0 <= share.random() - chosen.skip < chosen.part
                if len(breaks) - breaks.count(NO_BREAK) not in numbers or not is_chosen:
                    continue
                if time.monotonic() > end_s:
                    break
                try:
                    found = run(CASES[name], breaks)
                    texts = problems(name, found, breaks)
                    waits_s.append(found.wait_s)
                except Exception as error:
                    texts = [f"{type(error).__name__}: {error}"]
                counts[name, kind] += 1
                if texts:
                    wrong[name, kind] += 1
                    places = "; ".join(f"{b.member} {b.kind} {b.moment}" for b in breaks)
                    print(f"FAILED {name} {places}: {'; '.join(texts)[:500]}", flush=True)
            print(
                f"{name} {kind}: {counts[name, kind]} runs, {wrong[name, kind]} failures",
                flush=True,
            )
    except KeyboardInterrupt:
        interrupted = True
    waits_s = [wait_s for wait_s in waits_s if wait_s == wait_s]
    end = ", then interrupted" if interrupted else ""
    print(f"{counts.total()} runs, {wrong.total()} failures{end}")
    if waits_s:
        median_s = statistics.median(waits_s)
        print(f"loss to next result: median {median_s:.2f} s, worst {max(waits_s):.2f} s")
    return 1 if wrong or interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
