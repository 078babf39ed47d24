"""Varied, plain English sentences without digits: the hay around a needle, and names for needles."""

from __future__ import annotations

import random
from collections.abc import Iterator


def _list(text: str) -> list[str]:
    return text.split(",")


_WHO = _list(
    "the old miller,a young surveyor,the harbor master,my neighbor,the night nurse,a quiet gardener,"
    "the visiting painter,the baker's son,a retired captain,the village teacher,a passing tinker,"
    "the museum guard,the youngest clerk,a patient weaver,the station agent,the clockmaker,a tired courier,"
    "the head librarian,an amateur geologist,the ferry pilot,the glass blower,a cheerful plumber,"
    "the choir leader,the orchard keeper"
)
_DID = _list(
    "repaired,described,painted,counted,forgot,borrowed,carried,measured,sold,admired,cleaned,hid,sketched,"
    "replaced,inspected,polished,wrapped,gathered,weighed,returned,labelled,discovered,dropped,praised"
)
_WHAT = _list(
    "a broken lantern,the wooden boats,several maps,an empty basket,the copper kettle,two heavy coats,"
    "the garden gate,some dried apples,a box of letters,the brass telescope,a torn sail,the winter curtains,"
    "a sack of flour,the stone steps,three blue jars,the piano keys,a bundle of reeds,the church bell,"
    "a pair of boots,the market scales,an unfinished quilt,the bicycle wheel,a crate of lemons,the oak table"
)
_WHERE = _list(
    "near the harbor,behind the mill,at the edge of town,in the narrow kitchen,under the bridge,"
    "beside the river,along the coast road,in the attic,on the south platform,outside the bakery,"
    "between the two barns,at the foot of the hill,inside the chapel,by the open window,on the upper deck,"
    "in the botanical garden,across the square,beneath the willow"
)
_WHEN = _list(
    "before sunrise,after the storm,during the long winter,late in the evening,on market day,"
    "while the others slept,when the fog lifted,in early spring,without saying a word,for the second time,"
    "as the church clock struck,just before supper,in the middle of the harvest,despite the rain"
)
_THEN = _list(
    "nobody asked why,the work took longer than expected,everyone agreed it was worth the trouble,"
    "the dog followed at a distance,it was the talk of the village,the light was already fading,"
    "there was still plenty of tea,the wind had turned by then,the children laughed about it for days,"
    "a letter arrived soon afterwards"
)

_ADJECTIVES = _list(
    "amber,ancient,bitter,blazing,brisk,calm,clever,crimson,curious,daring,distant,dusty,eager,faithful,"
    "fancy,feral,gentle,gleaming,golden,grumpy,hollow,humble,icy,jolly,keen,lively,lonely,lucky,mellow,"
    "mighty,misty,modest,nimble,noble,pale,proud,rapid,rustic,scarlet,shy,silent,silver,sleepy,solemn,spiral,"
    "stormy,sunny,swift,tidy,velvet,vivid,wandering,wise,witty,zealous"
)
_NOUNS = _list(
    "anchor,antler,badger,banner,beacon,bobcat,canyon,cedar,comet,condor,cricket,dolphin,dragon,ember,falcon,"
    "ferret,glacier,goblet,hammer,heron,island,jaguar,kestrel,lagoon,lantern,lizard,magnet,mammoth,meadow,"
    "meteor,monsoon,otter,panther,parrot,pebble,pelican,pepper,pillow,pirate,planet,quartz,raven,rocket,"
    "saddle,salmon,sparrow,teapot,temple,thistle,tiger,trumpet,turtle,walnut,whistle,zephyr"
)


def sentences(rng: random.Random) -> Iterator[str]:
    """Endless sentences of 10 to 25 words, each with its full stop."""
    while True:
        parts = [rng.choice(_WHO), rng.choice(_DID), rng.choice(_WHAT), rng.choice(_WHERE)]
        when = rng.choice(_WHEN)
        form = rng.randrange(3)
        if form == 0:
            text = f"{' '.join(parts)} {when}"
        elif form == 1:
            text = f"{when}, {' '.join(parts)}"
        else:
            text = f"{' '.join(parts)} {when}, and {rng.choice(_THEN)}"
        yield text[0].upper() + text[1:] + "."


def keys(rng: random.Random, n: int) -> list[str]:
    """``n`` different names like ``silent-heron`` (at most 55 × 55)."""
    picks = rng.sample(range(len(_ADJECTIVES) * len(_NOUNS)), n)
    return [f"{_ADJECTIVES[i % len(_ADJECTIVES)]}-{_NOUNS[i // len(_ADJECTIVES)]}" for i in picks]


KEY_COUNT = len(_ADJECTIVES) * len(_NOUNS)
