"""Words, names and values that the skills draw from: short hand-made lists, and syllables for new words."""

import random


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


WORDS = words_of("""
able acorn actor adult alarm album anchor angel ankle apple april arrow aunt autumn bacon badge bag baker ball
bamboo banana band bank barn basket beach bean bear bed bee bell bench berry bird blade blanket blue board boat body
bone book boot bottle bowl box boy brain branch brave bread brick bridge broom brown brush bucket bus butter button
cabin cable cactus cake camel camera candle candy canyon car card carpet carrot castle cat cave chair chalk cheese
cherry chess chicken child circle city clay clean clock cloud clover coat cobra coffee coin comet cook copper corn
cotton couch cow crab cream crow crown cup curtain dance deer desert desk diamond dinner dog doll donkey door dragon
drawer dream dress drum duck eagle ear earth east egg elbow elephant engine envelope evening eye fabric face falcon
farm feather fence field finger fire fish flag flame flower flute fog forest fork fox frog fruit garden garlic ghost
giant ginger giraffe glass glove goat gold goose grape grass green guitar hammer hand happy harbor hat hawk head
heart hedge hill honey hood horse hotel house ice ink iron island ivory jacket jar jelly jewel juice jungle kettle
key king kitchen kite kitten knee knife ladder lake lamp leaf lemon letter lighthouse lily lime lion lizard llama
lobster lock log lunch magnet maple marble market meadow melon metal milk mint mirror monkey moon moss mother motor
mountain mouse mouth museum music nail napkin nest night noodle north nose nut oak oasis ocean olive onion orange
orchard otter oven owl paint palace panda paper park parrot peach pear pearl pen pencil pepper piano pillow pilot
pine pink pirate pizza planet plant plate plum pocket pond pony potato prince puzzle queen quilt rabbit radio rain
raven red ribbon rice ring river robin robot rocket roof rope rose ruby saddle sail salad salt sand school sea seed
shadow shark sheep shell ship shirt shoe silver sky snail snake snow soap sock soup south spider spoon spring square
star stone storm strawberry summer sun swan table tail tea temple tent tiger tomato tooth torch tower train tree
truck tulip turtle umbrella valley vase velvet violin wagon wall walnut water watch west whale wheat wheel white
willow window winter wolf wood wool yellow zebra
""")

NAMES = words_of("""
Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Liam Maria Noah Olga Paul Rosa Sam Tina Victor Alice Bob
Carol Dan Eva Frank Gina Hugo Ines Jonas Lena Max Nina Oscar Peter Rita Simon Tom Vera Will
""")
CITIES = words_of("""
Oslo Rome Paris Berlin Madrid London Tokyo Cairo Lima Delhi Seoul Vienna Prague Dublin Athens Lisbon Boston Chicago
Denver Toronto Sydney Nairobi Warsaw Zurich Geneva Munich Hamburg Milan Naples Porto Bergen Helsinki Kyoto Osaka
Quito Bogota Dakar Accra Tunis Riga
""")

_ONSETS = words_of("""
b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sn sp st t th tr v w y z
""")
_VOWELS = words_of("""
a e i o u a e i o u ai ea ee oa oo ou
""")
_ENDS = ("", "", "", *words_of("b ck d g k l ll m mp n nd ng nk nt p r rk rt s sh st t th x"))


def invented(rng: random.Random) -> str:
    """A pronounceable word of one or two syllables that is probably in no dictionary."""
    count = rng.choice((1, 2, 2))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(count))


def word(rng: random.Random) -> str:
    """A real or an invented word, in small letters."""
    return rng.choice(WORDS) if rng.random() < 0.6 else invented(rng)


def name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else invented(rng).capitalize()


def city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else invented(rng).capitalize()


def phrase(rng: random.Random) -> str:
    """One to three words."""
    return " ".join(word(rng) for _ in range(rng.randint(1, 3)))


def date(rng: random.Random) -> str:
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def email(rng: random.Random) -> str:
    return f"{rng.choice(NAMES).lower()}@{invented(rng)}.com"
