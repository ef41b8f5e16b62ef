"""Requests of many kinds, made up from parts: what people ask a chat model for.

A model that makes up its own prompts asks for few kinds of things. These are templates over many
subjects; passages to work on are articles that the target wrote before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from foredraft.train.german import german_sentence
from foredraft.train.tasks_code import code_task
from foredraft.train.topics import (
    AUDIENCES,
    CONTAINERS,
    FORMS,
    JOBS,
    LANGUAGES,
    NAMES,
    PLACES,
    SUBJECTS,
    SURNAMES,
    THINGS,
    TONES,
)

Passages = Sequence[str]
Task = Callable[[random.Random, Passages], str]
ARTICLE = "article"
"""The kind whose replies are passages for others."""


def made_up_task(random_: random.Random, passages: Passages) -> tuple[str, str]:
    """A kind and a request of it; without passages, only kinds that need none."""
    kinds = [kind for kind in _WEIGHTS if passages or kind not in _ON_PASSAGES]
    kind = random_.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
    return kind, _TASKS[kind](random_, passages)


def _article(random_: random.Random, _: Passages) -> str:
    pick = random_.choice
    subject = pick((*SUBJECTS, *PLACES, f"{pick(SUBJECTS)} in {pick(PLACES)}"))
    return pick(
        (
            f"Write an encyclopedia article about {subject}.",
            f"Write a newspaper article about {subject}. Mention names, dates and numbers.",
            f"Write a news report from {pick(PLACES)} about {subject}, with quotes of two people.",
            f"Write a long paragraph about {subject}.",
            f"Write a short biography of {_person(random_)}, {pick(JOBS)} from {pick(PLACES)}.",
            f"Tell the story of a day on which {_person(random_)} from {pick(PLACES)} had to deal "
            f"with {pick(SUBJECTS)}. Write it as a newspaper would.",
        )
    )


def _writing(random_: random.Random, _: Passages) -> str:
    pick = random_.choice
    subject, form, audience = pick(SUBJECTS), pick(FORMS), pick(AUDIENCES)
    return pick(
        (
            f"Write {form} about {subject}.",
            f"Write {form} about {subject} for {audience}. Keep it {pick(TONES)}.",
            f"Please write {form} in which {pick(JOBS)} learns something about {subject}.",
            f"Compose a {pick(TONES)} email to {pick(NAMES)} {pick(SURNAMES)} about {subject}, and "
            "ask for an answer by Friday.",
            f"Draft a {pick(TONES)} message to {audience}, explaining why the meeting about "
            f"{subject} has to move to another day.",
            f"Describe {pick(PLACES)} in the {pick(('morning', 'rain', 'winter', 'evening'))} so "
            "that the reader can smell, hear and see it.",
            f"Come up with {random_.randint(3, 10)} titles for {form} about {subject}.",
            f"Outline a blog post that compares {subject} with {pick(SUBJECTS)}.",
            f"Rewrite this sentence in a {pick(TONES)} way: {_sentence(random_)}",
            f"Start a story with these words: {_sentence(random_)}",
        )
    )


def _roleplay(random_: random.Random, _: Passages) -> str:
    pick = random_.choice
    job, subject = pick(JOBS), pick(SUBJECTS)
    return pick(
        (
            f"You are {job}. {_question(random_, subject)}",
            f"Pretend to be {job} and tell me what you think about {subject}.",
            f"Act as {job}. I will ask you questions and you answer in character. The first one: "
            f"{_question(random_, subject)}",
            f"Imagine that you are {job} in {pick(PLACES)}. Introduce yourself and talk about "
            f"{subject}.",
            f"Let us play a game: you are {job}, I am {pick(JOBS)}. Say hello and ask me about "
            f"{subject}.",
            f"Be my adviser, {job}. My problem is this: my friend {pick(NAMES)} and I always argue "
            f"about {subject}. What should we do?",
        )
    )


def _explain(random_: random.Random, _: Passages) -> str:
    pick = random_.choice
    subject, other = random_.sample(SUBJECTS, 2)
    return pick(
        (
            f"Explain {subject} to {pick(AUDIENCES)}.",
            f"What is the connection between {subject} and {other}?",
            f"What are the main causes and effects of {subject}? Give examples.",
            f"How did {subject} change over the last hundred years?",
            f"Describe how {subject} works, step by step.",
            f"What are the advantages and disadvantages of {subject}?",
            f"Give {random_.randint(3, 8)} facts about {subject}.",
            f"Compare {subject} and {other}. Which matters more, and why?",
            f"Why is {subject} important for society? Discuss two points of view.",
            f"Make a lesson plan about {subject} for {pick(AUDIENCES)}.",
            f"Which mistakes do people make when they first learn about {subject}?",
            _question(random_, subject),
        )
    )


def _short_question(random_: random.Random, _: Passages) -> str:
    pick = random_.choice
    subject, place = pick(SUBJECTS), pick(PLACES)
    return pick(
        (
            f"When was the first book about {subject} written?",
            f"Who is the most famous person in the history of {subject}?",
            f"What is the biggest city near {place}?",
            f"Who was in charge of {place} in {random_.randint(1900, 2015)}?",
            f"Which country is best known for {subject}?",
            f"Where does the word for {subject} come from?",
            f"What is the meaning of {subject} in one sentence?",
            f"How many people live in {place}?",
            f"What language do they speak in {place}?",
            f"When did {subject} come to {place}?",
            f"Who sings the song about {pick((subject, place))}?",
            f"Who plays {pick(JOBS)} in the film about {subject}?",
            f"What kind of {pick(('animal', 'plant', 'stone', 'food', 'tool'))} is on the flag of "
            f"{place}?",
        )
    )


def _reasoning(random_: random.Random, _: Passages) -> str:
    pick = random_.choice
    a, b, c = random_.sample(NAMES, 3)
    x, y, z = random_.sample(THINGS, 3)
    more = pick(("more expensive", "heavier", "older", "bigger", "better"))
    sisters, brothers = random_.randint(1, 5), random_.randint(1, 5)
    return pick(
        (
            f"{a} is taller than {b}. {c} is shorter than {b}. Who is the tallest?",
            f"All {x} are {y}. Some {y} are {z}. Are some {x} {z}? Explain your reasoning.",
            f"1. {x.capitalize()} are {more} than {y}.\n2. {y.capitalize()} are {more} than {z}.\n"
            f"3. {z.capitalize()} are {more} than {x}.\nIf the first two are true, is the third "
            "one true, false or uncertain?",
            f"{a} sits left of {b}. {c} sits right of {b}. Who sits in the middle?",
            f"{a} has {sisters} sisters and {brothers} brothers. How many brothers does each of "
            "the sisters have?",
            f"If it rains, {a} takes the bus. {a} did not take the bus. Did it rain?",
            f"Yesterday was {pick(('Monday', 'Friday', 'Sunday'))}. Which day is it in "
            f"{random_.randint(2, 40)} days?",
            f"Which word does not belong here: {x}, {y}, {z}, {pick(SUBJECTS)}? Why?",
            f"{a} came in second in a race and {b} came in right after {c}, who was first. What is "
            "wrong here?",
        )
    )


def _arithmetic(random_: random.Random, _: Passages) -> str:
    pick, number = random_.choice, random_.randint
    name, other = random_.sample(NAMES, 2)
    thing, second = random_.sample(THINGS, 2)
    boxes, each, gone, price = number(2, 15), number(3, 40), number(1, 6), number(2, 30)
    return pick(
        (
            f"{name} has {boxes} {pick(CONTAINERS)} with {each} {thing} in each. {name} gives "
            f"{gone} {thing} to {other}. How many {thing} does {name} have left?",
            f"{name} buys {boxes} {thing} for ${price} each and {gone} {second} for ${price + 3} "
            "each. How much does that cost in all?",
            f"A shop sells {each} {thing} on Monday and twice as many on Tuesday. On Wednesday it "
            f"sells {gone} fewer than on Tuesday. How many {thing} does it sell in three days?",
            f"{name} earns ${price} an hour and works {boxes} hours a day, {number(3, 6)} days a "
            f"week. How much does {name} earn in {gone + 1} weeks?",
            f"{name} reads {each} pages a day. The book has {each * boxes} pages. After how many "
            "days is the book finished?",
            f"{name} is {gone + 2} years older than {other}, who is {each}. How old will {name} be "
            f"in {boxes} years?",
            f"A train travels {each * 10} kilometres in {gone + 1} hours. How far does it travel "
            f"in {boxes} hours at the same speed?",
            f"{number(10, 90)} percent of the {each * 10} {thing} are red, the others are blue. "
            f"How many are blue? {name} says {boxes}. Is that right?",
            f"Solve for x: {gone + 1}x + {boxes} = {price * 3}",
            f"What is {number(12, 99)} times {number(3, 25)}, minus {number(5, 80)}?",
            f"What is the area of a rectangle that is {each} cm long and {boxes} cm wide?",
            f"{name} and {other} share {each * 2} {thing}. {name} takes half, {other} takes a "
            f"quarter, and the rest goes to {pick(NAMES)}. How many does each of them get?",
            f"What is the probability of rolling a {number(2, 6)} with one die, and of rolling it "
            f"{gone + 1} times in a row?",
        )
    )


def _translation(random_: random.Random, passages: Passages) -> str:
    pick = random_.choice
    sentence = german_sentence(random_)
    ask = pick(
        (
            "Translate German to English: {}", "Translate German to English: {}",
            "Translate this German sentence into English: {}", "What does this mean in English? {}",
            "Please translate into English.\n\n{}", "{}\n\nTranslate the text above to English.",
        )
    )  # fmt: skip
    if random_.random() < 0.8:
        return ask.format(sentence)
    return f"Translate into {pick(LANGUAGES)}: {_sentence(random_)}"


def _extraction(random_: random.Random, _: Passages) -> str:
    pick, number = random_.choice, random_.randint
    people = [_person(random_) for _ in range(number(3, 6))]
    rows = [f"{p}, {pick(JOBS)[2:].strip()}, {pick(PLACES)}, {number(19, 80)}" for p in people]
    firms = [
        f"{pick(SURNAMES)} & {pick(SURNAMES)} made ${number(2, 90)} million in {number(1995, 2023)}"
        for _ in people
    ]
    notes = [f"{p} wrote about {pick(SUBJECTS)}: {_sentence(random_)}" for p in people]
    return pick(
        (
            "Make a table of these people with name, job, city and age:\n" + "\n".join(rows),
            "Return this list as JSON with the keys name, job, city and age:\n" + "\n".join(rows),
            "Who of these is the oldest, and where does that person live?\n" + "\n".join(rows),
            "Which company made most? List the companies by amount.\n" + "\n".join(firms),
            "Extract all names and numbers from this text: " + ". ".join(firms) + ".",
            "Rate each of these notes as positive, neutral or negative.\n" + "\n".join(notes),
            "Sort each of these into one of the classes science, arts, or everyday life, one a "
            "line:\n" + "\n".join(random_.sample(SUBJECTS, 6)),
            "Name the main subject of each note, one a line:\n" + "\n".join(notes),
        )
    )


def _summary(random_: random.Random, passages: Passages) -> str:
    text = _passage(random_, passages, random_.randint(1, 3))
    ask = random_.choice(
        (
            "Summarize: {}", "Summarize: {}", "Summarize the following text.\n\n{}",
            "{}\n\nSummarize this in two sentences.", "Give the key points of this article:\n{}",
            "TL;DR of this, please: {}", "{}\n\nWhat is this text about?",
        )
    )  # fmt: skip
    return ask.format(text)


def _reading(random_: random.Random, passages: Passages) -> str:
    """A question after several passages, of which one or none may help."""
    pick = random_.choice
    texts = [_passage(random_, passages, 1) for _ in range(random_.randint(1, 4))]
    words = pick(texts).split()
    start = random_.randrange(max(1, len(words) - 6))
    about = " ".join(words[start : start + random_.randint(2, 5)]).strip(".,:;\"'*()")
    ask = pick(
        (
            f"What does the text say about {about}?", f"Who or what is {about}?",
            f"When did {about} happen?", f"Where is {about}?", f"Why is {about} important?",
            f"How many {about} were there?", _question(random_, pick(SUBJECTS)),
            "Who is named in the text?", "What is the main idea?",
        )
    )  # fmt: skip
    return "\n".join([*texts, ask])


def _editing(random_: random.Random, passages: Passages) -> str:
    text = _passage(random_, passages, 1)
    ask = random_.choice(
        (
            "Improve the style of this text:\n\n{}", "Correct all mistakes in this text.\n{}",
            "Rewrite this for children: {}", "Turn this into a list of bullet points:\n{}",
            "How often does the word \"the\" appear in this text? {}", "Continue this text: {}",
            "List all names of persons and places in this text, one a line: {}",
            "Rewrite the following in the past tense:\n{}", "Make this shorter: {}",
        )
    )  # fmt: skip
    return ask.format(text)


def _code(random_: random.Random, _: Passages) -> str:
    return code_task(random_)


def _passage(random_: random.Random, passages: Passages, parts: int) -> str:
    """Articles, or stretches of some, as one paragraph."""
    chosen = [random_.choice(passages).split() for _ in range(parts)]
    if random_.random() < 0.3:
        chosen = [words[random_.randrange(1 + len(words) // 2) :] for words in chosen]
    return " ".join(word for words in chosen for word in words)


def _person(random_: random.Random) -> str:
    return f"{random_.choice(NAMES)} {random_.choice(SURNAMES)}"


def _sentence(random_: random.Random) -> str:
    pick = random_.choice
    return pick(
        (
            f"{pick(NAMES)} went to {pick(PLACES)} to learn about {pick(SUBJECTS)}.",
            f"{pick(JOBS).capitalize()} found {random_.randint(2, 90)} {pick(THINGS)} in a box.",
            f"Nobody in {pick(PLACES)} knew anything about {pick(SUBJECTS)}.",
            f"The film about {pick(SUBJECTS)} was {pick(('dull', 'too long', 'fine'))}.",
            f"We lost our {pick(THINGS)} on the way to {pick(PLACES)}.",
            f"I think that {pick(SUBJECTS)} is {pick(('overrated', 'fascinating', 'hard'))}.",
        )
    )


def _question(random_: random.Random, subject: str) -> str:
    return random_.choice(
        (
            f"What do you think about {subject}?", f"What should everybody know about {subject}?",
            f"How would you explain {subject}?", f"Why do so many people care about {subject}?",
            f"What is the future of {subject}?", f"How does {subject} shape our lives?",
            f"What can we learn from {subject}?", f"How did it all begin with {subject}?",
        )
    )  # fmt: skip


_TASKS: dict[str, Task] = {
    ARTICLE: _article,
    "writing": _writing,
    "roleplay": _roleplay,
    "explain": _explain,
    "question": _short_question,
    "reasoning": _reasoning,
    "arithmetic": _arithmetic,
    "translation": _translation,
    "extraction": _extraction,
    "code": _code,
    "summary": _summary,
    "reading": _reading,
    "editing": _editing,
}
_WEIGHTS = {
    ARTICLE: 10,
    "writing": 8,
    "roleplay": 7,
    "explain": 11,
    "question": 9,
    "reasoning": 6,
    "arithmetic": 8,
    "translation": 9,
    "extraction": 6,
    "code": 11,
    "summary": 8,
    "reading": 9,
    "editing": 3,
}
_ON_PASSAGES = frozenset({"summary", "reading", "editing"})
