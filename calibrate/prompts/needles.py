"""Needles: short facts hidden in a long text, and the questions that ask for them.

A needle is one line that states a five-digit code for a word. Its question, much later, repeats the word and states the
code again: teacher-forced, a model that can look back predicts all five digits. The training of the demo model, the
prompts and the evaluation all take the wording from here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = """
    acorn amber anchor apple arrow autumn badger bamboo banner barley basil beacon beetle birch bishop blanket
    blossom bonfire bottle boulder branch bridge bronze bucket butter button cabin cactus camel candle canyon
    carbon carpet castle cedar cellar cherry chimney cinder circus cliff clover cobalt coffee comet copper coral
    cotton cradle crater cricket crimson crystal curtain cypress dagger daisy dancer desert diamond dolphin
    donkey dragon drawer dune eagle ember emerald falcon feather fennel ferry fiddle finch flame flint forest
    fossil fountain fox galaxy garden garlic garnet ginger glacier goblet granite grape gravel guitar hammer
    harbor harvest hazel helmet heron hickory honey horizon hornet igloo indigo island ivory jacket jasmine
    jasper jungle kettle kitten ladder lagoon lantern lavender lemon leopard lichen lily linen lizard lobster
    lotus magnet mango maple marble marigold meadow melon mercury meteor mirror mitten monsoon mosaic mountain
    mustard napkin nectar needle nickel nutmeg oasis ocean olive onion opal orange orchard orchid otter oyster
    paddle palace panther parrot pebble pelican pepper petal piano pigeon pillow pine pirate planet plaza plum
    pocket pollen poplar prairie prism pumpkin quarry quartz quiver rabbit radish raft raven ribbon river robin
    rocket rose ruby saddle saffron salmon sandal sapphire satin scarlet shadow shelter sierra silver sparrow
    spiral spruce squirrel stable statue summit sunset swan tablet temple thistle thunder tiger timber topaz
    torch trumpet tulip tundra tunnel turtle valley velvet violet violin walnut walrus whisper willow window
    winter wolf yarrow zebra zephyr
"""
WORDS = tuple(_WORDS.split())
DIGITS = 5


@dataclass(frozen=True)
class Needle:
    """A hidden fact and its question, as text.

    fact: the line that is hidden in the text. question: up to where the answer is due. code: what answers it.
    """

    fact: str
    question: str
    code: str

    @property
    def answer(self) -> str:
        """The code, as it follows the question."""
        return f"{self.code}.\n"


def needle_of(key: str, code: str) -> Needle:
    """The needle that states a code for a key."""
    return Needle(
        f"\n# The secret code for {key} is {code}.\n",
        f"\n# What is the secret code for {key}? The secret code for {key} is ",
        code,
    )


def make_needles(count: int, rng: random.Random) -> list[Needle]:
    """`count` needles with distinct words and random codes.

    Raises:
        ValueError: There are fewer than `count` words.
    """
    if count > len(WORDS):
        raise ValueError(f"{count} needles were asked for, but there are {len(WORDS)} distinct words")
    return [needle_of(word, random_code(rng)) for word in rng.sample(WORDS, count)]


def random_code(rng: random.Random) -> str:
    """A code of `DIGITS` digits."""
    return "".join(rng.choices("0123456789", k=DIGITS))
