"""A text to measure quality on: ours, in several voices, so that no kind of text decides alone."""

from __future__ import annotations

from pathlib import Path

from foredraft.core.errors import ConfigError

_PROSE = """\
The ferry left Sandholm a quarter of an hour late, because the captain would not sail without \
the post. There were eleven passengers that morning: a schoolteacher with two boxes of apples, a \
family from the mainland who had rented the keeper's cottage for a week, three men who repaired \
roofs, and a girl of nine who travelled alone and had a letter pinned to her coat. The wind came \
from the north-west and was not strong, but the swell of the night before had not gone down yet, \
and beyond the breakwater the small ship began to climb and fall like a slow swing. The girl \
stood at the rail and counted the waves. At two hundred and forty she lost count, started again, \
and was surprised to find the island much larger than before. Later she could never say how long \
the crossing had taken. She remembered the smell of tar and apples, and that somebody had lent \
her a pair of gloves."""

_FACTS = """\
Sound travels through air at about 343 metres per second when the air has a temperature of 20 \
degrees Celsius. In water it is more than four times as fast, and in steel about fifteen times. \
The reason is stiffness: the harder it is to compress a material, the more quickly a disturbance \
is passed on from one layer to the next. Density works the other way, but in solids stiffness \
wins. Thunder is heard about three seconds after the lightning for every kilometre of distance. \
A change of temperature matters as well: for each degree the speed in air rises by 0.6 metres \
per second, so wind instruments sound higher as an orchestra warms the hall, while the strings \
go slightly flat."""

_CODE = '''\
def shortest_path(graph, start, goal):
    """The cheapest way from start to goal, as a list of nodes, or None if there is none."""
    queue = [(0, start)]
    best = {start: 0}
    previous = {}
    while queue:
        cost, node = heapq.heappop(queue)
        if node == goal:
            path = [goal]
            while path[-1] != start:
                path.append(previous[path[-1]])
            return path[::-1]
        if cost > best[node]:
            continue
        for neighbour, length in graph[node]:
            total = cost + length
            if total < best.get(neighbour, float("inf")):
                best[neighbour] = total
                previous[neighbour] = node
                heapq.heappush(queue, (total, neighbour))
    return None
'''

_DIALOGUE = """\
"You said the shop would be open," said Marta.
"It was open on Tuesday," said her brother. "I even bought string."
"Today is not Tuesday."
"No," he admitted, and looked through the glass once more. "There is a light at the back, \
though. Somebody must be in there."
She knocked. For a while nothing happened. Then an old man came out from behind the shelves, \
wiped his hands on his apron, and pointed at the sign that hung between them.
"We know," Marta called. "We only want to ask what it would cost to mend a clock."
The old man unlocked the door. "What kind of clock?" he asked."""

_LETTER = """\
Dear Mr Lindqvist,

thank you for your letter of 4 May. We are sorry to hear that the second of the two lamps \
arrived with a broken shade. A new shade was sent to you this morning; it should reach you by \
Thursday. You need not return the broken one. If you would rather have your money back, please \
tell us the number of your order, which you find at the top right of the invoice, and we will \
refund 48 euros within a week. We have also spoken to the people who pack our parcels.

Yours sincerely,
Ilse Brandt
"""

_LIST = """\
# Bread for a cold kitchen

- 500 g strong flour, 350 g water, 10 g salt, 2 g dried yeast
- Mix in the evening until no dry flour is left. Cover the bowl and go to bed.
- In the morning, fold the dough four times, once from each side, and let it rest for an hour.
- Heat the oven to 240 degrees with an iron pot inside.
- Bake for 25 minutes with the lid and 20 minutes without. The crust should be a dark brown.
- Wait until it has cooled before you cut it. This is the hardest part."""

BUILT_IN = "\n\n".join((_PROSE, _FACTS, _CODE, _DIALOGUE, _LETTER, _LIST))


def read_text(path: str | None) -> str:
    """The text of a file, or the built-in one.

    Raises:
        ConfigError: the file is not there, is not UTF-8 or holds nothing.
    """
    if path is None:
        return BUILT_IN
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path} holds no text")
    return text
