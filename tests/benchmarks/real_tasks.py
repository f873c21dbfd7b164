"""Narrow tasks for a small pretrained model, whose data a script makes: prompts with a short answer.

Those of ``TASKS`` interfere: their prompts have the same form. Those of ``APART`` differ in form, as tasks of
models that people merge often do: questions to a database as SQL, the intent of a request, numbers as German words.
The test pairs' numbers, tables, or a wording are not among the training pairs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

TEST_ITEMS = 80

Pair = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """A task's pairs of a prompt and an answer."""

    training: list[Pair]
    test: list[Pair]


def _split_numbers(make: Callable[[random.Random, int], Pair], highest: int, seed: int) -> Split:
    generator = random.Random(seed)
    numbers = generator.sample(range(1, highest), min(highest - 1, 4000))
    pairs = [make(generator, number) for number in numbers]
    return Split(pairs[TEST_ITEMS:], pairs[:TEST_ITEMS])


def _roman(generator: random.Random, number: int) -> Pair:
    values = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL"}
    values |= {10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
    left, numeral = number, ""
    for value, letters in values.items():
        numeral += letters * (left // value)
        left %= value
    return f"Write {number} in Roman numerals.", " ".join(numeral)


def _german(generator: random.Random, number: int) -> Pair:
    from num2words import num2words

    return f"Write {number} in German words.", num2words(number, lang="de")


def _countries(seed: int) -> Split:
    import pycountry

    wordings = ["ISO code of {}?", "What is the three-letter country code of {}?", "Country: {}. Code:"]
    unseen = "Which three letters stand for {}?"
    countries = [(country.name, " ".join(country.alpha_3)) for country in pycountry.countries]
    training = [(wording.format(name), code) for wording in wordings for name, code in countries]
    generator = random.Random(seed)
    generator.shuffle(training)
    return Split(training, [(unseen.format(name), code) for name, code in generator.sample(countries, TEST_ITEMS)])


# Tables, each with a column of text and its values, and a column of numbers; of the last four, only the test asks.
TABLES = {
    "employees": ("city", "Paris Rome Oslo Lima", "salary"),
    "books": ("genre", "poetry crime history drama", "pages"),
    "flights": ("airline", "Aero Nordic Delta Swift", "distance"),
    "students": ("major", "physics law music art", "age"),
    "cars": ("brand", "Ford Audi Fiat Seat", "price"),
    "movies": ("director", "Lang Ozu Varda Leone", "rating"),
    "songs": ("artist", "Nina Otis Ella Sade", "seconds"),
    "orders": ("status", "open paid sent lost", "total"),
    "houses": ("street", "Main Oak Mill Lake", "rooms"),
    "rivers": ("country", "Chile Mali Nepal Spain", "length"),
    "players": ("team", "Lions Bears Hawks Sharks", "goals"),
    "hotels": ("region", "north south east west", "stars"),
    "planes": ("maker", "Airbus Boeing Cessna Fokker", "seats"),
    "museums": ("town", "Basel Turin Delft Bath", "visitors"),
    "recipes": ("cuisine", "Thai Greek Indian French", "minutes"),
    "ships": ("port", "Genoa Kiel Dover Cadiz", "tons"),
}
QUERIES = (
    ("How many {t} are there?", "SELECT COUNT(*) FROM {t}"),
    ("List all {t} whose {c} is {v}.", "SELECT * FROM {t} WHERE {c} = '{v}'"),
    ("How many {t} have the {c} {v}?", "SELECT COUNT(*) FROM {t} WHERE {c} = '{v}'"),
    ("What is the average {n} of the {t}?", "SELECT AVG({n}) FROM {t}"),
    ("What is the highest {n} of the {t} whose {c} is {v}?", "SELECT MAX({n}) FROM {t} WHERE {c} = '{v}'"),
    ("List the {t} with a {n} above {k}.", "SELECT * FROM {t} WHERE {n} > {k}"),
    ("How many {t} are there for each {c}?", "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}"),
    ("Which {t} have the {k} largest {n}?", "SELECT * FROM {t} ORDER BY {n} DESC LIMIT {k}"),
)


def _sql(seed: int) -> Split:
    made: list[set[Pair]] = [set(), set()]
    for number, (table, (column, values, amount)) in enumerate(TABLES.items()):
        for value, limit, (question, query) in product(values.split(), range(2, 10), QUERIES):
            names = {"t": table, "c": column, "n": amount, "v": value, "k": limit}
            asked = f"Table {table}(id, name, {column}, {amount}). {question.format(**names)}"
            made[number >= len(TABLES) - 4].add((asked, query.format(**names)))
    training, test = map(sorted, made)
    return Split(training, random.Random(seed).sample(test, TEST_ITEMS))


# By intent, requests, of which the last is only in the test; "#" is one of ``THINGS``.
INTENTS = {
    "play_music": "Play # for me.|I want to hear #.|Put on some #.|Could you start #?",
    "set_alarm": "Wake me at #.|Set an alarm for #.|I have to get up at #.|Make sure I am awake at #.",
    "get_weather": "Will it rain in #?|How warm is it in #?|What is the weather in #?|Do I need a coat in #?",
    "book_table": "Reserve a table at #.|I would like to dine at #.|Book # for tonight.|Get us seats at #.",
    "send_message": "Text #.|Tell # that I am late.|Write to #.|Let # know that I am coming.",
    "find_route": "How do I get to #?|Navigate to #.|Show me the way to #.|Which road leads to #?",
    "buy_item": "Order # for me.|I need to buy #.|Add # to my basket.|Get me #.",
    "translate": "What is # in Spanish?|Translate #.|How do you say # in French?|Say # in Italian.",
    "turn_off": "Switch off #.|Turn # off.|I do not need # any more, turn it off.|Shut # down.",
    "call_person": "Ring #.|Call #.|Phone # now.|I want to speak with #.",
}
THINGS = (
    *("the kitchen", "my brother", "a good book", "eight", "the old harbour", "Anna", "some jazz", "Berlin", "noon"),
    *("the lamp", "the station", "fresh bread", "Doctor Lee", "the radio", "Lisbon", "half past six", "the lake"),
    *("Omar", "a red scarf", "the heater", "my teacher", "the museum", "Tokyo", "green tea", "the airport", "Maria"),
)


def _intents(seed: int) -> Split:
    made: list[list[Pair]] = [[], []]
    for (intent, requests), thing in product(INTENTS.items(), THINGS):
        *training, last = requests.split("|")
        for which, texts in enumerate((training, [last])):
            made[which] += [(text.replace("#", thing), intent) for text in texts]
    return Split(made[0], random.Random(seed).sample(made[1], TEST_ITEMS))


TASKS: dict[str, Callable[[int], Split]] = {
    "roman": partial(_split_numbers, _roman, 1000),
    "german": partial(_split_numbers, _german, 1000),
    "country": _countries,
}
APART: dict[str, Callable[[int], Split]] = {"sql": _sql, "intents": _intents, "german": TASKS["german"]}
