"""Finds links that share a network card: messages that leave or enter one host at the same time.

For each host, two messages leave at once, two enter at once, and one leaves while one enters. If
they take about as long as one after the other, they share the card. A card's parts are media, such
as "a up" (all that host a sends), "a down", or "a" if both directions share a half-duplex card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.crew.crew import Crew
from hetpipe.profile.links import NBYTES, Links, Way, networked_hosts, round_trips

ROUNDS = 4
"""Steps of a measurement; the first does not count. Few are enough: shared links take twice as
long."""
SHARED = 0.5
"""Two messages share a medium if the shorter one adds more than this part of its time to the
longer one."""


def with_cards(crew: Crew, links: Links) -> Links:
    """Return the links with the media that messages between hosts share, as measured."""
    members = {crew.cluster.member(member).host: member for member in reversed(list(crew.infos))}
    hosts = [host for host in members if host in networked_hosts(crew)]
    found: dict[frozenset[Way], bool] = {}

    def share(*ways: Way) -> bool:
        key = frozenset(ways)
        if key not in found:
            nbytes = NBYTES[-1]
            alone_s = sorted(links[s, t].time_s(nbytes) + links[t, s].latency_s for s, t in ways)
            times_s = zip(*round_trips(crew, ways, nbytes, ROUNDS), strict=True)
            together_s = min([max(each) for each in times_s][1:])
            found[key] = together_s - alone_s[-1] > SHARED * alone_s[0]
        return found[key]

    media: dict[str, tuple[str, str]] = {}  # by host, of messages that leave and that enter
    for host in hosts:
        own = members[host]
        out = _fastest(links, [(own, members[other]) for other in hosts if other != host])
        into = _fastest(links, [(members[other], own) for other in hosts if other != host])
        if out and share(out[0], into[-1]):
            media[host] = host, host
            continue
        up, down = (len(ways) > 1 and share(*ways) for ways in (out, into))
        media[host] = f"{host} up" * up, f"{host} down" * down

    def on(source: str, target: str) -> tuple[str, ...]:
        here, there = (crew.cluster.member(member).host for member in (source, target))
        if here == there or here not in media or there not in media:
            return ()
        return tuple(filter(None, (media[here][0], media[there][1])))

    return {way: replace(link, media=on(*way)) for way, link in links.items()}


def _fastest(links: Links, ways: Sequence[Way]) -> list[Way]:
    """Return the two fastest ways: a slow one does not load a fast host's card."""
    return sorted(ways, key=lambda way: links[way].time_s(NBYTES[-1]))[:2]
