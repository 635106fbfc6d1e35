"""Words that tasks are made of: plain English nouns."""
from __future__ import annotations

from .samples import Haystack

NOUNS = (
    "tiger river apple chair table spoon horse eagle piano guitar hammer needle ladder pillow carpet kettle button ribbon "
    "jacket helmet tunnel castle desert forest island valley ocean planet comet engine wheel barrel cotton marble silver "
    "copper pepper ginger lemon cherry peach onion carrot potato butter cheese rabbit monkey turtle spider dragon knight "
    "wizard pirate sailor doctor nurse baker farmer hunter painter poet singer dancer soldier prince queen king crown sword "
    "shield arrow feather shell stone brick glass paper plastic metal leaf root seed flower grass rain snow storm thunder "
    "cloud moon star fire smoke dust sand clay bread soup salad pizza sugar salt honey milk coffee beer juice bottle plate "
    "bowl knife fork lamp clock phone radio camera mirror brush soap towel blanket curtain door roof wall floor kitchen "
    "bedroom office school church hospital museum theater market bank hotel airport station bridge road street fence farm "
    "barn field pond lake hill cliff cave beach coast violin glacier lantern harbour compass quarry saddle walnut chimney "
    "anchor candle garden window rocket pencil basket lighthouse orchard meadow falcon pebble thistle"
).split()


def alike(haystack: Haystack, words: list[str] | tuple[str, ...], count: int) -> list[str]:
    """The words that take the same number of tokens, the number that most of them take, where that leaves `count`.

    Questions that differ in one of them are then of one length, and can be asked in one batch.
    """
    sizes = {word: len(haystack.encode(" " + word)) for word in words}
    usual = max(set(sizes.values()), key=lambda size: (list(sizes.values()).count(size), -size))
    found = [word for word in words if sizes[word] == usual]
    return found if len(found) >= count else list(words)
