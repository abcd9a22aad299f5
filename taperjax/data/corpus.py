"""The embedded corpus: short stories from a grammar of our own.

A story is a plot filled in. A plot is a list of paragraphs, a paragraph a
list of steps, and a step some templates of which one is taken. In a template

  {A} {B}        are two children; {A_he} {A_his} ... agree with their gender,
  {G}            is a grown-up of {A}, with pronouns likewise,
  {toy} {food}   and so on are one word each from `WORDS`, kept for the story,
  [x|y|]         is one of the choices, here x, y or nothing, and
  a~             is "a" or "an", as the next word wants it.

`parses` matches a sentence against the same templates as regular expressions.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
from collections.abc import Iterator

from taperjax.data import files, text

SEPARATOR = text.SEPARATOR

PEOPLE = {
  "A": {
    "girl": "Lily Mia Anna Sara Ella Rosa Nora Ruby Zoe Emma",
    "boy": "Tom Ben Max Sam Leo Tim Jack Finn Noah Hugo",
  },
  "G": {"girl": "mom grandma aunt sister", "boy": "dad grandpa uncle brother"},
}
PEOPLE["B"] = PEOPLE["A"]
PRONOUNS = {
  "girl": {"he": "she", "him": "her", "his": "her", "kid": "girl"},
  "boy": {"he": "he", "him": "him", "his": "his", "kid": "boy"},
}
WORDS = {
  "trait": "kind brave shy clever cheerful curious gentle quiet funny careful "
  "polite eager calm happy",
  "trait2": "kind brave shy clever cheerful curious gentle quiet funny careful "
  "polite eager calm happy",
  "adj": "red blue green yellow big small old new shiny soft orange tiny "
  "round pretty wooden purple striped golden",
  "toy": "ball kite doll truck boat train drum robot puzzle hat scarf book "
  "lamp bear whistle bell basket balloon crown mask",
  "place": "park garden forest yard field meadow barn orchard market "
  "playground valley village",
  "near": "under behind near beside",
  "spot": "tree bench rock bush table gate fence wagon bridge ladder log tent "
  "chair barrel",
  "coat": "brown white black gray spotted fluffy little young old orange",
  "animal": "dog cat rabbit duck pony frog bird mouse fox squirrel goat turtle "
  "owl hen lamb",
  "taste": "sweet warm fresh big yummy juicy tasty crunchy",
  "food": "apple cake pie sandwich pear cookie carrot muffin pancake banana "
  "plum bun peach melon",
  "weather": "sunny rainy windy cold warm cloudy snowy bright",
  "time": "morning afternoon evening day",
  "skill": "swim paint bake read sing dance draw climb skate cook sew juggle "
  "ski knit",
  "job": "sweep wash paint clean fix",
  "thing": "floor window boat shed fence wagon bench door cart",
}

OPENING = [
  (
    "Once upon a time, there was a~ {trait} child named {A}.",
    "There once was a~ {trait} {A_kid} named {A}.",
    "{A} was a~ {trait} {A_kid} who lived near the {place}.",
    "In a~ {adj} house near the {place}, there lived a~ {trait} child named "
    "{A}.",
  ),
  (
    "{A_He} had a~ {trait2} friend named {B}.",
    "{A} had a~ {trait2} friend named {B} who lived by the {place}.",
    "The best friend of {A} was a~ {trait2} child named {B}.",
    "{A} and {B} were [good|best|old] friends.",
  ),
]
SETTING = (
  "One {weather} {time}, {A} went to the {place} with {A_his} {G}.",
  "One {weather} {time}, {A} and {B} were in the {place}.",
  "On a~ {weather} {time}, {A} [walked|ran] to the {place} to see {B}.",
  "One {time}, {A} took {A_his} {adj} {toy} to the {place}.",
)
ENDING = [
  (
    "{A} and {B} [laughed|smiled] and played with the {adj} {toy} until the "
    "{time} was over.",
    "That night, {A} told {A_his} {G} about the {place} and the {adj} {toy}.",
    "{A} hugged {B} and they went home from the {place} together.",
    "After that {weather} {time}, {A} and {B} were always [kind|good] to each "
    "other.",
  ),
  (
    "{A} was [very|so] happy to have a~ {trait2} friend like {B}.",
    "{A} learned that it is good to be {trait} and to help a friend.",
    "{A_He} fell asleep with a smile and dreamed of the {place}.",
    "{A_His} {G} was proud of {A_him} and gave {A_him} a~ {taste} {food}.",
    "From then on, {A} and {B} met in the {place} every {time}.",
  ),
]

LOST = [
  [
    (
      "{A} loved {A_his} {adj} {toy} and took it to the {place} every {time}.",
      "{A_His} {G} had given {A_him} a~ {adj} {toy}.",
      "{A} had a~ {adj} {toy} that {A_he} liked [very much|most of all].",
    ),
    SETTING,
    (
      "{A} put the {adj} {toy} down and ran after a~ {coat} {animal}.",
      "When {A} looked into {A_his} bag, the {adj} {toy} was gone.",
      "{A} played all {time}, but then {A_he} could not find {A_his} {adj} "
      "{toy}.",
    ),
    (
      "{A_He} was [very|so] sad and began to cry.",
      "{A} felt sad without {A_his} {adj} {toy}.",
      "{A} looked {near} the {spot}, but the {toy} was not there.",
    ),
  ],
  [
    (
      '"I lost my {adj} {toy} in the {place}," said {A}.',
      '"Where is my {adj} {toy}?" asked {A}.',
      '"Have you seen a~ {adj} {toy}, {B}?" asked {A}.',
    ),
    (
      '"Do not cry, {A}, I will help you find the {toy}," said {B}.',
      '"We can look for it {near} the {spot}," said {B}.',
      '{B} said, "Let us look for the {adj} {toy} together."',
    ),
    (
      "{A} and {B} looked {near} the {spot} and all over the {place}.",
      "{B} asked a~ {coat} {animal} if it had seen the {toy}.",
      "They walked through the {place} and looked {near} every {spot}.",
    ),
    (
      "At last, {B} found the {adj} {toy} {near} the {spot}.",
      "Then {A} saw the {adj} {toy} {near} a~ {spot}.",
      "A~ {coat} {animal} was sleeping on the {adj} {toy} {near} the {spot}.",
    ),
    (
      '"Thank you, {B}, you found my {adj} {toy}!" said {A}.',
      '"Is this your {adj} {toy}, {A}?" asked {B}, and {A} was very happy.',
      "{A} jumped up and down and was happy to have {A_his} {toy} again.",
    ),
  ],
]
BROKEN = [
  [
    SETTING,
    (
      "{A} had made a~ {adj} {toy} for {B}.",
      "{B} had brought a~ {adj} {toy} for {A} to play with.",
      "{A} and {B} wanted to play with the {adj} {toy} {near} the {spot}.",
    ),
    (
      "But {A} fell over a~ {spot} and broke the {adj} {toy}.",
      "But a~ {coat} {animal} jumped on the {adj} {toy} and broke it.",
      "But the {adj} {toy} hit the {spot} and broke in two.",
    ),
    (
      "{A} looked at the broken {toy} and felt [very|so] sad.",
      '"Oh no, the {adj} {toy} is broken!" said {A}.',
      "{A} looked at {B}, and {B} looked at the broken {toy}.",
    ),
  ],
  [
    (
      '"Do not worry, we can fix the {toy}," said {B}.',
      '"I am sorry about your {adj} {toy}, {B}," said {A}.',
      '{B} said, "My {G} can help us fix the {adj} {toy}."',
    ),
    (
      "They took the {toy} to a~ {trait} {B_kid} who lived {near} the {spot}.",
      "{A_His} {G} came with some glue and a~ {adj} string.",
      "{A} asked {A_his} {G} to help with the broken {toy}.",
    ),
    (
      "{A} and {A_his} {G} worked all {time} to fix the {adj} {toy}.",
      "{B} held the {adj} {toy} while {A} put on the glue.",
      "They sat {near} the {spot} and fixed the {toy} with glue.",
    ),
    (
      "Soon the {adj} {toy} was as good as new.",
      '"Look, {B}, the {adj} {toy} is as good as new!" said {A}.',
      "The {adj} {toy} looked even better than before, and {B} was glad.",
    ),
  ],
]
HUNGRY = [
  [
    SETTING,
    (
      "{A_His} {G} had packed a~ {taste} {food} for {A_him}.",
      "{A} wanted to eat a~ {taste} {food} {near} the {spot}.",
      "{A} sat down {near} the {spot} with a~ {taste} {food}.",
    ),
    (
      "Then {A} saw a~ {coat} {animal} {near} the {spot}.",
      "A~ {coat} {animal} came and looked at the {taste} {food}.",
      "Then {A_he} heard a~ {coat} {animal} crying {near} the {spot}.",
    ),
    (
      "The {coat} {animal} was [very|so] hungry and cold.",
      "The poor {animal} had not eaten all {time}.",
      "The {coat} {animal} looked at {A} and at the {food} with big eyes.",
    ),
  ],
  [
    (
      '"Are you hungry, little {animal}?" asked {A}.',
      '"You can have my {taste} {food}," said {A} to the {animal}.',
      '"Look, {B}, this {coat} {animal} is hungry!" said {A}.',
    ),
    (
      "{A} gave half of the {taste} {food} to the {coat} {animal}.",
      "{A} and {B} shared the {taste} {food} with the {coat} {animal}.",
      "{B} ran home to get a~ {taste} {food} for the {animal}.",
    ),
    (
      "The {coat} {animal} ate the {food} and was happy.",
      "The {animal} ate the {taste} {food} and followed {A} through the "
      "{place}.",
      "The {animal} jumped {near} the {spot} to say thank you.",
    ),
    (
      "The {coat} {animal} showed {A} a~ {adj} {toy} {near} the {spot}.",
      "From that {time} on, the {coat} {animal} waited for {A} {near} the "
      "{spot}.",
      "{A} asked {A_his} {G} if the {coat} {animal} could live with them.",
    ),
  ],
]
SKILL = [
  [
    (
      "{A} wanted to learn to {skill}, but {A_he} was [afraid|not sure how].",
      "{A} saw {B} {skill} in the {place} and wanted to learn it too.",
      "More than anything, {A} wanted to {skill} like {A_his} {G}.",
    ),
    (
      "One {weather} {time}, {A} tried to {skill} {near} the {spot}.",
      "On a~ {weather} {time}, {A} went to the {place} to learn to {skill}.",
      "{A} tried to {skill} all {time}, but it was hard.",
    ),
    (
      "But {A_he} made a mistake and hit the {spot}.",
      "A~ {coat} {animal} laughed at {A}, and {A_he} felt bad.",
      '"I will never learn to {skill}," said {A}.',
      "{A} fell down {near} the {spot} and wanted to go home.",
    ),
  ],
  [
    (
      '"Do not give up, {A}, you can learn to {skill}," said {B}.',
      '"I will show you how to {skill}," said {B}.',
      '{B} said, "It took me all {time} to learn to {skill}."',
    ),
    (
      "{A} and {B} went to the {place} every {time} to {skill}.",
      "{B} showed {A} how to {skill} {near} the {spot}.",
      "{A_His} {G} brought a~ {taste} {food}, and {A} tried again.",
    ),
    (
      "At last, {A} could {skill} as well as {B}.",
      "After one more {weather} {time}, {A} could {skill} very well.",
      '"Look, {B}, I can {skill} now!" said {A}.',
    ),
    (
      "{B} gave {A} a~ {adj} {toy} because {A_he} did not give up.",
      "{A_His} {G} clapped and gave {A_him} a~ {adj} {toy}.",
      "{A} was so happy that {A_he} ran around the {spot} with the {animal}.",
    ),
  ],
]
TAKEN = [
  [
    (
      "{B} had a~ {adj} {toy}, and {A} wanted it.",
      "{A} saw a~ {adj} {toy} {near} the {spot} that was not {A_his} own.",
      "{B} left a~ {adj} {toy} {near} the {spot} in the {place}.",
    ),
    (
      "One {weather} {time}, {A} took the {adj} {toy} without asking.",
      "{A} hid the {adj} {toy} {near} a~ {spot} in the {place}.",
      "When nobody was looking, {A} put the {adj} {toy} into {A_his} bag.",
    ),
    (
      '"My {adj} {toy} is gone!" said {B}.',
      "{B} looked {near} the {spot} and could not find the {adj} {toy}.",
      "{B} was [very|so] sad and looked for the {toy} all {time}.",
    ),
    (
      "{A} saw that {B} was sad and felt bad about the {toy}.",
      "{A} could not eat {A_his} {taste} {food} because {A_he} felt bad.",
      '"It is not good to take a~ {toy} without asking," said {A_his} {G}.',
    ),
  ],
  [
    (
      '"I am sorry, {B}, I took your {adj} {toy}," said {A}.',
      "{A} gave the {adj} {toy} back to {B} and said sorry.",
      '{A} said, "Here is your {adj} {toy}, I am sorry."',
    ),
    (
      '"Thank you for telling me, {A}," said {B}.',
      '"Next time, just ask me for the {toy}," said {B}.',
      "{B} was glad to have the {adj} {toy} back and was not angry.",
    ),
    (
      "{A} shared a~ {taste} {food} with {B} {near} the {spot}.",
      "Then {A} and {B} played with the {adj} {toy} {near} the {spot}.",
      "They sat {near} the {spot} and ate a~ {taste} {food}.",
    ),
  ],
]
STORM = [
  [
    SETTING,
    (
      "Then the sky got dark, and it began to rain on the {place}.",
      "A big storm came over the {place}, and the {spot} shook.",
      "There was a loud noise {near} the {spot}, and {A} was afraid.",
    ),
    (
      "{A} hid {near} the {spot} with {A_his} {adj} {toy}.",
      "{A} saw a~ {coat} {animal} {near} the {spot}, and it was afraid too.",
      "{A} and {B} ran to a~ {spot} and sat close together.",
    ),
    (
      '"I am afraid of the storm, {B}," said {A}.',
      '"Do not be afraid, little {animal}," said {A}.',
      '"Can we go home to my {G}?" asked {A}.',
    ),
  ],
  [
    (
      '"We will sing until the storm is over," said {B}.',
      '{B} said, "Hold my hand, {A}, and be {trait}."',
      '"Come with me to the {spot}, {A}, it is dry there," said {B}.',
    ),
    (
      "{A} sang to the {coat} {animal}, and it was not afraid anymore.",
      "{B} told a funny story about a~ {coat} {animal} and a~ {adj} {toy}.",
      "They shared a~ {taste} {food} and waited {near} the {spot}.",
    ),
    (
      "Soon the storm was over, and the {place} was bright again.",
      "{A_His} {G} came to the {place} with a~ {adj} light and took them home.",
      "Then the sun came out, and the {coat} {animal} ran into the {place}.",
    ),
  ],
]
JOB = [
  [
    (
      "{A_His} {G} asked {A_him} to {job} the {thing} before the {time} was "
      "over.",
      "{A} had to {job} the {thing} in the {place} for {A_his} {G}.",
      '"Can you {job} the {thing} for me, {A}?" asked {A_his} {G}.',
    ),
    (
      "But {A} wanted to play with {A_his} {adj} {toy}.",
      "It was a~ {weather} {time}, and {A} wanted to go to the {place}.",
      "{A} did not want to {job} the {thing} all alone.",
    ),
    (
      '"I have to {job} the {thing}, so I cannot play," said {A} to {B}.',
      "{A} began to {job} the {thing}, but it took a long time.",
      "{A} looked at the {thing} and felt tired.",
    ),
  ],
  [
    (
      '"I will help you {job} the {thing}," said {B}.',
      "{B} came with a~ {taste} {food} and said that {B_he} would help.",
      '{B} said, "If we {job} the {thing} together, it will be fun."',
    ),
    (
      "{A} and {B} sang a song about a~ {coat} {animal} while they worked.",
      "{A} and {B} began to {job} the {thing} together.",
      "A~ {coat} {animal} sat {near} the {spot} and looked at them.",
    ),
    (
      "Soon the work was done, and the {thing} looked like new.",
      "When the {G} saw the {thing}, {G_he} was very happy.",
      "Before the {time} was over, the {thing} in the {place} was ready.",
    ),
    (
      '"Thank you, {A} and {B}," said the {G}.',
      "The {G} gave them a~ {taste} {food} and a~ {adj} {toy}.",
      "Then they could play with the {adj} {toy} {near} the {spot}.",
    ),
  ],
]
GIFT = [
  [
    (
      "It was the birthday of {B}, and {A} wanted to give {B_him} a~ {adj} "
      "{toy}.",
      "{A} wanted to make a surprise for {B} on a~ {weather} {time}.",
      "{A} thought about a gift for {B}, who liked every {toy}.",
    ),
    (
      "{A} went to the market with {A_his} {G} to find a~ {adj} {toy}.",
      "{A} and {A_his} {G} made a~ {adj} {toy} and a~ {taste} {food}.",
      "{A_His} {G} helped {A_him} bake a~ {taste} {food} for {B}.",
    ),
    (
      "{A} hid the {adj} {toy} {near} the {spot} in the {place}.",
      "{A} put the {toy} into a~ {adj} box and went to the {place}.",
      "On the way, {A} met a~ {coat} {animal} {near} the {spot}.",
    ),
  ],
  [
    (
      '"I have a surprise for you, {B}!" said {A}.',
      '"Look {near} the {spot}, {B}!" said {A}.',
      '"What is in the {adj} box, {A}?" asked {B}.',
    ),
    (
      "{B} looked {near} the {spot} and saw the {adj} {toy}.",
      "{B} took off the ribbon and found a~ {adj} {toy}.",
      "{B} closed {B_his} eyes, and {A} gave {B_him} the {adj} {toy}.",
    ),
    (
      '"This is the best {toy} in the {place}, thank you!" said {B}.',
      "{B} was so happy that {B_he} danced around the {spot}.",
      "{B} gave {A} a big hug and a~ {taste} {food}.",
    ),
    (
      "{A} and {B} ate the {taste} {food} {near} the {spot}.",
      "A~ {coat} {animal} came to the {place} and wanted a bit of {food} too.",
      "They played with the {adj} {toy} and a~ {coat} {animal} all {time}.",
    ),
  ],
]
PLOTS = [LOST, BROKEN, HUNGRY, SKILL, TAKEN, STORM, JOB, GIFT]

_FIELD = re.compile(r"(\{\w+\}|\[[^]]*\]|\ba~|\bA~)")


def generate_story(seed: int, index: int) -> str:
  """Story number `index` of the corpus with this seed; a pure function."""
  rng = random.Random(f"taperjax {seed} {index}")  # a str is hashed by sha512
  words = {slot: _pick(rng, choice.split()) for slot, choice in WORDS.items()}
  while words["trait2"] == words["trait"]:
    words["trait2"] = _pick(rng, WORDS["trait2"].split())
  for person, names in PEOPLE.items():
    gender = _pick(rng, ["girl", "boy"])
    words[person] = _pick(rng, names[gender].split())
    while person == "B" and words["B"] == words["A"]:
      words["B"] = _pick(rng, names[gender].split())
    words |= _pronouns(person, gender)
  paragraphs = [OPENING, *_pick(rng, PLOTS), ENDING]
  between = _pick(rng, ["\n", "\n", " "])
  return between.join(
    " ".join(_fill(_pick(rng, step), words, rng) for step in paragraph)
    for paragraph in paragraphs
  )


def generate_stories(num_stories: int, seed: int) -> Iterator[str]:
  """The first stories of the corpus with this seed."""
  return (generate_story(seed, index) for index in range(num_stories))


def write_corpus(path: str | os.PathLike, num_stories: int, seed: int) -> None:
  """Writes stories as .txt, each followed by a line `<|endoftext|>`."""
  with files.atomic_write(path) as file:
    for story in generate_stories(num_stories, seed):
      file.write(f"{story}\n{SEPARATOR}\n".encode())


def split_sentences(text: str) -> list[str]:
  """Sentences of a text; a quotation stays with its "said ..."."""
  ends = r"""(?:(?<=[.!?])|(?<=[.!?]"))[ ]+(?=[A-Z"])|\n+"""
  return [part.strip() for part in re.split(ends, text) if part.strip()]


def parses(sentence: str) -> bool:
  """Whether the grammar can make this sentence, with all its agreements."""
  return any(pattern.fullmatch(sentence) for pattern in _patterns())


def _pick(rng: random.Random, choices):
  """As rng.choice, from `random()` alone: that is stable over versions."""
  return choices[int(rng.random() * len(choices))]


def _pronouns(person: str, gender: str) -> dict[str, str]:
  """{"A_he": "she", "A_He": "She", ...}."""
  return {
    f"{person}_{form}": word
    for key, value in PRONOUNS[gender].items()
    for form, word in ((key, value), (key.capitalize(), value.capitalize()))
  }


def _fill(template: str, words: dict[str, str], rng: random.Random) -> str:
  parts = _FIELD.split(template)
  for i, part in enumerate(parts):
    if part.startswith("{"):
      parts[i] = words[part[1:-1]]
    elif part.startswith("["):
      parts[i] = _pick(rng, part[1:-1].split("|"))
  return re.sub(
    r"\b([aA])~ (.)",
    lambda m: m[1] + ("n " if m[2] in "aeiou" else " ") + m[2],
    "".join(parts),
  )


@functools.cache
def _patterns() -> list[re.Pattern[str]]:
  """All templates, once for each choice of the genders they depend on."""
  templates = {
    template: None
    for paragraph in (OPENING, ENDING, *itertools.chain(*PLOTS))
    for step in paragraph
    for template in step
  }
  patterns = []
  for template in templates:
    people = [p for p in PEOPLE if re.search(rf"\{{{p}(_\w+)?\}}", template)]
    for genders in itertools.product(["girl", "boy"], repeat=len(people)):
      cast = dict(zip(people, genders, strict=True))
      patterns.append(re.compile(_pattern(template, cast)))
  return patterns


def _pattern(template: str, cast: dict[str, str]) -> str:
  """A template as a regular expression, with people of the given genders."""
  words = WORDS | {
    person: PEOPLE[person][gender] for person, gender in cast.items()
  }
  fixed = {}
  for person, gender in cast.items():
    fixed |= _pronouns(person, gender)
  pattern, seen = "", set()
  for part in _FIELD.split(template):
    slot = part[1:-1]
    if part in ("a~", "A~"):
      pattern += f"{part[0]}(?:n(?= [aeiou])|(?= [^aeiou]))"
    elif part.startswith("["):
      pattern += f"(?:{'|'.join(map(re.escape, slot.split('|')))})"
    elif slot in fixed:
      pattern += fixed[slot]
    elif part.startswith("{") and slot in seen:
      pattern += f"(?P={slot})"
    elif part.startswith("{"):
      other = {"A": "B", "B": "A", "trait": "trait2", "trait2": "trait"}
      if other.get(slot) in seen:  # two friends have two names
        pattern += rf"(?!(?P={other[slot]})\b)"
      pattern += f"(?P<{slot}>{'|'.join(words[slot].split())})"
      seen.add(slot)
    else:
      pattern += re.escape(part)
  return pattern
